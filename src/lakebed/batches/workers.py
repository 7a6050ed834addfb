"""The roles that run beside the gateway: the reconciler, its followers of events and of findings, the sweeper."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.batches.events import EventFollower
from lakebed.batches.findings import FindingsRepairer
from lakebed.batches.incremental import IncrementalScan
from lakebed.batches.notifications import NotificationFollower, SqsNotifications
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settings import BatchesSettings, ReconcilerSettings
from lakebed.batches.sweeper import BlobSweeper
from lakebed.core.context import Context, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

RETENTION_INTERVAL_S = 1800.0  # an hour is removed two passes after its record: collectors must read that first

log = logger("batches")


def reconciler(context: Context) -> Reconciler:
    settings = context.settings.of(ReconcilerSettings)
    return Reconciler(
        context, overlap_s=settings.overlap_s, concurrency=settings.concurrency, name=f"reconciler:{context.node}"
    )


def incremental_scan(context: Context, role: Reconciler) -> IncrementalScan:
    settings = context.settings.of(ReconcilerSettings)
    return IncrementalScan(context, role, interval_s=settings.interval_s, owner=context.node)


def findings_repairer(context: Context, reconciler: Reconciler) -> FindingsRepairer:
    return FindingsRepairer(context, reconciler)


def sweeper(context: Context) -> BlobSweeper:
    settings = context.settings.of(ReconcilerSettings)
    return BlobSweeper(
        context.on(sweeper_store(context)),
        horizon_s=settings.gc_horizon_s,
        undecided=settings.gc_undecided,
        name=f"gc:{context.node}",
    )


def retention(context: Context) -> BatchRetention:
    days = context.settings.of(BatchesSettings).retention_days
    return BatchRetention(context.on(sweeper_store(context)), retention_days=days, owner=context.node)


def sweeper_store(context: Context) -> Store:
    """The bucket under the credentials of the garbage collection role, where such are set."""
    settings = context.settings.of(ReconcilerSettings)
    if not settings.gc_access_key_id:
        return context.store
    store = msgspec.structs.replace(
        context.settings.of(StoreSettings),
        access_key_id=settings.gc_access_key_id,
        secret_access_key=settings.gc_secret_access_key,
    )
    return connect(store, context)


def workers(context: Context) -> Sequence[Worker]:
    settings = context.settings.of(ReconcilerSettings)
    role = reconciler(context)
    made = [
        Worker("batches-reconciler", incremental_scan(context, role).run),
        Worker(
            "batches-findings", lambda: _repair_forever(context, findings_repairer(context, role), settings.interval_s)
        ),
    ]
    if (filer := context.settings.of(FilerSettings)).configured:
        made.append(Worker("batches-events", event_follower(context, role, filer).run))
    if settings.events_queue_url:
        queue = SqsNotifications(context.settings.of(StoreSettings), settings.events_queue_url)
        made.append(Worker("batches-notifications", NotificationFollower(context.clock, queue, role).run))
    if settings.audit_interval_s:
        made.append(Worker("batches-audit", lambda: _audit_forever(context, role, settings.audit_interval_s)))
    if context.settings.of(BatchesSettings).retention_days:
        made.append(Worker("batches-retention", lambda: retention(context).forever(RETENTION_INTERVAL_S)))
    if settings.gc_interval_s:
        made.append(Worker("batches-gc", lambda: _sweep_forever(context, settings.gc_interval_s)))
    return made


def event_follower(context: Context, role: Reconciler, filer: FilerSettings) -> EventFollower:
    store = context.settings.of(StoreSettings)
    bucket = store.url.removeprefix("s3://").strip("/")
    root = f"/buckets/{bucket}/" + (f"{store.prefix.strip('/')}/" if store.prefix else "")
    client = FilerClient.of(filer, context)
    return EventFollower(context, client, root, role)


async def _repair_forever(context: Context, role: FindingsRepairer, interval_s: float) -> None:
    while True:
        await context.clock.sleep(interval_s)
        try:
            if (report := await role.repair()) is not None:
                log.info("repaired the findings of an audit", checked=report.checked, repaired=report.repaired)
        except LakebedError as error:
            log.warning("repair of audit findings failed and is retried", error=error.message)


async def _audit_forever(context: Context, role: Reconciler, interval_s: float) -> None:
    while True:
        try:
            report = await role.audit()
            log.info("audited all accepted batches", checked=report.checked, repaired=report.repaired)
        except LakebedError as error:
            log.warning("audit of accepted batches failed and is retried", error=error.message)
        await context.clock.sleep(interval_s)


async def _sweep_forever(context: Context, interval_s: float) -> None:
    swept = sweeper(context)
    while True:
        try:
            report = await swept.sweep(dry_run=False)
            log.info("swept raw blobs", counts=report.counts)
        except LakebedError as error:
            log.warning("sweep failed and is retried", error=error.message)
        await context.clock.sleep(interval_s)
