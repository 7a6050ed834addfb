"""What the console and the CLI show of lifecycle: rules, actions, streams, blockers, ledger rows, dry runs."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.lifecycle.dry_run import DryRun, dry_run
from lakebed.lifecycle.evaluate import action_kinds
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import rule_hash
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import rules_of
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LedgerRow
from lakebed.lifecycle.workers import LifecycleServices, open_services, state_of

ROWS_MAX = 500
LEDGER_SHOWN = 50


class StreamRow(msgspec.Struct, frozen=True):
    """A cursor of the shared reader: `behind_s` is how far it is from what is due for it now."""

    stream: str
    delay_s: float
    at_ns: int
    behind_s: float


async def status(context: Context, bucket: str = "") -> list[dict[str, Any]]:
    """Mode, health and progress of every action."""
    calendar = context.settings.of(LifecycleSettings).calendar
    return await Operator(state_of(context), calendar).status(bucket, limit=ROWS_MAX)


async def streams(context: Context) -> list[StreamRow]:
    """Where each cursor is, and how far behind the instant its delay allows."""
    state = (await state_of(context).reader.read()).value
    calendar = context.settings.of(LifecycleSettings).calendar
    now_ns = context.clock.now_ns()
    rows = [
        StreamRow(
            f"delay {int(delay) / calendar.day_ns:g} d",
            int(delay) / 1e9,
            at.ts_ns,
            _s(calendar.cutoff(now_ns, int(delay)) - at.ts_ns),
        )
        for delay, at in sorted(state.originals.items(), key=lambda pair: int(pair[0]))
    ]
    if state.predicate is not None:
        due_ns = now_ns - calendar.small_delay_ns
        rows.append(StreamRow("predicates", 0.0, state.predicate.ts_ns, _s(due_ns - state.predicate.ts_ns)))
    return rows


async def blockers(context: Context, *, stream: str = "", bucket: str = "") -> list[Any]:
    """Every blocked stream, and why."""
    found = await Operator(state_of(context)).blockers(stream=stream, bucket=bucket)
    return list(found[:ROWS_MAX])


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
        for rule in rules_of(policy.text)
    ]


async def all_rules(context: Context) -> list[dict[str, Any]]:
    async with open_services(context) as services:
        return (await rules(services))[:ROWS_MAX]


async def preview(
    services: LifecycleServices, bucket: str, text: bytes | None = None, *, days_ahead: float = 0.0, keys_max: int = 0
) -> DryRun:
    """What a policy would delete: the one in force, or this text. Changes nothing. 0 is no limit."""
    known = text if text is not None else await policy(services, bucket)
    calendar = services.settings.calendar
    now_ns = services.state.clock.now_ns() + round(days_ahead * calendar.day_ns)
    checked = rules_of(known, unique_ids=text is not None)
    return await dry_run(
        services.lake, bucket, checked, now_ns, calendar, reserved=services.reserved, keys_max=keys_max
    )


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
    if key is None:
        return [ledger_row(row) for row in await book.latest(bucket, limit)]
    found = deque[LedgerRow](maxlen=limit)
    async for row in book.rows(bucket, key=key):
        found.append(row)
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
