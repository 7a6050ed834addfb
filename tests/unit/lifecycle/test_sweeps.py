"""Sweeps: two watermarks, work by events and delay groups, exceptions that an unrelated edit does not touch."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.model import ActionKey, ActionKind, Degraded, Mode, ObjectIdentity, Position
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.pending import PendingStore
from lakebed.lifecycle.seams import ChangeEvent
from lakebed.lifecycle.state import PendingItem, ReaderState
from lakebed.lifecycle.streams import OpenStream, plan_passes
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000
DAY = round(DAY_S) * SECOND
TAGGED = rule(prefix="t", expiration_days=3, tags=(("t", "1"),))


class Counting:
    """The event source, counting what is read from it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.reads, self.events = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        self.reads += 1
        async for event in self._inner.read(after, until_ns):
            self.events += 1
            yield event


@pytest.mark.parametrize(("rules", "days"), [(5, (1, 1, 3, 3, 6)), (50, (1, 1, 3, 3, 6)), (5, (1, 2, 3, 4, 5))])
async def test_one_pass_over_the_log_serves_every_delay_group(rules: int, days: tuple[int, ...]) -> None:
    """A worker that catches up reads each event once, whatever the number of rules, buckets and distinct delays."""
    world = Harness()
    for number in range(4):
        await world.policy(
            f"b{number}", *(rule(prefix=f"p{n}", expiration_days=days[n % len(days)]) for n in range(rules))
        )
    await world.run_round()
    for number in range(20):
        world.lake.write(f"b{number % 4}", f"p{number % 5}-{number}")
    count = len(world.lake.log)
    source = Counting(world.lake)
    world.worker = world.new_worker(source)

    await world.run_round(6.5)

    assert (1, count) == (source.reads, source.events)
    assert [] == [key for number in range(4) for key in world.left(f"b{number}")]


async def test_what_was_seen_to_hold_no_work_is_not_read_again() -> None:
    """Rounds in which nothing is due cost no read of the log: the last one looked ahead."""
    world = Harness()
    await world.policy("b", rule(expiration_days=3))
    await world.run_round()
    source = Counting(world.lake)
    world.worker = world.new_worker(source)
    world.lake.write("b", "a")
    await world.run_round(0.1)
    reads = source.reads

    for _ in range(10):
        await world.run_round(0.2)

    assert reads == source.reads
    await world.run_round(1)
    assert [] == world.left()


async def test_each_cursor_trails_by_its_own_delay() -> None:
    """The delay group's by its days, the predicates' by the small delay; both move on without each other."""
    world = Harness()
    await world.policy("b", rule(expiration_days=2), TAGGED)
    await world.run_round()
    await world.run_round(10)

    state, now_ns = await world.reader(), world.clock.now_ns()

    assert now_ns - 2 * DAY == state.originals[str(2 * DAY)].ts_ns
    assert now_ns - 3 * DAY == state.originals[str(3 * DAY)].ts_ns
    assert state.predicate is not None and now_ns - SECOND == state.predicate.ts_ns


async def test_no_cursor_passes_what_may_still_appear_in_the_log() -> None:
    """An event appears in the store's log up to `flush_lag_s` late: until then its instant is not passed."""
    world = Harness(flush_lag_s=30.0)
    await world.policy("b", TAGGED)
    await world.run_round()
    await world.run_round(10)
    world.lake.write("b", "t1")
    await world.run_round(4)  # its own instant has passed: only the tag is missing
    world.lake.tag("b", "t1", {"t": "1"})
    held = world.lake.log.pop()

    await world.run_round(0.2)  # 20 s later the event is not there yet

    cursor = (await world.reader()).predicate
    assert cursor is not None and cursor < held.position
    world.lake.log.append(held)
    await world.run_round(0.2)
    assert [] == world.left()


async def test_an_exception_that_comes_during_a_compaction_is_kept() -> None:
    """Compaction removes the segments it has folded, and no segment of another writer."""
    clock = ManualClock()
    ref = ActionRef("b", ActionKey("0" * 16, ActionKind.EXPIRATION_DAYS))

    def item(key: str) -> PendingItem:
        return PendingItem(key, "", 7, ObjectIdentity(1, 1, "", ""))

    class Racing(MemoryStore):
        raced = False

        async def delete(self, key: str) -> None:
            if not self.raced:
                self.raced = True
                await PendingStore(
                    StoreRuntime(clock=ManualClock(), ids=Ids.seeded(2), metrics=Metrics(), store=self)
                ).upsert(ref, [item("late")])
            await super().delete(key)

    store = Racing(clock=clock)
    pending = PendingStore(StoreRuntime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics(), store=store))
    for key in ("a", "b", "c"):
        await pending.upsert(ref, [item(key)])

    await pending.remove(ref, [item("a").id, item("b").id])

    assert store.raced
    assert {item("c").id, item("late").id} == set((await pending.load(ref)).items)


