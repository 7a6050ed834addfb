"""Which parts there are and where each one plugs in. Adding a part is adding a row here and a folder beside.

Places are named, not imported, so that a command loads only what it uses. By the row's name a part also has, where it
needs them, `cli/<name>.py`, `sim/<name>.py`, `bench/<name>.py` and `demo/<name>.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

from lakebed.context import Component, Context, Diagnosis, Worker
from lakebed.settings import Section


class Part(msgspec.Struct, frozen=True):
    """Where a part plugs in, as `module:name`; an empty place is one the part does not have."""

    name: str
    about: str
    settings: str = ""  # a Section
    component: str = ""  # (Context) -> Component
    workers: str = ""  # (Context) -> Sequence[Worker]
    checks: str = ""  # async (Context) -> Sequence[Diagnosis], for `lakebed doctor`
    active_active: bool = True  # writes under conditions, so the store must be proven before it starts


PARTS: tuple[Part, ...] = (
    Part("store", "the seam to object storage", settings="lakebed.store.settings:StoreSettings"),
    Part(
        "queue",
        "stateless ingest through a manifest in the bucket",
        settings="lakebed.queue.settings:QueueSettings",
        component="lakebed.queue.routes:component",
        workers="lakebed.queue.workers:workers",
    ),
    Part(
        "ticks",
        "chunked uploads that become tables",
        settings="lakebed.ticks.settings:TicksSettings",
        component="lakebed.gateway.ticks:component",
        workers="lakebed.gateway.ticks:workers",
    ),
    Part("pipeline", "Spark over everything", settings="lakebed.pipeline.settings:SparkSettings"),
    Part(
        "flow",
        "bronze, silver and gold",
        settings="lakebed.pipeline.flow_settings:FlowSettings",
        workers="lakebed.pipeline.workers:workers",
    ),
    Part(
        "audit",
        "proofs over everything in the bucket",
        settings="lakebed.pipeline.audit.settings:AuditSettings",
        component="lakebed.pipeline.audit.routes:component",
    ),
    Part(
        "bronze",
        "batches and topics as tables",
        settings="lakebed.pipeline.bronze_settings:BronzeSettings",
        workers="lakebed.pipeline.bronze_workers:workers",
    ),
    Part(
        "filer",
        "the metadata of a SeaweedFS store",
        settings="lakebed.filer.settings:FilerSettings",
        checks="lakebed.filer.checks:checks",
    ),
    Part(
        "lifecycle",
        "expiration rules that really run",
        settings="lakebed.lifecycle.settings:LifecycleSettings",
        component="lakebed.lifecycle.routes:component",
        workers="lakebed.lifecycle.workers:workers",
    ),
    Part("gateway", "HTTP in front of every part", settings="lakebed.gateway.settings:GatewaySettings"),
    Part("agent", "samples to batches to collectors, nothing lost", settings="lakebed.agent.settings:AgentSettings"),
    Part(
        "batches",
        "active-active ingest of metric batches",
        settings="lakebed.batches.settings:IngestSettings",
        component="lakebed.batches.routes:component",
        checks="lakebed.batches.checks:checks",
    ),
    Part(
        "reconciler",
        "repairs and garbage collection of batches",
        settings="lakebed.batches.settings:ReconcilerSettings",
        workers="lakebed.batches.workers:workers",
    ),
    Part(
        "rollups",
        "what samples come to in windows of time",
        settings="lakebed.batches.settings:RollupSettings",
        workers="lakebed.gateway.rollups:workers",
    ),
    Part("meta", "ordered keys the log coordinates through", settings="lakebed.meta.settings:MetaSettings"),
    Part(
        "log",
        "a leaderless log: produce and consume",
        settings="lakebed.log.settings:LogSettings",
        component="lakebed.log.routes:component",
        workers="lakebed.log.workers:workers",
    ),
    Part("console", "web pages", component="lakebed.console.routes:component", active_active=False),
)


def sections() -> list[type[Section]]:
    return [cast(type[Section], resolve(part.settings)) for part in PARTS if part.settings]


def components(context: Context, names: Sequence[str] = ()) -> list[Component]:
    return [
        cast(Callable[[Context], Component], resolve(part.component))(context)
        for part in PARTS
        if part.component and (not names or part.name in names)
    ]


def workers(context: Context, names: Sequence[str] = ()) -> list[Worker]:
    return [
        worker
        for part in PARTS
        if part.workers and (not names or part.name in names)
        for worker in cast(Callable[[Context], Sequence[Worker]], resolve(part.workers))(context)
    ]


async def diagnose(context: Context) -> list[Diagnosis]:
    """What each part says of its own ground, in the order of the table."""
    found: list[Diagnosis] = []
    for part in PARTS:
        if part.checks:
            found += await cast(Callable[[Context], Awaitable[Sequence[Diagnosis]]], resolve(part.checks))(context)
    return found


def resolve(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
