"""Lifecycle in a process: its services, opened from a context with the filers of the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import msgspec

from lakebed.core.context import Context, Worker
from lakebed.core.errors import Invalid
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.ledger import Publish
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seaweed.store import SeaweedLake
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LifecycleState
from lakebed.store.settings import StoreSettings


class LifecycleServices(msgspec.Struct, frozen=True):
    """Everything a command or a worker needs."""

    settings: LifecycleSettings
    state: LifecycleState
    lake: SeaweedLake
    enforcer: Enforcer
    operator: Operator
    reserved: ReservedKeys


def state_of(context: Context) -> LifecycleState:
    return LifecycleState(context)


def reserved_of(context: Context) -> ReservedKeys:
    settings = context.settings.of(LifecycleSettings)
    return ReservedKeys.of(context.settings.of(StoreSettings), settings.shared, settings.buckets)


@asynccontextmanager
async def open_services(context: Context, publish: Publish | None = None) -> AsyncIterator[LifecycleServices]:
    """Raises Invalid when no filer is configured: rules run on SeaweedFS, through its filer."""
    filers = context.settings.of(FilerSettings)
    if not filers.configured:
        raise Invalid("no filer is configured", hint="start a stack (lakebed up), or set filer.grpc to host:port")
    settings = context.settings.of(LifecycleSettings)
    reserved, state = reserved_of(context), state_of(context)
    filer = FilerClient.of(filers, context)
    lake = SeaweedLake(filer, context)
    worker = Enforcer(
        lake, Seams(lake, lake, lake), state, settings, node=context.node, reserved=reserved, publish=publish
    )
    try:
        yield LifecycleServices(settings, state, lake, worker, Operator(state, settings), reserved)
    finally:
        await worker.counts.record(now=True)
        await lake.close()


Publisher = Callable[[Context], AbstractAsyncContextManager[Publish | None]]


def workers(context: Context, publisher: Publisher = lambda _: nullcontext()) -> Sequence[Worker]:
    """One worker where a filer is configured, none elsewhere. `publisher` opens what takes expiration events."""
    if not context.settings.of(FilerSettings).configured:
        return ()

    async def run() -> None:
        async with publisher(context) as publish, open_services(context, publish) as services:
            await services.enforcer.run()

    return (Worker("lifecycle", run),)
