"""What goes wrong: transport errors, broken entries, lost logs, lag, full exceptions; and what operators decide."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.errors import Corrupt, Invalid, NotFound, Unavailable
from lakebed.lifecycle import blockers
from lakebed.lifecycle.model import Degraded, Mode, ObjectEntry, StreamKind, StreamResolution, Verb
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import Removal
from support.lifecycle_harness import DAY_S, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000
DAY = round(DAY_S) * SECOND


async def test_a_transport_error_holds_the_cursor_and_is_tried_again() -> None:
    """Nothing is passed over: when the store is back, the same event is resolved, and its budget is gone."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.write("b", "z")
    store.deletes["a"] = Unavailable("down")

    await world.run_round(1.01)
    before = (await world.reader()).originals
    assert "a" in world.left()
    assert 1 == len((await world.blockers()).budgets)
    await world.run_round(0.01)
    assert before == (await world.reader()).originals
    store.deletes.clear()
    await world.run_round(0.01)

    assert [] == world.left()
    assert {} == (await world.blockers()).budgets


async def test_sustained_retries_become_a_blocker_and_other_groups_go_on() -> None:
    """Past the budget the delay group stands still with a blocker; another group of the same bucket goes on."""
    world, store = failing(retries_max=3)
    await world.policy("b", rule(prefix="a", expiration_days=1), rule(prefix="z", expiration_days=2))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.write("b", "z")
    store.deletes["a"] = Unavailable("down")
    await world.run_round(1.01)
    for _ in range(3):
        await world.run_round(0.01)
    (blocker,) = (await world.blockers()).blockers.values()
    assert ("sustained RETRY_LATER: TRANSPORT_ERROR", StreamKind.ORIGINAL, 3) == (
        blocker.reason, blocker.stream.kind, blocker.retries
    )  # fmt: skip
    tried = len(store.tried)

    await world.run_round(1.01)

    assert ["a"] == world.left()
    assert tried + 1 == len(store.tried)  # z alone: the blocked event is not read again
    assert {} == (await world.blockers()).budgets


async def test_a_fatal_error_is_tried_five_times_and_then_isolated() -> None:
    """The scan goes on behind the broken entry and completes; the entry is on record with its reason, until it goes."""
    world, store = failing()
    for key in ("a", "m", "z"):
        world.lake.write("b", key)
    await world.clock.advance(2 * DAY_S)
    store.deletes["m"] = Corrupt("broken")
    await world.policy("b", rule(expiration_days=1))

    await world.run_round()

    assert (5, ["m"]) == (store.tried.count("m"), world.left())
    assert (await world.action("EXPIRATION_DAYS")).bootstrap_complete
    operator = Operator(world.registers)
    (item,) = await operator.isolated(bucket="b")
    assert ("m", "broken", 1, []) == (item.key, item.error, item.times, await operator.blockers())
    assert 1 == world.metrics.value("lakebed_lifecycle_isolated", bucket="b")
    store.deletes.clear()
    await operator.rebootstrap("b")
    await world.run_round(0.01)
    assert ([], []) == (world.left(), await operator.isolated())


async def test_a_live_entry_that_cannot_be_read_is_isolated_with_the_reason() -> None:
    """Errors, errors, then fatal: it is on record, no stale budget is left beside it, and its stream goes on."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.looks["a"] = Unavailable("blip")
    await world.run_round(1.01)
    await world.run_round(0.01)
    store.looks["a"] = Corrupt("attributes")
    world.lake.write("b", "later")

    await world.run_round(1.01)

    found = await world.blockers()
    assert ["attributes"] == [one.error for one in found.isolated.values()]
    assert ({}, {}, ["a"]) == (found.budgets, found.blockers, world.left())


async def test_an_event_that_does_not_decode_is_isolated_and_the_stream_goes_on() -> None:
    """With its reason, counted; what comes behind it is deleted in time."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "bad")
    world.lake.write("b", "good")
    store.unreadable.add("bad")

    await world.run_round(1.01)
    world.lake.write("b", "later")
    await world.run_round(1.01)

    assert ["bad"] == world.left()
    (item,) = await Operator(world.registers).isolated()
    assert ("bad", "the event cannot be read: no") == (item.key, item.error)
    assert [] == await Operator(world.registers).blockers()


async def test_too_many_isolated_are_a_fault_and_block_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses everything must not be taken for a bucket of odd keys."""
    monkeypatch.setattr(blockers, "ISOLATED_MAX", 2)
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("a", "b", "c"):
        world.lake.write("b", key)
        store.deletes[key] = Corrupt("too old")

    await world.run_round(1.01)

    (blocker,) = await Operator(world.registers).blockers()
    assert "too many isolated: FATAL_EVENT_ERROR" == blocker.reason
    assert {} == (await world.blockers()).isolated
    store.deletes.clear()
    await Operator(world.registers).resume(blocker.blocker_id)
    await world.run_round(0.01)
    assert [] == world.left()


async def test_a_failing_batch_makes_one_blocker_and_quarantine_skips_what_it_names() -> None:
    """Not one for each object: the blocker names all of them, and only those are skipped."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        world.lake.write("b", key)
        store.deletes[key] = Unavailable("down")
    await world.run_round(1.01)
    operator = Operator(world.registers)
    (blocker,) = await operator.blockers()
    assert 20 == len(blocker.items)
    with pytest.raises(Invalid):
        await operator.quarantine(blocker.blocker_id, reason=" ", who="me")

    await operator.quarantine(blocker.blocker_id[:6], reason="known bad", who="me")
    world.lake.write("b", "later")
    await world.run_round(1.01)

    assert sorted(keys) == world.left()
    assert 1 == world.metrics.value("lakebed_lifecycle_quarantined_total", stream_kind="ORIGINAL", bucket="b")
    found = await world.blockers()
    assert ("known bad" in found.quarantined[0], {}) == (True, found.skips)


