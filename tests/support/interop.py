"""Engines on one table, and the model they are compared with.

Every engine reads the whole table and changes it by its own means. The model is a dictionary in plain Python, and one
for each version, so that a restore is known too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.errors import LakebedError
from lakebed.core.ids import Ids
from lakebed.delta import cleanup, history, vacuum
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.pipeline.tables.table import Table
from support.delta_tables import Folder
from support.folder_store import folder_store
from support.runtimes import runtime_on

ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("p", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("note", pa.string()),
        ("value", pa.decimal128(20, 4)),
        ("tags", pa.list_(pa.string())),
    ]
)
NAMES = list(ARROW.names)
PARTITIONS = ("plain", "a b", "x/y", "ü%20", "c:d", None)
PROPERTIES = {"delta.checkpointInterval": "5", "delta.logRetentionDuration": "interval 1 seconds"}
BEGIN = datetime(2026, 11, 16, 12, tzinfo=UTC)

KINDS = ("append", "upsert", "delete", "retire", "optimize", "vacuum", "clean", "restore")

Row = dict[str, Any]
Model = dict[int, Row]


def row(dice: Random, number: int) -> Row:
    text = dice.choice(["short", "k" * 300 + str(number), "ü" * 40, None])
    tags = dice.choice([None, [], ["a", None], ["b"]])
    at = BEGIN + timedelta(seconds=number, microseconds=dice.randrange(1_000_000))
    value = round(dice.uniform(-1e6, 1e6) * 10_000)
    return {
        "id": number,
        "p": dice.choice(PARTITIONS),
        "at": dice.choice([at, at, None]),
        "note": text,
        "value": None if value % 7 == 0 else Decimal(value).scaleb(-4),
        "tags": tags,
    }


def arrow(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=ARROW)


def plain(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows as values that compare, in order of their ids."""
    return sorted((tuple(str(each[name]) for name in NAMES) for each in rows), key=lambda one: int(one[0]))


