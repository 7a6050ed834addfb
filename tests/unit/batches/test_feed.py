"""Accepted batches in bulk: offsets, limits, pruning, late batches and damage, on a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import decode
from lakebed.batches.feed import BatchesFeed, moment_ns
from lakebed.batches.model import AcceptedBatch, BatchIdentity, write_record
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, SliceRead, read_all
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.batch_frames import frame_of

START_NS = 1_760_000_000_000_000_000
HOUR_NS = 3_600_000_000_000


class Env:
    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.store = clock, MemoryStore(clock=clock)

    async def accept(self, number: int, at_ns: int, *, noted: bool = False, agent: str = "a") -> str:
        """Ten samples; gives the key of the index entry."""
        identity = BatchIdentity(agent, "b", number * 10, number * 10 + 9)
        frame = frame_of(identity.seq_start, identity.seq_end, agent=agent, boot="b")
        sha256 = acceptance.submission(frame, decode(frame)).sha256
        accepted = AcceptedBatch(
            "lightmetrics.accepted_batch.v1",
            agent,
            "b",
            identity.seq_start,
            identity.seq_end,
            sha256,
            len(frame),
            paths.blob_key(sha256),
            at_ns,
            "c",
            1,
            1,
        )
        entry = acceptance.by_time(accepted, acceptance.span_of(decode(frame)))
        await self.store.create(accepted.raw_blob_key, frame)
        await self.store.create(paths.accepted_key(identity), write_record(accepted))
        await self.store.create(entry.key, entry.data)
        if noted:
            note = acceptance.rollup_work(accepted)
            await self.store.create(note.key, note.data)
        return entry.key

    def feed(self, **bounds: Any) -> BatchesFeed:
        return BatchesFeed(self.store, now_ns=self.clock.now_ns, **bounds)


@pytest.fixture
def env(manual_clock: ManualClock) -> Env:
    return Env(manual_clock)


async def given(feed: BatchesFeed, limit: Limit, steps: int) -> list[list[str]]:
    """The keys of each step, from the beginning on."""
    at, found = await feed.begin(), []
    for _ in range(steps):
        end = await feed.reach(at, limit)
        found.append([piece.key for piece in await feed.slices(at, end, FeedFilter())])
        at = end
    return found


async def test_steps_give_every_batch_once_in_order_of_acceptance(env: Env) -> None:
    """Whatever the limit, steps follow each other without a gap and without a repeat, across hours."""
    keys = [await env.accept(n, START_NS + n * HOUR_NS // 2) for n in range(5)]
    await env.clock.advance(36_000)

    assert [keys, []] == await given(env.feed(), Limit(), 2)
    assert [keys[:2], keys[2:4], keys[4:], []] == await given(env.feed(), Limit(objects=2), 4)
    assert [keys[:2], keys[2:4], keys[4:], []] == await given(env.feed(), Limit(rows=25), 4)
    assert [[key] for key in keys] == await given(env.feed(), Limit(size_bytes=1), 5)


async def test_batches_of_one_instant_stay_together(env: Env) -> None:
    """An offset is an instant, so a limit never cuts through one."""
    keys = {await env.accept(n, START_NS) for n in range(3)}
    later = await env.accept(3, START_NS + 1)

    first, second = await given(env.feed(settle_s=-1.0), Limit(objects=1), 2)

    assert (keys, [later]) == (set(first), second)


async def test_the_youngest_settle_first(env: Env) -> None:
    """A batch younger than the pause is left to the next step: its neighbours may not be indexed yet."""
    old = await env.accept(0, env.clock.now_ns() - 20_000_000_000)
    await env.accept(1, env.clock.now_ns() - 5_000_000_000)

    assert [[old]] == await given(env.feed(settle_s=10.0), Limit(), 1)


async def test_a_clock_that_is_ahead_makes_nobody_pass_over_others(env: Env) -> None:
    """An offset never is beyond now: a batch from the future waits, and what is accepted until then is given."""
    await env.accept(9, env.clock.now_ns() + HOUR_NS)
    feed = env.feed(settle_s=0.0)
    at = await feed.reach(await feed.begin(), Limit())
    normal = await env.accept(0, env.clock.now_ns() + 1)
    await env.clock.advance(1)

    end = await feed.reach(at, Limit())

    assert [normal] == [piece.key for piece in await feed.slices(at, end, FeedFilter())]


async def test_a_batch_that_was_indexed_late_is_given_by_its_note(env: Env) -> None:
    """The reconciler's note brings a batch to readers who have passed its place; to others the index brings it."""
    first = await env.accept(5, START_NS + HOUR_NS)
    feed = env.feed(settle_s=-1.0)
    passed = await feed.reach(await feed.begin(), Limit())
    late = await env.accept(1, START_NS, noted=True)
    note = late.replace(paths.ACCEPTED_BY_TIME, ROLLUP_WORK)
    await env.store.delete(note)
    await env.store.create(note, b"half of a no")  # its name says it all

    end = await feed.reach(passed, Limit())

    assert [late] == [piece.key for piece in await feed.slices(passed, end, FeedFilter())]
    assert [] == await feed.slices(end, await feed.reach(end, Limit()), FeedFilter())
    assert [[late, first]] == await given(feed, Limit(), 1)


