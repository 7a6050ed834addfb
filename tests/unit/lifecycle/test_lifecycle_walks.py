"""Walks: where they stop and go on, what holds them, what they hand to the sweeps, and in which order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from lifecycle_harness import DAY_S, Harness, failing
from lifecycle_makers import rule

from lakebed.errors import Corrupt, Unavailable
from lakebed.lifecycle.model import Mode, Resolution, StreamKind
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import Family
from lakebed.lifecycle.state import WalkProgress
from lakebed.lifecycle.walker import Walker

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
    walker = Walker(store, world.worker.resolver, world.shelf, world.settings)
    late, fresh = WalkProgress("same", 1), WalkProgress("same", 2)
    await world.shelf.bucket("b").change(lambda state: (msgspec.structs.replace(state, walk=fresh), None))

    await walker._checkpoint("b", late, "k/z", 5)
    assert fresh == (await world.state()).walk

    await walker._checkpoint("b", fresh, "k/c", 5)
    assert WalkProgress("same", 2, "k/c", 5) == (await world.state()).walk


async def test_a_scan_is_dated_to_its_start() -> None:
    """What came while it went along may have been passed by: the next scan is due from the start, not from the end."""
    world, store = await old_bucket("a")

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        async def walk(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
            async for family in store.walk(bucket, after):
                await world.clock.advance(50)
                yield family

    world.worker = world.new_worker(Slow())
    started_ns = world.clock.now_ns()
    await world.tick()

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

    async def walk(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        self.began.append(after)
        async for family in self._inner.walk(bucket, after):
            yield family


async def test_a_walk_that_met_an_outage_goes_on_behind_the_last_key_it_resolved() -> None:
    """One batch is not repeated, nothing is passed over, and another worker can take it up."""
    world, store = await old_bucket("a", "b", "c", "d", "e", batch=2)
    spy = Spy(store)
    world.worker = world.new_worker(spy)
    store.deletes["d"] = Unavailable("down")

    (walk,) = (await world.tick()).walks
    assert (False, False) == (walk.complete, walk.blocked)
    state = await world.state()
    assert state.walk is not None and ("k/c", 3) == (state.walk.after, state.walk.scanned)
    assert ["d", "e"] == world.left()
    store.deletes.clear()
    world.worker = world.new_worker(spy)
    (walk,) = (await world.tick(0.01)).walks

    assert (True, ["", "k/c"]) == (walk.complete, spy.began)
    assert [] == world.left()


async def test_a_fatal_entry_blocks_its_walk_and_only_its_walk() -> None:
    """Tried five times, on record with its key; the checkpoint stays before it, and the next round stands still."""
    world, store = await old_bucket("a", "bad", "c", batch=1)
    world.lake.write("other", "x")
    await world.policy("other", rule(expiration_days=1))
    store.deletes["bad"] = Corrupt("no such needle")

    await world.tick(1.01)

    (blocker,) = await Operator(world.shelf).blockers()
    assert (StreamKind.BOOTSTRAP, "b", "bad", 5) == (
        blocker.stream.kind, blocker.bucket, blocker.key, blocker.retries
    )  # fmt: skip
    assert 5 == store.tried.count("bad")
    state = await world.state()
    assert state.walk is not None and "k/a" == state.walk.after
    assert [] == world.left("other")
    (walk,) = [walk for walk in (await world.tick(0.01)).walks if walk.bucket == "b"]
    assert walk.blocked and 5 == store.tried.count("bad")


async def test_a_retry_of_a_walks_key_removes_the_blocker_and_leaves_the_checkpoint() -> None:
    """The next walk goes on from where it stood, and finds the key done."""
    world, store = await old_bucket("a", "bad", "c", batch=1)
    store.deletes["bad"] = Corrupt("no such needle")
    await world.tick()
    operator, snapshot = Operator(world.shelf), await world.worker.compile()
    (blocker,) = await operator.blockers()
    before = (await world.state()).walk

    assert Resolution.BLOCKED is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    assert before == (await world.state()).walk
    store.deletes.clear()
    assert Resolution.DONE is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)

    assert [] == await operator.blockers() and before == (await world.state()).walk
    assert ["c"] == world.left()
    await world.tick(0.01)
    assert [] == world.left()


class Blind:
    """A listing that overlooks a key, as one that is no snapshot may."""

    def __init__(self, inner: Any, key: str) -> None:
        self._inner, self._key = inner, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def walk(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        async for family in self._inner.walk(bucket, after):
            if family.key != self._key:
                yield family


async def test_what_a_walk_overlooks_while_it_goes_along_is_replayed_from_the_log() -> None:
    """Cursors are seeded behind the walk's start by the delay: the object's own event is still to come."""
    world = Harness()
    world.lake.write("b", "overlooked")
    await world.clock.advance(0.5 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Blind(world.lake, "overlooked"))

    await world.tick()
    assert ["overlooked"] == world.left()
    await world.tick(0.51)

    assert [] == world.left()


async def test_what_a_walk_and_the_log_both_missed_goes_with_the_next_safety_scan() -> None:
    """An object older than the delay has no event to come; the scan of its kind finds it."""
    world = Harness()
    world.lake.write("b", "overlooked")
    await world.clock.advance(3 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Blind(world.lake, "overlooked"))
    await world.tick()
    world.worker = world.new_worker(world.lake)
    await world.tick(3)
    assert ["overlooked"] == world.left()

    await world.tick(4.1)

    assert [] == world.left()


async def test_cursors_are_seeded_before_an_action_is_called_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the two leaves it waiting, with its cursor; nothing is swept for it until the walk ends."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    seen: list[tuple[bool, bool]] = []
    finished = Walker._finished

    def spying(self: Walker, *words: Any) -> Any:
        seen.append((bool(world.store), True))
        raise Unavailable("died here")

    monkeypatch.setattr(Walker, "_finished", spying)
    await world.tick()
    assert seen and (await world.reader()).originals
    assert not any(one.bootstrap_complete for one in (await world.state()).actions.values())
    assert {} == (await world.worker.compile()).original_delay_groups

    monkeypatch.setattr(Walker, "_finished", finished)
    await world.tick(0.01)
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode


async def test_a_policy_edited_under_a_walk_begins_another_and_keeps_what_is_unchanged() -> None:
    """Unchanged actions stay complete; the new one waits for its own walk."""
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=1))
    await world.tick()
    (old,) = (await world.state()).actions
    await world.policy("b", rule(prefix="x", expiration_days=1), rule(prefix="y", expiration_days=2))

    snapshot = await world.worker.compile()
    assert {old} == {str(one.ref.key) for one in snapshot.actions.values() if one.active}
    assert [True] == [walk.complete for walk in (await world.tick()).walks]

    assert all(one.bootstrap_complete for one in (await world.state()).actions.values())


async def test_a_worker_that_starts_without_its_store_catches_up_when_it_comes() -> None:
    """Nothing is lost and nothing is passed: rounds fail until the store answers."""

    class Down:
        def __init__(self, inner: Any) -> None:
            self.inner, self.down = inner, True

        def __getattr__(self, name: str) -> Any:
            if self.down and name in ("all", "walk", "look", "read", "delete", "get"):
                raise Unavailable("no endpoint answers")
            return getattr(self.inner, name)

    world = Harness()
    world.lake.write("b", "a")
    await world.policy("b", rule(expiration_days=1))
    store = Down(world.lake)
    world.worker = world.new_worker(store)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await world.tick(1)
    store.down = False

    await world.tick(0.1)

    assert [] == world.left()
