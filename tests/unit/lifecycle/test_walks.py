"""Walks: where they stop and go on, what holds them, what they hand to the sweeps, and in which order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Corrupt, Unavailable
from lakebed.lifecycle.model import Mode, StreamKind, StreamResolution
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.scanner import BucketScanner
from lakebed.lifecycle.seams import Family
from lakebed.lifecycle.state import ScanProgress
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000


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
    world, store = await old_bucket("a")
    scanner = BucketScanner(store, world.worker.resolver, world.registers, world.settings)
    late, fresh = ScanProgress("same", 1), ScanProgress("same", 2)
    await world.registers.bucket("b").change(lambda state: (msgspec.structs.replace(state, scan=fresh), None))

    await scanner._checkpoint("b", late, "k/z", 5)
    assert fresh == (await world.state()).scan

    await scanner._checkpoint("b", fresh, "k/c", 5)
    assert ScanProgress("same", 2, "k/c", 5) == (await world.state()).scan


async def test_a_scan_is_dated_to_its_start() -> None:
    """What came while it went along may have been passed by: the next scan is due from the start, not from the end."""
    world, store = await old_bucket("a")

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def scan(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
            async for family in store.scan(bucket, after):
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

    async def scan(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        self.began.append(after)
        async for family in self._inner.scan(bucket, after):
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
    assert state.scan is not None and ("k/c", 3) == (state.scan.after, state.scan.scanned)
    assert ["d", "e"] == world.left()
    store.deletes.clear()
    world.worker = world.new_worker(spy)
    (scan,) = (await world.run_round(0.01)).scans

    assert (True, ["", "k/c"]) == (scan.complete, spy.began)
    assert [] == world.left()


async def test_a_fatal_entry_blocks_its_walk_and_only_its_walk() -> None:
    """Tried five times, on record with its key; the checkpoint stays before it, and the next round stands still."""
    world, store = await old_bucket("a", "bad", "c", batch=1)
    world.lake.write("other", "x")
    await world.policy("other", rule(expiration_days=1))
    store.deletes["bad"] = Corrupt("no such needle")

    await world.run_round(1.01)

    (blocker,) = await Operator(world.registers).blockers()
    assert (StreamKind.BOOTSTRAP, "b", "bad", 5) == (
        blocker.stream.kind, blocker.bucket, blocker.key, blocker.retries
    )  # fmt: skip
    assert 5 == store.tried.count("bad")
    state = await world.state()
    assert state.scan is not None and "k/a" == state.scan.after
    assert [] == world.left("other")
    (scan,) = [scan for scan in (await world.run_round(0.01)).scans if scan.bucket == "b"]
    assert scan.blocked and 5 == store.tried.count("bad")


async def test_a_retry_of_a_walks_key_removes_the_blocker_and_leaves_the_checkpoint() -> None:
    """The next walk goes on from where it stood, and finds the key done."""
    world, store = await old_bucket("a", "bad", "c", batch=1)
    store.deletes["bad"] = Corrupt("no such needle")
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

    async def scan(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        async for family in self._inner.scan(bucket, after):
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


async def test_cursors_are_seeded_before_an_action_is_called_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the two leaves it waiting, with its cursor; nothing is swept for it until the walk ends."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    seen: list[tuple[bool, bool]] = []
    finished = BucketScanner._finished

    def spying(self: BucketScanner, *words: Any) -> Any:
        seen.append((bool(world.store), True))
        raise Unavailable("died here")

    monkeypatch.setattr(BucketScanner, "_finished", spying)
    await world.run_round()
    assert seen and (await world.reader()).originals
    assert not any(one.bootstrap_complete for one in (await world.state()).actions.values())
    assert {} == (await world.worker.compile()).original_delay_groups

    monkeypatch.setattr(BucketScanner, "_finished", finished)
    await world.run_round(0.01)
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode


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
