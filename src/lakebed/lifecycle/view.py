"""What the console and the CLI show of lifecycle: rules, actions, streams, blockers, ledger rows, dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec

from lakebed.console.runs import RecordedRuns, RunRecord
from lakebed.core.auth import Shows, every_name
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.core.runs import RecordedRun
from lakebed.lifecycle.counters import ActionCounts, BucketCounts, counts_of
from lakebed.lifecycle.dry_run import DryRun, dry_run
from lakebed.lifecycle.eligibility import action_kinds
from lakebed.lifecycle.forecast import DueAction, due_actions, expiration_header, scan_only_warnings
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import Rule, rule_hash
from lakebed.lifecycle.modes import known_retention, stream_lag
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import rules_of
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import LedgerRow, slowest
from lakebed.lifecycle.stored_policy import stored_policy
from lakebed.lifecycle.workers import LifecycleServices, open_services, state_of
from lakebed.store.runtime import StoreRuntime

ROWS_MAX = 500
LEDGER_SHOWN = 50
ACTIONS_MAX = 100_000  # of a summary, which shows no rows


class StreamRow(msgspec.Struct, frozen=True):
    """A cursor of the shared reader: `behind_s` is how far it is from what is due for it now."""

    stream: str
    delay_s: float
    at_ns: int
    behind_s: float


async def status(
    context: Context, bucket: str = "", *, limit: int = 0, shows: Shows = every_name
) -> list[dict[str, Any]]:
    """Mode, health and progress of every action, at most `limit` of them; 0 is as many as a page shows."""
    operator = Operator(state_of(context), context.settings.of(LifecycleSettings))
    return await status_rows(operator, context, bucket, limit=limit or ROWS_MAX, shows=shows)


async def status_rows(
    operator: Operator,
    runtime: StoreRuntime,
    bucket: str = "",
    *,
    limit: int,
    shows: Shows = every_name,
) -> list[dict[str, Any]]:
    """The operator's rows, each with the counts of its action."""
    rows, counts = await operator.status(bucket, limit=limit, shows=shows), dict[str, BucketCounts]()
    for row in rows:
        name = row["bucket"]
        if name not in counts:
            counts[name] = (await counts_of(runtime, name).read()).value
        if row["action"]:
            row |= msgspec.structs.asdict(counts[name].actions.get(row["action"], ActionCounts()))
    return rows


class LifecycleRuns(RecordedRuns):
    """Scans of buckets."""

    part, right = "lifecycle", "lifecycle:read:*"

    def shown(self, run: RecordedRun) -> RunRecord:
        href = f"/lifecycle?{urlencode({'bucket': run.subject})}"
        return msgspec.structs.replace(super().shown(run), href=href, action="lifecycle.walk", fields=run.fields)


class LaneSummary(msgspec.Struct, frozen=True):
    """All of lifecycle in one line: how late its actions are, what waits, what was done."""

    actions: int
    lag_p50_s: float
    lag_p99_s: float
    pending: int
    blockers: int
    scanning: int  # buckets
    evaluated: int
    expired: int
    errors: int
    run_hours: str
    last_round_ns: int
    last_engine_compiled_at_ns: int


