"""The log's workers: the compactor service, the vacuum, and the scan behind the billing estimate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lakebed.clock import Clock
from lakebed.context import Context, Worker
from lakebed.log.billing import MeteredStore
from lakebed.log.compactor import Compactor
from lakebed.log.housekeeper import Housekeeper
from lakebed.log.paths import uris
from lakebed.log.reader import Reader
from lakebed.log.records import Records
from lakebed.log.schedule import Schedule
from lakebed.log.settings import LogSettings
from lakebed.log.vacuum import Vacuum
from lakebed.logs import logger
from lakebed.meta.connect import connect
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings

log = logger("log")


class Workshop:
    """The roles that work on the log beside its brokers, wired."""

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        clock, ids, metrics = context.clock, context.ids, context.metrics
        self.settings = context.settings.of(LogSettings)
        self.meta = meta or connect(
            context.settings.of(MetaSettings), store=context.store, clock=clock, ids=ids, metrics=metrics
        )
        where = context.settings.of(StoreSettings)
        self.uris = uris(where.url, where.prefix, where.moved_from)
        self.store = MeteredStore(context.store, metrics=metrics)
        self.records = Records(self.meta, clock=clock, ids=ids)
        self.reader = Reader(self.store, self.records, self.uris, metrics=metrics, bodies_bytes=0)
        self.compactor = Compactor(
            self.store, self.records, self.reader, self.uris, self.settings, clock=clock, ids=ids, metrics=metrics
        )
        self.housekeeper = Housekeeper(self.store, self.records, self.uris, self.settings, clock=clock, metrics=metrics)
        self.schedule = Schedule(
            self.records,
            self.compactor,
            self.housekeeper,
            self.settings,
            node=context.node,
            clock=clock,
            ids=ids,
            metrics=metrics,
        )
        self.vacuum = Vacuum(
            self.store,
            self.records,
            self.uris,
            horizon_s=self.settings.vacuum_horizon_s,
            clock=clock,
            metrics=metrics,
        )


def workers(context: Context) -> Sequence[Worker]:
    shop = Workshop(context)
    found = [Worker("log-compactor", shop.schedule.run)]
    if shop.settings.vacuum_every_s > 0:
        found.append(Worker("log-vacuum", _every(shop.settings.vacuum_every_s, shop.vacuum.sweep_once, context.clock)))
    if shop.settings.billing_every_s > 0:
        found.append(Worker("log-billing", _every(shop.settings.billing_every_s, shop.store.measure, context.clock)))
    return found


def _every(seconds: float, work: Callable[[], Awaitable[Any]], clock: Clock) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        while True:
            await clock.sleep(seconds)
            log.info("done", result=str(await work())[:500])

    return run