class SharedTable:
    """The table in a folder, with every engine's own way to it."""

    def __init__(self, folder: Path, spark: SparkSession, *, partitioned: bool) -> None:
        self.spark, self.clock = spark, SystemClock()
        self.store = folder_store(folder, self.clock)
        by = ("p",) if partitioned else ()
        self.spec = TableSpec("shared", from_arrow_schema(ARROW).json(), keys=("id",), partition_by=by)
        self.uri = str(folder / self.spec.root)
        self.location = Folder.at(folder)
        DeltaTable.create(
            self.uri,
            deltalake.Schema.from_json(self.spec.schema_json),
            partition_by=list(by),
            configuration={**PROPERTIES, "lakebed.keys": "id"},
            raise_if_key_not_exists=False,
        )

    def theirs(self) -> DeltaTable:
        return DeltaTable(self.uri)

    def state(self, version: int | None = None) -> Snapshot:
        return asyncio.run(history.snapshot(self.store, self.spec.root, version=version))

    def ours(self) -> Table:
        runtime = runtime_on(self.store, self.clock, Ids())
        return Table(self.spark, self.spec, runtime, location=self.location)

    def later(self, days: float) -> ManualClock:
        return ManualClock(self.clock.now_ns() + int(days * 86_400e9))

    # Readers: every engine reads all rows.

    def read_by_delta_rs(self) -> list[Row]:
        return self.theirs().to_pyarrow_table().to_pylist()

    def read_by_delta_rs_query(self) -> list[Row]:
        found = QueryBuilder().register("t", self.theirs()).execute("select * from t")
        return pa.table(found.read_all()).cast(ARROW).to_pylist()

    def read_by_polars(self) -> list[Row]:
        return pl.scan_delta(self.uri).collect().to_arrow().cast(ARROW).to_pylist()

    def read_by_duckdb(self) -> list[Row]:
        rows = self.theirs().to_pyarrow_dataset()
        found = duckdb.sql("select * from rows").to_arrow_table().cast(ARROW)
        assert rows is not None
        return found.to_pylist()

    def read_by_lakebed(self) -> list[Row]:
        return self.ours().read().select(*NAMES).toArrow().cast(ARROW).to_pylist()

    def read_by_delta_spark(self) -> list[Row]:
        return self.spark.read.format("delta").load(self.uri).select(*NAMES).toArrow().cast(ARROW).to_pylist()

    # Writers.

    def append_by_delta_rs(self, rows: list[Row]) -> None:
        deltalake.write_deltalake(self.uri, arrow(rows), mode="append")

    def append_by_polars(self, rows: list[Row]) -> None:
        pl.DataFrame(arrow(rows)).write_delta(self.uri, mode="append")

    def append_by_duckdb(self, rows: list[Row]) -> None:
        coming = arrow(rows)
        made = duckdb.sql("select * from coming").to_arrow_table().cast(coming.schema)
        deltalake.write_deltalake(self.uri, made, mode="append")

    def append_by_lakebed(self, rows: list[Row]) -> None:
        self.ours().append(self.spark.createDataFrame(arrow(rows)))

    def append_by_delta_spark(self, rows: list[Row]) -> None:
        self.spark.createDataFrame(arrow(rows)).write.format("delta").mode("append").save(self.uri)

    def upsert_by_delta_rs(self, rows: list[Row]) -> None:
        merger = self.theirs().merge(arrow(rows), "t.id = s.id", source_alias="s", target_alias="t")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def upsert_by_polars(self, rows: list[Row]) -> None:
        options = {"predicate": "t.id = s.id", "source_alias": "s", "target_alias": "t"}
        merger = pl.DataFrame(arrow(rows)).write_delta(self.uri, mode="merge", delta_merge_options=options)
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def upsert_by_lakebed(self, rows: list[Row]) -> None:
        self.ours().upsert(self.spark.createDataFrame(arrow(rows)))

    def upsert_by_delta_spark(self, rows: list[Row]) -> None:
        self.spark.createDataFrame(arrow(rows)).createOrReplaceTempView("coming")
        self.spark.sql(
            f"merge into delta.`{self.uri}` t using coming s on t.id = s.id "
            "when matched then update set * when not matched then insert *"
        ).collect()

    def delete_by_delta_rs(self, below: int) -> None:
        self.theirs().delete(f"id < {below}")

    def delete_by_delta_spark(self, below: int) -> None:
        self.spark.sql(f"delete from delta.`{self.uri}` where id < {below}").collect()

    def delete_by_lakebed(self, below: int) -> None:
        self.ours().delete(f"id < {below}")

    def retire_by_lakebed(self, below: int) -> None:
        """What retention does: rows without a moment stay."""
        self.ours().remove_before("at", BEGIN + timedelta(seconds=below))

    # Upkeep: rows stay.

    def optimize_by_delta_rs(self) -> None:
        self.theirs().optimize.compact()

    def optimize_by_delta_spark(self) -> None:
        self.spark.sql(f"optimize delta.`{self.uri}`").collect()

    def optimize_by_lakebed(self) -> None:
        self.ours().compact()

    def vacuum_by_delta_rs(self) -> None:
        self.theirs().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def vacuum_by_delta_spark(self) -> None:
        self.spark.sql(f"vacuum delta.`{self.uri}` retain 0 hours").collect()

    def vacuum_by_lakebed(self) -> None:
        asyncio.run(vacuum.sweep(self.store, self.spec.root, clock=self.later(8)))

    def clean_by_delta_rs(self) -> None:
        table = self.theirs()
        table.create_checkpoint()
        table.cleanup_metadata()

    def clean_by_lakebed(self) -> None:
        asyncio.run(history.checkpointed(self.store, self.spec.root, self.state()))
        asyncio.run(cleanup.clean(self.store, self.spec.root, clock=self.later(1)))

    def clean_by_delta_spark(self) -> None:
        jvm: Any = self.spark._jvm
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(self.spark._jsparkSession, self.uri)
        log.checkpoint()

    def restore_by_delta_rs(self, version: int) -> None:
        self.theirs().restore(version)

    def restore_by_delta_spark(self, version: int) -> None:
        self.spark.sql(f"restore table delta.`{self.uri}` to version as of {version}").collect()


