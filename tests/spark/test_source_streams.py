"""The sources as streams, and those of the log and the queue, through real Spark on the real bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import lakebed.spark
from lakebed.core.context import Context
from lakebed.core.settings import load
from lakebed.log.kafka_batch import KafkaRecord
from lakebed.pipeline.tables.sink import TableSink
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.accepted_batches import BatchesYard
from support.topic_records import LogYard


@pytest.fixture
def context(bucket_settings: StoreSettings, tmp_path: Path) -> Context:
    layer = {**bucket_settings.as_layer(), "meta.path": str(tmp_path / "meta.sqlite"), "log.compact_min_entries": 2}
    return make_context(load(sections(), stack=layer), role="test")


@pytest.fixture
def registered(spark: SparkSession, context: Context) -> Iterator[SparkSession]:
    lakebed.spark.register(spark, context.settings)
    yield spark


class Sink:
    """A table as a stream's end, and what its commits say that each micro-batch brought."""

    def __init__(self, spark: SparkSession, context: Context, columns: str) -> None:
        schema = spark.createDataFrame([], columns).schema
        self.write = TableSink(context.settings, "streamed/rows", schema, application="stream")
        self.table = self.write.table(spark)

    def drain(self, rows: DataFrame, checkpoint: Path) -> None:
        query = rows.writeStream.foreachBatch(self.write).option("checkpointLocation", str(checkpoint))
        started = query.trigger(availableNow=True).start()
        assert started.awaitTermination(300)
        if failed := started.exception():
            raise failed

    @property
    def sizes(self) -> list[int]:
        """Rows of each commit; a micro-batch that came again makes none."""
        return [change.rows_inserted for change in self.table.changes(-1, self.table.snapshot().version)]

    def seqs(self, column: str = "seq") -> list[int]:
        return sorted(row[column] for row in self.table.read().collect())


@pytest.mark.full
def test_available_now_drains_within_the_rate_and_stops(
    registered: SparkSession, context: Context, bucket: Store, tmp_path: Path
) -> None:
    """Micro-batches keep the limit; a sink that dies between its commit and the checkpoint gets nothing twice."""
    yard = BatchesYard(bucket)
    for n in range(5):
        yard.accept(n * 10, n * 10 + 9, at_s=n)
    rows = registered.readStream.format("lakebed.batches").options(settle_s=0, max_objects=2, columns="seq").load()
    sink = Sink(registered, context, "seq long")

    sink.drain(rows, tmp_path / "checkpoint")
    assert [20, 20, 10] == sink.sizes
    yard.accept(50, 59, at_s=60)
    sink.drain(rows, tmp_path / "checkpoint")
    for name in ("3", ".3.crc"):  # as if it had died between the table's commit and its own
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    sink.drain(rows, tmp_path / "checkpoint")

    assert [20, 20, 10, 10] == sink.sizes
    assert list(range(60)) == sink.seqs()


@pytest.mark.full
def test_a_topic_reads_by_offset_in_batch_and_as_a_stream(
    registered: SparkSession, context: Context, tmp_path: Path
) -> None:
    """Offset, time and value, over WAL and compacted blobs; filters and ranges prune; streams go on."""
    yard = LogYard(context)
    for n in range(3):
        yard.append("events", *(b"e%d" % (n * 3 + i) for i in range(3)))
    yard.append("events", b"other", partition=2)
    rows = registered.read.format("lakebed.topic").options(topic="events").load()

    found = rows.orderBy("partition", "offset").collect()
    assert [(0, n + 1, b"e%d" % n) for n in range(9)] + [(2, 1, b"other")] == [
        (row["partition"], row["offset"], bytes(row["value"])) for row in found
    ]
    assert {("events", None)} == {(row["topic"], row["key"]) for row in found}
    assert rows.filter("time > timestamp'2026-01-01' AND partition = 2").count() == 1
    assert rows.filter((F.col("offset") > 3) & (F.col("offset") <= 5)).count() == 2
    bounded = registered.read.format("lakebed.topic").options(topic="events", start='{"0": 8, "2": 2}').load()
    assert [8, 9] == sorted(row["offset"] for row in bounded.collect())
    stream = registered.readStream.format("lakebed.topic").options(topic="events", max_rows=4).load()
    sink = Sink(registered, context, "partition int, offset bigint")
    sink.drain(stream, tmp_path / "checkpoint")
    yard.compact("events")
    yard.append("events", b"late", partition=7)
    sink.drain(stream, tmp_path / "checkpoint")

    assert max(sink.sizes) <= 4
    assert 11 == sum(sink.sizes)
    assert [(0, n) for n in range(1, 10)] + [(2, 1), (7, 1)] == sorted(tuple(r) for r in sink.table.read().collect())


def test_a_topic_gives_the_key_headers_and_time_of_its_records(registered: SparkSession, context: Context) -> None:
    """Of Kafka clients' records, before and after a compaction; plain records beside them have neither."""
    yard = LogYard(context)
    yard.append("keyed", b"plain")
    yard.append_keyed("keyed", KafkaRecord(b"v", b"k", (("h", b"x"),), 1_767_225_600_000), KafkaRecord(None, b"gone"))

    def read() -> list[Any]:
        rows = registered.read.format("lakebed.topic").options(topic="keyed").load()
        shown = rows.orderBy("offset").select("offset", "key", "value", "headers", F.unix_millis("time").alias("ms"))
        return [
            (row.offset, row.key, row.value, [tuple(each) for each in row.headers or ()], row.ms)
            for row in shown.collect()
        ]

    before = read()
    yard.compact("keyed")

    assert [(1, None, b"plain", []), (2, b"k", b"v", [("h", b"x")]), (3, b"gone", None, [])] == [
        row[:4] for row in before
    ]
    assert 1_767_225_600_000 == before[1][4]
    assert before == read()


def test_a_queue_reads_by_sequence(registered: SparkSession, context: Context, tmp_path: Path) -> None:
    """Entries with their sequence and place, in batch and as a stream; nothing is claimed."""

    async def put(count: int) -> None:
        queue = Queue.of(context, "work")
        ingestor = queue.ingestor()
        for n in range(count):
            watcher = await ingestor.ingest([KeyValueEntry(b"k", b"v%d-%d" % (n, i)) for i in range(2)])
            await ingestor.flush()
            await watcher.await_durable()
        await ingestor.close()

    asyncio.run(put(3))
    rows = registered.read.format("lakebed.queue").options(queue="work").load()
    stream = registered.readStream.format("lakebed.queue").options(queue="work", max_objects=2).load()
    sink = Sink(registered, context, "sequence bigint, index int")

    sink.drain(stream, tmp_path / "checkpoint")
    found: list[Any] = rows.orderBy("sequence", "index").collect()

    assert [(n + 1, i, b"v%d-%d" % (n, i)) for n in range(3) for i in range(2)] == [
        (row["sequence"], row["index"], bytes(row["value"])) for row in found
    ]
    assert rows.filter("sequence = 2").count() == 2
    assert [4, 2] == sink.sizes
    assert 0 == asyncio.run(Queue.of(context, "work").status()).claimed
