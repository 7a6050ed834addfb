"""Bronze of topics and queues: every record whose payload matches its contract, once.

The tables are `bronze/topics/lake/<table>` and `bronze/queues/lake/<table>`.

The table's commit carries the offsets it has come to, so a run that dies before it is repeated, and a later run
continues from there. A record that cannot be decoded, or breaks its contract, is upserted into the table
`quarantine/topics/lake/<table>` under its partition and offset, with every reason; an unreadable slice of the log,
under its key.

Reading a queue claims nothing. Entries that its collectors finish before a run has read them are not loaded: the
sequences in the table show which they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.context import Context
from lakebed.core.errors import Conflict, Corrupt, NotFound, Overloaded, Stale
from lakebed.core.feed import Feed, FeedFilter, FeedSlice, Limit, Offset
from lakebed.core.settings import Settings
from lakebed.delta import history
from lakebed.delta.log import decode, fields_of, log_key, note_of
from lakebed.delta.model import Snapshot, TableSpec, WriteBatch
from lakebed.pipeline.bronze.payloads import TopicContract, Undecodable, decoder, texts
from lakebed.pipeline.bronze.places import QUEUES, TOPICS, placed, quarantine_of
from lakebed.pipeline.bronze.runs import IngestReport, cores_of
from lakebed.pipeline.bronze.ticks import schema_of
from lakebed.pipeline.silver import transforms as silver
from lakebed.pipeline.silver.contract import BadContract
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.table import Table
from lakebed.spark.feeds import open_feed, reads
from lakebed.spark.location import Location
from lakebed.spark.pruning import shared_out
from lakebed.spark.tasks import in_arrow
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

RACES_MAX = 30
NOTES_MAX = 1_000  # versions that are looked through for the last load: commits of other engines came after it
QUARANTINE = (
    "key string, partition int, offset bigint, time timestamp, value binary, reasons array<string>, seen_at timestamp"
)
UNREADABLE_MAX = 1_000  # keys of slices that one report names
# Where a row comes from; `_rows` is how many records an unreadable slice would have given.
LINEAGE = {"_partition": "int", "_offset": "bigint", "_time": "timestamp", "_value": "binary"}
NAMES = ["partition", "offset", "time", "value"]  # of a record, whatever its source calls them
FATE = {"_key": "string", "_problem": "string", "_rows": "bigint"}


class RecordKind(msgspec.Struct, frozen=True):
    """How records of one kind of source are read: `position` are the source's columns for `_partition` and `_offset`.

    `kept` names them in the table, beside the contract's columns.
    """

    source: str
    option: str
    folder: str
    position: tuple[str, str]
    kept: dict[str, str]  # the table's column → what it is made of

    @property
    def schema(self) -> dict[str, str]:
        types = {"_partition": "integer", "_offset": "long", "_time": "timestamp"}
        return {name: types[made_of] for name, made_of in self.kept.items()}


KINDS = {
    "topic": RecordKind(
        "lakebed.topic",
        "topic",
        TOPICS,
        ("partition", "offset"),
        {"_partition": "_partition", "_offset": "_offset", "_time": "_time"},
    ),
    "queue": RecordKind(
        "lakebed.queue",
        "queue",
        QUEUES,
        ("index", "sequence"),
        {"_sequence": "_offset", "_index": "_partition", "_time": "_time"},
    ),
}


class TopicNote(msgspec.Struct, frozen=True):
    """The note of a commit: the last offset of each partition that is in the table or quarantined."""

    topic: str
    offset: Offset
    version: int = 1


async def offset_of(store: Store, table: str, state: Snapshot, application: str) -> Offset | None:
    """How far the table has come; None before its first load.

    Commits of other engines have no note, or one of their own: then the last load is looked for behind them. Raises
    Corrupt when its entry is gone: from the beginning every record would be loaded a second time.
    """
    if (note := _read(state.note)) is not None:
        return note.offset
    if application not in state.applied:
        return None
    for version in range(state.version, max(-1, state.version - NOTES_MAX), -1):
        key = log_key(f"tables/{table}", version)
        try:
            actions = decode((await store.get(key)).data, key)
        except NotFound:
            break  # cleaned up, and so is what is older
        for info in (action["commitInfo"] for action in actions if action.get("commitInfo")):
            if (note := _read(note_of(info))) is not None:
                return note.offset
    raise Corrupt(
        f"{table} has rows of {state.applied[application] + 1} loads, and its log names no offset to continue from",
        hint="load it into another table: change `table` in its contract",
    )


def _read(text: str | None) -> TopicNote | None:
    """None for a note that is not ours."""
    try:
        return msgspec.json.decode(text, type=TopicNote) if text else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


async def behind(context: Context, made: TopicContract) -> int:
    """How many records a topic or queue has that are not in bronze yet. Needs no Spark."""
    kind = KINDS[made.kind]
    feed: Feed = open_feed(kind.source, context, {kind.option: made.topic})
    name = await placed(context.store, f"{kind.folder}/{made.contract.table}")
    state = await history.snapshot(context.store, f"tables/{name}")
    offset = await offset_of(context.store, name, state, kind.source) or await feed.begin()
    newest = await feed.reach(offset, Limit())
    return sum(max(0, newest[n] - offset.get(n, 0)) for n in newest)


class TopicLoader:
    """One topic or queue into its table. Synchronous, as Spark is."""

    def __init__(self, spark: SparkSession, context: Context, made: TopicContract) -> None:
        self._spark, self._context, self._made = spark, context, made
        self._kind = KINDS[made.kind]
        self._feed: Feed = open_feed(self._kind.source, context, {self._kind.option: made.topic})
        self._types = {name: column.type for name, column in made.contract.columns.items()}
        spec_schema = schema_of({**self._types, **self._kind.schema}).json()
        name = f"{self._kind.folder}/{made.contract.table}"
        place, aside = (asyncio.run(placed(context.store, each)) for each in (name, quarantine_of(name)))
        self.table = self._open(TableSpec(place, spec_schema, stats=("_time", next(iter(self._kind.kept)))))
        rejected = spark.createDataFrame([], QUARANTINE).schema.json()
        self.quarantine = self._open(TableSpec(aside, rejected, keys=("key",)))

    def step(self, limit: Limit) -> IngestReport | None:
        """Takes up to `limit` of what the topic has gained, exactly once. None when it has gained nothing.

        Raises BadContract when the table has other types, Conflict when the topic was made again, Overloaded when
        others keep committing first.
        """
        for _ in range(RACES_MAX):
            state = self.table.snapshot()
            self._check(state)
            number = state.applied.get(self._kind.source, -1)
            offset = asyncio.run(self._offset(state))
            reached, pieces, newest = asyncio.run(self._plan(offset, limit))
            if not pieces:
                asyncio.run(self._check_end(offset))
                return None
            rows = self._judged(pieces).cache()
            try:
                report = self._counted(rows, len(pieces))
                if report.quarantined:
                    self.quarantine.upsert(self._quarantined(rows))
                good = rows.filter(F.size(silver.REASONS) == 0).select(*self._columns())
                note = msgspec.json.encode(TopicNote(self._made.topic, reached)).decode()
                done = self.table.append_files(
                    self.table.write(good), WriteBatch(self._kind.source, number + 1, after=number), note=note
                )
            except Stale:
                continue
            finally:
                rows.unpersist()
            if done.repeated:  # the same step of another run: it may have gone less far, or further
                continue
            behind = sum(max(0, newest[n] - reached.get(n, 0)) for n in newest)
            through = ", ".join(f"{n}:{at}" for n, at in sorted(reached.items()))
            return msgspec.structs.replace(report, version=done.version, through=through, behind=behind)
        raise Overloaded(f"others committed to {self.table.spec.name} first {RACES_MAX} times")

    async def _offset(self, state: Snapshot) -> Offset:
        name = self.table.spec.name
        return await offset_of(self._context.store, name, state, self._kind.source) or await self._feed.begin()

    async def _plan(self, offset: Offset, limit: Limit) -> tuple[Offset, list[FeedSlice], Offset]:
        reached = await self._feed.reach(offset, limit)
        pieces = await self._feed.slices(offset, reached, FeedFilter())
        return reached, pieces, await self._feed.reach(offset, Limit())

    async def _check_end(self, offset: Offset) -> None:
        """Raises Conflict when the topic ends before what the table has of it: it was deleted for so long that its
        offsets begin anew, and the records up to the table's offset would never be loaded.
        """
        if self._made.kind != "topic":
            return
        ends = await self._feed.reach(await self._feed.begin(), Limit())
        for n, at in offset.items():
            if n in ends and ends[n] < at:
                table = self.table.spec.name
                raise Conflict(
                    f"partition {n} of topic {self._made.topic!r} ends at {ends[n]}, but {table} has it up to {at}: "
                    "the topic was made again",
                    hint="load it into another table: change `table` in its contract",
                )

    def _judged(self, pieces: Sequence[FeedSlice]) -> DataFrame:
        shares = shared_out(pieces, cores_of(self._spark))
        requests = [(msgspec.json.encode(share).decode(),) for share in shares]
        frame = self._spark.createDataFrame(requests, "works string").coalesce(1).repartition(len(requests))
        rows = in_arrow(frame, decoding(self._context.settings, self._made), schema(self._made))
        lineage = [*LINEAGE, *FATE]
        read = silver.cast(rows, self._made.contract, self._types, lineage).drop("_row")
        reasons = F.when(F.col("_problem").isNotNull(), F.array("_problem")).otherwise(F.col(silver.REASONS))
        return silver.checked(read, self._made.contract).withColumn(silver.REASONS, reasons)

    def _counted(self, rows: DataFrame, objects: int) -> IngestReport:
        bad = F.size(silver.REASONS) > 0
        counted = rows.agg(F.sum("_rows"), F.sum(F.when(bad, F.col("_rows")).otherwise(F.lit(0)))).first()
        total, bad_rows = (counted[0] or 0, counted[1] or 0) if counted else (0, 0)
        keys = rows.filter(F.col("_key").isNotNull()).select("_key").limit(UNREADABLE_MAX).collect() if bad_rows else []
        return IngestReport(
            table=self.table.spec.name,
            objects=objects,
            rows_in=total,
            good=total - bad_rows,
            quarantined=bad_rows,
            unreadable=tuple(row["_key"] for row in keys),
        )

    def _columns(self) -> list[Column]:
        kept = {name: F.col(made_of).alias(name) for name, made_of in self._kind.kept.items()}
        return [kept.get(name, F.col(name)) for name in self.table.spec.columns]

    def _quarantined(self, rows: DataFrame) -> DataFrame:
        now = datetime.fromtimestamp(self._context.clock.now_ns() / 1e9, UTC)
        places = [F.col(self._kind.kept[name]) for name in list(self._kind.kept)[:2]]
        position = F.concat_ws("/", F.lit(self._made.topic), *places)
        return rows.filter(F.size(silver.REASONS) > 0).select(
            F.coalesce("_key", position).alias("key"),
            F.col("_partition").alias("partition"),
            F.col("_offset").alias("offset"),
            F.col("_time").alias("time"),
            F.col("_value").alias("value"),
            F.col(silver.REASONS).cast("array<string>").alias("reasons"),
            F.lit(now).cast("timestamp").alias("seen_at"),
        )

    def _check(self, state: Snapshot) -> None:
        held = fields_of(state.schema_json)
        for name, kind in self._types.items():
            if held.get(name, kind) != kind:
                table = self._made.contract.table
                raise BadContract(
                    f"contract of {table!r}: {name!r} is {kind}, but the table has it as {held[name]}",
                    hint="rename the column or the table in the contract",
                )

    def _open(self, spec: TableSpec) -> Table:
        context = self._context
        location = Location.of(context.settings.of(StoreSettings))
        return Table(self._spark, spec, context, location=location)


def schema(made: TopicContract) -> str:
    """What the task gives, as DDL: lineage, fate, and the text of each field."""
    return ", ".join(f"`{name}` {kind}" for name, kind in {**LINEAGE, **FATE, **_fields(made)}.items())


def _fields(made: TopicContract) -> dict[str, str]:
    return dict.fromkeys(made.sources, "string")


def decoding(settings: Settings, made: TopicContract) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of pieces a row, its output rows of `schema`."""
    sources, kind = made.sources, KINDS[made.kind]
    columns = [*kind.position, "time", "value"]
    frozen = made.contract.drift == "freeze"

    def decode(batches: files.Batches) -> files.Batches:
        feed = open_feed(kind.source, settings, {kind.option: made.topic})
        of = decoder(made.payload, made.avro)
        for batch in batches:
            for text in batch["works"].to_pylist():
                pieces = msgspec.json.decode(text, type=list[FeedSlice])
                for read in reads(feed, pieces, columns, FeedFilter()):
                    if read.problem:
                        yield _unreadable(read.piece, read.problem, sources)
                    else:
                        yield _decoded(read.rows.rename_columns(NAMES), of, sources, frozen)

    return decode


