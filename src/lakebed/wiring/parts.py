"""The table of parts: where each one plugs in. To add a part, add a folder and a row here.

Modules are named, not imported, so that a command loads only what it uses. This is the only module that names others by
text; a test resolves every name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

from lakebed.core.context import Component, Context, Diagnosis, Worker
from lakebed.core.settings import Section


class Command(msgspec.Struct, frozen=True):
    """A command of `lakebed`: `module:name` of its function or app, its name, one line of help and its group."""

    place: str
    name: str
    about: str
    group: str


class SimWorld(msgspec.Struct, frozen=True):
    """A simulated world: `script` is an async function of one World."""

    name: str
    about: str
    script: str


class Part(msgspec.Struct, frozen=True):
    """Where a part plugs in, as `module:name`; empty where the part has nothing."""

    name: str
    about: str
    settings: str = ""  # a Section
    component: str = ""  # (Context) -> Component
    workers: str = ""  # (Context) -> Sequence[Worker]
    machine: str = ""  # () -> Diagnosis of this machine, for `lakebed doctor`
    checks: str = ""  # async (Context) -> Sequence[Diagnosis], for `lakebed doctor`
    commands: tuple[Command, ...] = ()
    page: str = ""  # a PartPage of the console
    bench: str = ""  # async (BenchEnvironment) -> Sequence[Check], for `lakebed bench`
    load_test: str = ""  # async (BenchEnvironment, scenario, folder) -> Summary, for `lakebed bench --scenario`
    demo: str = ""  # a module with TITLE, NEXT and play(ScenarioContext), for `lakebed demo`
    worlds: tuple[SimWorld, ...] = ()
    active_active: bool = True  # makes conditional writes, so the store is verified before it starts


DATA, TABLES, OPERATE = "Data in and out", "Tables", "Operate"

PARTS: tuple[Part, ...] = (
    Part(
        "store",
        "the interface to object storage",
        settings="lakebed.store.settings:StoreSettings",
        bench="lakebed.store.bench:bench",
        demo="lakebed.store.demo",
        worlds=(
            SimWorld("register", "many processes update one register", "lakebed.store.simulation:register"),
            SimWorld("lease", "many processes compete for one lease", "lakebed.store.simulation:lease"),
            SimWorld("boot", "many processes start on a fresh bucket", "lakebed.store.simulation:boot"),
        ),
    ),
    Part(
        "gateway",
        "HTTP in front of every part",
        settings="lakebed.gateway.settings:GatewaySettings",
        bench="lakebed.gateway.bench:bench",
    ),
    Part(
        "agent",
        "collects samples into batches, queues them on disk and sends them to collectors",
        settings="lakebed.agent.settings:AgentSettings",
        commands=(
            Command(
                "lakebed.wiring.agent_commands:app",
                "agent",
                "Collect samples into a disk queue and send them to collectors.",
                DATA,
            ),
        ),
        bench="lakebed.agent.bench:bench",
        demo="lakebed.agent.demo",
        worlds=(
            SimWorld(
                "agent",
                "an agent that is killed repeatedly, with failing collectors",
                "lakebed.agent.simulation:agent",
            ),
        ),
    ),
    Part(
        "batches",
        "active-active ingest of metric batches",
        settings="lakebed.batches.settings:BatchesSettings",
        component="lakebed.batches.routes:component",
        checks="lakebed.batches.bucket:checks",
        commands=(
            Command(
                "lakebed.batches.commands:app",
                "batches",
                "Metric batches: frames, conflicts, repair, garbage, queries.",
                DATA,
            ),
            Command("lakebed.batches.commands:bucket_app", "bucket", "Generate the S3 bucket policy.", OPERATE),
        ),
        page="lakebed.batches.page:BatchesPage",
        bench="lakebed.batches.bench:bench",
        worlds=(
            SimWorld(
                "batches",
                "agents, collectors, reconcilers and sweepers on one bucket",
                "lakebed.batches.simulation:batches",
            ),
        ),
    ),
    Part(
        "reconciler",
        "repairs and garbage collection of batches",
        settings="lakebed.batches.settings:ReconcilerSettings",
        workers="lakebed.batches.workers:workers",
    ),
    Part(
        "rollups",
        "samples aggregated in windows of time",
        settings="lakebed.rollups.settings:RollupSettings",
        workers="lakebed.rollups.workers:workers",
    ),
    Part(
        "log",
        "a leaderless log: produce and consume",
        settings="lakebed.log.settings:LogSettings",
        component="lakebed.log.routes:component",
        workers="lakebed.log.workers:workers",
        commands=(
            Command(
                "lakebed.log.commands:app",
                "topics",
                "The log: list, describe, produce, consume, trim, fence, delete.",
                DATA,
            ),
        ),
        page="lakebed.log.page:LogPage",
        bench="lakebed.log.bench:bench",
        load_test="lakebed.log.loadtest.run:run",
        demo="lakebed.log.demo",
        worlds=(
            SimWorld(
                "log",
                "brokers, compactors, sweeper and operator on a few partitions",
                "lakebed.log.simulation:log",
            ),
        ),
    ),
    Part(
        "meta",
        "ordered keys the log coordinates through",
        settings="lakebed.meta.settings:MetaSettings",
        commands=(
            Command(
                "lakebed.meta.commands:app", "meta", "Inspect the ordered keys the log coordinates through.", OPERATE
            ),
        ),
    ),
    Part(
        "queue",
        "stateless ingest through a manifest in the bucket",
        settings="lakebed.queue.settings:QueueSettings",
        component="lakebed.queue.routes:component",
        workers="lakebed.queue.workers:workers",
        commands=(Command("lakebed.queue.commands:app", "queue", "Queues: status, contents, dead letters.", DATA),),
        page="lakebed.queue.page:QueuePage",
        bench="lakebed.queue.bench:bench",
        demo="lakebed.queue.demo",
        worlds=(
            SimWorld(
                "queue",
                "ingestors and collectors on one queue, with poison, sweeps and failover",
                "lakebed.queue.simulation:queue",
            ),
        ),
    ),
    Part(
        "ticks",
        "chunked uploads that become tables",
        settings="lakebed.ticks.settings:TicksSettings",
        component="lakebed.wiring.ticks:component",
        workers="lakebed.wiring.ticks:workers",
        commands=(
            Command("lakebed.ticks.commands:app", "ticks", "Ticks: upload Parquet files, show their status.", DATA),
            Command("lakebed.wiring.silver_commands:app", "silver", "Silver: dispatch, dead letters, replays.", TABLES),
        ),
        page="lakebed.ticks.page:TicksPage",
        bench="lakebed.ticks.bench:bench",
        demo="lakebed.ticks.demo",
        worlds=(
            SimWorld(
                "ticks",
                "replicas and dispatchers bring the same ticks to silver",
                "lakebed.ticks.simulation:ticks",
            ),
        ),
    ),
    Part(
        "spark",
        "the Spark session and Spark sources",
        settings="lakebed.spark.settings:SparkSettings",
        machine="lakebed.spark.java:diagnosis",
    ),
    Part(
        "pipeline",
        "bronze, silver and gold",
        settings="lakebed.pipeline.settings:PipelineSettings",
        workers="lakebed.pipeline.workers:workers",
        commands=(
            Command(
                "lakebed.pipeline.commands:app",
                "pipeline",
                "Load batches and topics into bronze; compact and vacuum tables.",
                TABLES,
            ),
            Command(
                "lakebed.pipeline.tables.commands:app", "tables", "Tables: list, schema and versions, rows.", TABLES
            ),
        ),
        page="lakebed.pipeline.tables.page:TablesPage",
        bench="lakebed.pipeline.bench:bench",
        demo="lakebed.pipeline.demo",
    ),
    Part(
        "bronze",
        "batches and topics as tables",
        settings="lakebed.pipeline.settings:BronzeSettings",
        workers="lakebed.pipeline.workers:bronze_workers",
    ),
    Part(
        "filer",
        "the metadata of a SeaweedFS store",
        settings="lakebed.filer.settings:FilerSettings",
        checks="lakebed.filer.checks:checks",
    ),
    Part(
        "lifecycle",
        "S3 expiration rules, driven by events",
        settings="lakebed.lifecycle.settings:LifecycleSettings",
        component="lakebed.lifecycle.routes:component",
        workers="lakebed.lifecycle.workers:workers",
        commands=(
            Command(
                "lakebed.lifecycle.commands.root:app",
                "lifecycle",
                "S3 expiration rules: put, dry-run, status, why.",
                OPERATE,
            ),
        ),
        page="lakebed.lifecycle.page:LifecyclePage",
        bench="lakebed.lifecycle.bench:bench",
        demo="lakebed.lifecycle.demo",
        worlds=(
            SimWorld(
                "lifecycle",
                "workers expire objects under a changing policy",
                "lakebed.lifecycle.simulation:lifecycle",
            ),
            SimWorld(
                "versions",
                "workers expire versions in versioned and suspended buckets",
                "lakebed.lifecycle.simulation:versions",
            ),
        ),
    ),
    Part(
        "audit",
        "a listing of the bucket compared with every index",
        settings="lakebed.pipeline.settings:AuditSettings",
        component="lakebed.pipeline.audit.routes:component",
        page="lakebed.pipeline.audit.page:AuditPage",
        commands=(
            Command(
                "lakebed.pipeline.audit.commands:audit",
                "audit",
                "Compare a listing of the bucket with all indexes; report lost and orphaned objects.",
                OPERATE,
            ),
        ),
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


def machine_checks() -> list[Diagnosis]:
    """What each part needs of this machine, for `lakebed doctor`."""
    return [cast(Callable[[], Diagnosis], resolve(part.machine))() for part in PARTS if part.machine]


async def diagnose(context: Context) -> list[Diagnosis]:
    """Each part's own checks for `lakebed doctor`, in the order of the table."""
    found: list[Diagnosis] = []
    for part in PARTS:
        if part.checks:
            found += await cast(Callable[[Context], Awaitable[Sequence[Diagnosis]]], resolve(part.checks))(context)
    return found


def resolve(place: str) -> Any:
    """The object at `module:name`, or the module itself when no name is given."""
    module, _, name = place.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found
