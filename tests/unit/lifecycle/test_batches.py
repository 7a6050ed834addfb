"""Batches of work: where a sweep checkpoints, what one unresolved work holds, and what is recorded of each delete."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Corrupt, Unavailable
from lakebed.lifecycle import reader, streams
from lakebed.lifecycle.drainer import Applier, ApplyReport
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.model import (
    ActionKey,
    ActionKind,
    DeleteOutcome,
    ObjectIdentity,
    Position,
    StreamKind,
    StreamResolution,
)
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.pending import PendingFull, PendingStore
from lakebed.lifecycle.rate import DeleteRateLimiter
from lakebed.lifecycle.seams import ChangeEvent, Family
from lakebed.lifecycle.state import PendingItem
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND_NS = 10**9
DAY_NS = round(DAY_S * SECOND_NS)


def cursor(state: Any, days: int = 1) -> Position:
    found: Position = state.originals[str(days * DAY_NS)]
    return found


# Sweeps.


async def test_a_sweep_checkpoints_after_each_batch_and_stops_at_the_first_stuck_one() -> None:
    """Five due events in batches of two: the third fails, so the sweep ends with the second batch, behind event two."""
    world, store = failing(batch=2)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    places = []
    for number in range(5):
        await world.clock.advance(1.0)
        world.lake.write("b", f"k{number}")
        places.append(world.lake.log[-1].position)
    store.deletes["k2"] = Unavailable("down")

    (stuck,) = (await world.run_round(1.01)).sweeps
    held = cursor(await world.reader())
    assert (1 + 4, 4, True, False) == (stuck.read, stuck.worked, stuck.halted, stuck.blocked)  # the policy is one
    assert ["k2", "k4"] == world.left()
    assert places[1] == held
    (budget,) = (await world.blockers()).budgets.values()
    assert 1 == budget.retries

    store.deletes.clear()
    (done,) = (await world.run_round(0.01)).sweeps
    assert (3, 3, False) == (done.read, done.worked, done.halted)
    assert ([], {}) == (world.left(), (await world.blockers()).budgets)


async def test_a_sweep_asks_for_its_lease_before_every_batch() -> None:
    """A worker that lost its lease stops before the next delete."""
    world = Harness(batch=2)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for number in range(5):
        world.lake.write("b", f"k{number}")
    await world.clock.advance(1.01 * DAY_S)
    left: list[int] = []

    async def alive() -> None:
        left.append(len(world.left()))

    await world.worker._reader.run(await world.worker.compile(), alive)

    assert [5, 3, 1] == left


async def test_events_that_concern_nobody_are_checkpointed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log without work is not read again from its beginning after a crash."""
    monkeypatch.setattr(reader, "CHECKPOINT_EVENTS", 3)
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=1))
    await world.run_round()
    for number in range(4):
        await world.clock.advance(0.5)
        world.lake.write("b", f"other{number}")
    third = world.lake.log[-3].position  # the policy is the first event
    await world.clock.advance(1.01 * DAY_S)
    asked: list[Position] = []
    moved: list[Position] = []
    advance = world.worker._reader._advance

    async def alive() -> None:
        asked.append(Position())

    async def noted(shard: int, wanted: Any) -> None:
        some = list(wanted)
        moved.extend(to for stream, to in some if to > stream.cursor)
        await advance(shard, some)

    world.worker._reader._advance = noted  # type: ignore[method-assign]
    await world.worker._reader.run(await world.worker.compile(), alive)

    assert ([], True) == (asked, third <= cursor(await world.reader()))
    assert third == moved[0]