async def test_a_retry_passes_itself_and_nothing_before_it() -> None:
    """Two causes hold one stream; the retry of the later one leaves the cursor before the earlier one."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("k1", "k2", "k3"):
        world.lake.write("b", key)
    before = world.lake.log[-3].position
    store.deletes["k1"] = Unavailable("down")
    store.deletes["k3"] = Unavailable("down")
    await world.run_round(1.01)
    operator, snapshot = Operator(world.registers), await world.worker.compile()
    (blocker,) = await operator.blockers()
    del store.deletes["k3"]

    assert StreamResolution.BLOCKED is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    (cursor,) = (await world.reader()).originals.values()
    assert cursor < before
    assert ["k1"] == world.left()
    del store.deletes["k1"]
    assert StreamResolution.DONE is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    assert ([], []) == (world.left(), await operator.blockers())


@pytest.mark.parametrize("chosen", [{"every": True}, {"bucket": "b"}, {"cause": "transport_error"}])
async def test_many_blockers_are_meant_at_once(chosen: dict[str, Any]) -> None:
    """All, those of a bucket, or those of a cause; none by saying nothing."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(prefix="a", expiration_days=1), rule(prefix="b", expiration_days=2))
    await world.run_round()
    for key in ("a", "b"):
        world.lake.write("b", key)
        store.deletes[key] = Unavailable("down")
    await world.run_round(1.01)
    await world.run_round(1.01)
    operator = Operator(world.registers)

    assert 2 == len(await operator.chosen(**chosen))
    assert [] == await operator.chosen(bucket="other") == await operator.chosen(every=True, cause="too many")
    assert [] == await operator.chosen(bucket="b", cause="fatal_event_error")
    with pytest.raises(Invalid):
        await operator.chosen()


async def test_retry_by_an_operator_resolves_and_continues() -> None:
    """A retry that fails leaves everything and counts; one that works removes the blocker, and the stream goes on."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("broken")
    await world.run_round(1.01)
    operator, snapshot = Operator(world.registers), await world.worker.compile()
    (blocker,) = await operator.blockers()

    assert StreamResolution.BLOCKED is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    (again,) = await operator.blockers()
    assert again.retries > blocker.retries and again.first_seen_ns == blocker.first_seen_ns
    store.deletes.clear()
    assert StreamResolution.DONE is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)

    assert [] == await operator.blockers()
    await world.run_round(0.1)
    assert blocker.stream.position < (await world.reader()).originals[str(blocker.stream.delay_ns)]
    with pytest.raises(NotFound):
        await operator.resume(blocker.blocker_id)


async def test_a_blocked_stream_near_the_end_of_the_log_is_demoted_and_reseeded() -> None:
    """Lag at 0.95 of retention: scans take over; a reseed of the delay brings events back."""
    world, store = failing(retention_s=10 * DAY_S, retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("broken")
    await world.run_round(1.01)
    await world.run_round(5)
    assert Degraded.LAG_HIGH is (await world.action("EXPIRATION_DAYS")).degraded
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode
    await world.run_round(4)
    assert Mode.SCAN_ONLY is (await world.action("EXPIRATION_DAYS")).mode

    store.deletes.clear()
    operator = Operator(world.registers)
    for blocker in await operator.blockers():
        await operator.resume(blocker.blocker_id)
    await world.run_round(0.1)
    assert Mode.SCAN_ONLY is (await world.action("EXPIRATION_DAYS")).mode
    assert ["b"] == await operator.reseed(await world.worker.compile(), delay_ns=DAY)
    await world.run_round(0.1)

    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == (action.mode, action.degraded)
    assert [] == world.left()


async def test_a_paused_action_does_nothing_and_catches_up_when_it_goes_on() -> None:
    """What fell due while it was paused is found by the walk with which it begins again."""
    world, _ = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    operator = Operator(world.registers)
    await operator.pause("b")
    world.lake.write("b", "a")
    await world.run_round(3)
    assert ["a"] == world.left()
    assert "OPERATOR_PAUSED" == (await operator.status("b"))[0]["degraded"]

    await operator.pause("b", paused=False)
    await world.run_round(0.01)

    assert [] == world.left()


async def test_a_tag_that_no_rule_asks_for_does_not_save_an_object() -> None:
    """It changes the identity between judging and deleting, and its event interests nobody: judged again at once."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    delete = store.delete

    async def late(entry: ObjectEntry, verb: Verb) -> Removal:
        if not store.tried:
            world.lake.tag("b", "a", {"unrelated": "1"})
        return await delete(entry, verb)

    store.delete = late  # type: ignore[method-assign]
    await world.run_round(1.01)

    assert ["a", "a"] == store.tried
    assert [] == world.left()
