"""What operators see and do: numbers, the log's reach, rounds on demand, beginning anew, quarantine of every stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Conflict, Corrupt, Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.lifecycle.blockers import Failure, block
from lakebed.lifecycle.model import (
    ActionKind,
    Degraded,
    Mode,
    ObjectEntry,
    Position,
    StreamKind,
    StreamResolution,
    Verb,
)
from lakebed.lifecycle.modes import LagLevel, judge_lag, known_retention
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.rate import DeleteRateLimiter
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.state import ActionState, BucketLifecycle, LifecycleState, RetryBudget, Stream
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject
from lakebed.store.runtime import StoreRuntime
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000


def value(world: Harness, name: str, **labels: str) -> float:
    return world.metrics.value(f"lakebed_lifecycle_{name}", **labels)


# Numbers.


async def test_what_is_judged_and_deleted_is_counted_by_action() -> None:
    """Evaluated, expired, skipped and failed, each with the action it belongs to; deletes are timed."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("gone", "locked", "broken"):
        world.lake.write("b", key)
    world.lake.hold("b", "locked")
    store.deletes["broken"] = Unavailable("no")
    await world.run_round(1.01)
    (action,) = (await world.state()).actions

    assert 3 == value(world, "evaluated_total", bucket="b", action=action)
    assert 1 == value(world, "expired_total", bucket="b", action=action)
    assert 1 == value(world, "skipped_object_lock_total", bucket="b", action=action)
    assert 1 == value(world, "errors_total", bucket="b", action=action, kind="TRANSPORT_ERROR")
    assert 2 == value(world, "delete_seconds_count")
    assert 0 == value(world, "delete_saturation")


async def test_events_are_counted_once_per_sweep() -> None:
    """By the stream that read them: a delay group, or the predicates."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1), rule(expiration_days=2, tags=(("t", "1"),)))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.write("b", "b")

    await world.run_round(2.01)

    assert 2 <= value(world, "events_total", stream=f"{DAY_S:g}s")
    assert value(world, "events_total", stream=f"{DAY_S:g}s") == value(world, "events_total", stream=f"{2 * DAY_S:g}s")
    assert 2 <= value(world, "events_total", stream="predicate")
    assert 0 <= value(world, "predicate_lag_seconds") < DAY_S


async def test_mode_and_degradation_are_shown_per_action_and_go_with_it() -> None:
    """One of the modes is 1; a reason is 1 while it holds; an action that is forgotten has no sample."""
    world = Harness(grace_s=10.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    (action,) = (await world.state()).actions

    def modes() -> dict[str, float]:
        return {mode.value: value(world, "action_mode", bucket="b", action=action, mode=mode.value) for mode in Mode}

    assert {"event_driven": 1, "scan_at_date": 0, "scan_only": 0, "disabled": 0} == modes()
    await Operator(world.registers).pause("b")
    await world.run_round()
    assert 1 == modes()["disabled"] and 0 == modes()["event_driven"]
    assert 1 == value(world, "degraded", bucket="b", action=action, reason="OPERATOR_PAUSED")
    await world.policy("b", rule(prefix="other", expiration_days=1))
    await world.run_round()
    await world.run_round(0.5)

    assert {0} == set(modes().values())
    assert action not in world.metrics.prometheus().decode().split("lakebed_lifecycle_action_mode{", 1)[1]


async def test_what_is_shown_of_a_bucket_goes_with_its_policy() -> None:
    """Modes, reasons, exceptions and the lag of its delays: what is left of them would alert for ever."""
    world = Harness(retention_s=10 * DAY_S)
    await world.policy("b", rule(expiration_days=1, tags=(("t", "1"),)))
    await world.policy("c", rule(prefix="x/", expiration_days=2))
    await world.run_round()
    world.lake.write("b", "a", tags={"t": "1"})
    await world.exceptions("a")
    await world.run_round(0.1)
    await world.clock.advance(6 * DAY_S)
    await world.worker._monitor.judge(await world.worker.compile(), {})

    def shown() -> set[str]:
        lines = world.metrics.prometheus().decode().splitlines()
        mine = ('bucket="b"', f'stream="{DAY_S:g}s"', 'stream="predicate"')
        found = [line.partition("{")[0] for line in lines if any(map(line.count, mine))]
        return gauges & {name.removeprefix("lakebed_lifecycle_") for name in found}

    gauges = {"action_mode", "degraded", "pending_size", "watermark_lag_seconds", "lag_warning"}
    before, late_s = shown(), value(world, "predicate_lag_seconds")
    await world.policy("b")
    await world.run_round()

    assert gauges == before
    assert late_s > 0 == value(world, "predicate_lag_seconds")
    assert set() == shown()
    (action,) = (await world.state("c")).actions
    assert 1 == value(world, "action_mode", bucket="c", action=action, mode="event_driven")


async def test_blocked_streams_are_shown_by_kind_and_bucket_and_cleared() -> None:
    """A gauge, so it goes down again when an operator has decided."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    assert 0 == value(world, "blocked_streams", stream_kind="ORIGINAL", bucket="")
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("broken")
    await world.run_round(1.01)
    assert 1 == value(world, "blocked_streams", stream_kind="ORIGINAL", bucket="b")
    store.deletes.clear()
    (blocker,) = await Operator(world.registers).blockers()
    await Operator(world.registers).resume(blocker.blocker_id)

    await world.run_round(0.01)

    assert 0 == value(world, "blocked_streams", stream_kind="ORIGINAL", bucket="b")


