"""Walks: where they stop and go on, what holds them, what they hand to the sweeps, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lakebed.core.errors import Unavailable
from lakebed.lifecycle import scanner
from lakebed.lifecycle.cluster import LogGap
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.model import Calendar, Mode, Rule, StreamKind, StreamResolution
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.scan_plan import newest_wanted_ns
from lakebed.lifecycle.scanner import BucketScanner
from lakebed.lifecycle.seams import Family
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000
DAY = 86_400 * SECOND


async def old_bucket(*keys: str, **changed: Any) -> tuple[Harness, Any]:
    """Objects that are due when the policy comes, so that only a walk finds them."""
    world, store = failing(**changed)
    for key in keys:
        world.lake.write("b", key)
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(rule_id="r", expiration_days=1))
    return world, store


async def test_a_walk_that_was_overtaken_does_not_move_its_successor() -> None:
    """A rescan for the same actions begins anew: progress of the walk before it would hide what it has not seen."""
    world, _ = await old_bucket("a", "b")
    snapshot = await world.worker.compile()
    scanner = world.worker._scanner
    late = await scanner.begin("b", snapshot)
    await Operator(world.registers).rebootstrap("b")
    await world.clock.advance(1)
    fresh = await scanner.begin("b", snapshot)

    assert not (await scanner.run("b", 0, late, snapshot, nothing)).complete
    assert fresh == (await world.state()).scan
    assert (await scanner.run("b", 0, fresh, snapshot, nothing)).complete
    assert [] == world.left()


async def nothing() -> None:
    return None


@pytest.mark.parametrize("workers", [1, 3])
async def test_parts_of_a_walk_are_shared_between_workers_and_nothing_is_met_twice(workers: int) -> None:
    """Each part is one worker's; the walk is complete when all of them are, whoever did the last."""
    world, store = await old_bucket(*(f"k{number:02d}" for number in range(20)), batch=2)
    world.lake.parts = 5
    seen: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
            async for family in store.scan(bucket, after, **bounds):
                seen.append(family.key)
                await asyncio.sleep(0)
                yield family

    several = [world.new_worker(Watched()) for _ in range(workers)]
    reports = await asyncio.gather(*(worker.run_round() for worker in several))

    assert ([], sorted(set(seen))) == (world.left(), sorted(seen))
    assert 1 == sum(scan.complete for report in reports for scan in report.scans)
    assert 20 == (await world.state()).objects


async def test_a_walk_lists_by_prefix_where_every_rule_has_one() -> None:
    """Other folders are not listed; uploads are where a rule aborts them."""
    world = Harness()
    for key in ("a/1", "b/1", "c/1"):
        world.lake.write("b", key)
    world.lake.begin_upload("b", "a/u")
    listed: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.lake, name)

        async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
            async for family in world.lake.scan(bucket, after, **bounds):
                listed.append(family.key)
                yield family

    world.worker = world.new_worker(Watched())
    await world.policy("b", rule(prefix="a/", expiration_days=1), rule(prefix="a/1", expiration_days=2))
    await world.run_round(2)
    assert (["a/1"], ["b/1", "c/1"]) == (listed, world.left())

    await world.policy("b", rule(prefix="b/", expiration_days=1), rule(prefix="a/", abort_days=1))
    await world.run_round(0.1)
    assert ["a/1", "b/1", "a/u"] == listed
    assert (["c/1"], {}) == (world.left(), world.lake.uploads["b"])


async def test_a_scan_is_dated_to_its_start() -> None:
    """What came while it went along may have been passed by: the next scan is due from the start, not from the end."""
    world, store = await old_bucket("a")

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
            async for family in store.scan(bucket, after, **bounds):
                await world.clock.advance(50)
                yield family

    world.worker = world.new_worker(Slow())
    started_ns = world.clock.now_ns()
    await world.run_round()

    action = await world.action("EXPIRATION_DAYS")
    assert (started_ns, started_ns) == (action.bootstrap_started_at_ns, action.last_scan_ns)
    assert started_ns + 50 * SECOND == action.bootstrap_completed_at_ns
    assert started_ns + round(7 * DAY_S) * SECOND == action.next_scan_ns


