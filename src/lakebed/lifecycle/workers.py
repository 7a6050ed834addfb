"""Lifecycle in a process: opened over a context, with the filers the settings name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from lakebed.context import Context, Worker
from lakebed.errors import Invalid
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seaweed_filer import SeaweedLake
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.shelf import Shelf
from lakebed.lifecycle.worker import LifecycleWorker
from lakebed.store.settings import StoreSettings


class Site(msgspec.Struct, frozen=True):
    """Everything a command or a worker needs."""

    settings: LifecycleSettings
    shelf: Shelf
    lake: SeaweedLake
    worker: LifecycleWorker
    operator: Operator
    home: Home


def shelf_of(context: Context) -> Shelf:
    return Shelf(context.store, clock=context.clock, ids=context.ids, metrics=context.metrics)


def home_of(context: Context) -> Home:
    return Home.of(context.settings.of(StoreSettings), context.settings.of(LifecycleSettings).shared)


@asynccontextmanager
async def opened(context: Context) -> AsyncIterator[Site]:
    """Raises Invalid when no filer is named: rules run on SeaweedFS, through its filer."""
    filers = context.settings.of(FilerSettings)
    if not filers.endpoints:
        raise Invalid("no filer is named", hint="start a stack (lakebed up), or set filer.grpc to host:port")
    settings = context.settings.of(LifecycleSettings)
    home, shelf = home_of(context), shelf_of(context)
    filer = FilerClient(
        filers.endpoints,
        clock=context.clock,
        ids=context.ids,
        timeout_s=filers.timeout_s,
        unhealthy_s=filers.unhealthy_s,
    )
    lake = SeaweedLake(filer, context.clock, context.ids)
    worker = LifecycleWorker(lake, Seams(lake, lake, lake), shelf, settings, node=context.node, home=home)
    try:
        yield Site(settings, shelf, lake, worker, Operator(shelf, settings.calendar), home)
    finally:
        await lake.close()


def workers(context: Context) -> Sequence[Worker]:
    """One worker where a filer is named, none elsewhere."""
    if not context.settings.of(FilerSettings).endpoints:
        return ()

    async def run() -> None:
        async with opened(context) as site:
            await site.worker.run()

    return (Worker("lifecycle", run),)
