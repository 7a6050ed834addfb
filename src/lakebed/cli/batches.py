"""`lakebed batches`: look into frames, decide conflicts, repair, collect garbage, ask for values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop
from lakebed.errors import Invalid

if TYPE_CHECKING:
    from lakebed.frame.model import Batch

app = App(name="batches", help="Metric batches: frames, conflicts, repair, garbage, queries.")

DryRun = Annotated[bool, Parameter(name="--dry-run", help="say what would be done, and do nothing", negative="")]
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
        from lakebed.frame.rollup import decode_rollup

        emit(decode_rollup(data).slice(0, limit).to_pylist(), output)
    elif place.endswith(".lmindex.zst"):
        from lakebed.frame.index import decode_index

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
    from lakebed.batches.model import Accepted, read_record

    store = where.context("dump").store
    stored = await store.get(key)
    if not key.startswith(paths.ACCEPTED):
        return {}, stored.data
    accepted = read_record(stored, Accepted)
    return msgspec.to_builtins(accepted), (await store.get(accepted.raw_blob_key)).data


def _frame(data: bytes, limit: int) -> dict[str, Any]:
    import hashlib

    from lakebed.batches.raw import ANY_FRAME
    from lakebed.frame.codec import decode

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
    """Show every agent by its newest accepted batches, those heard last first."""
    from lakebed.views.batches import RecentBatches

    emit(in_loop(lambda: RecentBatches.of(where.context("agents")).agents()), output)


@app.command
def recent(
    *,
    limit: Annotated[int, Parameter(help="batches to show at most")] = 50,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the newest accepted batches, newest first."""
    from lakebed.views.batches import NEWEST_MAX, RecentBatches

    emit(in_loop(lambda: RecentBatches.of(where.context("recent")).newest(min(limit, NEWEST_MAX))), output)


