"""Real collectors on the real bucket: racing, killed with -9 at every step, and nothing acknowledged is ever lost."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import msgspec
import pytest

from lakebed.batches import paths
from lakebed.batches.model import ID_BYTES_MAX, SEQ_MAX, AcceptedBatch
from lakebed.batches.reader import RawBatches, read_frame, verified
from lakebed.batches.reconciler import Reconciler
from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import env_name
from lakebed.store.model import read_record
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.batch_frames import frame_of, submit
from support.batches_gateway import collector
from support.process_output import next_line
from support.runtimes import runtime_on

CRASH_POINTS = 7  # before and behind each of three creates: blob, manifest, index segment; the last one survives
DEADLINE_S = 200.0
TESTS = Path(__file__).parent.parent
SECRET = "a-secret-of-an-agent-that-is-long-enough"


def environment(settings: StoreSettings, **more: object) -> dict[str, str]:
    layer = {"gateway.prove": "never", **settings.as_layer(), **more}
    return {**os.environ, **{env_name(key): str(value) for key, value in layer.items()}}


@asynccontextmanager
async def served(settings: StoreSettings, **more: object) -> AsyncIterator[tuple[Process, httpx2.AsyncClient]]:
    command = [sys.executable, "-m", "lakebed", "serve", "--port", "0", "--parts", "batches", "--log", "error"]
    process = await asyncio.create_subprocess_exec(*command, env=environment(settings, **more), stdout=PIPE)
    try:
        url = msgspec.json.decode(await next_line(process))["url"]
        async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def accepted(store: Store) -> list[AcceptedBatch]:
    found = [read_record(await store.get(info.key), AcceptedBatch) async for info in store.list(paths.ACCEPTED)]
    for manifest in found:
        verified(await read_frame(store, manifest.place), manifest.frame_sha256)
    return found


def reconciler(store: Store) -> Reconciler:
    return Reconciler(runtime_on(store, SystemClock(), ids=Ids(), metrics=Metrics()), overlap_s=900.0, concurrency=4)


async def test_a_collector_killed_at_every_step_loses_and_doubles_nothing(
    bucket: Store, bucket_settings: StoreSettings
) -> None:
    """kill -9 before and behind each request: a 200 that was heard exists, and the agent's retry ends in one truth."""
    crashing = await asyncio.create_subprocess_exec(
        sys.executable,
        str(TESTS / "support/collector_crash_points.py"),
        str(CRASH_POINTS),
        env=environment(bucket_settings) | {"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"},
        stdout=PIPE,
    )
    output, _ = await asyncio.wait_for(crashing.communicate(), DEADLINE_S)
    output_text = output.decode().splitlines()
    before = {manifest.agent_id for manifest in await accepted(bucket)}

    async with collector(bucket) as (client, _):
        answers = {
            point: await client.post("/v1/batches", content=frame_of(agent=f"agent-{point}"))
            for point in range(1, CRASH_POINTS + 1)
        }
    report = await reconciler(bucket).audit()
    again = await reconciler(bucket).audit()

    assert sum(line.endswith("killed") for line in output_text) == CRASH_POINTS - 1
    assert {200} == {answer.status_code for answer in answers.values()}
    for point, answer in answers.items():
        assert answer.json()["duplicate"] == (f"agent-{point}" in before), point
        if f"{point} answered False" in output_text:
            assert f"agent-{point}" in before, point
    assert {f"agent-{point}" for point in range(4, CRASH_POINTS + 1)} == before
    assert len(await accepted(bucket)) == CRASH_POINTS
    assert (again.checked, again.repaired) == (CRASH_POINTS, {})
    assert report.repaired["indexed"] >= 1


@pytest.mark.parametrize("pack_ms", [0, pytest.param(30, marks=pytest.mark.full)])
async def test_racing_collectors_have_one_winner_per_identity(
    bucket: Store, bucket_settings: StoreSettings, pack_ms: int
) -> None:
    """Two processes, the same batch to both at once: one accepts, one reports duplicate; other bytes are a conflict."""
    packing = {"batches.pack_ms": pack_ms}
    async with served(bucket_settings, **packing) as (_, one), served(bucket_settings, **packing) as (_, other):
        for number in range(3):
            start = number * 10
            same = await asyncio.gather(
                *(client.post("/v1/batches", content=frame_of(start, start + 9)) for client in (one, other))
            )
            assert [answer.status_code for answer in same] == [200, 200]
            assert sorted(answer.json()["duplicate"] for answer in same) == [False, True]
        for number in range(3, 5):
            start = number * 10
            frames = [frame_of(start, start + 9, value=float(n)) for n in range(2)]
            mixed = await asyncio.gather(
                one.post("/v1/batches", content=frames[0]), other.post("/v1/batches", content=frames[1])
            )
            assert sorted(answer.status_code for answer in mixed) == [200, 409]
            lost = next(answer.json() for answer in mixed if answer.status_code == 409)
            on_accepted = next(answer.json() for answer in mixed if answer.status_code == 200)
            assert on_accepted["frame_sha256"] == lost["accepted_frame_sha256"]
            assert lost["quarantined"]

    assert len(await accepted(bucket)) == 5


