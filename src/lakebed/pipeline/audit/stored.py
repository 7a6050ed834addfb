"""Stored audits: published, and read back. Needs no Spark."""

from __future__ import annotations

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, NotFound
from lakebed.pipeline.audit import paths
from lakebed.pipeline.audit.model import AuditRecord, LatestAudit
from lakebed.store.register import Register


def last_register(context: Context) -> Register[LatestAudit]:
    return Register(context, paths.LAST, LatestAudit, LatestAudit(), name="last_audit")


async def publish(context: Context, record: AuditRecord) -> None:
    """Creates the record, which completes the audit, and registers it as the last one unless a later one is."""
    await context.store.create(paths.record_key(record.audit_id), msgspec.json.encode(record))
    last = LatestAudit(record.audit_id, record.completed_at_unix_ns, record.ok)
    await last_register(context).change(lambda at: (at if at.audit_id > last.audit_id else last, None))


async def last_audit(context: Context) -> AuditRecord:
    """The last audit that was completed. Raises NotFound when there was none yet."""
    last = (await last_register(context).read()).value
    if not last.audit_id:
        raise NotFound("no audit has run yet", hint="lakebed audit")
    key = paths.record_key(last.audit_id)
    stored = await context.store.get(key)
    try:
        return msgspec.json.decode(stored.data, type=AuditRecord)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key!r} does not decode: {error}", key=key) from error


async def last(context: Context) -> AuditRecord | None:
    try:
        return await last_audit(context)
    except NotFound:
        return None
