"""A tick committed again with corrected parts: a new attempt beside the first, which stays as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from lakebed.core.errors import NotFound
from lakebed.ticks import paths
from lakebed.ticks.model import BronzeResult, CommitRecord, TickId
from lakebed.ticks.packing import pack
from lakebed.ticks.replay import first_of, next_attempt, note_replay, stored_parts
from support.tick_fixtures import ORG, PROJECT, TICK, Service, context_of, manifest, parquet, serving

OF = TickId(ORG, PROJECT, TICK)
COMMIT = CommitRecord("s", ORG, PROJECT, TICK, "20261116", "delta", "x", {}, BronzeResult(5, 1), "", 4000, "a")


async def committed_again(service: Service, note: str) -> str:
    attempt = await next_attempt(service.context, OF)
    parts = {1: parquet([1, 2], note=note)}
    assert 202 == (await service.put(1, parts[1], tick=attempt.attempt_id)).status_code
    answer = await service.finalize(manifest(parts, {1: 2}, tick=attempt.attempt_id), tick=attempt.attempt_id)
    assert 200 == answer.status_code
    return attempt.attempt_id


async def test_corrected_parts_are_a_new_attempt_and_the_first_stays() -> None:
    """Its rows replace those of the same keys; the first record is unchanged; a third attempt has the next number."""
    async with serving(context_of()) as service:
        await service.finalize(await service.upload())
        first = (await service.context.store.get(paths.commit(OF))).data

        attempts = [await committed_again(service, "corrected"), await committed_again(service, "again")]
        rows = await service.rows()
        messages = [received.message().tick_id for received in await service.queue.inner.receive(10)]

        assert [f"{TICK}.r2", f"{TICK}.r3"] == attempts
        assert {"again": 2, "x": 3} == {
            note: sum(row["note"] == note for row in rows.values()) for note in ("again", "x")
        }
        assert first == (await service.context.store.get(paths.commit(OF))).data
        assert {TICK, *attempts} == set(messages)


async def test_a_replay_of_an_attempt_is_one_of_its_tick() -> None:
    """`t.r2` is replayed as `t.r3`; an id that only looks alike is a tick of its own."""
    async with serving(context_of()) as service:
        await service.finalize(await service.upload())
        await committed_again(service, "corrected")

        again = await next_attempt(service.context, TickId(ORG, PROJECT, f"{TICK}.r2"))

        assert (TICK, f"{TICK}.r3") == (again.of.tick_id, again.attempt_id)
        assert ["t", "t.r1", "t.rx"] == [first_of(each) for each in ("t.r2", "t.r1", "t.rx")]


@pytest.mark.parametrize(
    ("committed", "expected"),
    [((), 2), ((2,), 3), ((2, 3, 5), 6), ((2, 9), 10), ((2, 9, 10), 11), ((99, 100, 9), 101), ((200_000,), 200_001)],
)
async def test_the_next_attempt_is_behind_the_last_one_whatever_is_between(
    committed: tuple[int, ...], expected: int
) -> None:
    """By number, not by text, and with holes: an attempt that was given up, or one whose record is gone. Ticks whose
    ids only begin like one of them are others."""
    context = context_of()
    others = [f"{TICK}.r", f"{TICK}.r1", f"{TICK}.r02", f"{TICK}.r777x", f"{TICK}.r2.r900", f"{TICK}0.r800"]
    for name in (*(f"{TICK}.r{number}" for number in committed), *others):
        await context.store.create(paths.commit(TickId(ORG, PROJECT, name)), b"{}")
    await context.store.create(paths.commit(OF), msgspec.json.encode(COMMIT))

    attempt = await next_attempt(context, OF)

    assert (OF, f"{TICK}.r{expected}") == (attempt.of, attempt.attempt_id)


async def test_a_tick_that_is_not_committed_is_not_replayed() -> None:
    """It is finalized by its agent instead."""
    async with serving(context_of()) as service:
        await service.upload()

        with pytest.raises(NotFound):
            await next_attempt(service.context, OF)


async def test_without_files_the_kept_parts_are_committed_again(tmp_path: Path) -> None:
    """They come with the keys of the first manifest, and pack into the next attempt."""
    async with serving(context_of()) as service:
        await service.finalize(await service.upload())
        attempt = await next_attempt(service.context, OF)

        files = await stored_parts(service.context, attempt, tmp_path / "parts")
        packed = await asyncio.to_thread(
            pack, files, project_id=PROJECT, tick_id=attempt.attempt_id, dt="20261115", keys=attempt.keys
        )
        await note_replay(service.context, attempt, "a rule was wrong")

        assert ({"orders": ["id"]}, 2) == (attempt.keys, len(packed.files))
        assert {0o600} == {file.stat().st_mode & 0o777 for file in files}, "rows are for their owner alone"
        assert 0o700 == (tmp_path / "parts").stat().st_mode & 0o777
        notes = [info.key async for info in service.context.store.list(f"{paths.REPLAYS}/{OF.path}/")]
        assert 1 == len(notes)
