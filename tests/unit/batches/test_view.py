"""The newest batches and their agents, from the by-time index alone, at a bounded cost."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise
from typing import Any

from lakebed.batches import view as views
from lakebed.batches import workers
from lakebed.batches.conflicts import ConflictReview
from lakebed.batches.page import BatchesPage
from lakebed.batches.view import RecentBatches
from lakebed.core.clock import ManualClock
from lakebed.store.memory import MemoryStore
from support.batch_frames import frame_of
from support.batches_gateway import collector
from support.rollup_fixtures import accept
from support.runtimes import runtime_on
from support.tick_fixtures import context_of


class CountingStore(MemoryStore):
    gets = 0

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        self.gets += 1
        return await super().get(key)


async def filled(store: MemoryStore, clock: ManualClock) -> None:
    for number in range(3):
        async with collector(store, clock=clock) as (client, part):
            for agent in ("web-1", "web-2"):
                frame = frame_of(number * 10, number * 10 + 9, agent=agent, at_ns=clock.now_ns() - 10**9)
                assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await part.derived_writes.stop()
        await clock.advance(40 * 60)  # between collectors: no loop of theirs wakes 2,400 times


async def test_agents_are_told_from_their_newest_batches() -> None:
    """Counts, the last sequence and when it was heard, over hour folders; a second look reads nothing again."""
    clock = ManualClock()
    store = CountingStore(clock=clock)
    await filled(store, clock)
    recent = RecentBatches(runtime_on(store, clock))

    agents = {row.agent_id: row for row in await recent.agents()}
    read = store.gets
    newest = await recent.newest(2)

    assert {name: (row.batches, row.samples, row.last_seq) for name, row in agents.items()} == {
        "web-1": (3, 30, 29),
        "web-2": (3, 30, 29),
    }
    assert [row.seq_start for row in newest] == [20, 20]
    assert store.gets == read


async def test_an_agent_that_was_not_heard_lately_is_still_named() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await filled(store, clock)

    agents = await RecentBatches(runtime_on(store, clock)).agents(limit=1)

    assert sorted(row.agent_id for row in agents) == ["web-1", "web-2"]
    assert sorted(row.batches for row in agents) == [0, 1]


async def test_of_one_hour_the_newest_are_shown_newest_first() -> None:
    """Five batches within a minute and a look at two: the last two, the last one first."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        for number in range(5):
            frame = frame_of(number * 10, number * 10 + 9, at_ns=clock.now_ns() - 10**9)
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await clock.advance(2.0)
        await part.derived_writes.stop()

    newest = await RecentBatches(runtime_on(store, clock)).newest(2)

    assert [40, 30] == [row.seq_start for row in newest]
    assert all(0.9 < row.delay_s < 1.0 for row in newest)  # seconds from the last sample to its acceptance


