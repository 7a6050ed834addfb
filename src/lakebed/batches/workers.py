"""The roles that run beside the gateway: the reconciler, its followers of events and of findings, the sweeper."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.batches.events import EventFollower
from lakebed.batches.findings import FindingsMender
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.settings import ReconcilerSettings
from lakebed.batches.sweeper import Sweeper
from lakebed.context import Context, Worker
from lakebed.errors import LakebedError
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.logs import logger
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

log = logger("batches")


def reconciler(context: Context) -> Reconciler:
    settings = context.settings.of(ReconcilerSettings)
    return Reconciler(
        context.store,
        overlap_s=settings.overlap_s,
        concurrency=settings.concurrency,
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )


def mender(context: Context, reconciler: Reconciler) -> FindingsMender:
    return FindingsMender(context.store, reconciler, clock=context.clock, ids=context.ids, metrics=context.metrics)


def sweeper(context: Context) -> Sweeper:
    settings = context.settings.of(ReconcilerSettings)
    return Sweeper(
        sweeper_store(context),
        reconciler(context),
        horizon_s=settings.gc_horizon_s,
        undecided=settings.gc_undecided,
        name=f"gc:{context.node}",
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )


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
    return connect(store, clock=context.clock, ids=context.ids, metrics=context.metrics)


def workers(context: Context) -> Sequence[Worker]:
    settings = context.settings.of(ReconcilerSettings)
    role = reconciler(context)
    made = [
        Worker(
            "batches-reconciler",
            lambda: role.run(interval_s=settings.interval_s, audit_interval_s=settings.audit_interval_s),
        ),
        Worker("batches-findings", lambda: _mend_forever(context, mender(context, role), settings.interval_s)),
    ]
    if (filer := context.settings.of(FilerSettings)).endpoints:
        made.append(Worker("batches-events", event_follower(context, role, filer).run))
    if settings.gc_interval_s:
        made.append(Worker("batches-gc", lambda: _sweep_forever(context, settings.gc_interval_s)))
    return made


def event_follower(context: Context, role: Reconciler, filer: FilerSettings) -> EventFollower:
    store = context.settings.of(StoreSettings)
    bucket = store.url.removeprefix("s3://").strip("/")
    root = f"/buckets/{bucket}/" + (f"{store.prefix.strip('/')}/" if store.prefix else "")
    client = FilerClient.of(filer, clock=context.clock, ids=context.ids)
    return EventFollower(
        client, root, role, context.store, clock=context.clock, ids=context.ids, metrics=context.metrics
    )


async def _mend_forever(context: Context, role: FindingsMender, interval_s: float) -> None:
    while True:
        await context.clock.sleep(interval_s)
        try:
            if (report := await role.mend()) is not None:
                log.info("mended an audit's findings", checked=report.checked, repaired=report.repaired)
        except LakebedError as error:
            log.warning("mending an audit's findings was cut short", cause=error.message)


async def _sweep_forever(context: Context, interval_s: float) -> None:
    swept = sweeper(context)
    while True:
        try:
            report = await swept.sweep(dry_run=False)
            log.info("swept raw blobs", counts=report.counts)
        except LakebedError as error:
            log.warning("sweeping was cut short", cause=error.message)
        await context.clock.sleep(interval_s)
