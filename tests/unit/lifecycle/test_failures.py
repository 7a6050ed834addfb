"""What goes wrong: transport errors, broken entries, lost logs, lag, full exceptions; and what operators decide."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.errors import Conflict, Corrupt, Invalid, NotFound, Unavailable
from lakebed.lifecycle.blockers import block, record_retry
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.model import Calendar, Degraded, Mode, ObjectEntry, Position, StreamKind, StreamResolution, Verb
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.reader import advance_cursor, seed_cursors
from lakebed.lifecycle.state import BlockerState, ReaderState, Stream
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
    assert ("sustained RETRY_LATER", StreamKind.ORIGINAL, 3) == (blocker.reason, blocker.stream.kind, blocker.retries)
    tried = len(store.tried)

    await world.run_round(1.01)

    assert ["a"] == world.left()
    assert tried + 1 == len(store.tried)  # z alone: the blocked event is not read again
    assert {} == (await world.blockers()).budgets


async def test_a_fatal_error_is_tried_five_times_and_then_blocks() -> None:
    """The walker stops before the broken entry and refuses to go on until an operator decides; then it does."""
    world, store = failing()
    for key in ("a", "m", "z"):
        world.lake.write("b", key)
    await world.clock.advance(2 * DAY_S)
    store.deletes["m"] = Corrupt("broken")
    await world.policy("b", rule(expiration_days=1))

    await world.run_round()
    assert 5 == store.tried.count("m")
    (blocker,) = await Operator(world.registers).blockers(stream="BOOTSTRAP", bucket="b")
    state = await world.state()
    assert state.scan is not None and "k/a" == state.scan.after
    assert not state.actions
    await world.run_round(0.5)
    assert 5 == store.tried.count("m")

    store.deletes.clear()
    await Operator(world.registers).resume(blocker.blocker_id)
    await world.run_round()
    assert [] == world.left()
    assert (await world.action("EXPIRATION_DAYS")).bootstrap_complete


async def test_a_live_entry_that_cannot_be_read_blocks_its_stream_with_the_reason() -> None:
    """Errors, errors, then fatal: the blocker is there, and no stale budget is left beside it."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.looks["a"] = Unavailable("blip")
    await world.run_round(1.01)
    await world.run_round(0.01)
    store.looks["a"] = Corrupt("attributes")

    await world.run_round(0.01)

    found = await world.blockers()
    assert ["attributes"] == [one.last_error for one in found.blockers.values()]
    assert {} == found.budgets


async def test_an_event_that_does_not_decode_blocks_its_streams_and_quarantine_passes_it() -> None:
    """Only an operator with a reason may give it up; that is counted, and the stream goes on."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "bad")
    world.lake.write("b", "good")
    store.unreadable.add("bad")
    await world.run_round(1.01)
    assert ["bad"] == world.left()  # of one batch, all others are resolved; the cursor still stands before it
    (blocker,) = await Operator(world.registers).blockers()
    operator = Operator(world.registers)
    with pytest.raises(Invalid):
        await operator.quarantine(blocker.blocker_id, reason=" ", who="me")

    await operator.quarantine(blocker.blocker_id[:6], reason="known bad", who="me")
    world.lake.write("b", "later")
    await world.run_round(1.01)

    assert ["bad"] == world.left()
    assert 1 == world.metrics.value("lakebed_lifecycle_quarantined_total", stream_kind="ORIGINAL", bucket="b")
    assert "known bad" in (await world.blockers()).quarantined[0]


async def test_what_a_sweep_gave_up_is_met_again_by_the_safety_scan_and_given_up_there_too() -> None:
    """Giving up is for one stream: the next scan finds the object still due, and only then passes it by for good."""
    world, store = failing()
    operator = Operator(world.registers)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "bad")
    store.deletes["bad"] = Corrupt("no")
    await world.run_round(1.01)
    (swept,) = await operator.blockers()
    await operator.quarantine(swept.blocker_id, reason="known", who="me")

    await world.run_round(1.0)
    before_the_scan = await operator.blockers()
    await world.run_round(7.0)
    (scanned,) = await operator.blockers()
    await operator.quarantine(scanned.blocker_id, reason="known", who="me")
    await world.run_round(0.01)
    world.lake.write("b", "later")
    await world.run_round(8.0)

    assert [] == before_the_scan
    assert ["ORIGINAL", "BOOTSTRAP"] == [one.stream.kind.value for one in (swept, scanned)]
    assert ["bad", "bad"] == [swept.key, scanned.key]
    assert ([], ["bad"]) == (await operator.blockers(), world.left())


async def test_retry_by_an_operator_resolves_and_passes() -> None:
    """A retry that fails leaves everything and counts; one that works takes the blocker away and moves the cursor."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Corrupt("broken")
    await world.run_round(1.01)
    operator, snapshot = Operator(world.registers), await world.worker.compile()
    (blocker,) = await operator.blockers()

    assert StreamResolution.BLOCKED is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)
    (again,) = await operator.blockers()
    assert again.retries > blocker.retries and again.first_seen_ns == blocker.first_seen_ns
    store.deletes.clear()
    assert StreamResolution.DONE is await operator.retry(blocker.blocker_id, world.worker.resolver, snapshot)

    assert [] == await operator.blockers()
    assert blocker.stream.position == (await world.reader()).originals[str(blocker.stream.delay_ns)]
    with pytest.raises(NotFound):
        await operator.resume(blocker.blocker_id)