async def test_status_tells_lag_progress_exceptions_and_blockers() -> None:
    """Per action: what a page of a console needs."""
    world, store = failing(batch=2, retries_max=1)
    await world.policy("b", rule(rule_id="r", expiration_days=2))
    await world.run_round()
    world.lake.write("b", "late")
    await world.exceptions("late")
    world.lake.write("b", "other")
    await world.run_round(1)

    (row,) = await Operator(world.registers, world.settings).status("b")
    assert (1, 0, "r", 0.0) == (row["pending"], row["blockers"], row["rule"], row["lag_s"])
    store.looks |= {"late": Unavailable("away"), "other": Unavailable("away")}
    await world.run_round(1)
    (row,) = await Operator(world.registers, world.settings).status("b")
    assert 2 == row["blockers"]  # the exception's, and the delay group's own


class CountingStore(MemoryStore):
    """Counts what is read and listed."""

    asked = 0

    async def get(self, key: str) -> StoredObject:
        self.asked += 1
        return await super().get(key)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.asked += 1
        async for info in super().list(prefix, after=after):
            yield info


async def test_status_reads_only_what_it_tells() -> None:
    """Of many actions the first few are told, at the same cost however many there are."""
    costs = []
    for buckets in (3, 40):
        world = Harness()
        store = CountingStore(clock=world.clock)
        registers = LifecycleState(
            StoreRuntime(clock=world.clock, ids=Ids.seeded(1), metrics=world.metrics, store=store)
        )
        actions = {f"{number:016x}/EXPIRATION_DAYS": ActionState(rule_id=f"r{number}") for number in range(4)}
        for number in range(buckets):
            await registers.bucket(f"b{number:03d}").change(
                lambda _, held=actions: (BucketLifecycle(actions=held), None)
            )
        store.asked = 0

        rows = await Operator(
            LifecycleState(StoreRuntime(clock=world.clock, ids=Ids(), metrics=world.metrics, store=store))
        ).status(limit=6)

        assert [("b000", 4), ("b001", 2)] == sorted(Counter(row["bucket"] for row in rows).items())
        costs.append(store.asked)
    assert costs[0] == costs[1]


# How far the log reaches.


@pytest.mark.parametrize(
    ("behind", "verdict"),
    [
        (49, LagLevel.HEALTHY),
        (50, LagLevel.WARN),
        (79, LagLevel.WARN),
        (80, LagLevel.FORCE_SCAN),
        (94, LagLevel.FORCE_SCAN),
        (95, LagLevel.DEMOTE),
    ],
)
def test_lag_is_judged_by_the_room_behind_the_delay(behind: int, verdict: LagLevel) -> None:
    """A sweep of thirty days is thirty days behind when all is well."""
    assert verdict is judge_lag(behind, 30_100, 30_000)
    assert LagLevel.HEALTHY is judge_lag(0, 30_100, 30_000)


def test_the_log_itself_can_show_less_than_the_settings_say() -> None:
    """The shorter of the two counts; a log from which nothing was removed shows nothing."""
    assert known_retention(None, 0, 100) is None
    assert 50 == known_retention(50, 0, 100)
    assert 30 == known_retention(None, 70, 100)
    assert 30 == known_retention(50, 70, 100)
    assert 20 == known_retention(20, 70, 100)
    assert 0 == known_retention(None, 200, 100)