def _decoded(rows: Any, of: Any, sources: Sequence[str], frozen: bool) -> Any:
    import pyarrow as pa

    values: list[list[str | None]] = []
    problems: list[str | None] = []
    empty: list[str | None] = [None] * len(sources)
    known = set(sources)
    for value in rows.column("value").to_pylist():
        try:
            fields = of(value or b"")  # a record without a value is one that does not decode
        except Undecodable as error:
            values.append(empty)
            problems.append(str(error))
            continue
        more = sorted(fields.keys() - known) if frozen else []
        values.append(texts(fields, sources))
        problems.append(f"{more[0]}: not in the contract, which is frozen" if more else None)
    count = rows.num_rows
    columns = list(zip(*values, strict=True)) if values else [()] * len(sources)
    arrays = [rows.column(name) for name in ("partition", "offset", "time", "value")]
    arrays += [
        pa.nulls(count, pa.string()),
        pa.array(problems, pa.string()),
        pa.repeat(pa.scalar(1, pa.int64()), count),
    ]
    arrays += [pa.array(column, pa.string()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=[*LINEAGE, *FATE, *sources])


def _unreadable(piece: FeedSlice, problem: str, sources: Sequence[str]) -> Any:
    import pyarrow as pa

    kinds = (pa.int32(), pa.int64(), pa.timestamp("us", "UTC"), pa.binary())
    arrays = [pa.nulls(1, kind) for kind in kinds]
    arrays += [pa.array([piece.key]), pa.array([problem]), pa.array([piece.rows], pa.int64())]
    arrays += [pa.nulls(1, pa.string()) for _ in sources]
    return pa.RecordBatch.from_arrays(arrays, names=[*LINEAGE, *FATE, *sources])