async def test_a_lost_log_degrades_to_scans_and_says_so_until_acknowledged() -> None:
    """Never silently: LOST_LOG on every reader-driven action, scans go on, and acknowledging brings events back."""
    world, _ = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.log_begins_ns = world.clock.now_ns() + SECOND
    world.lake.write("b", "a")
    await world.run_round(0.5)
    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.SCAN_ONLY, Degraded.LOST_LOG) == (action.mode, action.degraded)
    await world.run_round(7)
    assert [] == world.left()

    operator = Operator(world.registers)
    with pytest.raises(Invalid):
        await operator.acknowledge_lost_log(await world.worker.compile(), reason="")
    await operator.acknowledge_lost_log(await world.worker.compile(), reason="disk was replaced")
    await world.run_round(0.1)
    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == (action.mode, action.degraded)
    world.lake.write("b", "c")
    await world.run_round(1.01)
    assert [] == world.left()
    with pytest.raises(Conflict):
        await operator.acknowledge_lost_log(await world.worker.compile(), reason="again")


async def test_a_blocked_stream_near_the_end_of_the_log_is_demoted_and_reseeded() -> None:
    """Lag at 0.95 of retention: scans take over; a reseed of the delay brings events back."""
    world, store = failing(retention_s=10 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Corrupt("broken")
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


async def test_too_many_exceptions_demote_the_action_and_not_the_stream() -> None:
    """The action goes on by scans; other rules' late tags are still seen."""
    world, _ = failing(pending_max=2)
    tmp, other = (("tmp", "1"),), (("other", "1"),)
    await world.policy(
        "b", rule(prefix="x", expiration_days=2, tags=tmp), rule(prefix="y", expiration_days=2, tags=other)
    )
    await world.run_round()
    for key in ("x1", "x2", "x3", "y1"):
        world.lake.write("b", key)
    await world.run_round(1)
    for key in ("x1", "x2", "x3"):
        world.lake.tag("b", key, {"tmp": "1"})
    world.lake.tag("b", "y1", {"other": "1"})

    await world.run_round(0.1)

    modes = sorted((one.mode, one.degraded) for one in (await world.state()).actions.values())
    assert [(Mode.EVENT_DRIVEN, Degraded.NONE), (Mode.SCAN_ONLY, Degraded.PENDING_FULL)] == modes
    await world.run_round(1)
    assert "y1" not in world.left()
    await world.run_round(8)
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

    async def late(entry: ObjectEntry, verb: Verb) -> None:
        if not store.tried:
            world.lake.tag("b", "a", {"unrelated": "1"})
        await delete(entry, verb)

    store.delete = late  # type: ignore[method-assign]
    await world.run_round(1.01)

    assert ["a", "a"] == store.tried
    assert [] == world.left()


# Cursors: the regressions the design names.

CALENDAR = Calendar(day_ns=DAY, rounding="exact", small_delay_ns=SECOND)
AGED, TAGGED, DATED = rule(expiration_days=1), rule(expiration_days=3, tags=(("a", "b"),)), rule(expiration_date_ns=0)
SNAPSHOT = compile_policies({"b": (AGED, TAGGED, DATED)}, lambda _: Activation(), CALENDAR)
BY_DELAY = {action.delays_ns: ref for ref, action in SNAPSHOT.actions.items()}
AGED_REF, TAGGED_REF, DATED_REF = BY_DELAY[(DAY,)], BY_DELAY[(3 * DAY,)], BY_DELAY[()]
START = 100 * DAY


def seeded(state: ReaderState, refs: list[Any], modes: dict[Any, Mode], **force: Any) -> ReaderState:
    return seed_cursors(state, SNAPSHOT, refs, modes, START, lookback_ns=2 * DAY, **force)


def test_seeding_uses_the_target_modes_and_not_what_is_stored() -> None:
    """Only an action that will be event-driven moves a cursor; its floor is the larger of delay and lookback."""
    found = seeded(ReaderState(), [AGED_REF, TAGGED_REF], {AGED_REF: Mode.EVENT_DRIVEN, TAGGED_REF: Mode.SCAN_ONLY})

    assert {str(DAY): Position(START - 2 * DAY)} == found.originals
    assert found.predicate is None
    dated = seeded(ReaderState(), [DATED_REF], {DATED_REF: Mode.SCAN_AT_DATE})
    assert ReaderState() == dated


def test_a_predicate_action_pulls_the_predicate_cursor_back_too() -> None:
    """To the lookback, whatever its delay; never forward."""
    early = ReaderState(predicate=Position(5, 3))

    found = seeded(ReaderState(predicate=Position(START)), [TAGGED_REF], {TAGGED_REF: Mode.EVENT_DRIVEN})
    kept = seeded(early, [TAGGED_REF], {TAGGED_REF: Mode.EVENT_DRIVEN})

    assert Position(START - 2 * DAY) == found.predicate
    assert Position(START - 3 * DAY) == found.originals[str(3 * DAY)]
    assert early.predicate == kept.predicate


def test_equal_times_are_compared_by_offset() -> None:
    """A cursor on an event of the floor's very instant is pulled back before it."""
    floor = START - 2 * DAY

    found = seeded(ReaderState(originals={str(DAY): Position(floor, 7)}), [AGED_REF], {AGED_REF: Mode.EVENT_DRIVEN})

    assert Position(floor, -1) == found.originals[str(DAY)]


def test_a_safety_scan_moves_no_cursor_and_a_forced_reseed_does() -> None:
    """Nothing newly complete and nothing forced: cursors stay. Forced: the group and the predicates are seeded."""
    known = ReaderState(originals={str(DAY): Position(START)}, predicate=Position(START))

    assert known is seeded(known, [], {})
    assert Position(START - 2 * DAY) == seeded(ReaderState(), [], {}, force_delays_ns=(DAY,)).originals[str(DAY)]
    forced = seeded(known, [], {}, force_predicate=True)
    assert (Position(START - 2 * DAY), known.originals) == (forced.predicate, forced.originals)


def test_a_reader_does_not_undo_a_rewind() -> None:
    """A cursor that was pulled back while a batch was under way stays there."""
    rewound = ReaderState(originals={"5": Position(10)})

    assert rewound is advance_cursor(rewound, 5, Position(50), Position(60))
    assert Position(60) == advance_cursor(rewound, 5, Position(10), Position(60)).originals["5"]


def test_blocking_the_same_place_again_keeps_when_it_was_first_seen() -> None:
    """One record per place, with every try counted; other places have their own."""
    one, other = (Stream(StreamKind.ORIGINAL, 5, Position(7, n)) for n in (0, 1))
    known = block(BlockerState(), one, bucket="b", key="k", now_ns=1, reason="r", error="e")
    known = block(known, one, bucket="b", key="k", now_ns=9, reason="r", error="e2")
    known = block(known, other, bucket="b", key="k", now_ns=9, reason="r", error="e")

    first, second = known.blockers.values()
    assert (1, 9, 2, "e2") == (first.first_seen_ns, first.last_retry_ns, first.retries, first.last_error)
    assert 1 == second.retries


def test_a_retry_budget_ends_by_count_or_by_age() -> None:
    """Whichever comes first; the promotion takes the budget away in the same change."""
    stream = Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k")

    def fail(known: BlockerState, now: int) -> tuple[BlockerState, StreamResolution]:
        return record_retry(known, stream, bucket="b", key="k", now_ns=now, error="e", retries_max=3, age_max_ns=100)

    known, answer = fail(BlockerState(), 1)
    known, answer = fail(known, 2)
    assert StreamResolution.RETRY_LATER is answer
    by_count, answer = fail(known, 3)
    assert (StreamResolution.BLOCKED, {}) == (answer, by_count.budgets)
    by_age, answer = fail(fail(BlockerState(), 1)[0], 101)
    assert (StreamResolution.BLOCKED, 1) == (answer, len(by_age.blockers))