async def test_the_probed_reach_of_the_log_drives_the_thresholds() -> None:
    """No setting says it: warn at half, scan at four fifths, scans alone at nineteen twentieths of what is there."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "stuck")
    store.deletes["stuck"] = Unavailable("broken")
    await world.run_round(1.01)
    assert 0 == value(world, "log_retention_seconds")
    cursor_ns = (await world.reader()).originals[str(round(DAY_S) * SECOND)].ts_ns

    async def at(part: float) -> tuple[Mode, Degraded, bool]:
        """The cursor has used up this part of the room that a log of eleven days leaves it."""
        now_ns = cursor_ns + round((1 + 10 * part) * DAY_S * SECOND)
        await world.clock.advance((now_ns - world.clock.now_ns()) / 1e9)
        world.lake.log_begins_ns = now_ns - round(11 * DAY_S * SECOND)
        before = (await world.action("EXPIRATION_DAYS")).next_scan_ns
        await world.worker.run_round()
        action = await world.action("EXPIRATION_DAYS")
        return action.mode, action.degraded, action.next_scan_ns < before

    assert (Mode.EVENT_DRIVEN, Degraded.NONE, False) == await at(0.4)
    assert (Mode.EVENT_DRIVEN, Degraded.LAG_HIGH, False) == await at(0.55)
    assert 11 * DAY_S == value(world, "log_retention_seconds")
    assert 1 == value(world, "lag_warning", stream=f"{DAY_S:g}s")
    assert (Mode.EVENT_DRIVEN, Degraded.LAG_HIGH) == (await at(0.85))[:2]
    assert (Mode.SCAN_ONLY, Degraded.LAG_HIGH) == (await at(0.96))[:2]


async def test_a_log_that_is_too_short_keeps_a_new_action_on_scans() -> None:
    """The gate goes by what the log shows, also when no setting says it."""
    world = Harness()
    world.lake.log_begins_ns = world.clock.now_ns() - SECOND
    await world.policy("b", rule(expiration_days=1))

    await world.run_round()

    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.SCAN_ONLY, Degraded.RETENTION_BELOW_HORIZON) == (action.mode, action.degraded)


async def test_predicate_lag_demotes_only_what_looks_at_predicates() -> None:
    """A rule without tags or sizes goes on by events; a reseed of the predicates brings the others back."""
    world, store = failing(retention_s=20 * DAY_S, retries_max=1)
    tagged, plain = rule(prefix="t", expiration_days=1, tags=(("t", "1"),)), rule(prefix="p", expiration_days=1)
    await world.policy("b", tagged, plain)
    await world.run_round()
    world.lake.write("b", "t")
    await world.run_round(0.1)
    store.looks["t"] = Unavailable("unreadable")
    world.lake.tag("b", "t", {"t": "0"})
    await world.run_round(0.1)
    assert [StreamKind.PREDICATE] == [one.stream.kind for one in await Operator(world.registers).blockers()]
    store.looks.clear()

    for _ in range(20):
        await world.run_round(0.98)

    states = {str(one.predicate): one for one in (await world.state()).actions.values()}
    assert (Mode.SCAN_ONLY, Degraded.LAG_HIGH) == (states["True"].mode, states["True"].degraded)
    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == (states["False"].mode, states["False"].degraded)
    operator = Operator(world.registers)
    for blocker in await operator.blockers():
        await operator.resume(blocker.blocker_id)
    world.lake.tag("b", "t", {"t": "1"})
    await operator.reseed(await world.worker.compile(), predicate=True)
    await world.run_round(0.1)
    assert {Mode.EVENT_DRIVEN} == {one.mode for one in (await world.state()).actions.values()}
    assert [] == world.left()


# Deciding.


async def test_a_walk_passes_by_what_was_quarantined_and_nothing_else() -> None:
    """By key, with the reason on record; beginning anew looks at it again."""
    world, store = failing(retries_max=1)
    for key in ("a", "bad", "c"):
        world.lake.write("b", key)
    store.deletes["bad"] = Unavailable("no entry")
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    operator = Operator(world.registers)
    (blocker,) = await operator.blockers()
    assert (StreamKind.BOOTSTRAP, "bad") == (blocker.stream.kind, blocker.key) and "no entry" in blocker.last_error
    assert not (await world.run_round(0.01)).scans[0].complete

    with pytest.raises(Invalid):
        await operator.quarantine(blocker.blocker_id, reason=" ", who="me")
    await operator.quarantine(blocker.blocker_id, reason="known", who="me")
    await world.run_round(0.01)

    assert (["bad"], {"bad": "known"}) == (world.left(), (await world.state()).skips)
    assert (await world.action("EXPIRATION_DAYS")).bootstrap_complete
    assert 1 == value(world, "quarantined_total", stream_kind="BOOTSTRAP", bucket="b")
    store.deletes.clear()
    await operator.rebootstrap("b")
    await world.run_round(0.01)
    assert [] == world.left() and {} == (await world.state()).skips


async def test_a_listing_that_cannot_be_read_has_no_key_to_pass_by() -> None:
    """Then only mending and resuming helps, and the answer says so."""
    world = Harness()
    stream = Stream(StreamKind.BOOTSTRAP, bucket="b")
    await world.registers.blockers.change(
        lambda known: (block(known, [Failure(stream, "b", "", "FATAL_EVENT_ERROR", "e")], 1, reason="r"), None)
    )
    (blocker,) = await Operator(world.registers).blockers()

    with pytest.raises(Conflict, match="the listing cannot be read"):
        await Operator(world.registers).quarantine(blocker.blocker_id, reason="x", who="me")


async def pending_blocker() -> tuple[Harness, Operator, object]:
    """An exception whose object cannot be read when its instant comes."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=2))
    await world.run_round()
    world.lake.write("b", "late")
    await world.exceptions("late")
    store.looks["late"] = Unavailable("unreadable")
    await world.run_round(2.1)
    return world, Operator(world.registers), store