@app.command
def conflicts(
    conflict_id: Annotated[str, Parameter(help="show this one whole")] = "",
    /,
    *,
    open: Annotated[bool, Parameter(help="only those not resolved yet", negative="")] = False,
    limit: Annotated[int, Parameter(help="conflicts to show at most")] = 100,
    after: Annotated[str, Parameter(help="conflict id to go on behind")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """List identity conflicts with both hashes, or show one whole."""
    from lakebed.batches.conflicts import ConflictDesk

    context = where.context("conflicts")
    desk = ConflictDesk(context.store, context.clock)
    if conflict_id:
        emit(in_loop(lambda: desk.show(conflict_id)), "json" if output == "table" else output)
        return
    found = in_loop(lambda: desk.list(limit=limit, after=after, open_only=open))
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
        Parameter(help="the accepted manifest is the truth, or nothing more of this boot is accepted"),
    ],
    reason: Annotated[str, Parameter(help="why, for whoever asks later")],
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Decide a conflict. The decision is recorded in the bucket with its reason and cannot be changed."""
    import getpass

    from lakebed.batches.conflicts import ConflictDesk

    context = where.context("conflicts")
    desk = ConflictDesk(context.store, context.clock)
    if dry_run:
        emit(in_loop(lambda: desk.show(conflict_id)), output)
        say(f"would resolve it as {action}")
        return
    chosen: Any = action.replace("-", "_")

    async def work() -> Any:
        async with by_hand(context, f"batches.{action}", {"conflict_id": conflict_id}, reason):
            return await desk.resolve(conflict_id, chosen, reason, f"cli:{getpass.getuser()}")

    emit(in_loop(work), output)


@app.command
def reconcile(
    *,
    cold: Annotated[bool, Parameter(help="audit all of accepted/v1/ and quarantine/v1/", negative="")] = False,
    findings: Annotated[bool, Parameter(help="mend what the last `lakebed audit` found", negative="")] = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Repair what is derived from accepted batches: once from the checkpoint, or everything with --cold."""
    from lakebed.batches.workers import mender, reconciler

    context = where.context("reconcile")
    role = reconciler(context)
    kind = "findings" if findings else "cold" if cold else "checkpoint"
    ways = {"findings": mender(context, role).mend, "cold": role.audit, "checkpoint": role.scan}

    async def work() -> Any:
        async with by_hand(context, "batches.reconcile", {"from": kind}) as told:
            report = await ways[kind]()
            told.detail = f"{sum(report.repaired.values())} repaired" if report else "nothing to mend"
            return report

    report = in_loop(work)
    if report is None:
        say("nothing to do: there is no audit whose findings are not mended")
        return
    emit({"path": report.path, "checked": report.checked, "repaired": report.repaired}, output)


@app.command
def gc(
    *,
    dry_run: DryRun = False,
    reason: Annotated[str, Parameter(help="why garbage is collected by hand; needed unless --dry-run")] = "",
    source: Annotated[Literal["all", "by-time", "audit"], Parameter(help="where candidates come from")] = "all",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Delete raw blobs that can never be accepted. A dry run lists each blob with its verdict and the reason."""
    from lakebed.batches.workers import sweeper

    if not dry_run and not reason.strip():
        raise Invalid("gc deletes: say why", hint="add --reason TEXT, or --dry-run")
    chosen: Any = source.replace("-", "_")
    context = where.context("gc")

    async def work() -> Any:
        if dry_run:
            return await sweeper(context).sweep(dry_run=True, source=chosen)
        async with by_hand(context, "batches.gc", {"source": source}, reason) as told:
            report = await sweeper(context).sweep(dry_run=False, source=chosen)
            told.detail = ", ".join(f"{name} {count}" for name, count in report.counts.items())
            return report

    report = in_loop(work)
    if output == "table":
        emit(report.rows, output, columns=("verdict", "age_s", "bytes", "key", "reason"))
    else:
        emit(report, output)
    say(f"{'would have done' if dry_run else 'done'}: {report.counts or 'nothing'}{f' ({reason})' if reason else ''}")


@app.command
def query(
    metric: Annotated[str, Parameter(help="the metric's name")],
    /,
    *,
    match: Match = None,
    since_s: Annotated[float, Parameter(help="how far back to look")] = 3600.0,
    latest: Annotated[bool, Parameter(help="only the newest point of each series", negative="")] = False,
    window_s: Annotated[int, Parameter(help="a row for each window of so many seconds, from rollups and samples")] = 0,
    q: Annotated[list[float] | None, Parameter(help="quantile such as 0.99, with --window-s; may be repeated")] = None,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Ask for a metric's points or windows, read from the bucket. A gateway answers the same at /v1/query/range."""
    from lakebed.batches.coverage import Coverage
    from lakebed.batches.live import Live
    from lakebed.batches.matchers import Selector, parse
    from lakebed.batches.query import Querier, QueryAnswer
    from lakebed.batches.raw import RawBatches
    from lakebed.batches.rollups import RollupAnswer, Rollups
    from lakebed.batches.settings import IngestSettings
    from lakebed.batches.sources import Sources

    if q and not window_s:
        raise Invalid("quantiles are of windows", hint="add --window-s SECONDS")
    context = where.context("query")
    settings, clock, raw = context.settings.of(IngestSettings), context.clock, RawBatches(context.store)
    sources = Sources(
        Live(bytes_max=0, window_s=0.0, clock=clock, metrics=context.metrics),
        raw,
        Coverage(context.store, raw),
        follower=None,
        spool=None,
        batches_max=settings.query_batches_max,
        clock=clock,
    )
    selector = Selector(metric, [parse(text) for text in match or []])
    now_ns = clock.now_ns()
    from_ns = max(0, now_ns - round(since_s * 1e9))

    async def ask() -> QueryAnswer | RollupAnswer:
        if window_s:
            return await Rollups(context.store, sources, clock).range(selector, window_s, from_ns, now_ns, q or ())
        querier = Querier(sources, points_max=settings.query_points_max, clock=clock)
        if latest:
            return await querier.latest(selector, lookback_s=since_s)
        return await querier.range(selector, from_ns, now_ns)

    answer = in_loop(ask)
    if isinstance(answer, RollupAnswer):
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