async def summary(context: Context) -> LaneSummary:
    rows = [row for row in await status(context, limit=ACTIONS_MAX) if row["action"]]
    state = state_of(context)
    lags = sorted(row["lag_s"] for row in rows) or [0.0]
    last = (await state.last_round.read()).value
    return LaneSummary(
        actions=len(rows),
        lag_p50_s=lags[(len(lags) - 1) // 2],
        lag_p99_s=lags[-1 - len(lags) // 100],
        pending=sum(row["pending"] for row in rows),
        blockers=len((await state.blockers.read()).value.blockers),
        scanning=len({row["bucket"] for row in rows if row["scanned"]}),
        evaluated=sum(row["evaluated"] for row in rows),
        expired=sum(row["expired"] for row in rows),
        errors=sum(row["errors"] for row in rows),
        run_hours=context.settings.of(LifecycleSettings).run_hours,
        last_round_ns=last.at_ns,
        last_engine_compiled_at_ns=last.compiled_at_ns,
    )


async def streams(context: Context) -> list[StreamRow]:
    """Where each cursor is, and how far behind the instant its delay allows."""
    state = slowest((await state_of(context).cursors()).values())
    settings = context.settings.of(LifecycleSettings)
    calendar = settings.calendar
    now_ns = context.clock.now_ns()
    rows = [
        StreamRow(
            f"delay {int(delay) / calendar.day_ns:g} d",
            int(delay) / 1e9,
            at.ts_ns,
            _s(stream_lag(settings, now_ns, int(delay), at)),
        )
        for delay, at in sorted(state.originals.items(), key=lambda pair: int(pair[0]))
    ]
    if state.predicate is not None:
        behind_s = _s(stream_lag(settings, now_ns, None, state.predicate))
        rows.append(StreamRow("predicates", 0.0, state.predicate.ts_ns, behind_s))
    return rows


async def blockers(context: Context, *, stream: str = "", bucket: str = "", shows: Shows = every_name) -> list[Any]:
    """Every blocked stream, and why: at most as many as a page shows, of the buckets that it `shows`."""
    found = await Operator(state_of(context)).blockers(stream=stream, bucket=bucket)
    return [one for one in found if shows(one.bucket)][:ROWS_MAX]


async def rules(services: LifecycleServices) -> list[dict[str, Any]]:
    """Every rule of every bucket."""
    return [
        {
            "bucket": policy.bucket,
            "id": rule.rule_id,
            "status": "Enabled" if rule.enabled else "Disabled",
            "hash": rule_hash(rule),
            "prefix": rule.prefix,
            "actions": ",".join(kind.value for kind in action_kinds(rule)),
        }
        for policy in await services.lake.all()
        for rule in stored_policy(policy.text).rules
    ]


async def all_rules(context: Context, *, shows: Shows = every_name) -> list[dict[str, Any]]:
    """At most as many as a page shows, of the buckets that it `shows`."""
    async with open_services(context) as services:
        return [row for row in await rules(services) if shows(row["bucket"])][:ROWS_MAX]


async def preview(
    services: LifecycleServices, bucket: str, text: bytes | None = None, *, days_ahead: float = 0.0, keys_max: int = 0
) -> DryRun:
    """What a policy would delete: the one in force, or this text. Changes nothing. 0 is no limit."""
    known = text if text is not None else await policy(services, bucket)
    calendar = services.settings.calendar
    now_ns = services.state.clock.now_ns() + round(days_ahead * calendar.day_ns)
    checked = stored_policy(known).rules if text is None else rules_of(text, unique_ids=True)
    return await dry_run(
        services.lake, bucket, checked, now_ns, calendar, reserved=services.reserved, keys_max=keys_max
    )


class KeyForecast(msgspec.Struct, frozen=True):
    """When a key is due: `expiration` as in AWS's `x-amz-expiration`, and every action that will apply to it."""

    bucket: str
    key: str
    expiration: str
    actions: list[DueAction]


async def when(services: LifecycleServices, bucket: str, key: str, upload_id: str = "") -> KeyForecast:
    """When the key, or one upload of it, is due by the policy in force. Raises NotFound when there is no such key."""
    known = await services.lake.get(bucket)
    rules = stored_policy(known.text).rules if known is not None else ()
    family = await services.lake.look(bucket, key, upload_id)
    if not family.entries:
        raise NotFound(f"{bucket} has no {'upload' if upload_id else 'object'} {upload_id or key!r}")
    now_ns, calendar = services.state.clock.now_ns(), services.settings.calendar
    found = [] if services.reserved.holds(bucket, key) else due_actions(family, rules, now_ns, calendar)
    return KeyForecast(bucket, key, expiration_header(found), found)


async def put_warnings(services: LifecycleServices, rules: Sequence[Rule]) -> list[str]:
    """What an operator should know before a policy is put: actions for which the event log is too short."""
    settings, now_ns = services.settings, services.state.clock.now_ns()
    retention_ns = known_retention(settings.retention_ns, (await services.lake.reach()).begins_ns, now_ns)
    return scan_only_warnings(rules, settings.calendar, retention_ns=retention_ns, lookback_ns=ns(settings.lookback_s))


async def policy(services: LifecycleServices, bucket: str) -> bytes:
    """The policy in force. Raises NotFound."""
    found = await services.lake.get(bucket)
    if found is None:
        raise NotFound(f"{bucket} has no policy", hint=f"lakebed lifecycle rules put {bucket} FILE")
    return bytes(found.text)


async def ledger(
    context: Context, bucket: str, key: str | None = None, *, limit: int = LEDGER_SHOWN
) -> list[dict[str, Any]]:
    """The last verdicts on a bucket's objects, or on one key: the newest `limit`, in order of time."""
    book = DeletionLedger(context)
    found = await (book.latest(bucket, limit) if key is None else book.of_key(bucket, key, limit))
    return [ledger_row(row) for row in found]


def ledger_row(row: LedgerRow) -> dict[str, Any]:
    return {
        "at_ns": row.at_ns,
        "key": row.key,
        "version": row.version_id or row.upload_id,
        "rule": row.rule_id or row.rule_hash,
        "kind": row.kind.value,
        "verb": row.verb,
        "outcome": row.outcome or "planned",
        "due_at_ns": row.due_at_ns,
        "stream": row.stream,
        "run": row.run,
        "reason": row.reason,
    }


def _s(ns: int) -> float:
    return round(max(0.0, ns / 1e9), 1)
