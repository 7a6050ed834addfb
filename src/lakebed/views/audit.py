"""The last audit, as people look at it: what `GET /v1/audit` answers, or nothing when none was made yet."""

from __future__ import annotations

from lakebed.context import Context
from lakebed.errors import NotFound
from lakebed.pipeline.audit.model import AuditRecord
from lakebed.pipeline.audit.shelf import last_audit


async def last(context: Context) -> AuditRecord | None:
    try:
        return await last_audit(context)
    except NotFound:
        return None
