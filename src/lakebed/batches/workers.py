"""The roles that run beside the gateway: the reconciler, its followers of events and of findings, the sweeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun, RunLog, Work
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

COLD, FINDINGS, GC, RETENTION = "reconciler audit", "repair of findings", "garbage collection", "batch retention"
KINDS = {"cold": COLD, "findings": FINDINGS}  # of the ways of `lakebed batches reconcile`; the others are scans
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
    own = connect(store, context)
    return context.store.beside(own) if isinstance(context.store, GuardedStore) else own


def workers(context: Context) -> Sequence[Worker]:
    settings = context.settings.of(ReconcilerSettings)
    role, runs = reconciler(context), context.run_log("batches")
    made = [
        Worker("batches-reconciler", lambda: incremental_scan(context, role).run(runs)),
        Worker("batches-findings", lambda: _repair_forever(runs, findings_repairer(context, role), settings)),
    ]
    if (filer := context.settings.of(FilerSettings)).configured:
        made.append(Worker("batches-events", event_follower(context, role, filer).run))
    if settings.events_queue_url:
        queue = SqsNotifications(context.settings.of(StoreSettings), settings.events_queue_url)
        made.append(Worker("batches-notifications", NotificationFollower(context.clock, queue, role).run))
    if settings.audit_interval_s:
        made.append(_periodic(runs, "batches-audit", COLD, lambda: partial(audited, role), settings.audit_interval_s))
    if context.settings.of(BatchesSettings).retention_days:
        made.append(
            _periodic(runs, "batches-retention", RETENTION, lambda: retention(context).work, RETENTION_INTERVAL_S)
        )
    if settings.gc_interval_s:
        made.append(_periodic(runs, "batches-gc", GC, lambda: partial(swept, sweeper(context)), settings.gc_interval_s))
    return made


def _periodic(runs: RunLog, name: str, kind: str, work: Callable[[], Work], every_s: float) -> Worker:
    return Worker(name, lambda: runs.forever(kind, "batches", work(), every_s=every_s))


def event_follower(context: Context, role: Reconciler, filer: FilerSettings) -> EventFollower:
    store = context.settings.of(StoreSettings)
    bucket = store.url.removeprefix("s3://").strip("/")
    root = f"/buckets/{bucket}/" + (f"{store.prefix.strip('/')}/" if store.prefix else "")
    client = FilerClient.of(filer, context)
    return EventFollower(context, client, root, role)


async def _repair_forever(runs: RunLog, role: FindingsRepairer, settings: ReconcilerSettings) -> None:
    async def work(run: ActiveRun) -> None:
        report = await role.repair()
        if report is None:
            run.idle = True
            return
        report.report_to(run)
        log.info("repaired the findings of an audit", checked=report.checked, repaired=report.repaired)

    await runs.forever(FINDINGS, "batches", work, every_s=settings.interval_s)


async def audited(role: Reconciler, run: ActiveRun) -> None:
    report = await role.audit()
    report.report_to(run)
    run.idle = False  # all of them were read, however few there are
    log.info("audited all accepted batches", checked=report.checked, repaired=report.repaired)


async def swept(role: BlobSweeper, run: ActiveRun) -> None:
    report = await role.sweep(dry_run=False)
    run.rows_in, run.rows_out = sum(report.counts.values()), report.counts.get("delete", 0)
    run.reason, run.idle = ", ".join(f"{count} {name}" for name, count in report.counts.items()), not report.counts
    log.info("swept raw blobs", counts=report.counts)
