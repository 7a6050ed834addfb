"""Opens the queue, the audit tables and the secrets that the settings choose."""

from __future__ import annotations

from lakebed.core.context import Context
from lakebed.store.settings import StoreSettings
from lakebed.ticks.audit import AuditTable
from lakebed.ticks.audit.bucket import BucketAudit
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.queue.bucket import BucketQueue
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.vault import Vault, key_ring


def open_queue(context: Context) -> TickQueue:
    settings = context.settings.of(TicksSettings)
    if settings.queue == "sqs":
        from lakebed.ticks.queue.sqs import SqsQueue

        return SqsQueue(settings)
    return BucketQueue(
        context,
        shards=settings.queue_shards,
        visibility_timeout_s=settings.visibility_timeout_s,
        receives_max=settings.receives_max,
        messages_max=settings.queue_messages_max,
    )


def open_audit(context: Context, table: str) -> AuditTable:
    settings = context.settings.of(TicksSettings)
    if settings.audit == "dynamodb":
        from lakebed.ticks.audit.dynamodb import DynamoAudit

        return DynamoAudit(settings, table, clock=context.clock)
    return BucketAudit(context, table, ttl_s=settings.audit_ttl_s)


def open_vault(context: Context) -> Vault:
    """Raises Invalid when ticks.payload_key is not a key."""
    settings = context.settings.of(TicksSettings)
    return Vault(
        context,
        keys=key_ring(settings.payload_key, context.settings.of(StoreSettings).secret_access_key),
        remember_s=settings.secrets_cache_s,
    )
