"""Bronze of topics: every record whose payload keeps its contract, once, in the table `topics/<table>`.

The table's commit carries the offsets it has come to, so what dies before it is done again and what comes after it goes
on from there. A record that cannot be decoded, or breaks its contract, is upserted into `topics-quarantine/<table>`
under its partition and offset, with every reason; a slice of the log that cannot be read, under its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.context import Context
from lakebed.delta.log import fields_of
from lakebed.delta.model import Batch, Snapshot, TableSpec
from lakebed.errors import Overloaded, Stale
from lakebed.feed import Feed, Limit, Offset, Piece, Wanted
from lakebed.pipeline import silver
from lakebed.pipeline.bronze import schema_of
from lakebed.pipeline.contract import BadContract
from lakebed.pipeline.ingested import IngestReport, cores_of
from lakebed.pipeline.tables.location import Location
from lakebed.pipeline.tables.table import Table
from lakebed.pipeline.tasks import in_arrow
from lakebed.pipeline.topics_decode import TopicContract
from lakebed.pipeline.topics_task import FATE, LINEAGE, SOURCE, decoding, schema
from lakebed.spark.feeds import open_feed
from lakebed.spark.pruning import shared_out
from lakebed.store.settings import StoreSettings

FOLDER, QUARANTINE_FOLDER = "topics", "topics-quarantine"
RACES_MAX = 30
KEPT = {"_partition": "integer", "_offset": "long", "_time": "timestamp"}  # of a record, beside the contract's columns
QUARANTINE = (
    "key string, partition int, offset bigint, time timestamp, value binary, reasons array<string>, seen_at timestamp"
)
UNREADABLE_MAX = 1_000  # keys of slices that one report names


class TopicNote(msgspec.Struct, frozen=True):
    """What a commit says of itself: the last offset of each partition that is in the table or set aside."""

    topic: str
    offset: Offset
    version: int = 1


class Topic:
    """One topic into its table. Synchronous, as Spark is."""

    def __init__(self, spark: SparkSession, context: Context, made: TopicContract) -> None:
        self._spark, self._context, self._made = spark, context, made
        self._feed: Feed = open_feed(SOURCE, context, {"topic": made.topic})
        self._types = {name: column.type for name, column in made.contract.columns.items()}
        spec_schema = schema_of({**self._types, **KEPT}).json()
        self.table = self._open(TableSpec(f"{FOLDER}/{made.contract.table}", spec_schema, stats=("_time", "_offset")))
        aside = spark.createDataFrame([], QUARANTINE).schema.json()
        self.quarantine = self._open(TableSpec(f"{QUARANTINE_FOLDER}/{made.contract.table}", aside, keys=("key",)))

    def step(self, limit: Limit) -> IngestReport | None:
        """Takes up to `limit` of what the topic has gained, exactly once. None when it has gained nothing.

        Raises BadContract when the table has other types, Overloaded when others keep committing first.
        """
        for _ in range(RACES_MAX):
            state = self.table.snapshot()
            self._check(state)
            number = state.applied.get(SOURCE, -1)
            offset = asyncio.run(self._offset(state))
            reached, pieces, newest = asyncio.run(self._plan(offset, limit))
            if not pieces:
                return None
            rows = self._judged(pieces).cache()
            try:
                report = self._counted(rows, len(pieces))
                if report.quarantined:
                    self.quarantine.upsert(self._aside(rows))
                good = rows.filter(F.size(silver.REASONS) == 0).select(*self.table.spec.columns)
                note = msgspec.json.encode(TopicNote(self._made.topic, reached)).decode()
                done = self.table.append_files(
                    self.table.write(good), Batch(SOURCE, number + 1, after=number), note=note
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
        return msgspec.json.decode(state.note, type=TopicNote).offset if state.note else await self._feed.begin()

    async def _plan(self, offset: Offset, limit: Limit) -> tuple[Offset, list[Piece], Offset]:
        reached = await self._feed.reach(offset, limit)
        pieces = await self._feed.pieces(offset, reached, Wanted())
        return reached, pieces, await self._feed.reach(offset, Limit())

    def _judged(self, pieces: Sequence[Piece]) -> DataFrame:
        shares = shared_out(pieces, cores_of(self._spark))
        asked = [(msgspec.json.encode(share).decode(),) for share in shares]
        frame = self._spark.createDataFrame(asked, "works string").coalesce(1).repartition(len(asked))
        rows = in_arrow(frame, decoding(self._context.settings, self._made), schema(self._made))
        lineage = [*LINEAGE, *FATE]
        read = silver.cast(rows, self._made.contract, self._types, lineage).drop("_row")
        told = F.when(F.col("_problem").isNotNull(), F.array("_problem")).otherwise(F.col(silver.REASONS))
        return silver.checked(read, self._made.contract).withColumn(silver.REASONS, told)

    def _counted(self, rows: DataFrame, objects: int) -> IngestReport:
        bad = F.size(silver.REASONS) > 0
        counted = rows.agg(F.sum("_rows"), F.sum(F.when(bad, F.col("_rows")).otherwise(F.lit(0)))).first()
        total, aside = (counted[0] or 0, counted[1] or 0) if counted else (0, 0)
        keys = rows.filter(F.col("_key").isNotNull()).select("_key").limit(UNREADABLE_MAX).collect() if aside else []
        return IngestReport(
            table=self.table.spec.name,
            objects=objects,
            rows_in=total,
            good=total - aside,
            quarantined=aside,
            unreadable=tuple(row["_key"] for row in keys),
        )

    def _aside(self, rows: DataFrame) -> DataFrame:
        now = datetime.fromtimestamp(self._context.clock.now_ns() / 1e9, UTC)
        place = F.concat_ws("/", F.lit(self._made.topic), F.col("_partition"), F.col("_offset"))
        return rows.filter(F.size(silver.REASONS) > 0).select(
            F.coalesce("_key", place).alias("key"),
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
                    hint="give the column another name, or the table",
                )

    def _open(self, spec: TableSpec) -> Table:
        context = self._context
        location = Location.of(context.settings.of(StoreSettings))
        return Table(self._spark, spec, store=context.store, location=location, clock=context.clock, ids=context.ids)
