"""What queries and collectors hold in memory reports no more than was read: caches, live state, held boots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.batches import paths
from lakebed.batches.conflicts import HeldBoots
from lakebed.batches.live import Follower, LiveBatches, batch_bytes
from lakebed.batches.model import BatchIdentity, BootHeld, HeldBoot, write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.rollups.model import Generation
from lakebed.rollups.reader import RollupCoverage
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.batch_frames import START_NS, frame_of, submit
from support.batches_gateway import collector
from support.rollup_fixtures import accept
from support.runtimes import runtime_of, runtime_on

SECOND_NS = 10**9


class Slow(MemoryStore):
    """Reads take a turn of the loop, so that two of them can be under way at once."""

    reads = 0

    async def get(self, key: str) -> Any:
        self.reads += 1
        await asyncio.sleep(0)
        return await super().get(key)


async def test_a_blob_that_many_queries_read_at_once_is_counted_once(manual_clock: ManualClock) -> None:
    """The cache's size is that of what it holds: reads of one blob at the same time do not fill it."""
    store = Slow(clock=manual_clock)
    frames = [submit(frame_of(n * 10, n * 10 + 9)) for n in range(3)]
    for each in frames:
        await write_blob(store, each)
    raw = RawBatches(store, cache_bytes_max=len(frames[0].frame) + len(frames[1].frame))

    for _ in range(5):
        await asyncio.gather(*(raw.batch(frames[0].sha256) for _ in range(8)))
        await raw.batch(frames[2].sha256)  # makes room
        await raw.batch(frames[1].sha256)
    before = store.reads
    found = [(await raw.batch(each.sha256)).identity for each in frames[1:]]

    assert [each.batch.identity for each in frames[1:]] == found
    assert before == store.reads


async def test_a_chunk_that_many_queries_read_at_once_is_counted_once(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for manifests and index chunks; what cannot be decoded is not kept."""
    store = Slow(clock=manual_clock)
    monkeypatch.setattr("lakebed.rollups.reader.CACHE_BYTES_MAX", 100)
    coverage = RollupCoverage(store, RawBatches(store))
    damaged = Generation(1, "d", 0, 1)
    await store.create(damaged.manifest_key, b"{" * 60)
    await store.create("x", b"x" * 60)

    for _ in range(3):
        values = await asyncio.gather(*(coverage._cached("x", len) for _ in range(8)))
        assert [60] * 8 == values
        with pytest.raises(Corrupt):
            await coverage.manifest(damaged)
    before = store.reads
    assert 60 == await coverage._cached("x", len)
    assert before == store.reads


async def test_what_was_evicted_is_known_by_the_latest_acceptance_of_it(
    manual_clock: ManualClock, metrics: Metrics
) -> None:
    """Batches come in any order: one that was accepted earlier and is evicted later does not hide the other's gap."""
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=0, window_s=3600)
    now_ns = manual_clock.now_ns()

    live.add(now_ns - 1, submit(frame_of(10, 19)).batch)
    live.add(now_ns - 5, submit(frame_of()).batch)

    assert (now_ns - 1, 0) == (live.evicted_through_ns, len(live))
    assert 0 == metrics.value("lakebed_batches_live_bytes") == metrics.value("lakebed_batches_live_batches")


async def test_live_state_that_ends_with_its_window_is_out_of_the_gauges(
    manual_clock: ManualClock, metrics: Metrics
) -> None:
    """The gauges show what is held also when it was a query that found it too old."""
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=10**7, window_s=60)
    live.add(manual_clock.now_ns(), submit(frame_of()).batch)
    assert 1 == metrics.value("lakebed_batches_live_batches")

    await manual_clock.advance(61)

    assert [] == list(live.batches())
    assert 0 == metrics.value("lakebed_batches_live_bytes") == metrics.value("lakebed_batches_live_batches")


async def test_a_batch_of_a_collector_that_died_joins_live_state_when_it_is_indexed(
    manual_clock: ManualClock, metrics: Metrics
) -> None:
    """Long after its acceptance the reconciler leaves a note and an entry: the next look finds the batch, once."""
    store = MemoryStore(clock=manual_clock)
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=10**7, window_s=3600)
    follower = Follower(RawBatches(store), live, window_s=3600.0, overlap_s=60.0, interval_s=1.0, clock=manual_clock)
    await follower.poll()
    await accept(store, frame_of(), manual_clock.now_ns() - 3000 * SECOND_NS, late=True)
    await accept(store, frame_of(10, 19), manual_clock.now_ns() - 3700 * SECOND_NS, late=True)

    assert [1, 0] == [await follower.poll(), await follower.poll()]
    assert 1 == len(live)


async def test_a_batch_that_is_indexed_late_joins_live_state(manual_clock: ManualClock, metrics: Metrics) -> None:
    """Each look reaches back over the overlap; a follower that has not looked for three intervals is not fresh."""
    store = MemoryStore(clock=manual_clock)
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=10**7, window_s=3600)
    follower = Follower(RawBatches(store), live, window_s=3600.0, overlap_s=60.0, interval_s=1.0, clock=manual_clock)
    await follower.poll()
    await manual_clock.advance(3)
    fresh = follower.is_fresh()
    await manual_clock.advance(1)
    await accept(store, frame_of(), manual_clock.now_ns() - 30 * SECOND_NS)

    assert (True, False) == (fresh, follower.is_fresh())
    assert 1 == await follower.poll()
    assert (True, 1) == (follower.is_fresh(), len(live))


WINDOW = f"metric=cpu&from={START_NS}&to={START_NS + SECOND_NS}"