async def test_objects_that_cannot_matter_are_not_opened(env: Env) -> None:
    """By acceptance before the index is read, by agent, number and time before the blob is."""
    kept = await env.accept(0, START_NS)
    for n, agent in ((1, "a"), (0, "other")):
        await env.accept(n, START_NS + HOUR_NS, agent=agent)
    feed = env.feed(settle_s=-1.0)
    start = await feed.begin()
    end = await feed.reach(start, Limit())

    pieces = await feed.slices(start, end, FeedFilter())
    among = FeedFilter(among={"agent_id": frozenset({"other"})})
    by_seq = [await feed.load(piece, ["seq"], FeedFilter(high={"seq": 9})) for piece in pieces]
    by_agent = [await feed.load(piece, ["seq"], among) for piece in pieces]
    accepted = FeedFilter(high={"accepted_at": datetime.fromtimestamp(START_NS / 1e9, UTC)})
    by_acceptance = await feed.slices(start, end, accepted)

    assert [kept] == [piece.key for piece in by_acceptance]
    assert [10, 10] == [rows.num_rows for rows in by_seq if rows is not None]
    assert [10] == [rows.num_rows for rows in by_agent if rows is not None]


@pytest.mark.parametrize("damage", ["missing", "half", "another", "future"])
async def test_damage_comes_back_as_a_problem_with_its_key(env: Env, damage: str) -> None:
    """A missing blob, half a blob, other bytes and a later format stop nobody."""
    bad, good = await env.accept(0, START_NS), await env.accept(1, START_NS + 1)
    feed = env.feed(settle_s=-1.0)
    blob = (await feed.entry(FeedSlice(bad))).raw_blob_key
    data = (await env.store.get(blob)).data
    await env.store.delete(blob)
    if damage != "missing":
        other = {"half": data[:50], "another": data[:-1] + b"!", "future": data[:8] + b"\x09" + data[9:]}[damage]
        await env.store.create(blob, other)

    found: list[SliceRead] = [
        read async for read in read_all(feed, [FeedSlice(bad), FeedSlice(good)], ["seq"], FeedFilter())
    ]

    assert [(bad, True), (good, False)] == [(read.piece.key, bool(read.problem)) for read in found]
    assert found[1].rows.column("seq").to_pylist() == list(range(10, 20))


def test_moments_are_exact() -> None:
    """A moment is read to the microsecond; what is none is refused."""
    assert moment_ns("2025-10-09T08:53:20.000001Z") == START_NS + 1000
    assert moment_ns("2025-10-09T08:53:20") == START_NS
    assert moment_ns(str(START_NS + 7)) == START_NS + 7
    with pytest.raises(Invalid, match="not a time"):
        moment_ns("yesterday")