@pytest.mark.parametrize("pack_ms", [0, pytest.param(30, marks=pytest.mark.full)])
async def test_batches_survive_a_collector_killed_under_load(
    bucket: Store, bucket_settings: StoreSettings, pack_ms: int
) -> None:
    """One of two collectors is killed in the middle; agents continue at the other, and every 200 ever heard is true."""
    acknowledged: set[str] = set()
    packing = {"batches.pack_ms": pack_ms}
    async with served(bucket_settings, **packing) as (victim, one), served(bucket_settings, **packing) as (_, other):

        async def agent(name: str) -> None:
            clients = [one, other]
            for number in range(6):
                frame = frame_of(number * 10, number * 10 + 9, agent=name)
                for attempt in range(20):
                    try:
                        answer = await clients[(attempt + number) % 2].post("/v1/batches", content=frame)
                    except httpx2.HTTPError:
                        await asyncio.sleep(0.05)
                        continue
                    if answer.status_code == 200:
                        acknowledged.add(submit(frame).sha256)
                        break
                else:
                    pytest.fail("a batch was never taken")

        async def kill() -> None:
            while len(acknowledged) < 10:
                await asyncio.sleep(0.01)
            victim.kill()

        await asyncio.gather(kill(), *(agent(f"agent-{n}") for n in range(6)))

    await reconciler(bucket).audit()
    found = await accepted(bucket)
    assert bool(pack_ms) == any(manifest.raw_blob_offset for manifest in found)
    assert len(acknowledged) == 36
    assert acknowledged == {manifest.frame_sha256 for manifest in found}
    assert 36 == len(found) == len([each async for each in RawBatches(bucket).entries(0, 2**62)])


async def test_a_spool_is_recovered_after_kill_9_and_lands(
    bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Acknowledged on disk, killed before landing: the next process deduplicates, lands, and the bucket has it once."""
    spool = {"batches.acceptance": "local_spool", "batches.spool_dir": str(tmp_path)}
    async with served(bucket_settings, **spool, **{"batches.object_landing_interval_ms": 3_600_000}) as (first, client):
        answers = [await client.post("/v1/batches", content=frame_of(n * 10, n * 10 + 9)) for n in range(5)]
        first.kill()
        await first.wait()
    before = await accepted(bucket)

    async with served(bucket_settings, **spool, **{"batches.object_landing_interval_ms": 50}) as (_, client):
        again = await client.post("/v1/batches", content=frame_of())
        async with asyncio.timeout(DEADLINE_S):
            while len(await accepted(bucket)) < 5 or list(tmp_path.glob("*.spool")):
                await asyncio.sleep(0.05)

    assert before == []
    assert [answer.status_code for answer in answers] == [200] * 5
    assert again.json()["duplicate"]
    assert {answer.json()["frame_sha256"] for answer in answers} == {m.frame_sha256 for m in await accepted(bucket)}


@pytest.mark.full
async def test_a_spooling_collector_starts_and_accepts_while_the_bucket_is_away(
    bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Restarted during an outage of the bucket it goes on accepting, and what it accepted lands afterwards."""
    spool: dict[str, object] = {
        "batches.acceptance": "local_spool",
        "batches.spool_dir": str(tmp_path),
        "batches.object_landing_interval_ms": 50,
    }
    keys = tmp_path.parent / f"{tmp_path.name}-keys.toml"
    keys.write_text(f'[[keys]]\nname = "agent"\nsecret = "{SECRET}"\nrights = ["*"]\n')
    keys.chmod(0o600)
    spool["gateway.keys_file"] = str(keys)
    away = msgspec.structs.replace(bucket_settings, endpoint="http://127.0.0.1:9")  # nothing listens there
    async with served(bucket_settings, **spool):
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / "authority.json").exists():
                await asyncio.sleep(0.05)

    async with served(away, **spool) as (_, client):
        taken = await client.post("/v1/batches", content=frame_of(), headers={"authorization": f"Bearer {SECRET}"})
    before = await accepted(bucket)
    async with served(bucket_settings, **spool):
        async with asyncio.timeout(DEADLINE_S):
            while not await accepted(bucket):
                await asyncio.sleep(0.05)

    assert (200, []) == (taken.status_code, before)
    assert [taken.json()["frame_sha256"]] == [each.frame_sha256 for each in await accepted(bucket)]


async def test_the_longest_identity_fits_every_key(bucket: Store) -> None:
    """The longest ids and the last sequence number go through acceptance, conflict, audit and query."""
    ids = {"agent": "a" * ID_BYTES_MAX, "boot": "b" * ID_BYTES_MAX}
    async with collector(bucket) as (client, part):
        first = await client.post("/v1/batches", content=frame_of(SEQ_MAX, SEQ_MAX, at_ns=1, **ids))
        other = await client.post("/v1/batches", content=frame_of(SEQ_MAX, SEQ_MAX, at_ns=2, **ids))
        (view,) = await part.review.list()
    report = await reconciler(bucket).audit()

    assert [first.status_code, other.status_code] == [200, 409]
    assert view.record.seq_end == SEQ_MAX
    assert report.checked == 2