async def test_a_range_after_an_eviction_reads_raw_batches_too() -> None:
    """Inside the follower's window, but not in memory any more: the answer is whole, and reports where it came from."""
    clock = ManualClock(START_NS + 120 * SECOND_NS)
    store = MemoryStore(clock=clock)
    for n in range(3):
        await accept(store, frame_of(n * 10, n * 10 + 9), clock.now_ns() - (3 - n) * SECOND_NS)
    room = batch_bytes(submit(frame_of()).batch) + 1
    async with collector(store, clock=clock, query_collector=True, live_bytes_max=room) as (client, part):
        await part.follower.poll()
        answer = (await client.get(f"/v1/query/range?{WINDOW}")).json()

    assert ({"live": 1, "spool": 0, "raw": 2}, False) == (answer["sources"], answer["partial"])
    assert 30 == sum(len(series["points"]) for series in answer["series"])


async def test_a_range_that_is_searched_up_to_a_delay_is_not_called_complete() -> None:
    """A batch of the range may have been accepted later than that: it is left out, and the answer says so."""
    clock = ManualClock(START_NS + 7200 * SECOND_NS)
    store = MemoryStore(clock=clock)
    await accept(store, frame_of(), START_NS + 5 * SECOND_NS)
    await accept(store, frame_of(10, 19), START_NS + 3600 * SECOND_NS)
    async with collector(store, clock=clock, query_collector=True, live_bytes_max=0) as (client, part):
        await part.follower.poll()
        asked = [
            (await client.get(f"/v1/query/range?{WINDOW}{late}")).json() for late in ("&late_s=60", "&late_s=7200", "")
        ]

    assert [10, 20, 20] == [sum(len(series["points"]) for series in answer["series"]) for answer in asked]
    assert [True, False, False] == [answer["partial"] for answer in asked]
    assert ["batches accepted more than late_s after the range were not searched"] == asked[0]["why_partial"]


@pytest.mark.parametrize("gone", ["blob", "entry"])
async def test_a_batch_that_live_state_could_not_read_makes_the_answer_partial(gone: str) -> None:
    """An accepted batch is there or is missed: a follower that left it out does not call itself complete."""
    clock = ManualClock(START_NS + 120 * SECOND_NS)
    store = MemoryStore(clock=clock)
    bad = await accept(store, frame_of(), clock.now_ns() - 2 * SECOND_NS)
    await accept(store, frame_of(10, 19), clock.now_ns() - SECOND_NS)
    key = bad.raw_blob_key
    if gone == "entry":
        key = paths.accepted_by_time_key(bad.identity, bad.accepted_at_unix_ns)
    await store.delete(key)
    await store.create(key, b"{")
    async with collector(store, clock=clock, query_collector=True) as (client, part):
        await part.follower.poll()
        answer = (await client.get(f"/v1/query/range?{WINDOW}")).json()

    assert (True, ["1 accepted batches cannot be read: see repairs/v1/"]) == (answer["partial"], answer["why_partial"])
    assert 10 == sum(len(series["points"]) for series in answer["series"])


async def test_a_damaged_record_of_a_held_boot_still_holds_it(manual_clock: ManualClock) -> None:
    """The key names the boot: a record that cannot be read neither frees its boot nor keeps others from being held."""
    store = MemoryStore(clock=manual_clock)
    await store.create(paths.held_boot_key("agent-a", "boot-1"), b"{")
    held = HeldBoot("lightmetrics.held_boot.v1", "agent-b", "boot-2", "why", "ann", 1)
    await store.create(paths.held_boot_key("agent-b", "boot-2"), write_record(held))
    await store.create(f"{paths.HELD_BOOTS}notes.txt", b"of a person")
    boots = HeldBoots(runtime_on(store, manual_clock))

    await boots.refresh()

    for agent, boot in (("agent-a", "boot-1"), ("agent-b", "boot-2")):
        with pytest.raises(Exception, match="quarantined this boot of the agent"):
            boots.check(BatchIdentity(agent, boot, 0, 9))
    boots.check(BatchIdentity("agent-a", "boot-2", 0, 9))


async def test_a_boot_stays_held_while_the_store_does_not_answer(manual_clock: ManualClock) -> None:
    """A collector that cannot ask keeps refusing the boot; when the store is back, what it says holds."""

    class Away(MemoryStore):
        away = False

        async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
            async for info in super().list(prefix, after=after):
                if self.away:
                    raise Unavailable("no answer")
                yield info

    store = Away(clock=manual_clock)
    record = HeldBoot("lightmetrics.held_boot.v1", "a", "b", "odd", "me", 1)
    await store.create(paths.held_boot_key("a", "b"), write_record(record))
    held = HeldBoots(runtime_on(store, manual_clock))
    await held.try_refresh()
    running = asyncio.create_task(held.run())
    await settle()

    store.away = True
    await manual_clock.advance(60)
    with pytest.raises(BootHeld):
        held.check(BatchIdentity("a", "b", 0, 9))
    store.away = False
    await store.delete(paths.held_boot_key("a", "b"))
    await manual_clock.advance(11)
    held.check(BatchIdentity("a", "b", 0, 9))
    running.cancel()


async def test_a_held_boot_is_refused_by_the_first_answer_of_a_new_collector(manual_clock: ManualClock) -> None:
    """A collector knows what is held before it takes its first batch."""
    store = MemoryStore(clock=manual_clock)
    held = HeldBoot("lightmetrics.held_boot.v1", "agent-a", "boot-1", "why", "ann", 1)
    await store.create(paths.held_boot_key("agent-a", "boot-1"), write_record(held))
    async with collector(store, clock=manual_clock) as (client, _):
        answer = await client.post("/v1/batches", content=frame_of())

    assert (409, "boot_quarantined") == (answer.status_code, answer.json()["code"])