async def test_a_quiet_sweep_moves_its_cursor_only_now_and_then() -> None:
    """Every 5 s of log at the earliest: a quiet lake does not cost a write in each round."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round(5)
    await world.run_round(1)
    before = cursor(await world.reader())
    await world.run_round(4.9 / DAY_S)
    same = cursor(await world.reader())
    await world.run_round(0.1 / DAY_S)
    after = cursor(await world.reader())

    assert before == same
    assert Position(world.clock.now_ns() - DAY_NS, streams.OFFSET_END) == after
    assert before.ts_ns + 5 * SECOND_NS == after.ts_ns


async def test_a_cursor_that_is_missing_reads_nothing_and_leads_to_a_scan() -> None:
    """It is not silence: the actions it served are named, wait for a scan with the reason, and what is due goes."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    snapshot = await world.worker.compile()
    for register in world.registers.readers:
        await register.change(lambda known: (type(known)(), None))
    world.lake.write("b", "a")
    await world.clock.advance(2 * DAY_S)

    async def alive() -> None:
        raise AssertionError("nothing to settle")

    found = await world.worker._reader.run(snapshot, alive)
    await world.worker._monitor.judge(snapshot, {})

    (sweep,) = found.sweeps
    assert (0, 0, None, False, False) == (sweep.read, sweep.worked, sweep.next_due_ns, sweep.halted, sweep.blocked)
    assert (list(snapshot.actions), ["a"]) == (list(found.unserved), world.left())
    await world.run_round()
    assert "cursor is missing" in (await world.action("EXPIRATION_DAYS")).why_scan
    await world.run_round(0.01)
    assert [] == world.left()


async def test_a_halted_or_blocked_sweep_ends_itself_and_no_other() -> None:
    """The other delay group of the same pass goes on."""
    for retries_max in (30, 1):
        world, store = failing(retries_max=retries_max)
        await world.policy("b", rule(prefix="a", expiration_days=1), rule(prefix="z", expiration_days=2))
        await world.run_round()
        world.lake.write("b", "a")
        world.lake.write("b", "z")
        store.deletes["a"] = Unavailable("down")
        sweeps = (await world.run_round(1.01)).sweeps
        assert (retries_max > 1, retries_max == 1) == (sweeps[0].halted, sweeps[0].blocked)
        assert (DAY_NS, 3) == (sweeps[0].delay_ns, sweeps[0].read)  # the policy is one
        await world.run_round(1.01)
        assert ["a"] == world.left()


# Applying candidates of a listing.


async def keys_of(*keys: str) -> Any:
    for key in keys:
        yield key


async def test_candidates_are_counted_by_what_became_of_them() -> None:
    """A key that comes twice in a row is one; one that is not due passes; one that fails is held."""
    world, store = failing(batch=2)
    for key in ("a", "b", "c"):
        world.lake.write("b", key)
    await world.clock.advance(2 * DAY_S)
    world.lake.write("b", "young")
    store.deletes["c"] = Unavailable("down")
    await world.policy("b", rule(expiration_days=1), rule(prefix="z", enabled=False, expiration_days=1))
    snapshot = await world.worker.compile()
    batches: list[int] = []
    settle = world.worker.resolver.settle

    async def noted(works: Any) -> list[StreamResolution]:
        batches.append(len(works))
        return await settle(works)

    world.worker.resolver.settle = noted  # type: ignore[method-assign]
    applier = Applier(world.worker.resolver, world.settings)
    found = await applier.run("b", keys_of("a", "a", "b", "c", "gone", "young"), snapshot)
    nothing = await applier.run("b", keys_of(), snapshot)

    assert ApplyReport(keys=5, deleted=2, passed=2, held=1) == found
    assert ([2, 2, 1], ApplyReport()) == (batches, nothing)
    assert ["c", "young"] == world.left()


