"""`lakebed batches` and `lakebed bucket`: inspect frames, decide conflicts, repair, sweep, query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.batches.upkeep_commands import DryRun, reconcile, retain, sweep
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop

if TYPE_CHECKING:
    from lakebed.batches.model import Batch

app = App(name="batches", help="Metric batches: frames, conflicts, repair, garbage, queries.")


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
        an .lmbatch frame, an .lmpack of frames, an .lmrollup.zst or .lmindex.zst chunk, an index segment, or a .spool
        segment; or a key below store.prefix, which may also be an accepted manifest or any other JSON object of the
        part.
    """
    manifest: dict[str, Any] = {}
    if Path(place).is_file():
        data = Path(place).read_bytes()
    else:
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
    elif place.endswith(".json.zst"):
        from lakebed.batches.codec.index import decode_segment

        emit(list(decode_segment(place, data).rows)[:limit], output)
    elif place.endswith(".lmpack"):
        from lakebed.batches.codec.pack import decode_table

        emit(decode_table(data)[:limit], output)
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
    from lakebed.batches.model import AcceptedBatch
    from lakebed.batches.reader import read_frame
    from lakebed.store.model import read_record

    store = where.context("dump").store
    stored = await store.get(key)
    if not key.startswith(paths.ACCEPTED):
        return {}, stored.data
    accepted = read_record(stored, AcceptedBatch)
    return msgspec.to_builtins(accepted), await read_frame(store, accepted.place)


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

    if limit > NEWEST_MAX:
        say(f"only the newest {NEWEST_MAX} are shown; `lakebed batches query` reads any time range")
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
def release(
    agent_id: Annotated[str, Parameter(help="the agent")],
    boot_id: Annotated[str, Parameter(help="its boot, as `lakebed batches conflicts` shows it")],
    /,
    *,
    reason: Annotated[str, Parameter(help="why, for the audit trail")],
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Accept batches of a boot again that quarantine-boot rejected. Its agent returns them: lakebed agent release."""
    from lakebed.batches.conflicts import ConflictReview
    from lakebed.batches.workers import sweeper_store

    context = where.context("conflicts")
    review = ConflictReview(context.on(sweeper_store(context)))

    async def work() -> Any:
        if dry_run:
            return await review.held(agent_id, boot_id)
        async with as_operator(context, "batches.release", {"agent_id": agent_id, "boot_id": boot_id}, reason):
            return await review.release(agent_id, boot_id)

    emit(in_loop(work), output)


for each in (reconcile, sweep, retain):
    app.command(each)
app.command(sweep, name="gc", show=False)  # the former name
app.command("lakebed.batches.query_commands:query", name="query")
app.command("lakebed.batches.query_commands:metrics", name="metrics")


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


bucket_app = App(name="bucket", help="Create a bucket; generate the S3 bucket policy.")
bucket_app.command("lakebed.embedded.commands:create_bucket", name="create")


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

    Beside it, let no lifecycle rule expire accepted/v1/, raw-blobs/v1/ or trail/v2/: `lakebed doctor` checks that.
    """
    from lakebed.batches.bucket import bucket_policy
    from lakebed.batches.settings import BatchesSettings
    from lakebed.store.settings import StoreSettings

    store = where.settings().of(StoreSettings)
    made = bucket_policy(
        bucket or store.url.removeprefix("s3://").split("/", 1)[0],
        prefix=store.prefix,
        collectors=collector,
        sweepers=gc,
        encryption=encryption,
        conditional_blobs=conditional_blobs,
        retention=bool(where.settings().of(BatchesSettings).retention_days),
    )
    emit(made, "json")
