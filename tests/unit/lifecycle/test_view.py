"""Lifecycle as people look at it: how far each stream is behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.console.page import DataSource
from lakebed.console.rendering import time_ns
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle import view
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import ActionKind, ObjectIdentity, Position, Rule, StreamKind
from lakebed.lifecycle.page import LifecyclePage
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.spark_job import apply, candidate_count, spec_of
from lakebed.lifecycle.state import (
    ActionState,
    Blocker,
    BlockerState,
    BucketLifecycle,
    LedgerRow,
    PendingIndex,
    ReaderState,
    Stream,
    changed,
)
from lakebed.lifecycle.workers import state_of
from lakebed.store.memory import MemoryStore
from support.console_site import site as console_site
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule
from support.tick_fixtures import context_of

DAY_NS = 86_400 * 10**9


async def test_a_stream_is_behind_by_what_is_due_and_not_by_its_delay(manual_clock: ManualClock) -> None:
    """A cursor 30 days before the last midnight is not behind when the rule waits 30 days and is due at midnight."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    now_ns = manual_clock.now_ns()
    midnight_ns = now_ns // DAY_NS * DAY_NS
    assert now_ns > midnight_ns + 3600 * 10**9
    state = ReaderState(
        originals={
            str(30 * DAY_NS): Position(midnight_ns - 30 * DAY_NS),
            str(DAY_NS): Position(midnight_ns - DAY_NS - 100 * 10**9),
        },
        predicate=Position(now_ns - 320 * 10**9),
    )
    for register in state_of(context).readers:
        await register.change(changed(lambda _: state))

    rows = await view.streams(context)

    assert [("delay 1 d", 86_400.0, 100.0), ("delay 30 d", 30 * 86_400.0, 0.0), ("predicates", 0.0, 200.0)] == [
        (row.stream, row.delay_s, row.behind_s) for row in rows
    ]


async def test_of_one_key_the_newest_verdicts_are_shown_in_order(manual_clock: ManualClock) -> None:
    """More verdicts than are shown: the last ones, and none of another key or bucket."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    book = DeletionLedger(context)
    for number in range(5):
        for bucket, key in (("b", "k"), ("b", "other"), ("c", "k")):
            row = LedgerRow(
                manual_clock.now_ns(), f"run-{number}", bucket, key, "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                ObjectIdentity(1, 1), "original",
            )  # fmt: skip
            await book.append([row])
        await manual_clock.advance(1.0)

    of_key = await view.ledger(context, "b", "k", limit=2)
    of_bucket = await view.ledger(context, "b", limit=3)

    assert [("k", "run-3"), ("k", "run-4")] == [(row["key"], row["run"]) for row in of_key]
    assert ["run-3", "run-4", "run-4"] == [row["run"] for row in of_bucket]
    assert {"planned"} == {row["outcome"] for row in of_bucket}


def site_of(context: Context, lake: MemoryLake) -> Any:
    """What commands work with, over the lake in memory."""
    settings = LifecycleSettings(day_s=100.0, rounding="exact")
    return SimpleNamespace(
        settings=settings, state=state_of(context), lake=lake, reserved=ReservedKeys("lakebed", "own/")
    )


async def test_rules_of_every_bucket_are_shown_with_their_status_and_actions(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    lake = MemoryLake(manual_clock)
    on = Rule(rule_id="old", prefix="logs/", expiration_days=3)
    off = Rule(rule_id="off", enabled=False, expiration_days=9)
    await lake.put("a", render_xml((on, off)))
    await lake.put("b", render_xml((on,)))

    found = await view.rules(site_of(context, lake))

    assert [("a", "old", "Enabled", "logs/"), ("a", "off", "Disabled", ""), ("b", "old", "Enabled", "logs/")] == [
        (row["bucket"], row["id"], row["status"], row["prefix"]) for row in found
    ]
    assert {"EXPIRATION_DAYS"} == {row["actions"] for row in found}
    assert found[0]["hash"] == found[2]["hash"] != found[1]["hash"]


async def test_a_preview_judges_the_given_text_or_the_policy_in_force_at_a_day_ahead(manual_clock: ManualClock) -> None:
    """Days ahead are days of the settings; a text that is given is judged and not the policy in force."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    lake = MemoryLake(manual_clock)
    for number in range(3):
        lake.write("a", f"k{number}", size=10)
    await lake.put("a", render_xml((Rule(rule_id="old", expiration_days=3),)))
    site = site_of(context, lake)
    await manual_clock.advance(100.0)

    now = await view.preview(site, "a")
    ahead = await view.preview(site, "a", days_ahead=2.1)
    other = await view.preview(site, "a", render_xml((Rule(rule_id="new", expiration_days=1),)), days_ahead=0.1)
    cut = await view.preview(site, "a", days_ahead=2.1, keys_max=2)

    assert [(3, 0, 0), (3, 3, 30), (3, 3, 30)] == [(one.scanned, one.count, one.bytes) for one in (now, ahead, other)]
    assert (True, False, 2) == (ahead.complete, cut.complete, cut.scanned)
    assert {"new"} == {one.rule for one in other.sample}


