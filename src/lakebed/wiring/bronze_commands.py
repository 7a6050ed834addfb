"""`lakebed bronze`: loads into bronze now, replays a tick with corrected parts, backfills a range of batches."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop, job_as_operator
from lakebed.core.errors import Invalid
from lakebed.spark.progress import spark_progress
from lakebed.ticks.commands import outbox_in, send, target_of

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.ticks.model import TickId
    from lakebed.ticks.packing import PackedTick
    from lakebed.ticks.replay import TickAttempt

app = App(name="bronze", help="Bronze: load now, replay a tick with corrected parts, backfill batches.")

Reason = Annotated[str, Parameter(help="why; recorded in the audit trail")]
DryRun = Annotated[bool, Parameter(help="show what would be done, and change nothing", negative="")]


@app.command
def process(*, where: Where = Where(), output: Output = "table") -> int:
    """Load what has come since the last load: batches, and topics and queues with a contract; then silver and gold.

    Exits 1 when objects or records were quarantined, because they are unreadable or break their contract.
    """
    from lakebed.pipeline.bronze.ingestion import Ingestion

    context = where.context("pipeline")
    ingestion = Ingestion(context)
    with job_as_operator(context, "bronze.process", {}), spark_progress("bronze"):
        reports = ingestion.run()
    emit([msgspec.to_builtins(report) for report in reports], output)
    for report in ingestion.refined.silver if ingestion.refined else ():
        say(f"silver {report.table} version {report.silver_version}: {report.good} rows of {report.rows_in}")
    return exits.OK if all(report.sound for report in reports) else exits.FAILED


@app.command
def replay(
    *files: Path,
    tick: Annotated[str, Parameter(help="the committed tick")],
    org: Annotated[str, Parameter(help="its org")],
    project: Annotated[str, Parameter(help="its project")],
    reason: Reason,
    url: Annotated[str, Parameter(help="the gateway's address (default: the running stack's)")] = "",
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Commit a tick again with corrected files, as a new attempt TICK.r2, TICK.r3, and so on.

    Its rows replace those with the same keys. The first attempt's record and table version stay as they were. Without
    files, the first attempt's own parts are committed again, while they are kept (ticks.parts_retention_s).

    Parameters
    ----------
    files
        corrected Parquet files, or folders of them; a table's name is its file's, as for `lakebed ticks push`.
    """
    from lakebed.ticks import paths

    context = where.context("cli")
    of = paths.tick_id(org, project, tick)
    if dry_run:
        packed, _ = _packed(context, where, of, files)
        emit(msgspec.json.decode(packed.manifest), "json" if output == "table" else output)
        return exits.OK
    with job_as_operator(context, "bronze.replay", {"tick": of.path}, reason):
        return _replayed(context, where, of, files, reason, url, output)


def _replayed(
    context: Context, where: Where, of: TickId, files: Sequence[Path], reason: str, url: str, output: Output
) -> int:
    from lakebed.ticks.outbox import OutboxTick
    from lakebed.ticks.replay import note_replay

    target = target_of(where, of.org_id, of.project_id, url)
    packed, attempt = _packed(context, where, of, files)
    in_loop(lambda: note_replay(context, attempt, reason))
    outbox_in(where).put(OutboxTick(packed))
    done = send(outbox_in(where), packed.tick_id, target)
    if done is None:
        return exits.FAILED
    shutil.rmtree(_folder(where, attempt), ignore_errors=True)
    emit([done], output)
    return exits.OK


def _packed(context: Context, where: Where, of: TickId, files: Sequence[Path]) -> tuple[PackedTick, TickAttempt]:
    """The next attempt of the tick, of these files or of its own parts. Raises NotFound or Invalid."""
    from lakebed.ticks import packing
    from lakebed.ticks.replay import next_attempt, stored_parts

    attempt = in_loop(lambda: next_attempt(context, of))
    if attempt.manifest is None or attempt.manifest.mode == "mixed":
        raise Invalid(
            f"the keys and the mode of {of.tick_id} are not known any more, or differ by table",
            hint=f"lakebed ticks push … --tick {attempt.attempt_id} --key … --mode …",
        )
    found = packing.find(files) if files else in_loop(lambda: stored_parts(context, attempt, _folder(where, attempt)))
    day = f"{datetime.fromtimestamp(context.clock.now_ns() / 1e9, UTC):%Y%m%d}"
    mode, keys = attempt.manifest.mode, attempt.keys
    packed = packing.pack(found, project_id=of.project_id, tick_id=attempt.attempt_id, dt=day, keys=keys, mode=mode)
    return packed, attempt


def _folder(where: Where, attempt: TickAttempt) -> Path:
    return where.folder / "ticks-replays" / attempt.attempt_id


@app.command
def backfill(
    *,
    from_: Annotated[str, Parameter(name="--from", help="the first moment of acceptance, ISO 8601")],
    to: Annotated[str, Parameter(help="the moment to stop before, ISO 8601")],
    reason: Reason,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Load accepted batches of a range that bronze does not have: removed by retention, or by a restore.

    A batch that is in bronze is left alone. Silver gets the rows with the next load.
    """
    from lakebed.batches.feed import moment_ns
    from lakebed.pipeline.bronze.samples import SampleLoader
    from lakebed.spark.session import open_session
    from lakebed.spark.settings import SparkSettings

    context = where.context("pipeline")
    begin_ns, end_ns = moment_ns(from_), moment_ns(to)
    if begin_ns >= end_ns:
        raise Invalid(f"the range from {from_} to {to} is empty", hint="--from must be before --to")

    def samples() -> SampleLoader:
        return SampleLoader(open_session(context.settings.of(SparkSettings)), context)

    if dry_run:
        loader = samples()
        emit([{"table": loader.table.spec.name, "batches": loader.lacking(begin_ns, end_ns)}], output)
        return exits.OK
    subject = {"from": from_, "to": to}
    with job_as_operator(context, "bronze.backfill", subject, reason), spark_progress("bronze"):
        report = samples().backfill(begin_ns, end_ns)
    emit([msgspec.to_builtins(report)] if report else [], output)
    return exits.OK if report is None or report.sound else exits.FAILED