@pytest.mark.parametrize("verb", ["retry", "resume", "quarantine"])
async def test_a_blocked_exception_stands_still_until_it_is_decided(verb: str) -> None:
    """The item stays and its drain pauses; each way on clears the blocker and its budget, and leaves nothing behind."""
    world, operator, store = await pending_blocker()
    (blocker,) = [one for one in await operator.blockers() if one.stream.kind is StreamKind.PENDING]
    assert 1 == (await operator.status("b"))[0]["pending"]
    await world.registers.blockers.change(
        lambda known: (
            type(known)(blockers=known.blockers, budgets={f"{blocker.stream.lane} x": RetryBudget(2, 1, 1)}),
            None,
        )
    )
    assert ["late"] == world.left()

    if verb == "quarantine":
        await operator.quarantine(blocker.blocker_id, reason="let it be", who="me")
    else:
        store.looks.clear()  # type: ignore[attr-defined]
    if verb == "retry":
        answer = await operator.retry(blocker.blocker_id, world.worker.resolver, await world.worker.compile())
        assert StreamResolution.DONE is answer
    elif verb == "resume":
        await operator.resume(blocker.blocker_id)
    await world.run_round(0.01)

    blockers = await world.blockers()
    assert blocker.blocker_id not in blockers.blockers
    assert {} == blockers.budgets
    assert 0 == (await operator.status("b"))[0]["pending"]
    assert (["late"] if verb == "quarantine" else []) == world.left()


async def test_a_blocked_predicate_stream_lets_the_others_go_on_and_is_passed_by_retry() -> None:
    """The cursor stands before the event, the delay group goes on in the same round; success lets it pass."""
    world, store = failing(retries_max=1)
    await world.policy("b", rule(expiration_days=1), rule(prefix="t", expiration_days=9, tags=(("t", "1"),)))
    await world.run_round()
    world.lake.write("b", "t")
    world.lake.write("b", "plain")
    await world.run_round(0.1)
    store.looks["t"] = Unavailable("unreadable")
    world.lake.tag("b", "t", {"x": "1"})
    await world.run_round(0.95)

    operator = Operator(world.registers)
    kinds = {one.stream.kind for one in await operator.blockers()}
    assert StreamKind.PREDICATE in kinds
    assert "plain" not in world.left()
    store.looks.clear()
    (blocker,) = [one for one in await operator.blockers() if one.stream.kind is StreamKind.PREDICATE]
    before = (await world.reader()).predicate or Position()
    assert before < blocker.stream.position
    assert (await operator.retry(blocker.blocker_id, world.worker.resolver, await world.worker.compile())).resolved
    await world.run_round(0.1)
    after = (await world.reader()).predicate
    assert after is not None and blocker.stream.position < after


async def test_blockers_are_listed_by_stream_and_bucket() -> None:
    """As an operator narrows down what to look at."""
    world = Harness()
    for number, kind in enumerate(StreamKind):
        stream = Stream(kind, delay_ns=number, bucket=f"b{number % 2}", key=str(number))
        await world.registers.blockers.change(
            lambda known, stream=stream: (  # type: ignore[misc]
                block(known, [Failure(stream, stream.bucket, stream.key, "TRANSPORT_ERROR", "e")], 1, reason="r"),
                None,
            )
        )
    operator = Operator(world.registers)

    assert 4 == len(await operator.blockers())
    assert ["PENDING"] == [one.stream.kind.value for one in await operator.blockers(stream="PENDING")]
    assert {"b1"} == {one.bucket for one in await operator.blockers(bucket="b1")}