class Spy:
    """The lister, telling from where each walk began."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.began: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        self.began.append(after)
        async for family in self._inner.scan(bucket, after, **bounds):
            yield family


async def test_a_walk_that_met_an_outage_goes_on_behind_the_last_key_it_resolved() -> None:
    """One batch is not repeated, nothing is passed over, and another worker can take it up."""
    world, store = await old_bucket("a", "b", "c", "d", "e", batch=2)
    spy = Spy(store)
    world.worker = world.new_worker(spy)
    store.deletes["d"] = Unavailable("down")

    (scan,) = (await world.run_round()).scans
    assert (False, False) == (scan.complete, scan.blocked)
    state = await world.state()
    assert state.scan is not None and ("k/c", 3) == (state.scan.ranges[0].after, state.scan.scanned)
    assert ["d", "e"] == world.left()
    store.deletes.clear()
    world.worker = world.new_worker(spy)
    (scan,) = (await world.run_round(0.01)).scans

    assert (True, ["", "k/c"]) == (scan.complete, spy.began)
    assert [] == world.left()


async def test_a_blocked_walk_stands_still_and_only_that_one() -> None:
    """On record with its key; the checkpoint stays before it, and the next round tries nothing."""
    world, store = await old_bucket("a", "bad", "c", batch=1, retries_max=1)
    world.lake.write("other", "x")
    await world.policy("other", rule(expiration_days=1))
    store.deletes["bad"] = Unavailable("no such needle")

    await world.run_round(1.01)

    (blocker,) = await Operator(world.registers).blockers()
    assert (StreamKind.BOOTSTRAP, "b", "bad", 1) == (
        blocker.stream.kind, blocker.bucket, blocker.key, blocker.retries
    )  # fmt: skip
    assert 1 == store.tried.count("bad")
    state = await world.state()
    assert state.scan is not None and "k/a" == state.scan.ranges[0].after
    assert [] == world.left("other")
    (scan,) = [scan for scan in (await world.run_round(0.01)).scans if scan.bucket == "b"]
    assert scan.blocked and 1 == store.tried.count("bad")


async def test_a_retry_of_a_walks_key_removes_the_blocker_and_leaves_the_checkpoint() -> None:
    """The next walk goes on from where it stood, and finds the key done."""
    world, store = await old_bucket("a", "bad", "c", batch=1, retries_max=1)
    store.deletes["bad"] = Unavailable("no such needle")
    await world.run_round()
    operator, snapshot = Operator(world.registers), await world.worker.compile()
    (blocker,) = await operator.blockers()
    before = (await world.state()).scan

    assert StreamResolution.BLOCKED is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    assert before == (await world.state()).scan
    store.deletes.clear()
    assert StreamResolution.DONE is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)

    assert [] == await operator.blockers() and before == (await world.state()).scan
    assert ["c"] == world.left()
    await world.run_round(0.01)
    assert [] == world.left()


class Blind:
    """A listing that overlooks a key, as one that is no snapshot may."""

    def __init__(self, inner: Any, key: str) -> None:
        self._inner, self._key = inner, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        async for family in self._inner.scan(bucket, after, **bounds):
            if family.key != self._key:
                yield family


async def test_what_a_walk_overlooks_while_it_goes_along_is_replayed_from_the_log() -> None:
    """Cursors are seeded behind the walk's start by the delay: the object's own event is still to come."""
    world = Harness()
    world.lake.write("b", "overlooked")
    await world.clock.advance(0.5 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Blind(world.lake, "overlooked"))

    await world.run_round()
    assert ["overlooked"] == world.left()
    await world.run_round(0.51)

    assert [] == world.left()


async def test_what_a_walk_and_the_log_both_missed_goes_with_the_next_safety_scan() -> None:
    """An object older than the delay has no event to come; the scan of its kind finds it."""
    world = Harness()
    world.lake.write("b", "overlooked")
    await world.clock.advance(3 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Blind(world.lake, "overlooked"))
    await world.run_round()
    world.worker = world.new_worker(world.lake)
    await world.run_round(3)
    assert ["overlooked"] == world.left()

    await world.run_round(4.1)

    assert [] == world.left()


async def test_after_a_crash_between_activation_and_rewind_the_cursors_are_moved_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The action takes part in sweeps, and says that its cursors are still to be moved; whoever compiles next does."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    join = BucketScanner.join

    async def dying(self: BucketScanner, *words: Any) -> None:
        raise Unavailable("died here")

    monkeypatch.setattr(BucketScanner, "join", dying)
    with pytest.raises(Unavailable):
        await world.run_round()
    action = await world.action("EXPIRATION_DAYS")
    assert (True, 0, {}) == (action.bootstrap_complete, action.joined, (await world.reader()).originals)
    world.lake.write("b", "a")

    monkeypatch.setattr(BucketScanner, "join", join)
    await world.run_round(1.01)
    joined = (await world.action("EXPIRATION_DAYS")).joined
    assert joined and {joined} == {one.generation for one in (await world.registers.cursors()).values()}
    assert [] == world.left()


async def test_a_policy_edited_under_a_walk_begins_another_and_keeps_what_is_unchanged() -> None:
    """Unchanged actions stay complete; the new one waits for its own walk."""
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=1))
    await world.run_round()
    (old,) = (await world.state()).actions
    await world.policy("b", rule(prefix="x", expiration_days=1), rule(prefix="y", expiration_days=2))

    snapshot = await world.worker.compile()
    assert {old} == {str(one.ref.key) for one in snapshot.actions.values() if one.active}
    assert [True] == [scan.complete for scan in (await world.run_round()).scans]

    assert all(one.bootstrap_complete for one in (await world.state()).actions.values())


async def test_a_worker_that_starts_without_its_store_catches_up_when_it_comes() -> None:
    """Nothing is lost and nothing is passed: rounds fail until the store answers."""

    class Down:
        def __init__(self, inner: Any) -> None:
            self.inner, self.down = inner, True

        def __getattr__(self, name: str) -> Any:
            if self.down and name in ("all", "scan", "look", "read", "delete", "get"):
                raise Unavailable("no endpoint answers")
            return getattr(self.inner, name)

    world = Harness()
    world.lake.write("b", "a")
    await world.policy("b", rule(expiration_days=1))
    store = Down(world.lake)
    world.worker = world.new_worker(store)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await world.run_round(1)
    store.down = False

    await world.run_round(0.1)

    assert [] == world.left()


@pytest.mark.parametrize(
    ("rules", "mode", "gaps", "newest_ns"),
    [
        ((rule(expiration_days=1), rule(expiration_days=3, abort_days=9)), Mode.EVENT_DRIVEN, (), 9 * DAY),
        ((rule(noncurrent_days=1), rule(abort_days=1)), Mode.EVENT_DRIVEN, (), 0),
        ((rule(expiration_days=1), rule(expiration_date_ns=9 * DAY)), Mode.EVENT_DRIVEN, (), None),
        ((rule(expiration_days=1), rule(expiration_date_ns=11 * DAY)), Mode.EVENT_DRIVEN, (), 9 * DAY),
        ((rule(expiration_days=1),), Mode.SCAN_ONLY, (), None),
        ((rule(expiration_days=4),), Mode.EVENT_DRIVEN, (LogGap(7 * DAY, 8 * DAY), LogGap(1, 2)), 8 * DAY),
        ((rule(expiration_days=1),), Mode.EVENT_DRIVEN, (LogGap(1, 2),), 9 * DAY),
    ],
    ids=[
        "ages",
        "no age of objects",
        "a date that has come",
        "a date to come",
        "scans only",
        "events are missing",
        "events were missing long ago",
    ],
)
def test_a_walk_looks_at_no_object_that_is_too_young_for_every_rule(
    rules: tuple[Rule, ...], mode: Mode, gaps: tuple[LogGap, ...], newest_ns: int | None
) -> None:
    """Unless its date has come, or scans alone find it: then it looks at all. Of a gap in the log it looks at all."""
    snapshot = compile_policies({"b": rules}, lambda _: Activation(mode, True), Calendar(rounding="exact"))

    assert newest_ns == newest_wanted_ns(snapshot.of_bucket("b"), 10 * DAY, snapshot.calendar, gaps)


async def test_a_walk_counts_what_it_did_not_look_at() -> None:
    """Status shows every key as scanned; what is young stays and goes by its own event."""
    world, _ = await old_bucket("a", "b")
    for number in range(5):
        world.lake.write("b", f"young{number}")
    await world.run_round()

    assert 7 == (await world.state()).objects
    assert [f"young{number}" for number in range(5)] == world.left()
    await world.run_round(1.5 * DAY_S)
    assert [] == world.left()


@pytest.mark.parametrize("when", [1, 2, 3])
async def test_a_walk_that_is_overtaken_on_its_way_does_not_move_its_successor(when: int) -> None:
    """The rescan begins before one of its batches is settled: none of its later checkpoints is the successor's."""
    world, _ = await old_bucket("a", "b", "c", batch=1)
    snapshot = await world.worker.compile()
    scanner = world.worker._scanner
    late = await scanner.begin("b", snapshot)
    calls = 0

    async def alive() -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            await Operator(world.registers).rebootstrap("b")
            await world.clock.advance(1)
            await scanner.begin("b", snapshot)
        await world.clock.advance(10)  # every batch is a checkpoint

    overtaken = await scanner.run("b", 0, late, snapshot, alive)
    scan = (await world.state()).scan

    assert not overtaken.complete
    assert scan is not None and (0, False) == (scan.scanned, scan.done)
    assert scan.started_at_ns > late.started_at_ns


async def test_a_walk_that_goes_on_after_a_crash_keeps_the_first_due_instant_it_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No event drives the action: the next scan comes when the first of all that was left is due."""
    monkeypatch.setattr(scanner, "CHECKPOINT_S", 0.0)
    world, _ = failing(retention_s=0.5 * DAY_S, batch=1)
    world.lake.write("b", "a")
    due_ns = world.clock.now_ns() + round(DAY_S * SECOND)
    await world.clock.advance(0.4 * DAY_S)
    world.lake.write("b", "b")
    await world.clock.advance(0.2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    snapshot, walker, calls = await world.worker.compile(), world.worker._scanner, 0
    progress = await walker.begin("b", snapshot)

    async def dies() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Unavailable("the worker dies")

    with pytest.raises(Unavailable):
        await walker.run("b", 0, progress, snapshot, dies)
    assert (await walker.run("b", 0, progress, snapshot, nothing)).complete

    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.SCAN_ONLY, due_ns) == (action.mode, action.next_scan_ns)
