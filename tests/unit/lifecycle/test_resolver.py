"""What one unresolved work holds, and what is recorded of each delete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.core.errors import Corrupt, Denied, Invalid, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.lifecycle.delete_decision import outcome_of
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.model import (
    ActionKey,
    ActionKind,
    Degraded,
    DeleteOutcome,
    Mode,
    ObjectEntry,
    Position,
    Verb,
)
from lakebed.lifecycle.seams import Removal
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND_NS = 10**9
DAY_NS = round(DAY_S * SECOND_NS)


def cursor(state: Any, days: int = 1) -> Position:
    found: Position = state.originals[str(days * DAY_NS)]
    return found


# Resolving.


async def test_an_exception_that_cannot_be_stored_holds_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan does not pass it, and meets it again."""
    world = Harness()
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.crash_server(10.0)
    await world.policy("b", rule(expiration_days=3))
    upsert = world.worker.resolver.pending.upsert

    async def refuse(ref: Any, items: Any) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(world.worker.resolver.pending, "upsert", refuse)
    stuck = await world.run_round()
    monkeypatch.setattr(world.worker.resolver.pending, "upsert", upsert)
    await world.run_round(0.1)

    assert [False] == [scan.complete for scan in stuck.scans]
    (ref,) = (await world.worker.compile()).actions
    (item,) = (await world.worker.resolver.pending.load(ref)).items.values()
    assert ("a", world.lake.objects["b"]["a"][0].mtime_ns + 3 * DAY_NS) == (item.key, item.due_at_ns)
    assert ({}, {}) == ((await world.blockers()).budgets, (await world.blockers()).blockers)


CHANGED = {
    "gone": (DeleteOutcome.NOT_FOUND, []),
    "younger": (DeleteOutcome.STALE_IDENTITY, ["a"]),
    "away": (DeleteOutcome.TRANSPORT_ERROR, ["a"]),
}


@pytest.mark.parametrize("how", CHANGED)
async def test_what_changed_before_its_delete_is_judged_again_as_it_is_now(how: str) -> None:
    """Gone is resolved, a newer object is kept and resolved, and one that cannot be looked at is tried later."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")

    async def delete(entry: ObjectEntry, verb: Verb) -> Removal:
        store.tried.append(entry.key)
        if how == "gone":
            world.lake.remove("b", "a")
        elif how == "younger":
            world.lake.write("b", "a")
        else:
            store.looks["a"] = Unavailable("away")
        raise Stale("another identity")

    store.delete = delete  # type: ignore[method-assign]
    (sweep,) = (await world.run_round(1.01)).sweeps
    outcome, left = CHANGED[how]
    rows = await world.ledger()

    assert ["a"] == store.tried
    assert ["", outcome.value] == [row.outcome for row in rows]
    assert left == world.left()
    assert (how == "away") is sweep.halted


async def test_an_identity_that_keeps_changing_is_tried_five_times_and_then_later() -> None:
    """A client that tags without end does not hold the worker for ever."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")

    async def delete(entry: ObjectEntry, verb: Verb) -> Removal:
        store.tried.append(entry.key)
        world.lake.tag("b", "a", {"n": str(len(store.tried))})
        raise Stale("another identity")

    store.delete = delete  # type: ignore[method-assign]
    (sweep,) = (await world.run_round(1.01)).sweeps

    assert 5 == len(store.tried)
    assert sweep.halted
    assert [DeleteOutcome.TRANSPORT_ERROR.value] == [row.outcome for row in await world.ledger() if row.outcome]


async def test_a_policy_is_read_again_when_it_is_older_than_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `policy_fresh_s` deletes share one read; at that age the policy in force is read."""
    world = Harness(policy_fresh_s=2.0)
    await world.policy("b", rule(expiration_days=1))
    reads: list[str] = []
    get = world.lake.get

    async def counted(bucket: str) -> Any:
        reads.append(bucket)
        return await get(bucket)

    monkeypatch.setattr(world.lake, "get", counted)
    resolver = world.worker.resolver
    first = await resolver._policy("b")
    await world.clock.advance(1.9)
    again = await resolver._policy("b")
    await world.policy("b")
    await world.clock.advance(0.1)
    after = await resolver._policy("b")
    other = await resolver._policy("c")

    assert (1, 1, 0, 0) == tuple(len(one) for one in (first, again, after, other))
    assert ["b", "b", "c"] == reads


async def test_only_an_event_driven_action_is_demoted() -> None:
    """An action on scans keeps its own reason; one that has no state yet is demoted before its first scan ends."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    (ref,) = (await world.worker.compile()).actions
    resolver = world.worker.resolver
    await world.clock.advance(7.0)
    await resolver.demote(ref, Degraded.PENDING_FULL, "full")
    first, at_ns = await world.action("EXPIRATION_DAYS"), world.clock.now_ns()
    await world.clock.advance(7.0)
    await resolver.demote(ref, Degraded.LAG_HIGH, "late")
    await resolver.demote(ActionRef("b", ActionKey("0" * 16, ActionKind.ABORT_MPU)), Degraded.LAG_HIGH, "late")

    assert (Mode.SCAN_ONLY, Degraded.PENDING_FULL, at_ns, at_ns) == (
        first.mode,
        first.degraded,
        first.degraded_since_ns,
        first.next_scan_ns,
    )
    assert first == await world.action("EXPIRATION_DAYS")
    assert (await world.action("ABORT_MPU")).mode is Mode.SCAN_ONLY