async def test_when_a_key_goes_is_said_with_its_rule_and_shown_on_the_page(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the policy in force; a key that no rule takes is kept, and one that does not exist is not found."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    lake = MemoryLake(manual_clock)
    for key in ("logs/a", "kept/b"):
        lake.write("a", key, size=10)
    begun_ns = manual_clock.now_ns()
    await lake.put("a", render_xml((Rule(rule_id="old-logs", prefix="logs/", expiration_days=3),)))
    services = site_of(context, lake)

    found, kept = await view.when(services, "a", "logs/a"), await view.when(services, "a", "kept/b")
    with pytest.raises(NotFound, match="logs/z"):
        await view.when(services, "a", "logs/z")

    async def load() -> Any:
        return found

    monkeypatch.setattr(
        LifecyclePage, "forecast", lambda page, bucket, key: DataSource("lifecycle:read:a", f"when:{key}", 9.0, load)
    )
    async with console_site() as here:
        page = (await here.browser.open("/lifecycle?bucket=a&key=logs/a")).text

    (due,) = found.actions
    assert ("old-logs", begun_ns + 300 * 10**9, False) == (due.rule, due.due_at_ns, due.due)
    assert [] == kept.actions
    assert f'<time>{time_ns(due.due_at_ns)}</time> UTC</td><td class="mono">old-logs</td><td>expiration days' in page


async def test_a_bucket_without_a_policy_is_not_found_with_how_to_put_one(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    lake = MemoryLake(manual_clock)
    await lake.put("a", render_xml((Rule(rule_id="old", expiration_days=3),)))

    assert b"old" in await view.policy(site_of(context, lake), "a")
    with pytest.raises(NotFound, match="b has no policy") as refused:
        await view.preview(site_of(context, lake), "b")
    assert "lakebed lifecycle rules put b FILE" == refused.value.hint


def test_a_verdict_is_shown_with_every_field_it_has() -> None:
    """The version or the upload, the rule by its id or its hash, and the outcome, each in its own field."""
    base = LedgerRow(
        5, "run-1", "b", "k", "hash", ActionKind.EXPIRATION_DAYS, "DELETE", ObjectIdentity(1, 1), "original"
    )
    full = msgspec.structs.replace(
        base, rule_id="old", version_id="v1", due_at_ns=4, outcome="deleted", reason="over age"
    )
    upload = msgspec.structs.replace(base, upload_id="u1")

    assert {
        "at_ns": 5, "key": "k", "version": "v1", "rule": "old", "kind": "EXPIRATION_DAYS", "verb": "DELETE",
        "outcome": "deleted", "due_at_ns": 4, "stream": "original", "run": "run-1", "reason": "over age",
    } == view.ledger_row(full)  # fmt: skip
    assert ("u1", "hash", "planned") == tuple(view.ledger_row(upload)[name] for name in ("version", "rule", "outcome"))


async def test_blockers_are_those_of_the_bucket_and_stream_asked_for(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest first, and no more than one answer holds."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    stream = Stream(StreamKind.ORIGINAL, 10, Position(5, 0))
    known = {
        name: Blocker(name, stream, bucket, "k", "lock", "locked", seen, seen, 3)
        for name, bucket, seen in (("b1", "x", 9), ("b2", "y", 3), ("b3", "x", 5))
    }
    await state_of(context).blockers.change(changed(lambda _: BlockerState(blockers=known)))

    async def names(**chosen: str) -> list[str]:
        return [one.blocker_id for one in await view.blockers(context, **chosen)]

    assert ["b2", "b3", "b1"] == await names()
    assert ["b3", "b1"] == await names(bucket="x")
    assert ["b3", "b1"] == await names(bucket="x", stream=StreamKind.ORIGINAL.value)
    assert [] == await names(stream=StreamKind.PREDICATE.value)
    monkeypatch.setattr(view, "ROWS_MAX", 2)
    assert ["b2", "b3"] == await names()


async def test_the_status_is_of_every_action_or_of_one_bucket(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    for bucket in ("a", "b"):
        state = BucketLifecycle(actions={"h/EXPIRATION_DAYS": ActionState("old", bootstrap_complete=True)})
        await state_of(context).bucket(bucket).change(changed(lambda _, state=state: state))

    assert ["a", "b"] == [row["bucket"] for row in await view.status(context)]
    assert ["b"] == [row["bucket"] for row in await view.status(context, "b")]
    monkeypatch.setattr(view, "ROWS_MAX", 1)
    assert ["a"] == [row["bucket"] for row in await view.status(context)]


async def test_without_a_predicate_cursor_there_is_no_such_stream(manual_clock: ManualClock) -> None:
    """Streams are in the order of their delays, by number and not by text; a cursor ahead of now is not behind."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    now_ns = manual_clock.now_ns()
    originals = {str(days * DAY_NS): Position(now_ns + DAY_NS) for days in (10, 9, 100)}
    for register in state_of(context).readers:
        await register.change(changed(lambda _: ReaderState(originals=originals)))

    rows = await view.streams(context)

    assert [("delay 9 d", 0.0), ("delay 10 d", 0.0), ("delay 100 d", 0.0)] == [
        (row.stream, row.behind_s) for row in rows
    ]
    assert {now_ns + DAY_NS} == {row.at_ns for row in rows}


async def test_a_bucket_that_was_not_scanned_has_no_candidates(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    site = site_of(context, MemoryLake(manual_clock))

    for asked in (candidate_count, apply):
        with pytest.raises(NotFound, match="a was not scanned") as refused:
            await asked(site, "a")
        assert "lakebed lifecycle dry-run a --engine spark --keep" == refused.value.hint
    assert "lifecycle/candidates/a" == spec_of("a").name


async def test_a_text_with_one_id_twice_is_refused_and_a_policy_in_force_is_judged(manual_clock: ManualClock) -> None:
    """What is put by another client may name an id twice: it is in force all the same."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    lake = MemoryLake(manual_clock)
    twice = render_xml((Rule(rule_id="old", expiration_days=3), Rule(rule_id="old", expiration_days=9)))
    await lake.put("a", twice)
    lake.write("a", "k", size=10)

    assert 1 == (await view.preview(site_of(context, lake), "a", days_ahead=4.0)).count
    with pytest.raises(Invalid):
        await view.preview(site_of(context, lake), "a", twice, days_ahead=4.0)


async def test_a_summary_is_of_all_actions_and_reads_no_exceptions_of_those_that_have_none(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More actions than status shows; the index says which have exceptions."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    state = state_of(context)
    some = {f"{number:016x}/EXPIRATION_DAYS": ActionState() for number in range(view.ROWS_MAX // 2 + 1)}
    for bucket in ("b", "c"):
        await state.bucket(bucket).change(changed(lambda _: BucketLifecycle(actions=some)))
    await state.pending.change(changed(lambda _: PendingIndex(1, (f"b/{min(some)}",))))
    listed: list[str] = []
    plain = MemoryStore.list

    def noted(self: MemoryStore, prefix: str, *words: Any, **said: Any) -> Any:
        listed.append(prefix)
        return plain(self, prefix, *words, **said)

    monkeypatch.setattr(MemoryStore, "list", noted)
    found = await view.summary(context)

    assert 2 * len(some) == found.actions > view.ROWS_MAX
    assert 1 == len([prefix for prefix in listed if "/pending/" in prefix])


async def test_a_summary_says_when_the_policies_were_last_compiled() -> None:
    """The instant of the worker that ran last: it moves on with each compilation, and with nothing else."""
    world = Harness()
    context = context_of(world.store, clock=world.clock)
    await world.policy("b", rule(expiration_days=1))
    assert 0 == (await view.summary(context)).last_engine_compiled_at_ns

    await world.run_round()
    first = (await view.summary(context)).last_engine_compiled_at_ns
    await world.clock.advance(3600)
    unchanged = (await view.summary(context)).last_engine_compiled_at_ns
    await world.run_round()

    assert first == unchanged == world.clock.now_ns() - 3600 * 1_000_000_000
    assert world.clock.now_ns() == (await view.summary(context)).last_engine_compiled_at_ns


async def test_the_summary_counts_actions_once_and_buckets_under_way_once(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred lags the median and the last but one; sums over all actions; a bucket of several actions is one."""
    counts = {"pending": 1, "evaluated": 2, "expired": 3, "errors": 4}
    rows: list[dict[str, Any]] = [
        {"bucket": f"b{number // 50}", "action": f"a{number}", "lag_s": float(number), "scanned": number < 60} | counts
        for number in reversed(range(100))
    ]
    rows.append({"bucket": "odd", "action": "", "mode": "invalid policy", "why": "no XML"})

    async def status(context: Context, *, limit: int) -> list[dict[str, Any]]:
        return rows

    monkeypatch.setattr(view, "status", status)

    found = await view.summary(context_of(MemoryStore(clock=manual_clock), clock=manual_clock))

    assert (100, 49.0, 98.0, 2) == (found.actions, found.lag_p50_s, found.lag_p99_s, found.scanning)
    assert (100, 200, 300, 400) == (found.pending, found.evaluated, found.expired, found.errors)
    assert (0, 0, 0) == (found.blockers, found.last_round_ns, found.last_engine_compiled_at_ns)
