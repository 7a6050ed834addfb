"""`lakebed bench tables`: appends, reads, upserts and lookups of tables, beside other engines on the same rows.

Appends and reads are compared with Spark's own Parquet on local disk, upserts with delta-rs on the same bucket.
Lakebed's side includes the bucket and the commit. In a session with Delta's jars, delta-spark takes part too, and so
does Spark's own Parquet reader on the same bucket. Contenders take turns.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_least, at_most, measured, rounds_of
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt
from lakebed.delta.model import TableSpec
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings

ROWS, ROWS_QUICK = 4_000_000, 400_000
LOOKUP_ROWS, LOOKUP_ROWS_QUICK = 6_000_000, 600_000
LOOKUP = (7, 11)  # keys a lookup reads: every so many-th, so many of them
UPSERTED = 10_000
ROUNDS = 3
APPEND_BAR, NARROW_BAR, WIDE_BAR = 0.9, 0.8, 0.6  # of Spark's own Parquet, rows a second
DELTA_RS_BAR, DELTA_SPARK_BAR = 1.0, 0.2  # of their time
GROWTH_BAR = 1.3  # time of an upsert into recent keys: of a table four times as large ÷ of the table
LOOKUP_BAR_S = 0.5
COLUMNS = (
    "id",
    "concat('customer-', id % 50000) AS customer",
    "concat('product-', pmod(hash(id), 2000)) AS product",
    "cast(pmod(hash(id, 1), 100000) AS double) / 100 AS amount",
    "cast(pmod(hash(id, 2), 40) AS int) AS quantity",
    "timestamp_seconds(1700000000 + id div 10) AS at",
    "date_add(date'2026-01-01', cast(id div 100000 AS int)) AS day",
    "pmod(hash(id, 3), 2) = 0 AS paid",
    *(f"cast(pmod(hash(id, {n}), 1000000) AS double) AS measure_{n}" for n in range(4)),
    *(f"cast(pmod(hash(id, {n + 10}), 1000) AS bigint) AS count_{n}" for n in range(4)),
)
NARROW = ("customer", "amount")


class TablesBench:
    """The tables of one run, under a prefix of their own."""

    def __init__(self, env: BenchEnvironment, context: Context, folder: Path) -> None:
        from lakebed.spark import register
        from lakebed.spark.location import Location
        from lakebed.spark.session import open_session

        self.env, self.context, self.folder, self.clock = env, context, folder, context.clock
        self.spark = open_session(env.settings.of(SparkSettings))
        register(self.spark, context.settings)
        self.location = Location.of(context.settings.of(StoreSettings))
        self.rows = ROWS_QUICK if env.quick else ROWS
        self.turn = 0

    def frame(self, start: int, stop: int, parts: int = 8) -> Any:
        return self.spark.range(start, stop, numPartitions=parts).selectExpr(*COLUMNS)

    def table(self, name: str) -> Any:
        from lakebed.pipeline.tables.table import Table

        spec = TableSpec(f"bench/{name}", self.frame(0, 1).schema.json(), keys=("id",))
        return Table(self.spark, spec, self.context, location=self.location)

    def seconds(self, work: Callable[[], Any]) -> float:
        began = self.clock.monotonic_s()
        work()
        return self.clock.monotonic_s() - began

    def fresh(self) -> str:
        return self.context.ids.token()

    # Appends and reads, in rows a second

    def append(self) -> float:
        table = self.table(self.fresh())
        took = self.seconds(lambda: table.append(self.frame(0, self.rows)))
        if table.snapshot().rows != self.rows:
            raise Corrupt(f"{self.rows} rows were appended, and {table.snapshot().rows} are there")
        return self.rows / took

    def write_parquet(self) -> float:
        to = str(self.folder / self.fresh())
        return self.rows / self.seconds(lambda: self.frame(0, self.rows).write.parquet(to))

    def read(self, columns: Sequence[str]) -> float:
        reader = self.spark.read.format("lakebed.table")
        if columns:
            reader = reader.option("columns", ",".join(columns))
        frame = reader.load("bench/read")  # finding the schema is not part of the read, for none of them
        return self.rows / self.seconds(lambda: _consume(frame))

    def read_parquet(self, columns: Sequence[str]) -> float:
        frame = self.spark.read.parquet(str(self.folder / "read"))
        return self.rows / self.seconds(lambda: _consume(frame.select(*columns) if columns else frame))

    def read_native(self, columns: Sequence[str]) -> float:
        uri = self.location.uri("tables/bench/read").replace("s3://", "s3a://", 1)
        frame = self.spark.read.format("delta").load(uri)
        return self.rows / self.seconds(lambda: _consume(frame.select(*columns) if columns else frame))

    def read_parquet_in_bucket(self, columns: Sequence[str]) -> float:
        """Spark's own Parquet reader on the very files of the table, through Hadoop's S3 client."""
        root = self.location.uri("tables/bench/read").replace("s3://", "s3a://", 1)
        frame = self.spark.read.parquet(*[f"{root}/{file.path}" for file in self.table("read").snapshot().files])
        return self.rows / self.seconds(lambda: _consume(frame.select(*columns) if columns else frame))

    # Upserts, in seconds

    def random_keys(self) -> Any:
        """As many random keys of the table, others in each round; the values are new."""
        self.turn += 1
        step = max(1, self.rows // UPSERTED)
        keys = self.spark.range(0, self.rows, step, numPartitions=2).selectExpr(
            f"(id * 7919 + {self.turn * 13}) % {self.rows} AS id"
        )
        return keys.distinct().selectExpr(*COLUMNS)

    def upsert(self) -> float:
        return self._upserted(self.table("upserted"), self.random_keys())

    def _upserted(self, table: Any, frame: Any) -> float:
        """The time from rows in memory, as the other engines get them."""
        rows = frame.cache()
        rows.count()
        try:
            return self.seconds(lambda: table.upsert(rows))
        finally:
            rows.unpersist()

    def merge_delta_rs(self) -> float:
        from deltalake import DeltaTable

        arrow = self.random_keys().toArrow()

        def merge() -> None:
            table = DeltaTable(
                self.location.uri("tables/bench/delta-rs"), storage_options=self.location.storage_options()
            )
            found = table.merge(arrow, "t.id = s.id", source_alias="s", target_alias="t", streamed_exec=False)
            found.when_matched_update_all().when_not_matched_insert_all().execute()

        return self.seconds(merge)

    def merge_delta_spark(self) -> float:
        uri = self.location.uri("tables/bench/delta-spark").replace("s3://", "s3a://", 1)
        rows = self.random_keys().cache()
        rows.count()
        rows.createOrReplaceTempView("bench_coming")
        text = f"MERGE INTO delta.`{uri}` t USING bench_coming s ON t.id = s.id WHEN MATCHED THEN UPDATE SET * "
        text += "WHEN NOT MATCHED THEN INSERT *"
        return self.seconds(lambda: self.spark.sql(text).collect())

    def upsert_recent(self, name: str, rows: int) -> float:
        return self._upserted(self.table(name), self.frame(rows - UPSERTED, rows, 2))

    # Lookups, in seconds

    def lookup(self) -> float:
        from lakebed.delta.predicate import Comparison, Predicate
        from lakebed.pipeline.tables.scan import scan

        table = self.table("looked-up")  # knows nothing yet: opening it is part of the lookup
        wanted = Predicate((Comparison("id", "in", self.looked_up),))
        found: list[Any] = []

        def look() -> None:
            found.append(scan(self.location, table.spec.root, table.snapshot(), predicate=wanted))

        took = self.seconds(look)
        if found[0].num_rows != len(self.looked_up):
            raise Corrupt(f"{len(self.looked_up)} rows were looked up, and {found[0].num_rows} came")
        return took

    def lookup_spark(self) -> float:
        frame = self.spark.read.format("lakebed.table").load("bench/looked-up")
        keys = ", ".join(map(str, self.looked_up))
        return self.seconds(lambda: frame.filter(f"id in ({keys})").collect())

    @property
    def looked_up(self) -> tuple[int, ...]:
        rows = LOOKUP_ROWS_QUICK if self.env.quick else LOOKUP_ROWS
        return tuple(rows // 2 + LOOKUP[0] * n for n in range(LOOKUP[1]))


async def bench(env: BenchEnvironment) -> Sequence[Check]:
    folder = Path(tempfile.mkdtemp(prefix="lakebed-bench-"))
    try:
        with_spark = await asyncio.to_thread(TablesBench, env, env.apart(), folder)
        return [*await _throughput(with_spark), *await _upserts(with_spark), *await _lookups(with_spark)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _throughput(bench: TablesBench) -> list[Check]:
    from lakebed.spark.native import has_delta, use_bucket

    bench.env.report(f"Writing {bench.rows} rows, then reading them, in turn with Spark's own Parquet")
    await asyncio.to_thread(lambda: bench.table("read").append(bench.frame(0, bench.rows)))
    await asyncio.to_thread(lambda: bench.frame(0, bench.rows).write.parquet(str(bench.folder / "read")))
    contenders: dict[str, Callable[[], float]] = {
        "append": bench.append,
        "append parquet": bench.write_parquet,
        "narrow": lambda: bench.read(NARROW),
        "narrow parquet": lambda: bench.read_parquet(NARROW),
        "wide": lambda: bench.read(()),
        "wide parquet": lambda: bench.read_parquet(()),
    }
    native = await asyncio.to_thread(has_delta, bench.spark)
    if native:
        use_bucket(bench.spark, bench.location)
        contenders |= {
            "narrow native": lambda: bench.read_native(NARROW),
            "narrow parquet, bucket": lambda: bench.read_parquet_in_bucket(NARROW),
            "wide native": lambda: bench.read_native(()),
            "wide parquet, bucket": lambda: bench.read_parquet_in_bucket(()),
        }
    else:
        bench.env.report("Delta's own reader is not measured: spark.conf names no Delta jars (docs/parts/tables.md)")
    rates = await _rounds(contenders)
    checks = [measured(f"{name}, {bench.rows} rows", rates[name], "rows/s") for name in contenders]
    checks += [
        at_least("append ÷ Spark's own Parquet write", rates["append"], rates["append parquet"], APPEND_BAR),
        at_least(
            "read of two columns ÷ Spark's own Parquet read", rates["narrow"], rates["narrow parquet"], NARROW_BAR
        ),
        at_least("read of all columns ÷ Spark's own Parquet read", rates["wide"], rates["wide parquet"], WIDE_BAR),
    ]
    for name, what, bar in (("narrow", "two columns", NARROW_BAR), ("wide", "all columns", WIDE_BAR)) if native else ():
        local, bucket = rates[f"{name} parquet"], rates[f"{name} parquet, bucket"]
        checks += [
            at_least(f"Delta's own reader of {what} ÷ Spark's own Parquet read", rates[f"{name} native"], local, bar),
            at_least(f"read of {what} ÷ Spark's own Parquet read of the same bucket", rates[name], bucket, bar),
        ]
    return checks


async def _upserts(bench: TablesBench) -> list[Check]:
    from lakebed.spark.native import has_delta

    bench.env.report(f"Upserting {UPSERTED} keys into {bench.rows} rows, in turn with other engines")
    native = await asyncio.to_thread(has_delta, bench.spark)
    await asyncio.to_thread(_prepare, bench, native)
    contenders: dict[str, Callable[[], float]] = {
        "upsert": bench.upsert,
        "delta-rs": bench.merge_delta_rs,
        "recent": lambda: bench.upsert_recent("recent", bench.rows // 4),
        "recent, four times the rows": lambda: bench.upsert_recent("recent-large", bench.rows),
    }
    if native:
        contenders["delta-spark"] = bench.merge_delta_spark
    for name in contenders:
        await asyncio.to_thread(contenders[name])  # warm
    times = await _rounds(contenders)
    checks = [measured(f"upsert of {UPSERTED} rows: {name}", times[name], "s") for name in contenders]
    checks += [
        at_most("upsert of random keys ÷ delta-rs merge, time", times["upsert"], times["delta-rs"], DELTA_RS_BAR),
        at_most(
            "upsert of recent keys: four times the rows ÷ the rows, time",
            times["recent, four times the rows"],
            times["recent"],
            GROWTH_BAR,
        ),
    ]
    if native:
        checks.append(
            at_most(
                "upsert of random keys ÷ delta-spark MERGE, time",
                times["upsert"],
                times["delta-spark"],
                DELTA_SPARK_BAR,
            )
        )
    else:
        bench.env.report("delta-spark is not measured: spark.conf names no Delta jars")
    return checks


def _prepare(bench: TablesBench, native: bool) -> None:
    from deltalake import write_deltalake

    bench.table("upserted").append(bench.frame(0, bench.rows))
    bench.table("recent").append(bench.frame(0, bench.rows // 4, 2))
    bench.table("recent-large").append(bench.frame(0, bench.rows))
    for start in range(0, bench.rows, ROWS_QUICK):  # in parts: all rows at once are more than Java's memory may hold
        write_deltalake(
            bench.location.uri("tables/bench/delta-rs"),
            bench.frame(start, min(start + ROWS_QUICK, bench.rows)).toArrow(),
            mode="append",
            storage_options=bench.location.storage_options(),
            target_file_size=16 * 1024 * 1024,
        )
    if native:
        uri = bench.location.uri("tables/bench/delta-spark").replace("s3://", "s3a://", 1)
        bench.frame(0, bench.rows).write.format("delta").save(uri)


async def _lookups(bench: TablesBench) -> list[Check]:
    rows = LOOKUP_ROWS_QUICK if bench.env.quick else LOOKUP_ROWS
    bench.env.report(f"Looking up {LOOKUP[1]} rows by key in {rows}")
    await asyncio.to_thread(lambda: bench.table("looked-up").append(bench.frame(0, rows)))
    for work in (bench.lookup, bench.lookup_spark):
        await asyncio.to_thread(work)
    times = await _rounds({"Python": bench.lookup, "Spark": bench.lookup_spark})
    return [_under(f"{LOOKUP[1]} rows by key from {rows}, {name}", times[name], LOOKUP_BAR_S) for name in times]


def _under(name: str, values: Sequence[float], bar_s: float) -> Check:
    found = measured(name, values, "s")
    return Check(name, found.value, "s", bar_s, found.value <= bar_s, found.spread)


async def _rounds(contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    def in_thread(work: Callable[[], float]) -> Contender:
        return lambda: asyncio.to_thread(work)

    return await rounds_of(ROUNDS, {name: in_thread(work) for name, work in contenders.items()})


def _consume(frame: Any) -> None:
    """Reads every row and column, and keeps nothing."""
    frame.write.format("noop").mode("overwrite").save()