async def test_a_paused_action_is_not_applied_to_candidates() -> None:
    """What an operator paused stays, whichever way its key came."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    await Operator(world.registers).pause("b")
    world.lake.write("b", "a")
    await world.clock.advance(2 * DAY_S)

    found = await Applier(world.worker.resolver, world.settings).run("b", keys_of("a"), await world.worker.compile())

    assert (ApplyReport(keys=1, passed=1), ["a"]) == (found, world.left())


# Exceptions and pace.


def item(key: str, due_ns: int = 5) -> PendingItem:
    return PendingItem(key, "", due_ns, ObjectIdentity(1, 1))


REF = ActionRef("b", ActionKey("0" * 16, ActionKind.EXPIRATION_DAYS))


async def test_exceptions_are_kept_up_to_the_cap_and_renewed_at_it() -> None:
    """The last one that fits fits; a known one may change at the cap; one more is refused and nothing is written."""
    world = Harness()
    pending = PendingStore(world.registers.runtime, items_max=2)
    await pending.upsert(REF, [item("a"), item("b")])
    await pending.upsert(REF, [item("a", 9)])
    segments = (await pending.load(REF)).segments
    with pytest.raises(PendingFull, match="2 exceptions waiting"):
        await pending.upsert(REF, [item("c")])
    await pending.upsert(REF, [item("a", 9)])  # already so: no write

    log = await pending.load(REF)
    assert ({"a": 9, "b": 5}, segments) == ({one.key: one.due_at_ns for one in log.items.values()}, log.segments)


async def test_a_log_of_exceptions_is_compacted_when_most_of_it_is_gone() -> None:
    """More tombstones than live items: one segment is left, with what was live; an empty log leaves no object."""
    world = Harness()
    pending = PendingStore(world.registers.runtime)
    for key in ("a", "b", "c"):
        await pending.upsert(REF, [item(key)])
    await pending.remove(REF, [item("a").id])
    half = await pending.load(REF)
    await pending.remove(REF, [item("b").id, item("unknown").id])
    compacted = await pending.load(REF)
    await pending.remove(REF, [item("c").id])

    assert (4, 1, 2) == (half.segments, half.tombstones, len(half.items))
    assert (1, 0, ["c"]) == (compacted.segments, compacted.tombstones, [one.key for one in compacted.items.values()])
    assert 0 == (await pending.load(REF)).segments


async def test_a_damaged_segment_of_exceptions_is_named() -> None:
    """The error says which object it is and how to go on."""
    world = Harness()
    pending = PendingStore(world.registers.runtime)
    await pending.upsert(REF, [item("a")])
    (info,) = [info async for info in world.store.list("lifecycle/v1/buckets/b/pending/")]
    await world.store.delete(info.key)
    await world.store.create(info.key, b"{")

    with pytest.raises(Corrupt) as caught:
        await PendingStore(world.registers.runtime).load(REF)
    assert info.key in caught.value.message and "move the object away" in (caught.value.hint or "")


async def test_a_pace_lets_one_seconds_worth_through_at_once() -> None:
    """Ten a second, for all workers: after a pause eleven go at once (a second is saved up), then one each 0.1 s."""
    world = Harness()
    paces, at = [DeleteRateLimiter(10.0, world.registers) for _ in range(2)], list[float]()
    await world.clock.advance(100.0)

    async def one(number: int) -> None:
        await paces[number % 2].wait()
        at.append(round(world.clock.monotonic_s() - 100.0, 3))

    tasks = [asyncio.create_task(one(number)) for number in range(20)]
    await world.clock.advance(2.0)
    await asyncio.gather(*tasks)
    free = DeleteRateLimiter(0.0, world.registers)
    await asyncio.gather(*(free.wait() for _ in range(1000)))

    assert [0.0] * 11 + [number / 10 for number in range(1, 10)] == sorted(at)


async def test_a_family_that_a_listing_showed_is_looked_at_again_only_where_a_rule_counts_versions() -> None:
    """The deleter checks all else itself: a walk costs no look per object."""
    looks: dict[str, list[str]] = {}
    left: dict[str, int] = {}
    rules = {
        "plain": rule(expiration_days=1),
        "versions": rule(noncurrent_days=1),
        "counted": rule(noncurrent_days=1, newer_noncurrent=1),
    }
    for name, one in rules.items():
        world, store = failing()
        seen = looks.setdefault(name, [])
        if name != "plain":
            world.lake.versioned.add("b")
        for _ in range(1 if name == "plain" else 3):
            world.lake.write("b", "a")
        await world.clock.advance(2 * DAY_S)
        look = store.look

        async def noted(bucket: str, key: str, upload_id: str = "", look: Any = look, seen: list[str] = seen) -> Family:
            seen.append(key)
            found: Family = await look(bucket, key, upload_id)
            return found

        store.look = noted  # type: ignore[method-assign]
        await world.policy("b", one)
        await world.run_round()
        left[name] = len(world.lake.objects["b"].get("a", []))
    assert {"plain": [], "versions": [], "counted": ["a"]} == looks
    assert {"plain": 0, "versions": 1, "counted": 2} == left


async def test_an_unreadable_event_that_names_no_bucket_is_on_record_and_one_of_a_bucket_without_rules_is_not() -> None:
    """It may be about any of ours; what is surely nobody's is passed."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.log.append(ChangeEvent(Position(world.clock.now_ns(), 5), "foreign", unreadable="no"))
    await world.run_round(1.5)
    before = await Operator(world.registers).isolated()
    world.lake.log.append(ChangeEvent(Position(world.clock.now_ns()), "", unreadable="no entry"))
    await world.run_round(1.5)
    (item,) = await Operator(world.registers).isolated()

    assert ([], StreamKind.ORIGINAL, "") == (before, item.stream.kind, item.bucket)
    assert "no entry" in item.error


