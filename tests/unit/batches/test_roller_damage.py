"""Damage among the rollups themselves: reported by its key, and neither rolled up again nor counted twice."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.batches import paths as batch_paths
from lakebed.batches.index import AcceptedIndex, manifest_id_of, write_rows
from lakebed.batches.model import Sample
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, LakebedError
from lakebed.rollups import paths
from lakebed.rollups.reader import CoverageSnapshot, RollupCoverage
from lakebed.store.memory import MemoryStore
from support.rollup_fixtures import Failing, accept, ask, by_hand, frame, make_roller, shown

SECOND_NS = 10**9
HOUR_NS = 1_760_000_400_000_000_000  # a full hour
END_NS = HOUR_NS + 3 * 3600 * SECOND_NS


def some(agent: int, first: int) -> list[Sample]:
    """Samples of two series around the turn of an hour."""
    begin_ns = HOUR_NS + 3400 * SECOND_NS
    return [
        Sample("cpu", begin_ns + (first + n) * 7 * SECOND_NS, 0.1 * (n + agent), labels={"c": str(n % 2)})
        for n in range(40)
    ]


async def keys(store: MemoryStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


class Env:
    """A bucket, its time, and every sample that was accepted there."""

    def __init__(self) -> None:
        self.clock = ManualClock(END_NS)
        self.store = MemoryStore(clock=self.clock)
        self.told: list[tuple[str, Sample]] = []

    async def accept(self, agent: str, number: int, ago_s: float = 1.0, **more: Any) -> None:
        held = some(number, number)
        await accept(self.store, frame(agent, 0, held), self.clock.now_ns() - round(ago_s * SECOND_NS), **more)
        self.told += [(agent, sample) for sample in held]

    async def spoil(self, prefix: str, data: bytes | None) -> str:
        key = sorted(await keys(self.store, prefix))[0]
        before = (await self.store.get(key)).data
        await self.store.delete(key)
        if data is not None:
            await self.store.create(key, before[:-9] if data == CUT else before.replace(b".v1", data))
        return key


CUT = b"cut"


@pytest.mark.parametrize("data", [None, CUT, b".v2"], ids=["missing", "half-written", "a later format"])
@pytest.mark.parametrize("cold", [False, True])
async def test_a_manifest_of_rollups_that_cannot_be_read_is_told_and_nothing_counts_twice(
    data: bytes | None, cold: bool
) -> None:
    """Its batches are found in the index: the run continues with what is new, and names the manifest by its key."""
    env = Env()
    await env.accept("a", 0)
    await make_roller(env.store, env.clock).run()
    key = await env.spoil(paths.MANIFESTS, data)
    await env.accept("b", 1)

    report = await make_roller(env.store, env.clock).run(cold=cold)

    assert (40, [key]) == (report.samples, [each.key for each in report.unreadable])
    answer = await ask(env.store, env.clock, "cpu", 60, HOUR_NS - 7200 * SECOND_NS, END_NS)
    assert by_hand(env.told, "cpu", 60) == shown(answer)
    assert any("cannot be read" in why for why in answer.why_partial)


@pytest.mark.parametrize("data", [None, CUT], ids=["missing", "half-written"])
async def test_a_settled_generation_without_its_manifest_is_not_rolled_up_again(data: bytes | None) -> None:
    """A cold run queries the index of whatever no manifest covers."""
    env = Env()
    await env.accept("a", 0)
    for _ in range(2):
        await make_roller(env.store, env.clock).run()
        await env.clock.advance(7200)
    await env.spoil(paths.MANIFESTS, data)

    report = await make_roller(env.store, env.clock).run(cold=True)

    assert 0 == report.samples
    answer = await ask(env.store, env.clock, "cpu", 60, HOUR_NS, END_NS)
    assert by_hand(env.told, "cpu", 60) == shown(answer)


async def test_a_late_batch_of_which_nobody_can_tell_is_set_aside_and_the_rest_goes_on() -> None:
    """An index chunk that cannot be read: late batches that end in its hour wait, by its key, until it is repaired."""
    env = Env()
    await env.accept("a", 0)
    for _ in range(2):
        await make_roller(env.store, env.clock).run()
        await env.clock.advance(7200)
    (*_, index) = sorted(await keys(env.store, paths.INDEX))
    whole = (await env.store.get(index)).data
    await env.store.delete(index)
    await env.store.create(index, whole[:-9])
    await env.accept("late", 1, 12_000.0, late=True)
    await env.accept("b", 2)

    report = await make_roller(env.store, env.clock).run()
    partial = await ask(env.store, env.clock, "cpu", 60, HOUR_NS, END_NS)
    await env.store.delete(index)
    await env.store.create(index, whole)
    repaired = await make_roller(env.store, env.clock).run()

    assert (40, [index]) == (report.samples, [each.key for each in report.unreadable])
    assert by_hand([each for each in env.told if each[0] != "late"], "cpu", 60) == shown(partial)
    assert "1 accepted batches cannot be read: see repairs/v1/" in partial.why_partial
    assert (40, 1, []) == (repaired.samples, repaired.late, repaired.unreadable)
    assert [] == await keys(env.store, paths.ROLLER_UNREADABLE)
    answer = await ask(env.store, env.clock, "cpu", 60, HOUR_NS, END_NS)
    assert by_hand(env.told, "cpu", 60) == shown(answer)


@pytest.mark.parametrize("data", [None, CUT], ids=["missing", "half-written"])
async def test_a_plan_that_cannot_be_read_is_abandoned_and_its_batches_are_rolled_up(data: bytes | None) -> None:
    """What was begun with it never counts; the run names it, and makes a new generation."""
    env = Env()
    await env.accept("a", 0)
    with pytest.raises(LakebedError):
        await make_roller(env.store, env.clock, job=Failing(env.store)).run()
    key = await env.spoil(paths.ROLLER_PLANS, data)

    report = await make_roller(env.store, env.clock).run()

    assert (1, 1, [key]) == (report.abandoned, report.generations, [each.key for each in report.unreadable])
    answer = await ask(env.store, env.clock, "cpu", 60, HOUR_NS, END_NS)
    assert by_hand(env.told, "cpu", 60) == shown(answer)


@pytest.mark.parametrize("form", ["segment", "single object"])
async def test_an_index_that_cannot_be_read_does_not_say_that_a_batch_waits(form: str) -> None:
    """Its rows are unknown, not absent: a batch that was rolled up long ago would be taken a second time."""
    env = Env()
    await env.accept("a", 0)
    for _ in range(2):
        await make_roller(env.store, env.clock).run()
        await env.clock.advance(7200)
    (single,) = await keys(env.store, batch_paths.ACCEPTED_BY_TIME)
    (entry,) = (await AcceptedIndex(env.store).find([batch_paths.parse_by_time(single)[0]])).values()
    if form == "segment":
        await write_rows(env.store, [entry], writer="c")
        await env.store.delete(single)
    coverage = RollupCoverage(env.store, RawBatches(env.store))
    settled, ids = CoverageSnapshot((await coverage.snapshot()).state, frozenset()), [manifest_id_of(entry)]
    assert [] == await coverage.waiting(settled, ids, {})
    damaged = [
        key
        for folder in (batch_paths.ACCEPTED_BY_TIME, *batch_paths.INDEX_SHARDS)
        for key in await keys(env.store, folder)
    ]
    await env.spoil(damaged[0].rpartition("/")[0] + "/", CUT)
    unsure = dict[str, Corrupt]()

    waiting = await RollupCoverage(env.store, RawBatches(env.store)).waiting(settled, ids, unsure)

    assert ([], ids, damaged) == (waiting, list(unsure), [error.detail["key"] for error in unsure.values()])