class RandomWork:
    """A sequence of operations, by seed or each once. Each of `readers` reads after every one, and finds the model."""

    def __init__(self, table: SharedTable, seed: int, engines: tuple[str, ...], readers: tuple[str, ...]) -> None:
        self.table, self.dice, self.engines, self.readers = table, Random(seed), engines, readers
        self.model: Model = {}
        self.models: dict[int, Model] = {}  # by version, as long as its files are there
        self.done: list[str] = []
        self.next = 0

    def run(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        kind = self.dice.choice(["append", "upsert", *KINDS]) if self.model else "append"
        if kind == "restore" and not self._restorable():
            kind = "append"
        self.do(kind, self.dice.choice([name for name in self.engines if self.knows(name, kind)]))

    def tour(self, engine: str) -> None:
        """Everything that this engine can do; after each of it, every other one upserts."""
        for kind in (kind for kind in KINDS if self.knows(engine, kind)):
            self.do(kind, engine)
            for other in self.engines:
                if other != engine and self.knows(other, "upsert"):
                    self.do("upsert", other)

    def knows(self, engine: str, kind: str) -> bool:
        return hasattr(self.table, f"{kind}_by_{engine}")

    def do(self, kind: str, engine: str) -> None:
        work = getattr(self.table, f"{kind}_by_{engine}")
        self.done.append(f"{kind} by {engine}")
        getattr(self, f"_{kind}")(work)
        self.models[self.table.state().version] = dict(self.model)
        self.check(self.readers)

    def check(self, readers: tuple[str, ...]) -> None:
        wanted = plain(list(self.model.values()))
        for reader in readers:
            found = plain(getattr(self.table, f"read_by_{reader}")())
            assert wanted == found, f"{reader} after {self.done}: {_difference(wanted, found)}"
        assert len(wanted) == self.table.state().rows, f"rows in the log after {self.done}"

    def _append(self, work: Callable[[list[Row]], None]) -> None:
        rows = [row(self.dice, self.next + step) for step in range(self.dice.randrange(1, 12))]
        self.next += len(rows)
        work(rows)
        self.model |= {each["id"]: each for each in rows}

    def _upsert(self, work: Callable[[list[Row]], None]) -> None:
        ids = [*self.dice.sample(sorted(self.model), min(4, len(self.model))), self.next]
        self.next += 1
        rows = [row(self.dice, number) for number in ids]
        work(rows)
        self.model |= {each["id"]: each for each in rows}

    def _delete(self, work: Callable[[int], None]) -> None:
        below = self.dice.choice(sorted(self.model))
        work(below)
        self.model = {number: each for number, each in self.model.items() if number >= below}

    def _retire(self, work: Callable[[int], None]) -> None:
        below = self.dice.choice(sorted(self.model))
        work(below)
        moment = BEGIN + timedelta(seconds=below)
        self.model = {n: each for n, each in self.model.items() if each["at"] is None or each["at"] >= moment}

    def _optimize(self, work: Callable[[], None]) -> None:
        work()

    def _clean(self, work: Callable[[], None]) -> None:
        work()

    def _vacuum(self, work: Callable[[], None]) -> None:
        work()
        self.models.clear()

    def _restore(self, work: Callable[[int], None]) -> None:
        version = self.dice.choice(self._restorable())
        self.done[-1] += f" to {version}"
        work(version)
        self.model = dict(self.models[version])

    def _restorable(self) -> list[int]:
        now = self.table.state().version
        return [version for version in self.models if version < now and self._readable(version)]

    def _readable(self, version: int) -> bool:
        try:
            return self.table.state(version).version == version
        except LakebedError:
            return False


def _difference(wanted: list[tuple[Any, ...]], found: list[tuple[Any, ...]]) -> str:
    missing = [each for each in wanted if each not in found][:2]
    more = [each for each in found if each not in wanted][:2]
    return f"{len(found)} of {len(wanted)} rows; missing {missing}; more {more}"
