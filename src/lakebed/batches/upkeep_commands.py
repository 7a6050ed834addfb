"""Commands of `lakebed batches` that repair or delete: reconcile, sweep, retain."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid

DryRun = Annotated[bool, Parameter(name="--dry-run", help="show what would be done without doing it", negative="")]


def reconcile(
    *,
    cold: Annotated[bool, Parameter(help="audit all of accepted/v1/ and quarantine/v1/", negative="")] = False,
    findings: Annotated[bool, Parameter(help="repair what the last `lakebed audit` found", negative="")] = False,
    single_objects: Annotated[
        bool,
        Parameter(
            help="write accepted-by-time/, accepted-by-blob/ and raw-blobs-by-time/ for all rows of the index",
            negative="",
        ),
    ] = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Repair what is derived from accepted batches: of those not checked before, or everything with --cold."""
    from lakebed.batches.incremental import SCAN
    from lakebed.batches.workers import KINDS, findings_repairer, incremental_scan, reconciler

    context = where.context("reconcile")
    role = reconciler(context)
    kind = "findings" if findings else "cold" if cold else "single" if single_objects else "new"
    ways = {
        "findings": findings_repairer(context, role).repair,
        "cold": role.audit,
        "single": role.derive_single_objects,
        "new": incremental_scan(context, role).scan,
    }

    async def work() -> Any:
        async with (
            as_operator(context, "batches.reconcile", {"from": kind}) as trail_entry,
            context.run_log("batches").record(KINDS.get(kind, SCAN), "batches") as run,
        ):
            report = await ways[kind]()
            if report is not None:
                report.report_to(run)
            run.idle = report is None
            trail_entry.detail = f"{sum(report.repaired.values())} repaired" if report else "nothing to repair"
            return report

    report = in_loop(work)
    if report is None:
        say("nothing to do: all findings of the last audit are repaired")
        return
    emit({"path": report.path, "checked": report.checked, "repaired": report.repaired}, output)


def sweep(
    *,
    dry_run: DryRun = False,
    reason: Annotated[str, Parameter(help="why, for the audit trail; required unless --dry-run")] = "",
    source: Annotated[Literal["all", "by-time", "audit"], Parameter(help="where candidates come from")] = "all",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Delete raw blobs that can never be accepted. A dry run lists each blob with its verdict and the reason."""
    from lakebed.batches.workers import sweeper

    if not dry_run and not reason.strip():
        raise Invalid("sweep deletes raw blobs: a reason is required", hint="add --reason TEXT, or --dry-run")
    chosen: Any = source.replace("-", "_")
    context = where.context("gc")

    async def work() -> Any:
        if dry_run:
            return await sweeper(context).sweep(dry_run=True, source=chosen)
        async with as_operator(context, "batches.gc", {"source": source}, reason) as trail_entry:
            report = await sweeper(context).sweep(dry_run=False, source=chosen)
            trail_entry.detail = ", ".join(f"{name} {count}" for name, count in report.counts.items())
            return report

    report = in_loop(work)
    if output == "table":
        emit(report.rows, output, columns=("verdict", "age_s", "bytes", "key", "reason"))
    else:
        emit(report, output)
    say(f"{'would do' if dry_run else 'done'}: {report.counts or 'nothing'}{f' ({reason})' if reason else ''}")


def retain(
    *,
    dry_run: DryRun = False,
    reason: Annotated[str, Parameter(help="why, for the audit trail; required unless --dry-run")] = "",
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Remove batches that are older than batches.retention_days. An hour is removed an hour after its first pass."""
    from lakebed.batches.workers import retention

    if not dry_run and not reason.strip():
        raise Invalid("retain deletes accepted batches: a reason is required", hint="add --reason TEXT, or --dry-run")
    context = where.context("retention")

    async def work() -> Any:
        if dry_run:
            return await retention(context).run(dry_run=True)
        async with as_operator(context, "batches.retain", {}, reason) as trail_entry:
            report = await retention(context).run()
            trail_entry.detail = f"{report.removed_batches} batches, {report.removed_bytes} bytes removed"
            return report

    emit(in_loop(work), output)
