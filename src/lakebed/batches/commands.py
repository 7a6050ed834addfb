"""`lakebed batches` and `lakebed bucket`: inspect frames, decide conflicts, repair, sweep, query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid

if TYPE_CHECKING:
    from lakebed.batches.model import Batch

app = App(name="batches", help="Metric batches: frames, conflicts, repair, garbage, queries.")

DryRun = Annotated[bool, Parameter(name="--dry-run", help="show what would be done without doing it", negative="")]
Match = Annotated[list[str] | None, Parameter(help="label matcher such as host=web-1 or zone!~eu-.*; may be repeated")]


@app.command
def dump(
    place: str,
    /,
    *,
    limit: Annotated[int, Parameter(help="samples to show")] = 20,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Show what is stored: a file, or a key of the bucket.

    Parameters
    ----------
    place
        an .lmbatch frame, an .lmrollup.zst or .lmindex.zst chunk, or a .spool segment; or a key below store.prefix,
        which may also be an accepted manifest or any other JSON object of the part.
    """
    data = Path(place).read_bytes() if Path(place).is_file() else b""
    manifest: dict[str, Any] = {}
    if not data:
        manifest, data = in_loop(lambda: _fetch(where, place))
    if place.endswith(".lmrollup.zst"):
        from lakebed.rollups.codec.chunk import decode_rollup

        emit(decode_rollup(data).slice(0, limit).to_pylist(), output)
    elif place.endswith(".lmindex.zst"):
        from lakebed.rollups.codec.chunk import decode_index

        batches, series = decode_index(data)
        shown = series.slice(0, limit).to_pylist()
        named = batches["manifest_id"].to_pylist()
        emit([row | {"batches": [named[number] for number in row["batches"]]} for row in shown], output)
    elif place.endswith(".json") and not manifest:
        import msgspec

        emit(msgspec.json.decode(data), output)
    elif place.endswith(".spool"):
        emit([_spooled(data, record) for record in _records(data)][:limit], output)
    else:
        emit(_frame(data, limit) | ({"manifest": manifest} if manifest else {}), output)


async def _fetch(where: Where, key: str) -> tuple[dict[str, Any], bytes]:
    import msgspec

    from lakebed.batches import paths
    from lakebed.batches.model import AcceptedBatch, read_record

    store = where.context("dump").store
    stored = await store.get(key)
    if not key.startswith(paths.ACCEPTED):
        return {}, stored.data
    accepted = read_record(stored, AcceptedBatch)
    return msgspec.to_builtins(accepted), (await store.get(accepted.raw_blob_key)).data


def _frame(data: bytes, limit: int) -> dict[str, Any]:
    import hashlib

    from lakebed.batches.codec.frame import decode
    from lakebed.batches.reader import ANY_FRAME

    about = {"frame_bytes": len(data), "frame_sha256": hashlib.sha256(data).hexdigest()}
    return about | _shown(decode(data, ANY_FRAME), limit)


def _records(data: bytes) -> list[Any]:
    from lakebed.batches.segments import records

    return list(records(data))


def _spooled(data: bytes, record: Any) -> dict[str, Any]:
    from lakebed.batches.segments import HEAD

    start = record.offset + HEAD.size
    about = {"offset": record.offset, "accepted_at_unix_ns": record.at_ns, "attempt_id": record.attempt_id}
    return about | _frame(data[start : start + record.frame_bytes], 0)


@app.command
def agents(*, where: Where = Where(), output: Output = "table") -> None:
    """List agents by their newest accepted batches, most recent first."""
    from lakebed.batches.view import RecentBatches

    emit(in_loop(lambda: RecentBatches(where.context("agents")).agents()), output)


