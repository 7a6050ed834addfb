"""The table of parts: where each one plugs in. To add a part, add a folder and a row here.

Modules are named, not imported, so that a command loads only what it uses. This is the only module that names others by
text; a test resolves every name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from lakebed.wiring.part import Command, Part, SimWorld

if TYPE_CHECKING:  # the root of the command loads this table: what it names is loaded when it is used
    from lakebed.core.context import Component, Context, Diagnosis, Worker
    from lakebed.core.settings import Section, Settings

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
        commands=(
            Command(
                "lakebed.gateway.commands:app", "keys", "API keys in the bucket: add, list, revoke, rotate.", OPERATE
            ),
        ),
        checks="lakebed.gateway.tls:checks",
        warning="lakebed.gateway.tls:warning",
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
            SimWorld("agent", "an agent that is killed often, failing collectors", "lakebed.agent.simulation:agent"),
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
            Command(
                "lakebed.batches.commands:bucket_app",
                "bucket",
                "Create a bucket; generate the S3 bucket policy.",
                OPERATE,
            ),
        ),
        page="lakebed.batches.page:BatchesPage",
        runs="lakebed.batches.runs:BatchesRuns",
        bench="lakebed.batches.bench:bench",
        offline="lakebed.batches.landed:offline_authority",
        worlds=(
            SimWorld(
                "batches",
                "agents, collectors, reconcilers and sweepers on one bucket",
                "lakebed.batches.simulation:batches",
            ),
            SimWorld(
                "batches-retention",
                "months of batches, collectors that restart, reconcilers that stop for weeks, retention",
                "lakebed.batches.simulation:retention",
            ),
            SimWorld(
                "batches-packed",
                "agents, collectors that pack frames, reconcilers and sweepers, with conflicts and crashes",
                "lakebed.batches.simulation:packed",
            ),
            SimWorld(
                "batches-packed-retention",
                "the same months with packed batches",
                "lakebed.batches.simulation:packed_retention",
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
        runs="lakebed.rollups.runs:RollupRuns",
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
                "The log: create, produce, consume, groups, trim, fence, delete.",
                DATA,
            ),
        ),
        page="lakebed.log.page:LogPage",
        runs="lakebed.log.view:LogRuns",
        bench="lakebed.log.bench:bench",
        load_test="lakebed.log.loadtest.run:run",
        demo="lakebed.log.demo",
        worlds=(
            SimWorld(
                "log", "brokers, compactors, sweeper and operator on a few partitions", "lakebed.log.simulation:log"
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
            Command(
                "lakebed.ticks.commands:app",
                "ticks",
                "Ticks: upload files as tables, show their status.",
                DATA,
                extra="server",
            ),
        ),
        page="lakebed.ticks.page:TicksPage",
        runs="lakebed.ticks.runs:TicksRuns",
        bench="lakebed.ticks.bench:bench",
        load_test="lakebed.ticks.loadtest:run",
        demo="lakebed.ticks.demo",
        worlds=(
            SimWorld(
                "ticks", "replicas and dispatchers bring the same ticks to silver", "lakebed.ticks.simulation:ticks"
            ),
        ),
    ),
    Part(
        "silver",
        "brings every source to silver and gold",
        workers="lakebed.wiring.ticks:silver_workers",
        commands=(
            Command(
                "lakebed.wiring.silver_commands:app",
                "silver",
                "Silver: dispatch, dead letters, replays.",
                TABLES,
                extra="spark",
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
        workers="lakebed.wiring.ticks:pipeline_workers",
        commands=(
            Command(
                "lakebed.pipeline.silver.commands:app",
                "contract",
                "Check contracts of silver tables, without Spark.",
                TABLES,
                extra="server",
            ),
            Command(
                "lakebed.pipeline.models.commands:gold",
                "gold",
                "Gold models: dry run, tests, last runs.",
                TABLES,
                extra="spark",
            ),
            Command(
                "lakebed.pipeline.commands:app",
                "pipeline",
                "Load batches and topics into bronze, run models; compact and vacuum tables.",
                TABLES,
                extra="spark",
            ),
        ),
        bench="lakebed.pipeline.bench:bench",
        demo="lakebed.pipeline.demo",
    ),
    Part(
        "tables",
        "Delta tables: commands, routes, page, Spark source",
        commands=(
            Command(
                "lakebed.pipeline.tables.commands:app",
                "tables",
                "Tables: list, schema and versions, rows, forget.",
                TABLES,
                extra="spark",
            ),
        ),
        component="lakebed.pipeline.tables.routes:component",
        source="lakebed.pipeline.tables.source:TableSource",
        page="lakebed.pipeline.tables.page:TablesPage",
        runs="lakebed.pipeline.tables.runs:TablesRuns",
        bench="lakebed.pipeline.tables.bench:bench",
        active_active=False,
    ),
    Part(
        "bronze",
        "batches, topics and queues as tables",
        settings="lakebed.pipeline.settings:BronzeSettings",
        workers="lakebed.wiring.ticks:bronze_workers",
        commands=(
            Command(
                "lakebed.wiring.bronze_commands:app",
                "bronze",
                "Bronze: load now, replay a tick with corrected parts, backfill batches.",
                TABLES,
                extra="spark",
            ),
        ),
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
        workers="lakebed.wiring.lifecycle:workers",
        checks="lakebed.lifecycle.checks:checks",
        commands=(
            Command(
                "lakebed.lifecycle.commands.root:app",
                "lifecycle",
                "S3 expiration rules: put, dry-run, status, why.",
                OPERATE,
                extra="seaweedfs",
            ),
        ),
        page="lakebed.lifecycle.page:LifecyclePage",
        runs="lakebed.lifecycle.view:LifecycleRuns",
        bench="lakebed.lifecycle.bench:bench",
        demo="lakebed.lifecycle.demo",
        worlds=(
            SimWorld(
                "lifecycle", "workers expire objects under a changing policy", "lakebed.lifecycle.simulation:lifecycle"
            ),
            SimWorld(
                "versions",
                "workers expire versions in versioned and suspended buckets",
                "lakebed.lifecycle.simulation:versions",
            ),
            SimWorld(
                "policies",
                "policies, buckets and the event log come and go under two or three workers",
                "lakebed.lifecycle.outage_simulation:policies",
            ),
            SimWorld("policies-away", "objects fall due without a policy", "lakebed.lifecycle.outage_simulation:away"),
        ),
    ),
    Part(
        "audit",
        "a listing of the bucket compared with every index",
        settings="lakebed.pipeline.settings:AuditSettings",
        component="lakebed.pipeline.audit.routes:component",
        page="lakebed.pipeline.audit.page:AuditPage",
        runs="lakebed.pipeline.audit.stored:AuditRuns",
        commands=(
            Command(
                "lakebed.pipeline.audit.commands:audit",
                "audit",
                "Compare a listing of the bucket with all indexes; report lost and orphaned objects.",
                OPERATE,
                extra="spark",
            ),
        ),
    ),
    Part("console", "web pages", component="lakebed.console.routes:component", active_active=False),
)


def sections() -> list[type[Section]]:
    return [cast("type[Section]", resolve(part.settings)) for part in PARTS if part.settings]


def components(context: Context, names: Sequence[str] = ()) -> list[Component]:
    return [
        cast("Callable[[Context], Component]", resolve(part.component))(context)
        for part in PARTS
        if part.component and (not names or part.name in names)
    ]


def workers(context: Context, names: Sequence[str] = ()) -> list[Worker]:
    """Those of the named parts, or of all; a worker that several parts name is there once."""
    found: dict[str, Worker] = {}
    for part in PARTS:
        if part.workers and (not names or part.name in names):
            made = cast("Callable[[Context], Sequence[Worker]]", resolve(part.workers))(context)
            found = {worker.name: worker for worker in made} | found
    return list(found.values())


def machine_checks() -> list[Diagnosis]:
    """What each part needs of this machine, for `lakebed doctor`."""
    return [cast("Callable[[], Diagnosis]", resolve(part.machine))() for part in PARTS if part.machine]


def warnings_about(settings: Settings) -> list[str]:
    """What the parts warn of in these settings, for `lakebed status`."""
    found = (cast("Callable[[Settings], str]", resolve(part.warning))(settings) for part in PARTS if part.warning)
    return list(filter(None, found))


async def diagnose(context: Context) -> list[Diagnosis]:
    """Each part's own checks for `lakebed doctor`, in the order of the table."""
    found: list[Diagnosis] = []
    for part in PARTS:
        if part.checks:
            found += await cast("Callable[[Context], Awaitable[Sequence[Diagnosis]]]", resolve(part.checks))(context)
    return found


def resolve(place: str) -> Any:
    """The object at `module:name`, or the module itself when no name is given."""
    module, _, name = place.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found
