"""`lakebed audit`: compares a listing of the bucket with all indexes and reports what does not match."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.spark.progress import reporting, spark_progress

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.pipeline.audit.model import AuditRecord

SHOWN = 50  # findings and hours in a table; -o json has more, the tables all


def audit(
    *,
    quick: Annotated[
        bool, Parameter(help="use the listing only: read no blob, compare no samples", negative="")
    ] = False,
    last: Annotated[bool, Parameter(help="show the last audit instead of running one", negative="")] = False,
    inventory: Annotated[
        str, Parameter(help="manifest.json of an S3 Inventory report (a key of the bucket or a file) instead of LIST")
    ] = "",
    agent_queue: Annotated[
        list[Path] | None,
        Parameter(help="an agent's queue folder: samples it reports as given up are not lost; may be repeated"),
    ] = None,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Audit accepted batches, their blobs, indexes, bronze and rollups. Exits 1 when something is wrong.

    The findings are also in the tables audit/findings and audit/conservation, and at GET /v1/audit; the reconciler
    repairs it: lakebed batches reconcile --findings.
    """
    context = where.context("audit")
    record = _last(context) if last else _made(context, quick, inventory, agent_queue or [])
    if output == "table":
        _show(record)
    else:
        emit(record, output)
    return exits.OK if record.ok else exits.FAILED


def _last(context: Context) -> AuditRecord:
    from lakebed.pipeline.audit.stored import last_audit

    return in_loop(lambda: last_audit(context))


def _made(context: Context, quick: bool, inventory: str, queues: list[Path]) -> AuditRecord:
    from lakebed.agent.codec import accounts
    from lakebed.batches.settings import ReconcilerSettings
    from lakebed.pipeline.audit.conservation import DroppedSamples
    from lakebed.pipeline.audit.job import BucketAuditor
    from lakebed.pipeline.audit.stored import AUDIT, report_to
    from lakebed.spark.session import open_session
    from lakebed.spark.settings import SparkSettings

    known = [
        DroppedSamples(each.agent_id, each.boot_id, each.first, each.last)
        for folder in queues
        for each in accounts(folder)
    ]
    horizon_s = context.settings.of(ReconcilerSettings).gc_horizon_s
    depth = "quick" if quick else "full"
    with context.run_log("audit").job(AUDIT, depth, {"depth": depth}, at_once=True) as run, reporting(run):
        spark = open_session(context.settings.of(SparkSettings))
        listing = _report(context, spark, inventory) if inventory else None
        with spark_progress("audit"):
            auditor = BucketAuditor(spark, context)
            record = auditor.run(horizon_s=horizon_s, listing=listing, verify=not quick, dropped=known)
        report_to(run, record)
        return record


def _report(context: Context, spark: Any, manifest: str) -> Any:
    from lakebed.spark.inventory import ReportLocation, inventory
    from lakebed.spark.location import Location
    from lakebed.store.settings import StoreSettings

    settings = context.settings.of(StoreSettings)
    if (file := Path(manifest)).is_file():
        return inventory(spark, ReportLocation(folder=str(file.parent)), file.name, prefix=settings.prefix)
    return inventory(spark, ReportLocation(location=Location.of(settings)), manifest, prefix=settings.prefix)


def _show(record: AuditRecord) -> None:
    emit(
        [
            {
                "finding": total.finding,
                "kind": total.kind,
                "objects": total.objects,
                "bytes": total.size_bytes,
                "wrong": "yes" if total.wrong else "",
            }
            for total in record.totals
        ],
        columns=("finding", "kind", "objects", "bytes", "wrong"),
    )
    for each in [each for each in record.findings if each.finding != "orphaned"][:SHOWN]:
        say(f"{each.finding} {each.kind}: {each.key}{f' ({each.reason})' if each.reason else ''}")
    kept = record.conservation
    if kept.checked:
        say("conservation: " + " → ".join(f"{name} {count}" for name, count in kept.stages.items()))
        if kept.waiting:
            say(f"  {kept.waiting} samples are not in bronze yet: lakebed pipeline run")
        if kept.kept_since_unix_ns:
            since = datetime.fromtimestamp(kept.kept_since_unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
            say(f"  bronze is kept since {since} UTC: {kept.expired} samples accepted before are not in it")
        for row in kept.rows[:SHOWN]:
            say(f"  {row.agent_id} {row.hour}: {_named(row)}")
        for flow in kept.flows:
            counts = f"bronze {flow.bronze} → silver {flow.silver}, quarantined {flow.quarantined}, lost {flow.lost}"
            say(f"  {flow.org_id}/{flow.project_id} {flow.source} → {flow.table}: {counts}")
        for table, rows in kept.gold.items():
            say(f"  gold {table}: {rows} rows")
        if not kept.wrong:
            say(f"nothing lost, doubled or changed in {kept.hours} hours of {kept.agents} agents")
    for words in record.unseen:
        say(f"not checked by a quick audit: {words}")
    say(f"{'ok' if record.ok else 'WRONG'}: {record.objects} objects, audit {record.audit_id}")


def _named(row: Any) -> str:
    losses = [
        f"{count} {what} at {stage}"
        for what in ("lost", "doubled", "changed")
        for stage, count in getattr(row, what).items()
        if count
    ]
    return ", ".join(losses)