async def test_no_more_hours_are_looked_into_than_the_limit(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Batches of several hours: with one hour allowed, those of the newest alone are shown."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await filled(store, clock)
    every = await RecentBatches(runtime_on(store, clock)).newest()
    monkeypatch.setattr(views, "HOURS_MAX", 1)
    newest = await RecentBatches(runtime_on(store, clock)).newest()

    hours = {row.accepted_at_unix_ns // (3600 * 10**9) for row in every}
    assert len(hours) > 1
    assert {row.accepted_at_unix_ns // (3600 * 10**9) for row in newest} == {max(hours)}


async def sent(store: MemoryStore, clock: ManualClock, *ages_s: float) -> None:
    """One batch per age, oldest first; the clock ends at the age 0."""
    async with collector(store, clock=clock) as (client, part):
        for number, (age_s, next_s) in enumerate(zip(ages_s, (*ages_s[1:], 0.0), strict=True)):
            frame = frame_of(number * 10, number * 10 + 9, at_ns=clock.now_ns() - 10**9)
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await clock.advance(age_s - next_s)
        await part.derived_writes.stop()


async def test_a_row_says_what_was_accepted_of_whom() -> None:
    """Identity, counts, bytes, hash and the delay from the last sample to the acceptance, each in its own field."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    frame = frame_of(3, 7, agent="web-1", boot="boot-9", at_ns=clock.now_ns() - 5 * 10**9)
    async with collector(store, clock=clock) as (client, part):
        assert (await client.post("/v1/batches", content=frame)).status_code == 200
        accepted_ns = clock.now_ns()
        await clock.advance(1.0)
        await part.derived_writes.stop()

    (row,) = await RecentBatches(runtime_on(store, clock)).newest()

    assert ("web-1", "boot-9", 3, 7) == (row.agent_id, row.boot_id, row.seq_start, row.seq_end)
    assert (5, len(frame), sha256(frame).hexdigest()) == (row.samples, row.frame_bytes, row.frame_sha256)
    assert (accepted_ns, 4.993) == (row.accepted_at_unix_ns, row.delay_s)


async def test_an_agents_row_is_that_of_its_newest_batch() -> None:
    """The boot, the sequence, the time and the delay are the newest batch's; counts and bytes are of all of them."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    frames = [frame_of(0, 9, boot="boot-1", at_ns=clock.now_ns() - 10**9)]
    async with collector(store, clock=clock) as (client, part):
        assert (await client.post("/v1/batches", content=frames[0])).status_code == 200
        await clock.advance(30.0)
        frames.append(frame_of(0, 4, boot="boot-2", at_ns=clock.now_ns() - 2 * 10**9))
        assert (await client.post("/v1/batches", content=frames[1])).status_code == 200
        accepted_ns = clock.now_ns()
        await clock.advance(1.0)
        await part.derived_writes.stop()

    (row,) = await RecentBatches(runtime_on(store, clock)).agents()

    assert ("agent-a", "boot-2", 2, 15, 4) == (row.agent_id, row.boot_id, row.batches, row.samples, row.last_seq)
    assert (sum(map(len, frames)), accepted_ns, 1.996) == (
        row.frame_bytes, row.last_accepted_at_unix_ns, row.delay_s,
    )  # fmt: skip


async def test_agents_heard_last_come_first_and_silent_ones_behind_them(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        for agent in ("b", "a", "c"):
            frame = frame_of(agent=agent, at_ns=clock.now_ns())
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await clock.advance(1.0)
        await part.derived_writes.stop()
    await store.create("accepted/v1/agent=zz/stranger", b"")

    assert ["c", "a", "b"] == [row.agent_id for row in await RecentBatches(runtime_on(store, clock)).agents()]
    assert ["c", "a", "b"] == [row.agent_id for row in await RecentBatches(runtime_on(store, clock)).agents(limit=1)]
    monkeypatch.setattr(views, "AGENTS_MAX", 1)
    assert 2 == len(await RecentBatches(runtime_on(store, clock)).agents(limit=1))


async def test_batches_further_back_in_the_hour_are_found_when_the_last_minutes_hold_too_few() -> None:
    """One in the last minute, one within ten minutes, one before: a look at three finds all three, newest first."""
    clock = ManualClock()
    await clock.advance(3600.0 - clock.now_ns() / 1e9 % 3600)  # the begin of an hour
    store = MemoryStore(clock=clock)
    await sent(store, clock, 1800.0, 300.0, 30.0)

    recent = RecentBatches(runtime_on(store, clock))

    assert [[20], [20, 10], [20, 10, 0]] == [
        [row.seq_start for row in await recent.newest(limit)] for limit in (1, 2, 3)
    ]


async def test_a_folder_that_is_none_of_ours_is_passed_over() -> None:
    """Hours and dates with other names hold no batches and hide none."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await sent(store, clock, 10.0)
    (key,) = [info.key async for info in store.list("accepted-index/")]
    date = key.split("/")[-3]
    for folder in (f"{date}/hour=zz", "zz/hour=01"):
        await store.create(f"{key.split(date)[0]}{folder}/x.json", b"{}")

    assert [0] == [row.seq_start for row in await RecentBatches(runtime_on(store, clock)).newest()]


async def test_single_objects_are_kept_and_the_least_used_is_forgotten_first(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The cache is bounded: what was looked at lately is not read again."""
    clock = ManualClock()
    store = CountingStore(clock=clock)
    for number in range(3):
        await accept(store, frame_of(number * 10, number * 10 + 9), clock.now_ns() - (3 - number) * 10**9)
    monkeypatch.setattr(views, "KNOWN_MAX", 2)
    recent = RecentBatches(runtime_on(store, clock))
    await recent.newest(1)
    await recent.newest(2)
    read = store.gets

    assert [20, 10] == [row.seq_start for row in await recent.newest(2)]
    assert (0, 2) == (store.gets - read, len(recent._known))


async def test_a_look_that_has_found_enough_lists_no_further_hour() -> None:
    clock = ManualClock()

    class Listing(MemoryStore):
        def list(self, prefix: str, **options: Any) -> Any:
            listed.append(prefix)
            return super().list(prefix, **options)

    listed: list[str] = []
    store = Listing(clock=clock)
    await filled(store, clock)
    listed.clear()

    await RecentBatches(runtime_on(store, clock)).newest(2)

    assert 1 == len({prefix.partition("date=")[2] for prefix in listed})


async def test_an_earlier_hour_is_looked_at_from_its_own_end() -> None:
    """Not from now: of a busy hour that is over, the last batches are shown and not the first."""
    clock = ManualClock()
    await clock.advance(3600.0 - clock.now_ns() / 1e9 % 3600)  # the begin of an hour
    store = MemoryStore(clock=clock)
    await sent(store, clock, 7200.0 - 60.0, 7200.0 - 3000.0, 7200.0 - 3590.0)

    assert [20] == [row.seq_start for row in await RecentBatches(runtime_on(store, clock)).newest(1)]


async def test_conflicts_are_listed_from_a_place_on_up_to_a_limit_and_open_ones_alone() -> None:
    clock = ManualClock()
    context = context_of(MemoryStore(clock=clock), clock=clock)
    async with collector(context.store, clock=clock) as (client, part):
        for agent in ("a", "b", "c"):
            for value, status in ((1.0, 200), (9.0, 409)):
                frame = frame_of(agent=agent, value=value, at_ns=clock.now_ns())
                assert (await client.post("/v1/batches", content=frame)).status_code == status
                await clock.advance(1.0)
        await part.derived_writes.stop()
    every = await views.conflicts(context)
    names = [view.conflict_id for view in every]
    await ConflictReview(runtime_on(context.store, clock)).resolve(names[1], "accept_existing", "a disk", "ann")

    assert 3 == len(set(names))
    assert names[:2] == [view.conflict_id for view in await views.conflicts(context, limit=2)]
    assert names[1:] == [view.conflict_id for view in await views.conflicts(context, after=names[0])]
    assert [names[0], names[2]] == [view.conflict_id for view in await views.conflicts(context, open_only=True)]


async def test_an_open_conflict_is_not_hidden_behind_decided_ones() -> None:
    """The page shows a limited number: those to decide come first, and the overview counts them."""
    clock = ManualClock()
    context = context_of(MemoryStore(clock=clock), clock=clock)
    review = ConflictReview(context)
    async with collector(context.store, clock=clock) as (client, part):
        for agent in ("a", "b", "c"):
            for value in (1.0, 9.0):
                await client.post("/v1/batches", content=frame_of(agent=agent, value=value, at_ns=clock.now_ns()))
        await part.derived_writes.stop()
    first, second, last = [view.conflict_id for view in await review.list()]
    for decided in (first, second):
        await review.resolve(decided, "accept_existing", "a disk", "ann")

    shown = await views.conflicts_shown(context, limit=2)

    assert [last, first] == [view.conflict_id for view in shown]
    assert 1 == BatchesPage.levels({"batches.conflicts": shown}.get)["conflicts_open"]


async def test_batches_of_a_span_are_counted_once_however_it_is_cut() -> None:
    """By when they were accepted; a second look at an entry reads nothing again."""
    clock = ManualClock()
    store = CountingStore(clock=clock)
    begin_ns = clock.now_ns() - 1
    await filled(store, clock)
    recent = RecentBatches(runtime_on(store, clock))
    end_ns = clock.now_ns()

    whole = await recent.accepted_between(begin_ns, end_ns)
    cuts = [begin_ns, begin_ns + 30 * 60 * 10**9, begin_ns + 50 * 60 * 10**9, end_ns]
    parts = [await recent.accepted_between(one, other) for one, other in pairwise(cuts)]

    assert (6, 60) == whole
    assert (6, 60) == tuple(map(sum, zip(*parts, strict=True)))


async def test_samples_of_many_batches_are_estimated_from_a_bounded_number_of_reads(monkeypatch: Any) -> None:
    monkeypatch.setattr(views, "COUNTED_MAX", 2)
    clock = ManualClock()
    store = CountingStore(clock=clock)
    begin_ns = clock.now_ns() - 1
    await filled(store, clock)
    store.gets = 0

    found = await RecentBatches(runtime_on(store, clock)).accepted_between(begin_ns, clock.now_ns())

    assert (6, 60) == found
    assert store.gets <= 2 + 1  # one segment has all rows, whatever their number


async def test_a_batch_at_the_instant_of_a_cut_is_counted_on_one_side() -> None:
    """The sampler's spans touch: an acceptance at the end of one is not in the next."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    at_ns = clock.now_ns() - 10**10
    await accept(store, frame_of(), at_ns)
    recent = RecentBatches(runtime_on(store, clock))

    found = [await recent.accepted_between(*span) for span in ((at_ns - 10**9, at_ns), (at_ns, at_ns + 10**9))]

    assert [(1, 10), (0, 0)] == found


async def test_samples_of_single_objects_that_are_not_read_are_counted_as_the_others(monkeypatch: Any) -> None:
    """A chart is not lower because a look reads a bounded number of them."""
    monkeypatch.setattr(views, "COUNTED_MAX", 2)
    clock = ManualClock()
    store = CountingStore(clock=clock)
    for number in range(5):
        await accept(store, frame_of(number * 10, number * 10 + 9), clock.now_ns() - (5 - number) * 10**9)
    store.gets = 0

    found = await RecentBatches(runtime_on(store, clock)).accepted_between(clock.now_ns() - 60 * 10**9, clock.now_ns())

    assert ((5, 50), 2) == (found, store.gets)


async def test_the_reconcilers_delay_is_the_age_of_its_checkpoint() -> None:
    """Unknown when none ever ran: then its state is grey, not green."""
    context = context_of()
    assert await views.reconciler_behind_s(context) is None
    await workers.incremental_scan(context, workers.reconciler(context)).scan()

    behind_s = await views.reconciler_behind_s(context)

    assert behind_s is not None and 0 <= behind_s < 60
