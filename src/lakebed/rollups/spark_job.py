"""Rollups as a Spark job: executors read batches and add them up, a shuffle brings each metric's rows of an hour
together, and executors store the chunks.

What travels through Java are Arrow tables as bytes, one for each task, span of time and metric, so no row is ever
turned into one of Java's. What was read stays in Spark between `read` and `write`; should an executor lose its share,
Spark reads it again, and a batch that has become unreadable then fails the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel

from lakebed.core.errors import Conflict, Unavailable
from lakebed.core.settings import Settings
from lakebed.rollups.aggregate import EncodedChunk, chunks, noted, split
from lakebed.rollups.codec.chunk import ipc_bytes, ipc_table
from lakebed.rollups.model import RollupInput, RollupInputReport, StoredChunk
from lakebed.spark.lineage import Dataset, Lineage
from lakebed.spark.session import open_session, parallelism
from lakebed.spark.settings import SparkSettings
from lakebed.spark.tasks import in_arrow, line_of
from lakebed.store.protocol import Store
from lakebed.wiring.context import make_context

TASKS_PER_CORE = 3  # so that one slow task does not hold up the others
STORING_PER_CORE = 2  # likewise; such a task waits for the bucket as much as it works
BATCHES_PER_TASK_MIN = 8
BYTES_AT_ONCE = 16 * 1024 * 1024  # of partial rows that are made into chunks together
CONFLICT = "exists with other bytes"
ROWS, REPORTS, STORED, NOTED = 0, 1, 2, 3  # what a row of the job is

# Rows of the job: what they are, of which span and metric, and their bytes.
SCHEMA = "kind tinyint, span bigint, metric string, data binary"

Reading = Callable[[Store, Sequence[RollupInput], Sequence[int]], AsyncIterator[tuple[list[RollupInputReport], Any]]]
Storing = Callable[[Store, str, Iterator[EncodedChunk]], Awaitable[list[StoredChunk]]]
Indexing = Callable[[Store, str, Sequence[RollupInputReport], dict[int, list[Any]]], Awaitable[list[StoredChunk]]]


class SparkJob:
    """The engine of a roller, on Spark. How batches are read and chunks stored is passed in."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        reading: Reading,
        storing: Storing,
        indexing: Indexing,
        lineage: Lineage,
        spark: SparkSession | None = None,
    ) -> None:
        self._settings, self._store, self._given = settings, store, spark
        self._reading, self._storing, self._indexing, self._lineage = reading, storing, indexing, lineage
        self._frame: DataFrame | None = None
        self._reports: list[RollupInputReport] = []
        self._windows_s: tuple[int, ...] = ()

    async def read(self, inputs: list[RollupInput], windows_s: tuple[int, ...]) -> list[RollupInputReport]:
        await self.close()
        self._windows_s = windows_s
        with self._lineage.job("rollups/read", polls=True):  # reported when it fails; the write reports the rest
            self._reports = await asyncio.to_thread(self._read, inputs)
        return self._reports

    async def write(self, generation_id: str) -> list[StoredChunk]:
        read = Dataset("accepted/v1", rows=sum(each.samples for each in self._reports))
        with self._lineage.job("rollup", inputs=[read]) as run:
            stored, series = await asyncio.to_thread(self._write, generation_id)
            stored += await self._indexing(self._store, generation_id, self._reports, series)
            run.wrote("rollup/v1", version=int(generation_id.split("-")[0]), rows=sum(each.rows for each in stored))
        return stored

    async def close(self) -> None:
        frame, self._frame, self._reports = self._frame, None, []
        if frame is not None:
            await asyncio.to_thread(frame.unpersist)

    def _read(self, inputs: list[RollupInput]) -> list[RollupInputReport]:
        spark = self._spark()
        cores = parallelism(spark)
        count = max(1, min(cores * TASKS_PER_CORE, len(inputs) // BATCHES_PER_TASK_MIN))
        shares = [inputs[at::count] for at in range(count)]
        task = reading(self._settings, shares, self._windows_s, self._reading)
        self._frame = in_arrow(spark.range(0, count, 1, count), task, SCHEMA).persist(StorageLevel.MEMORY_AND_DISK)
        reports = _run(lambda: self._kept().where(f"kind = {REPORTS}").select("data").collect())
        return sorted(
            (each for row in reports for each in msgspec.json.decode(bytes(row["data"]), type=list[RollupInputReport])),
            key=lambda each: each.number,
        )

    def _write(self, generation_id: str) -> tuple[list[StoredChunk], dict[int, list[Any]]]:
        spark = self._spark()
        count = parallelism(spark) * STORING_PER_CORE
        task = writing(self._settings, generation_id, self._windows_s, self._storing)
        rows = self._kept().where(f"kind = {ROWS}").repartition(count, "span", "metric")
        found = _run(lambda: in_arrow(rows, task, SCHEMA).collect())
        stored: list[StoredChunk] = []
        series: dict[int, list[Any]] = {}
        for row in found:
            if row["kind"] == STORED:
                stored += msgspec.json.decode(bytes(row["data"]), type=list[StoredChunk])
            else:
                series.setdefault(row["span"], []).append(ipc_table(bytes(row["data"])))
        return stored, series

    def _spark(self) -> SparkSession:
        return self._given or open_session(self._settings.of(SparkSettings))

    def _kept(self) -> DataFrame:
        assert self._frame is not None
        return self._frame


def reading(settings: Settings, shares: Sequence[list[RollupInput]], windows_s: tuple[int, ...], read: Reading) -> Any:
    """The task that reads: its input is the number of its share, its output input reports and partial rows."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        store = make_context(settings, role="spark").store
        for batch in batches:
            for share in batch["id"].to_pylist():
                for reports, table in _each(read(store, shares[share], windows_s)):
                    rows = [(REPORTS, 0, "", msgspec.json.encode(reports))]
                    if table is not None:
                        rows += [(ROWS, span, metric, ipc_bytes(part)) for span, metric, part in split(table)]
                    yield _batch(rows)

    return run


def writing(settings: Settings, generation_id: str, windows_s: tuple[int, ...], store_all: Storing) -> Any:
    """The task that stores chunks: its input is partial rows, all there are of their spans and metrics."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        store = make_context(settings, role="spark").store
        held: dict[tuple[int, str], list[Any]] = {}
        for batch in batches:
            for span, metric, data in zip(
                *(batch[name].to_pylist() for name in ("span", "metric", "data")), strict=True
            ):
                held.setdefault((span, metric), []).append(ipc_table(data))
        tables = list(gathered([pa.concat_tables(parts) for _, parts in sorted(held.items())]))
        # One storing of all chunks, so that many are on their way at once while others are made.
        made = (chunk for table in tables for chunk in chunks(table, windows_s))
        stored = asyncio.run(_awaited(store_all(store, generation_id, made)))
        rows = [(STORED, 0, "", msgspec.json.encode(stored))]
        rows += [(NOTED, hour, "", ipc_bytes(found)) for table in tables for hour, found in noted(table).items()]
        yield _batch(rows)

    return run


def gathered(tables: Sequence[Any]) -> Iterator[Any]:
    """The tables in order, several as one: arithmetic costs by the call as well as by the row, memory by the row."""
    import pyarrow as pa

    some: list[Any] = []
    for table in tables:
        some.append(table)
        if sum(each.nbytes for each in some) >= BYTES_AT_ONCE:
            yield pa.concat_tables(some)
            some = []
    if some:
        yield pa.concat_tables(some)


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def _each(found: AsyncIterator[Any]) -> Iterator[Any]:
    """What an async iterator gives, in an executor, which has no event loop of its own."""
    loop = asyncio.new_event_loop()
    try:
        while (one := loop.run_until_complete(anext(found, None))) is not None:
            yield one
    finally:
        loop.close()


def _batch(rows: list[tuple[int, int, str, bytes]]) -> Any:
    import pyarrow as pa

    kinds, spans, metrics, data = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(kinds, pa.int8()), pa.array(spans, pa.int64()), pa.array(metrics), pa.array(data, pa.binary())],
        names=["kind", "span", "metric", "data"],
    )


def _run(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except PySparkException as error:
        if CONFLICT in str(error):
            raise Conflict(f"a chunk {CONFLICT}", hint="the generation is computed again") from error
        raise Unavailable(f"Spark could not finish the rollup: {line_of(error)}", retry_after_s=5.0) from error