@app.command
def recent(
    *,
    limit: Annotated[int, Parameter(help="batches to show at most")] = 50,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the newest accepted batches, newest first."""
    from lakebed.batches.view import NEWEST_MAX, RecentBatches

    emit(in_loop(lambda: RecentBatches(where.context("recent")).newest(min(limit, NEWEST_MAX))), output)


@app.command
def conflicts(
    conflict_id: Annotated[str, Parameter(help="show only this conflict, with all fields")] = "",
    /,
    *,
    open: Annotated[bool, Parameter(help="only unresolved conflicts", negative="")] = False,
    limit: Annotated[int, Parameter(help="conflicts to show at most")] = 100,
    after: Annotated[str, Parameter(help="list conflicts after this conflict id")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """List identity conflicts with both hashes, or show one with all fields."""
    from lakebed.batches.conflicts import ConflictReview

    context = where.context("conflicts")
    review = ConflictReview(context)
    if conflict_id:
        emit(in_loop(lambda: review.show(conflict_id)), "json" if output == "table" else output)
        return
    found = in_loop(lambda: review.list(limit=limit, after=after, open_only=open))
    if output != "table":
        emit(found, output)
        return
    emit(
        [
            {
                "conflict": view.conflict_id,
                "agent": view.record.agent_id,
                "boot": view.record.boot_id,
                "range": f"{view.record.seq_start}-{view.record.seq_end}",
                "accepted": view.record.accepted_frame_sha256[:16],
                "submitted": view.record.submitted_frame_sha256[:16],
                "first_seen_ns": view.first_seen_unix_ns,
                "resolved": view.resolution.action if view.resolution else "",
            }
            for view in found
        ],
        output,
    )


@app.command
def resolve(
    conflict_id: Annotated[str, Parameter(help="the conflict, as `lakebed batches conflicts` shows it")],
    /,
    *,
    action: Annotated[
        Literal["accept-existing", "quarantine-boot"],
        Parameter(help="accept-existing: keep the accepted batch; quarantine-boot: also reject this boot from now on"),
    ],
    reason: Annotated[str, Parameter(help="why, for the audit trail")],
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Decide a conflict. The decision is recorded in the bucket with its reason and cannot be changed."""
    import getpass

    from lakebed.batches.conflicts import ConflictReview

    context = where.context("conflicts")
    review = ConflictReview(context)
    if dry_run:
        emit(in_loop(lambda: review.show(conflict_id)), output)
        say(f"would resolve it as {action}")
        return
    chosen: Any = action.replace("-", "_")

    async def work() -> Any:
        async with as_operator(context, f"batches.{action}", {"conflict_id": conflict_id}, reason):
            return await review.resolve(conflict_id, chosen, reason, f"cli:{getpass.getuser()}")

    emit(in_loop(work), output)


@app.command
def reconcile(
    *,
    cold: Annotated[bool, Parameter(help="audit all of accepted/v1/ and quarantine/v1/", negative="")] = False,
    findings: Annotated[bool, Parameter(help="repair what the last `lakebed audit` found", negative="")] = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Repair what is derived from accepted batches: once from the checkpoint, or everything with --cold."""
    from lakebed.batches.workers import findings_repairer, reconciler

    context = where.context("reconcile")
    role = reconciler(context)
    kind = "findings" if findings else "cold" if cold else "checkpoint"
    ways = {"findings": findings_repairer(context, role).repair, "cold": role.audit, "checkpoint": role.scan}

    async def work() -> Any:
        async with as_operator(context, "batches.reconcile", {"from": kind}) as trail_entry:
            report = await ways[kind]()
            trail_entry.detail = f"{sum(report.repaired.values())} repaired" if report else "nothing to repair"
            return report

    report = in_loop(work)
    if report is None:
        say("nothing to do: all findings of the last audit are repaired")
        return
    emit({"path": report.path, "checked": report.checked, "repaired": report.repaired}, output)


@app.command
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


app.command(sweep, name="gc", show=False)  # the former name


@app.command
def query(
    metric: Annotated[str, Parameter(help="the metric's name")],
    /,
    *,
    match: Match = None,
    since_s: Annotated[float, Parameter(help="how far back to look")] = 3600.0,
    latest: Annotated[bool, Parameter(help="only the newest point of each series", negative="")] = False,
    window_s: Annotated[
        int, Parameter(help="return one row per window of this many seconds, from rollups and samples")
    ] = 0,
    q: Annotated[list[float] | None, Parameter(help="quantile such as 0.99, with --window-s; may be repeated")] = None,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Query points or windows of a metric from the bucket. A gateway serves the same at /v1/query/range."""
    from lakebed.batches.live import LiveBatches
    from lakebed.batches.matchers import Selector, parse
    from lakebed.batches.query import Querier, QueryResponse
    from lakebed.batches.reader import RawBatches
    from lakebed.batches.settings import BatchesSettings
    from lakebed.batches.sources import SampleSources
    from lakebed.batches.window_query import RollupQuerier, RollupResponse
    from lakebed.rollups.reader import RollupCoverage

    if q and not window_s:
        raise Invalid("quantiles need windows", hint="add --window-s SECONDS")
    context = where.context("query")
    settings, clock, raw = context.settings.of(BatchesSettings), context.clock, RawBatches(context.store)
    sources = SampleSources(
        LiveBatches(context, bytes_max=0, window_s=0.0),
        raw,
        RollupCoverage(context.store, raw),
        follower=None,
        spool=None,
        batches_max=settings.query_batches_max,
        clock=clock,
    )
    selector = Selector(metric, [parse(text) for text in match or []])
    now_ns = clock.now_ns()
    from_ns = max(0, now_ns - round(since_s * 1e9))

    async def ask() -> QueryResponse | RollupResponse:
        if window_s:
            return await RollupQuerier(context, sources).range(selector, window_s, from_ns, now_ns, q or ())
        querier = Querier(sources, points_max=settings.query_points_max, clock=clock)
        if latest:
            return await querier.latest(selector, lookback_s=since_s)
        return await querier.range(selector, from_ns, now_ns)

    answer = in_loop(ask)
    if isinstance(answer, RollupResponse):
        resolution = f"rollups of {answer.resolution_s} s" if answer.resolution_s else "samples alone"
        say(f"from {resolution}: {', '.join(f'{n} {name}' for name, n in answer.sources.items() if n) or 'nothing'}")
    emit(answer, output)


def _shown(batch: Batch, limit: int) -> dict[str, Any]:
    columns, identity = batch.columns, batch.identity
    rows = columns.rows() if columns.samples <= 100_000 else []
    return {
        "wire_version": batch.wire_version,
        "frame_version": batch.frame_version,
        "compression": batch.compression.name.lower(),
        "agent_id": identity.agent_id,
        "boot_id": identity.boot_id,
        "seq_start": identity.seq_start,
        "seq_end": identity.seq_end,
        "series": len(columns.series_metric),
        "strings": len(columns.strings),
        "samples": [
            {
                "seq": identity.seq_start + number,
                "metric": row.metric,
                "labels": dict(row.labels),
                "time_ns": row.time_ns,
                "value": row.value,
                "kind": row.kind.name.lower(),
            }
            for number, row in enumerate(rows[: max(0, limit)])
        ],
    }


bucket_app = App(name="bucket", help="Generate the S3 bucket policy.")


@bucket_app.command
def policy(
    *,
    collector: Annotated[list[str], Parameter(help="ARN of a role that collects batches (may be repeated)")],
    gc: Annotated[list[str], Parameter(help="ARN of the garbage collection role (may be repeated)")],
    bucket: Annotated[str, Parameter(help="name of the bucket (default: that of store.url)")] = "",
    encryption: Annotated[str, Parameter(help="server-side encryption to require: AES256 or aws:kms")] = "",
    conditional_blobs: Annotated[bool, Parameter(help="require If-None-Match for raw blobs too", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Print the bucket policy that protects accepted batches, as JSON for `aws s3api put-bucket-policy`.

    Beside it, let no lifecycle rule expire accepted/v1/ or raw-blobs/v1/: `lakebed doctor` checks that.
    """
    from lakebed.batches.bucket import bucket_policy
    from lakebed.store.settings import StoreSettings

    store = where.settings().of(StoreSettings)
    made = bucket_policy(
        bucket or store.url.removeprefix("s3://").split("/", 1)[0],
        prefix=store.prefix,
        collectors=collector,
        sweepers=gc,
        encryption=encryption,
        conditional_blobs=conditional_blobs,
    )
    emit(made, "json")