@pytest.mark.parametrize("meanwhile", ["current again and superseded anew", "locked", "tagged", "current"])
async def test_what_happens_to_a_version_between_listing_and_delete_counts(meanwhile: str) -> None:
    """No second look at all versions, and yet: days count anew, a lock holds, another tag or place is judged anew."""
    world, store = failing()
    world.lake.versioned.add("b")
    tags = {"t": "1"} if meanwhile == "tagged" else {}
    for _ in range(2):
        world.lake.write("b", "a", tags=tags)
    await world.clock.advance(2 * DAY_S)
    get, done = world.lake.get, list[str]()

    async def overtaken(bucket: str) -> Any:
        versions = world.lake.objects["b"]["a"]
        if not done:
            done.append(meanwhile)
            if meanwhile in ("current again and superseded anew", "current"):
                world.lake._drop("b", "a", versions[0])
            if meanwhile == "current again and superseded anew":
                world.lake.write("b", "a")
            if meanwhile == "locked":
                versions[1] = msgspec.structs.replace(versions[1], locked=True)
            if meanwhile == "tagged":
                versions[1] = msgspec.structs.replace(versions[1], tags=())
        return await get(bucket)

    store.get = overtaken  # type: ignore[attr-defined]
    await world.policy("b", rule(noncurrent_days=1, tags=tuple(tags.items())))
    await world.run_round()

    assert ([meanwhile], []) == (done, world.lake.removed)
    assert (1 if meanwhile == "current" else 2) == len(world.lake.objects["b"]["a"])


@pytest.mark.parametrize("noted", [True, False])
async def test_days_count_anew_also_where_a_version_does_not_say_since_when(
    noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noted, the deleter sees that it was current meanwhile; otherwise all versions are looked at again before."""
    world = Harness()
    world.lake.versioned.add("b")
    for _ in range(2):
        world.lake.write("b", "a")
    await world.clock.advance(2 * DAY_S)
    shown, done = world.lake._entries, list[int]()

    def entries(bucket: str, key: str) -> Any:
        return tuple(msgspec.structs.replace(one, since_noted=noted) for one in shown(bucket, key))

    async def overtaken() -> None:
        if not done:
            done.append(1)
            world.lake._drop("b", "a", world.lake.objects["b"]["a"][0])
            world.lake.write("b", "a")

    monkeypatch.setattr(world.lake, "_entries", entries)
    monkeypatch.setattr(world.worker.resolver._rate_limiter, "wait", overtaken)
    await world.policy("b", rule(noncurrent_days=1))
    await world.run_round()

    outcome = DeleteOutcome.STALE_IDENTITY if noted else DeleteOutcome.NO_LONGER_ELIGIBLE
    assert (2, [outcome.value]) == (
        len(world.lake.objects["b"]["a"]),
        [row.outcome for row in await world.ledger() if row.outcome],
    )


async def test_a_null_version_that_was_locked_after_it_was_listed_is_not_replaced_by_a_marker() -> None:
    """Where versions are suspended the marker takes its place, so its lock counts."""
    world, store = failing()
    world.lake.suspended.add("b")
    world.lake.write("b", "a")
    await world.clock.advance(2 * DAY_S)
    get = world.lake.get

    async def overtaken(bucket: str) -> Any:
        world.lake.hold("b", "a")
        return await get(bucket)

    store.get = overtaken  # type: ignore[attr-defined]
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()

    (only,) = world.lake.objects["b"]["a"]
    assert (True, False) == (only.locked, only.marker)
