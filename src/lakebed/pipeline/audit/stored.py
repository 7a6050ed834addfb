"""Stored audits: published, and read back. Needs no Spark."""

from __future__ import annotations

import msgspec

from lakebed.batches.model import LatestAudit
from lakebed.batches.paths import AUDITS, LAST_AUDIT, audit_record_key
from lakebed.console.runs import RunRecord
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.pipeline.audit.model import AuditRecord
from lakebed.store.model import read_record
from lakebed.store.register import Register

AUDITS_READ = 5


def last_register(context: Context) -> Register[LatestAudit]:
    return Register(context, LAST_AUDIT, LatestAudit, LatestAudit(), name="last_audit")


async def publish(context: Context, record: AuditRecord) -> None:
    """Creates the record, which completes the audit, and registers it as the last one unless a later one is."""
    await context.store.create(audit_record_key(record.audit_id), msgspec.json.encode(record))
    last = LatestAudit(record.audit_id, record.completed_at_unix_ns, record.ok)
    await last_register(context).change(lambda at: (at if at.audit_id > last.audit_id else last, None))


async def last_audit(context: Context) -> AuditRecord:
    """The last audit that was completed. Raises NotFound when there was none yet."""
    last = (await last_register(context).read()).value
    if not last.audit_id:
        raise NotFound("no audit has run yet", hint="lakebed audit")
    key = audit_record_key(last.audit_id)
    return read_record(await context.store.get(key), AuditRecord)


class AuditRuns:
    """Completed audits, as runs."""

    right = "audit:read"

    def __init__(self, context: Context) -> None:
        self._context = context

    async def latest(self, limit: int) -> list[RunRecord]:
        """One listing, and one request for each of the last AUDITS_READ."""
        found: list[RunRecord] = []
        for audit_id in list(reversed(await self._context.store.children(AUDITS)))[: min(limit, AUDITS_READ)]:
            try:
                record = read_record(await self._context.store.get(audit_record_key(audit_id)), AuditRecord)
            except NotFound:
                continue  # it died before its end
            found.append(run(record))
        return found

    async def close(self) -> None:
        return None


def run(record: AuditRecord) -> RunRecord:
    wrong = sum(total.objects for total in record.totals if total.wrong)
    return RunRecord(
        "audit",
        record.audit_id,
        "done" if record.ok else "failed",
        record.completed_at_unix_ns // 10**6,
        record.began_at_unix_ns // 10**6,
        rows_in=record.objects,
        reason="no loss" if record.ok else f"{wrong} wrong objects, or counts that differ",
        href="/audit",
        action="audit.run",
        fields={"depth": "full" if record.verified else "quick"},
    )


async def last(context: Context) -> AuditRecord | None:
    try:
        return await last_audit(context)
    except NotFound:
        return None
