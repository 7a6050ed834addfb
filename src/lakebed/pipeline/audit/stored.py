"""Stored audits: published, and read back. Needs no Spark."""

from __future__ import annotations

import msgspec

from lakebed.batches.model import LatestAudit
from lakebed.batches.paths import LAST_AUDIT, audit_record_key
from lakebed.console.runs import RecordedRuns, RunRecord
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.core.runs import ActiveRun, RecordedRun
from lakebed.pipeline.audit.model import AuditRecord
from lakebed.store.model import read_record
from lakebed.store.register import Register

AUDIT = "audit"  # the kind of its runs


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


class AuditRuns(RecordedRuns):
    """Audits by the console and by `lakebed audit`, with their progress."""

    part, right = "audit", "audit:read"

    def shown(self, run: RecordedRun) -> RunRecord:
        return msgspec.structs.replace(super().shown(run), href="/audit", action="audit.run", fields=run.fields)


def report_to(run: ActiveRun, record: AuditRecord) -> None:
    """Reports it as the result of a run: one that found something wrong has failed."""
    run.rows_in, run.rows_out = record.objects, sum(total.objects for total in record.totals)
    run.reason = "no loss"
    if not record.ok:
        wrong = sum(total.objects for total in record.totals if total.wrong)
        run.fail(f"{wrong} wrong objects" if wrong else "counts differ between stages")
    for total in record.totals:
        run.note(f"{total.finding} {total.kind}: {total.objects} objects{', wrong' if total.wrong else ''}")
    run.note(f"audit {record.audit_id}: {record.objects} objects compared")


async def last(context: Context) -> AuditRecord | None:
    try:
        return await last_audit(context)
    except NotFound:
        return None
