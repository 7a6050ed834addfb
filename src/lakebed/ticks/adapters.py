"""Which queue and which audit tables the settings ask for."""

from __future__ import annotations

from lakebed.context import Context
from lakebed.store.settings import StoreSettings
from lakebed.ticks.audit import AuditTable
from lakebed.ticks.audit_bucket import BucketAudit
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.queue_bucket import BucketQueue
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.vault import Vault, key_ring


def open_queue(context: Context) -> TickQueue:
    settings = context.settings.of(TicksSettings)
    if settings.queue == "sqs":
        from lakebed.ticks.queue_sqs import SqsQueue

        return SqsQueue(settings)
    return BucketQueue(
        context.store,
        shards=settings.queue_shards,
        visibility_timeout_s=settings.visibility_timeout_s,
        receives_max=settings.receives_max,
        messages_max=settings.queue_messages_max,
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )


def open_audit(context: Context, table: str) -> AuditTable:
    settings = context.settings.of(TicksSettings)
    if settings.audit == "dynamodb":
        from lakebed.ticks.audit_dynamodb import DynamoAudit

        return DynamoAudit(settings, table, clock=context.clock)
    return BucketAudit(context.store, table, clock=context.clock)


def open_vault(context: Context) -> Vault:
    """Raises Invalid when ticks.payload_key is no key."""
    settings = context.settings.of(TicksSettings)
    return Vault(
        context.store,
        keys=key_ring(settings.payload_key, context.settings.of(StoreSettings).secret_access_key),
        remember_s=settings.secrets_cache_s,
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )
