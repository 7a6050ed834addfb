"""Lifecycle in a process: its services, opened from a context with the filers of the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from lakebed.core.context import Context, Worker
from lakebed.core.errors import Invalid
from lakebed.filer.client import FilerClient
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.enforcer import Enforcer
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
    return ReservedKeys.of(context.settings.of(StoreSettings), context.settings.of(LifecycleSettings).shared)


@asynccontextmanager
async def open_services(context: Context) -> AsyncIterator[LifecycleServices]:
    """Raises Invalid when no filer is configured: rules run on SeaweedFS, through its filer."""
    filers = context.settings.of(FilerSettings)
    if not filers.endpoints:
        raise Invalid("no filer is configured", hint="start a stack (lakebed up), or set filer.grpc to host:port")
    settings = context.settings.of(LifecycleSettings)
    reserved, state = reserved_of(context), state_of(context)
    filer = FilerClient.of(filers, context)
    lake = SeaweedLake(filer, context)
    worker = Enforcer(lake, Seams(lake, lake, lake), state, settings, node=context.node, reserved=reserved)
    try:
        yield LifecycleServices(settings, state, lake, worker, Operator(state, settings.calendar), reserved)
    finally:
        await lake.close()


def workers(context: Context) -> Sequence[Worker]:
    """One worker where a filer is configured, none elsewhere."""
    if not context.settings.of(FilerSettings).endpoints:
        return ()

    async def run() -> None:
        async with open_services(context) as services:
            await services.enforcer.run()

    return (Worker("lifecycle", run),)
