"""The follower reports no more than it saw: where a look ends, what it left out, and how old it may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches import live as follower_module
from lakebed.batches.index import write_rows
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Unavailable
from lakebed.core.metrics import Metrics
from lakebed.rollups.paths import work_key
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject
from support.batch_frames import frame_of, submit
from support.counting_store import CountingStore
from support.rollup_fixtures import accept
from support.runtimes import runtime_of

SECOND_NS = 10**9


def _made(store: MemoryStore, clock: ManualClock, **more: float) -> tuple[Follower, LiveBatches]:
    settings = {"window_s": 600.0, "overlap_s": 60.0, "interval_s": 2.0} | more
    live = LiveBatches(runtime_of(clock, metrics=Metrics()), bytes_max=10**7, window_s=3600)
    return Follower(RawBatches(store), live, clock=clock, **settings), live


class SlowList(MemoryStore):
    """A listing takes some seconds."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.manual, self.takes_s = clock, 0.0

    async def list(self, prefix: str, **more: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async for info in super().list(prefix, **more):
            yield info
        takes_s, self.takes_s = self.takes_s, 0.0
        await self.manual.advance(takes_s)


async def test_a_look_is_as_old_as_its_beginning(manual_clock: ManualClock) -> None:
    """What was accepted while the look continued may be missing from it: freshness counts from its start."""
    store = SlowList(manual_clock)
    await accept(store, frame_of(), manual_clock.now_ns())
    follower, _ = _made(store, manual_clock)
    began_ns, store.takes_s = manual_clock.now_ns(), 7.0

    await follower.poll()

    assert 7 * SECOND_NS == manual_clock.now_ns() - began_ns
    assert (began_ns, False) == (follower.caught_up_ns, follower.is_fresh())


async def test_a_follower_that_never_looked_is_not_fresh() -> None:
    """Also when its clock is near zero."""
    clock = ManualClock(1)
    follower, _ = _made(MemoryStore(clock=clock), clock)
    assert not follower.is_fresh()


async def test_the_first_look_reaches_over_the_window_and_clocks_ahead_are_seen(manual_clock: ManualClock) -> None:
    """Accepted 599 s ago and by a clock 50 s ahead: both are held. 601 s ago: it is not."""
    store = MemoryStore(clock=manual_clock)
    now_ns = manual_clock.now_ns()
    for n, at_s in enumerate((-601, -599, 50)):
        await accept(store, frame_of(n * 10, n * 10 + 9), now_ns + at_s * SECOND_NS)
    follower, live = _made(store, manual_clock)

    assert (2, 0) == (await follower.poll(), await follower.poll())
    assert [10, 20] == sorted(identity.seq_start for identity, _ in live.batches())
    assert 0 == live.evicted_through_ns


async def test_a_look_with_too_many_entries_says_where_live_state_begins(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five entries the three newest are read: acceptances up to the second are not in live state."""
    monkeypatch.setattr(follower_module, "KEYS_MAX", 3)
    store = MemoryStore(clock=manual_clock)
    now_ns = manual_clock.now_ns()
    for n in range(5):
        await accept(store, frame_of(n * 10, n * 10 + 9), now_ns - (10 - n) * SECOND_NS)
    follower, live = _made(store, manual_clock)

    assert 3 == await follower.poll()
    assert now_ns - 9 * SECOND_NS == live.evicted_through_ns
    assert [20, 30, 40] == sorted(identity.seq_start for identity, _ in live.batches())
    assert 0 == await follower.poll()  # what was left out is not read again


async def test_an_older_gap_does_not_hide_a_later_one(manual_clock: ManualClock) -> None:
    """Two batches cannot be read; the later of them reports up to where queries must go to the bucket."""
    store = MemoryStore(clock=manual_clock)
    now_ns = manual_clock.now_ns()
    lost = [await accept(store, frame_of(n * 10, n * 10 + 9), now_ns - (9 - n) * SECOND_NS) for n in range(2)]
    for accepted in lost:
        for info in [each async for each in store.list("")]:
            if accepted.frame_sha256 in info.key:
                await store.delete(info.key)
    follower, live = _made(store, manual_clock)
    found = [each async for each in RawBatches(store).entries(0, now_ns)]

    for each in reversed(found):  # as reads at the same time may end
        assert await follower._take(each, None) is None
    assert now_ns - 8 * SECOND_NS == live.evicted_through_ns


async def test_a_look_that_fails_is_tried_again_after_the_interval(manual_clock: ManualClock) -> None:
    """And until one succeeds, the follower grows stale."""
    store = MemoryStore(clock=manual_clock)
    follower, _ = _made(store, manual_clock)
    await follower.poll()
    looks: list[int] = []
    look = follower.poll

    async def failing() -> int:
        looks.append(manual_clock.now_ns())
        if len(looks) < 5:
            raise Unavailable("no bucket")
        return await look()

    follower.poll = failing  # type: ignore[method-assign]
    began_ns = manual_clock.now_ns()
    running = asyncio.create_task(follower.run())
    await settle()
    for _ in range(7):
        await manual_clock.advance(1)
    fresh = follower.is_fresh()
    await manual_clock.advance(1)
    await settle()
    running.cancel()

    assert [began_ns + n * 2 * SECOND_NS for n in range(5)] == looks
    assert (False, True) == (fresh, follower.is_fresh())


async def test_a_segment_that_was_taken_is_not_read_again(manual_clock: ManualClock) -> None:
    """The overlap of the next look costs a listing; a segment that comes late inside it is found."""
    store = CountingStore(clock=manual_clock)
    now_ns = manual_clock.now_ns()
    rows = []
    for frame in (frame_of(0, 9), frame_of(10, 19)):
        accepted = await accept(store, frame, now_ns - (3 - len(rows)) * SECOND_NS, indexed=False)
        rows.append(acceptance.entry_of(accepted, acceptance.span_of(submit(frame).batch)))
    early, late = rows
    follower, live = _made(store, manual_clock)
    await write_rows(store, [early], writer="c")
    first = await follower.poll()
    store.gets.clear()
    second = await follower.poll()
    segments = [key for key in store.gets if key.startswith(paths.ACCEPTED_INDEX)]
    await write_rows(store, [late], writer="c")
    third = await follower.poll()

    assert (1, 0, [], 1) == (first, second, segments, third)
    assert 2 == len(live)


async def test_what_a_look_found_and_could_not_read_is_found_by_the_next(manual_clock: ManualClock) -> None:
    """The bucket goes away between the index and the blobs: nothing of that segment counts as seen."""

    class Away(MemoryStore):
        away = False

        async def get(self, key: str) -> StoredObject:
            if self.away and key.startswith(paths.RAW_BLOBS):
                raise Unavailable("down")
            return await super().get(key)

    store = Away(clock=manual_clock)
    submitted = submit(frame_of())
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a")
    await write_rows(store, [acceptance.entry_of(accepted, acceptance.span_of(submitted.batch))], writer="c")
    follower, live = _made(store, manual_clock)
    store.away = True
    with pytest.raises(Unavailable):
        await follower.poll()
    store.away = False

    assert (1, True) == (await follower.poll(), accepted.identity in live)


@pytest.mark.parametrize("damage", ["segment", "entry", "blob", "bytes"])
async def test_whatever_a_look_cannot_read_is_not_in_live_state_and_live_state_says_so(
    manual_clock: ManualClock, damage: str
) -> None:
    """A query must read the bucket up to there, and report what is missing: a look never calls itself complete."""
    store = MemoryStore(clock=manual_clock)
    now_ns = manual_clock.now_ns()
    rows = []
    for n in range(3):
        frame = frame_of(n * 10, n * 10 + 9)
        accepted = await accept(store, frame, now_ns - (9 - n) * SECOND_NS, indexed=False)
        rows.append(acceptance.entry_of(accepted, acceptance.span_of(submit(frame).batch)))
        await write_rows(store, rows[-1:], writer="c")
    segments = sorted([info.key async for info in store.list(paths.ACCEPTED_INDEX)], key=lambda key: key.split("/")[-1])
    doomed = rows[1].raw_blob_key if damage in ("blob", "bytes") else segments[1]
    data = (await store.get(doomed)).data
    await store.delete(doomed)
    if damage in ("segment", "bytes"):
        await store.create(doomed, data[:-3])
    elif damage == "entry":  # the index lost it; the reconciler's note of it is left
        note = work_key(paths.identity_of(rows[1].accepted_manifest_key), rows[1].accepted_at_unix_ns)
        await store.create(note, b"{}")
    follower, live = _made(store, manual_clock)

    assert 2 == await follower.poll()
    assert rows[1].accepted_at_unix_ns == live.evicted_through_ns


async def test_a_look_lists_the_overlap_and_what_came_since_not_the_hour(manual_clock: ManualClock) -> None:
    """Late in a busy hour: the entries before the overlap are not listed again."""
    listed: list[str] = []

    class Listing(MemoryStore):
        async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Any]:
            async for info in super().list(prefix, after=after):
                listed.append(info.key)
                yield info

    hour_ns = 3600 * SECOND_NS
    await manual_clock.advance((hour_ns - manual_clock.now_ns() % hour_ns) / SECOND_NS + 500)
    store = Listing(clock=manual_clock)
    for n in range(40):
        await accept(store, frame_of(n * 10, n * 10 + 9), manual_clock.now_ns() - (400 - 10 * n) * SECOND_NS)
    follower, _ = _made(store, manual_clock)
    first = await follower.poll()
    before = len(listed)
    await accept(store, frame_of(400, 409), manual_clock.now_ns())

    assert (40, 1) == (first, await follower.poll())
    assert 7 == len(listed[before:])  # six of the last 60 s, and the new one


class ReadingStore(MemoryStore):
    """Counts blobs that are read, and how many at once."""

    reads = now = most = 0

    async def get(self, key: str) -> StoredObject:
        if not key.startswith(paths.RAW_BLOBS):
            return await super().get(key)
        self.reads, self.now = self.reads + 1, self.now + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return await super().get(key)


@pytest.mark.parametrize(("limit", "most"), [({"READS_AT_ONCE": 2}, 2), ({"READ_BYTES_MAX": 1}, 1)])
async def test_a_look_reads_a_bounded_number_of_frames_at_once_and_all_of_them(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int], most: int
) -> None:
    """By number and by bytes; however they are grouped, live state has each, oldest first."""
    for name, value in limit.items():
        monkeypatch.setattr(follower_module, name, value)
    store = ReadingStore(clock=manual_clock)
    for n in range(5):
        frame = frame_of(n * 10, n * 10 + 9)
        accepted = await accept(store, frame, manual_clock.now_ns() - (9 - n) * SECOND_NS, indexed=False)
        row = acceptance.entry_of(accepted, acceptance.span_of(submit(frame).batch))
        await write_rows(store, [row], writer="c")
    follower, live = _made(store, manual_clock)

    assert (5, 5, most) == (await follower.poll(), store.reads, store.most)
    assert [0, 10, 20, 30, 40] == [identity.seq_start for identity, _ in live.batches()]
    assert 0 == live.evicted_through_ns


async def test_a_look_ends_where_memory_does_and_says_so(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are held; what there is no room for is not read, and queries go to the bucket for it."""
    monkeypatch.setattr(follower_module, "READS_AT_ONCE", 1)
    store = ReadingStore(clock=manual_clock)
    at_ns = [manual_clock.now_ns() - (9 - n) * SECOND_NS for n in range(6)]
    for n in range(6):
        await accept(store, frame_of(n * 10, n * 10 + 9), at_ns[n])
    room = 2 * follower_module.batch_bytes(submit(frame_of()).batch)
    live = LiveBatches(runtime_of(manual_clock, metrics=Metrics()), bytes_max=room, window_s=3600)
    follower = Follower(RawBatches(store), live, window_s=600.0, overlap_s=60.0, interval_s=2.0, clock=manual_clock)

    await follower.poll()

    assert [40, 50] == [identity.seq_start for identity, _ in live.batches()]
    assert (3, at_ns[3]) == (store.reads, live.evicted_through_ns)