async def test_the_ledger_says_everything_about_a_delete() -> None:
    """Each field of the intent and of the verdict: who, what, by which rule, since when due, and what became of it."""
    world = Harness()
    await world.policy("b", rule(rule_id="r", prefix="x/", expiration_days=1))
    await world.run_round()
    world.lake.write("b", "x/a", size=7)
    identity, made_ns = world.lake.objects["b"]["x/a"][0].identity, world.clock.now_ns()
    await world.run_round(1.5)
    intent, verdict = await world.ledger()

    (ref,) = (await world.worker.compile()).actions
    place = world.lake.log[-2].position
    assert ("test", "b", "x/a", ref.key.rule_hash, ActionKind.EXPIRATION_DAYS, "CURRENT", identity) == (
        verdict.run,
        verdict.bucket,
        verdict.key,
        verdict.rule_hash,
        verdict.kind,
        verdict.verb,
        verdict.identity,
    )
    assert (f"ORIGINAL:{DAY_NS}:{place.ts_ns}.{place.offset}", "r", "", "") == (
        verdict.stream,
        verdict.rule_id,
        verdict.version_id,
        verdict.upload_id,
    )
    assert (made_ns + DAY_NS, world.clock.now_ns(), "DELETED", "") == (
        verdict.due_at_ns,
        verdict.at_ns,
        verdict.outcome,
        verdict.reason,
    )
    assert ("", intent.due_at_ns) == (intent.outcome, verdict.due_at_ns)


async def test_intents_are_stored_before_the_first_delete_and_nothing_goes_without_them() -> None:
    """A store of our own that is away deletes nothing on the lake."""
    world, store = failing()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    seen: list[int] = []
    delete = store.delete

    async def noted(entry: ObjectEntry, verb: Verb) -> Removal:
        seen.append(len(await world.ledger()))
        return await delete(entry, verb)

    store.delete = noted  # type: ignore[method-assign]
    append = world.worker.resolver._ledger.append

    async def away(rows: Any) -> None:
        raise Unavailable("away")

    world.worker.resolver._ledger.append = away  # type: ignore[method-assign]
    await world.run_round(1.01)
    assert ([], ["a"]) == (store.tried, world.left())
    world.worker.resolver._ledger.append = append  # type: ignore[method-assign]
    await world.run_round(0.01)

    assert ([1], []) == (seen, world.left())


async def test_saturation_and_duration_of_deletes_are_shown() -> None:
    """Three under way of four slots are 0.75; each delete's seconds are observed; at rest the gauge is 0."""
    world = Harness(concurrency=4)
    shown: list[float] = []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.lake, name)

        async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
            await world.clock.sleep(2.0)
            shown.append(world.metrics.value("lakebed_lifecycle_delete_saturation"))
            return await world.lake.delete(entry, verb)

    for key in ("a", "b", "c"):
        world.lake.write("b", key)
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    world.worker = world.new_worker(Slow())
    await world.worker._monitor.observe()  # a first look at the log has requests of its own
    ticking = asyncio.create_task(world.worker.run_round())
    await world.clock.advance(3.0)
    await ticking

    assert [0.75, 0.5, 0.25] == shown
    assert 0 == world.metrics.value("lakebed_lifecycle_delete_saturation")
    assert 3 == world.metrics.value("lakebed_lifecycle_delete_seconds_count")
    assert 6.0 == world.metrics.value("lakebed_lifecycle_delete_seconds_sum")


REFUSALS = [
    (NotFound("x"), DeleteOutcome.NOT_FOUND),
    (Stale("x"), DeleteOutcome.STALE_IDENTITY),
    (Denied("x"), DeleteOutcome.SKIPPED_OBJECT_LOCK),
    (Corrupt("x"), DeleteOutcome.FATAL_EVENT_ERROR),
    (Invalid("x"), DeleteOutcome.FATAL_EVENT_ERROR),
    (Unavailable("x"), DeleteOutcome.TRANSPORT_ERROR),
    (OutcomeUnknown("x"), DeleteOutcome.TRANSPORT_ERROR),
]


@pytest.mark.parametrize(("error", "outcome"), REFUSALS, ids=lambda one: type(one).__name__)
def test_a_refusal_of_the_store_has_its_outcome(error: Any, outcome: DeleteOutcome) -> None:
    """What only time can help is retried; what will never work blocks; the rest is resolved."""
    assert outcome is outcome_of(error)