async def test_a_step_lists_what_came_since_the_last_one_not_the_hour(manual_clock: ManualClock) -> None:
    """Late in a busy hour: entries before the offset are not listed again."""
    env = Env(manual_clock)
    for number in range(300):
        await env.accept(number, START_NS + number * 1_000_000_000)
    listed: list[str] = []

    class Counting(MemoryStore):
        async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
            async for info in env.store.list(prefix, after=after):
                listed.append(info.key)
                yield info

    counting = Counting(clock=manual_clock)
    counting.children = env.store.children  # type: ignore[method-assign]
    feed = BatchesFeed(counting, now_ns=lambda: START_NS + HOUR_NS, settle_s=0.0)

    reached = await feed.reach({"through_ns": START_NS + 289 * 1_000_000_000, "late_ms": 0}, Limit(objects=100))

    assert START_NS + 299 * 1_000_000_000 == reached["through_ns"]
    assert 10 == len(listed)


async def test_a_note_of_the_same_instant_as_the_last_one_is_not_passed_over(env: Env) -> None:
    """A store's times have a resolution: a note that is stored after a look, with the time of one that was seen."""
    feed = env.feed(settle_s=10.0)
    await env.accept(9, env.clock.now_ns())
    await env.clock.advance(60)
    at = await feed.reach(await feed.begin(), Limit())
    given_late: list[str] = []
    wanted = [await env.accept(1, START_NS - HOUR_NS, noted=True)]
    for number in (2, None):
        end = await feed.reach(at, Limit())
        given_late += [piece.key for piece in await feed.slices(at, end, FeedFilter())]
        at = end
        if number is not None:
            wanted.append(await env.accept(number, START_NS - number, noted=True))
            await env.clock.advance(60)

    assert sorted(wanted) == sorted(given_late)


async def test_a_limit_is_kept_however_many_entries_are_looked_at_together(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long listing is cut in pieces: each step has what fits, and no entry is passed over or given twice."""
    monkeypatch.setattr("lakebed.batches.feed.CHUNK", 2)
    made = [await env.accept(number, env.clock.now_ns() - (100 - number) * 10**9) for number in range(7)]

    found = await given(env.feed(), Limit(rows=30), 4)

    assert [made[:3], made[3:6], made[6:], []] == found


async def test_notes_of_batches_behind_the_end_of_a_range_are_not_given(env: Env) -> None:
    """The end is exclusive, for late batches too."""
    inside, outside = (env.clock.now_ns() - at_s * 10**9 for at_s in (60, 50))
    feed = env.feed(end_ns=outside)
    at = {"through_ns": outside, "late_ms": 0}  # as after a range whose end was later
    keys = [await env.accept(n, at_ns, noted=True) for n, at_ns in enumerate((inside, outside))]
    await env.clock.advance(60)

    found = await feed.slices(at, await feed.reach(at, Limit()), FeedFilter())

    assert keys[:1] == [piece.key for piece in found]


async def test_a_blob_of_another_batch_is_corrupt_and_columns_say_where_a_sample_comes_from(env: Env) -> None:
    """A reader never gives the samples of one sender as those of another."""
    at_ns = env.clock.now_ns() - 60 * 10**9
    await env.accept(0, at_ns)
    await env.accept(0, at_ns + 1, agent="other")
    feed = env.feed()
    mine, other = await feed.slices(await feed.begin(), {"through_ns": at_ns + 1, "late_ms": 0}, FeedFilter())

    rows = await feed.load(mine, ["batch_id", "accepted_at", "agent_id"], FeedFilter())
    entries = [await feed.entry(piece) for piece in (mine, other)]
    swapped = msgspec.structs.replace(
        entries[0], frame_sha256=entries[1].frame_sha256, raw_blob_key=entries[1].raw_blob_key
    )
    wrong = msgspec.structs.replace(mine, locator=msgspec.json.encode(swapped))

    assert [(mine.id, "a")] * 10 == list(zip(rows["batch_id"].to_pylist(), rows["agent_id"].to_pylist(), strict=True))
    assert {at_ns // 1000} == set(rows["accepted_at"].cast("int64").to_pylist())
    with pytest.raises(Corrupt):
        await feed.load(wrong, ["agent_id"], FeedFilter())
    with pytest.raises(Invalid):
        env.feed(start_ns=5, end_ns=5)