async def test_an_exception_that_the_same_worker_adds_during_a_compaction_is_kept() -> None:
    """One that is stored between the fold and the compacted segment is in neither, so its own segment stays."""
    ref = ActionRef("b", ActionKey("0" * 16, ActionKind.EXPIRATION_DAYS))

    def item(key: str) -> PendingItem:
        return PendingItem(key, "", 7, ObjectIdentity(1, 1, "", ""))

    class Racing(MemoryStore):
        compacting = raced = False

        async def create(self, key: str, data: bytes, **more: Any) -> Any:
            if self.compacting and b'"tombstones":[]' in data and not self.raced:
                self.raced = True
                await pending.upsert(ref, [item("late")])
            return await super().create(key, data, **more)

    store = Racing(clock=ManualClock())
    pending = PendingStore(StoreRuntime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics(), store=store))
    for key in ("a", "b", "c"):
        await pending.upsert(ref, [item(key)])
    store.compacting = True

    await pending.remove(ref, [item("a").id, item("b").id])

    assert store.raced
    assert {item("c").id, item("late").id} == set((await pending.load(ref)).items)


async def test_a_blocked_group_is_not_read_again_until_somebody_decides() -> None:
    """No event is fetched for it, round after round; the other group goes on."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(prefix="a", expiration_days=1), rule(prefix="b", expiration_days=2))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("broken")
    await world.run_round(1.01)
    source = Counting(store)
    world.worker = world.new_worker(source)

    sweeps = (await world.run_round(0.01)).sweeps

    assert [True, False] == [sweep.blocked for sweep in sweeps]
    assert 0 == sweeps[0].read


async def test_a_later_event_does_not_move_a_cursor_past_a_blocked_one_in_the_same_batch() -> None:
    """All others of the batch are resolved; the cursor stands on the last one before the blocked event."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("a", "bad", "c"):
        world.lake.write("b", key)
    store.deletes["bad"] = Unavailable("broken")
    first, bad, _ = [event.position for event in world.lake.log[-3:]]

    await world.run_round(1.01)

    (cursor,) = (await world.reader()).originals.values()
    assert first <= cursor < bad
    assert ["bad"] == world.left()


async def test_a_date_never_makes_an_exception() -> None:
    """A tag that comes before the date is seen by the walk at the date."""
    world = Harness()
    midnight = 86_400 * SECOND
    date_ns = (world.clock.now_ns() // midnight + 1) * midnight
    await world.policy("b", rule(expiration_date_ns=date_ns, tags=(("t", "1"),)))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.tag("b", "a", {"t": "1"})
    await world.run_round(2)

    (row,) = await Operator(world.registers).status("b")
    assert ("scan_at_date", 0, date_ns) == (row["mode"], row["pending"], row["next_scan_ns"])
    assert ["a"] == world.left()
    await world.run_round((date_ns - world.clock.now_ns()) / DAY + 0.1)
    assert [] == world.left()


async def test_a_tag_that_came_while_an_action_was_on_scans_is_met_after_a_reseed() -> None:
    """The predicate cursor had passed it; rewound, the event is routed to the action again."""
    world = Harness(lookback_s=5 * DAY_S)
    await world.policy("b", TAGGED, rule(prefix="z", expiration_days=3, tags=(("z", "1"),)))
    await world.run_round()
    world.lake.write("b", "t1")
    await world.run_round(0.1)
    name = next(one for one, known in (await world.state()).actions.items() if known.predicate)
    (ref,) = [one for one in (await world.worker.compile()).actions if str(one.key) == name and one.bucket == "b"]
    await world.worker.resolver.demote(ref, Degraded.LAG_HIGH, "a test")
    await Operator(world.registers).cadence("b", name, 1000 * DAY)  # no scan comes to its help
    world.lake.tag("b", "t1", {"t": "1", "z": "1"})
    await world.run_round(0.1)
    assert 0 == sum(row["pending"] for row in await Operator(world.registers).status("b") if row["action"] == name)

    await Operator(world.registers).reseed(await world.worker.compile(), predicate=True)
    await world.run_round(0.1)

    assert Mode.EVENT_DRIVEN is (await world.state()).actions[name].mode
    await world.run_round(3)
    assert [] == world.left()


def test_streams_share_a_pass_where_they_overlap_and_beyond_the_bound_where_they_are_nearest() -> None:
    """One delay a pass while there are few; with many, neighbours are read together and none is left out."""

    def stream(delay_ns: int, cursor_ns: int, cutoff_ns: int) -> OpenStream:
        state = ReaderState(originals={str(delay_ns): Position(cursor_ns)})
        return OpenStream(0, delay_ns, state, "", cutoff_ns)

    several = [stream(10 * n, 1000 - 10 * n * n, 1004 - 10 * n * n) for n in range(1, 9)]
    overlapping = [stream(1, 991, 996), stream(2, 0, 2)]

    def planned(passes_max: int) -> list[list[int | None]]:
        found = plan_passes([*several, *overlapping], passes_max)
        return [[one.delay_ns for one in some] for some in found]

    assert [[2], [80], [70], [60], [50], [40], [30], [20], [10, 1]] == planned(16)
    assert [[2], [80], [70], [60], [50], [40], [30, 20, 10, 1]] == planned(7)
    assert [[2, 80, 70, 60, 50, 40, 30, 20, 10, 1]] == planned(1)