async def test_errors_that_end_as_fatal_leave_no_budget_behind() -> None:
    """Transient, transient, fatal: it is isolated, and the count goes."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.looks["a"] = Unavailable("down")
    await world.run_round(1.01)
    await world.run_round(0.01)
    assert [2] == [one.retries for one in (await world.blockers()).budgets.values()]
    store.looks["a"] = Corrupt("broken")
    await world.run_round(0.01)

    blockers = await world.blockers()
    assert (1, 0) == (len(blockers.isolated), len(blockers.budgets))


async def test_a_blocker_that_cannot_be_written_is_a_retry_and_the_cursor_stays() -> None:
    """Nothing may stand still for good without a record that an operator can find."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.deletes["a"] = Corrupt("broken")
    event = world.lake.log[-1].position
    change = world.registers.blockers.change

    async def refused(*_: object) -> None:
        raise Unavailable("the store is full")

    world.registers.blockers.change = refused  # type: ignore[method-assign,assignment]
    sweeps = (await world.run_round(1.01)).sweeps
    world.registers.blockers.change = change  # type: ignore[method-assign]

    assert [True] == [sweep.halted for sweep in sweeps] and [False] == [sweep.blocked for sweep in sweeps]
    assert all(cursor < event for cursor in (await world.reader()).originals.values())
    assert [] == await Operator(world.registers).blockers()
    store.deletes.clear()
    await world.run_round(0.01)
    assert [] == world.left()


# Rounds on demand, and beginning anew.


async def test_a_worker_at_rest_begins_a_round_when_it_is_asked_for() -> None:
    """Without waiting for its poll or the next due instant."""
    world = Harness(poll_s=3600.0)
    rounds: list[int] = []
    run_round = world.worker._read_round

    async def counted() -> int:
        rounds.append(world.clock.now_ns())
        return await run_round()

    world.worker._read_round = counted  # type: ignore[method-assign]
    running = asyncio.create_task(world.worker.run())
    try:
        await world.clock.advance(30.0)
        assert 1 == len(rounds)
        await Operator(world.registers).wake("me")
        for _ in range(4):
            await world.clock.advance(5.0)
        assert 2 == len(rounds)
    finally:
        running.cancel()


async def test_beginning_anew_walks_and_seeds_the_cursors_again() -> None:
    """For the actions that are named; a demoted one stays demoted, since only a reseed admits what it missed."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1), rule(prefix="x", abort_days=2))
    await world.run_round()
    await world.run_round(3)
    began_ns = (await world.action("EXPIRATION_DAYS")).bootstrap_started_at_ns
    name = next(one for one in (await world.state()).actions if one.endswith("EXPIRATION_DAYS"))

    await Operator(world.registers).rebootstrap("b", name)
    state = await world.state()
    assert {name: False} == {one: known.bootstrap_complete for one, known in state.actions.items() if one == name}
    assert [True] == [known.bootstrap_complete for one, known in state.actions.items() if one != name]
    assert [True] == [scan.complete for scan in (await world.run_round(0.01)).scans]

    assert all(known.bootstrap_complete for known in (await world.state()).actions.values())
    assert began_ns < (await world.action("EXPIRATION_DAYS")).bootstrap_started_at_ns


async def test_a_horizon_is_gated_per_sibling() -> None:
    """A log of ten days: ninety days go on by scans, the seven days of the same rule by events."""
    world = Harness(retention_s=10 * DAY_S)
    await world.policy("b", rule(expiration_days=90, abort_days=7, expiration_date_ns=None))
    await world.run_round()

    modes = {name.split("/")[1]: one.mode for name, one in (await world.state()).actions.items()}
    assert {ActionKind.EXPIRATION_DAYS.value: Mode.SCAN_ONLY, ActionKind.ABORT_MPU.value: Mode.EVENT_DRIVEN} == modes


# Limits.


async def test_deletes_keep_to_their_number_at_once_and_to_their_rate() -> None:
    """Never more under way than allowed; and with a rate, no more in a second than it says."""
    world = Harness(concurrency=3, batch=50)
    under_way, most = 0, 0

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(world.lake, name)

        async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            removal = await world.lake.delete(entry, verb)
            under_way -= 1
            return removal

    for number in range(20):
        world.lake.write("b", f"k{number:02d}")
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Slow())

    await world.run_round()

    assert (3, []) == (most, world.left())
    pace, began_s = DeleteRateLimiter(10.0, world.registers), world.clock.monotonic_s()
    waiting = asyncio.gather(*(pace.wait() for _ in range(31)))
    await settle()
    await world.clock.advance(1.5)
    assert not waiting.done()
    await world.clock.advance(1.0)
    await waiting
    assert 2.5 == world.clock.monotonic_s() - began_s
