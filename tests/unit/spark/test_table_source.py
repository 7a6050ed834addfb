"""`lakebed.table` without Spark: which filters are pushed, how files are shared out, what a write may change, what a
stream reads, and who reads a name in SQL.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThan, Not, StringStartsWith
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import DoubleType, IntegerType, LongType, StringType, StructField, StructType

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.core.settings import load
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.delta.predicate import Comparison
from lakebed.pipeline.tables import files, source, sql
from lakebed.pipeline.tables.source import FileTask, TableSource, TableStreamReader, file_tasks, predicate_of
from lakebed.pipeline.tables.sql import SqlTables
from lakebed.pipeline.tables.table import Table
from lakebed.pipeline.tables.writers import TableWriter, spec_of
from lakebed.spark.location import Location
from lakebed.spark.native import CATALOG, EXTENSION, S3A, delta_conf, has_delta
from lakebed.wiring.parts import sections
from support.delta_tables import Folder
from support.tick_fixtures import context_of

SCHEMA = schema_json((("id", "long"), ("note", "string"), ("x", "double"), ("at", "timestamp"), ("d", "decimal(5,2)")))


def test_filters_that_arrow_and_spark_decide_alike_are_pushed() -> None:
    """Others stay with Spark, which applies all of them anyway."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    filters = [
        EqualTo(("id",), 5),
        In(("note",), ["a", None]),
        LessThan(("at",), moment),
        GreaterThan(("d",), Decimal("1.50")),
        IsNotNull(("id",)),
        LessThan(("x",), 1.5),
        GreaterThan(("x",), 1.5),  # NaN is above every number in Spark, and above none in Arrow
        Not(EqualTo(("id",), 7)),
        StringStartsWith(("note",), "a"),
        EqualTo(("s", "inner"), 1),
        EqualTo(("id",), "no number"),
    ]

    assert (
        Comparison("id", "=", 5),
        Comparison("note", "in", ("a",)),
        Comparison("at", "<", moment),
        Comparison("d", ">", Decimal("1.50")),
        Comparison("id", "is not null"),
        Comparison("x", "<", 1.5),
    ) == predicate_of(filters, SCHEMA).terms


@pytest.mark.parametrize("sizes", [[], [1], [10] * 100, [500_000_000], [1, 900_000_000, 5, 64_000_000]])
@pytest.mark.parametrize("tasks", [0, 1, 7])
def test_every_part_of_every_file_is_read_by_exactly_one_task(sizes: list[int], tasks: int) -> None:
    """Small files share a task, large ones are read by several."""
    files = [DataFile(str(n), size, 1) for n, size in enumerate(sizes)]

    shared = [one for one in file_tasks(files, tasks) if isinstance(one, FileTask)]

    parts = [(file.path, number, of) for task in shared for file, number, of in task.parts]
    wanted = {path: of for path, _, of in parts}
    assert sorted((path, n, of) for path, of in wanted.items() for n in range(of)) == sorted(parts)
    assert {file.path for file in files} == wanted.keys()
    if sizes == [500_000_000]:
        assert len(shared) >= 7


def test_a_write_keeps_the_table_s_columns_and_adds_its_own() -> None:
    """Columns keep their order; keys and partitions are the table's, unless it is replaced."""
    state = Snapshot(3, schema_json((("id", "long"), ("note", "string"))), ("note",), keys=("id",))
    more, note = StructField("more", DoubleType()), StructField("note", StringType())
    rows = StructType([more, note, StructField("id", LongType())])

    appended = spec_of("t", state, rows, {})
    replaced = spec_of("t", state, rows, {"keys": "note", "partition_by": "more"}, overwrite=True)

    assert (["id", "note", "more"], ("id",), ("note",)) == (appended.columns, appended.keys, appended.partition_by)
    assert (["more", "note", "id"], ("note",), ("more",)) == (replaced.columns, replaced.keys, replaced.partition_by)
    assert appended == spec_of("t", state, StructType([more, note, StructField("id", IntegerType())]), {})  # narrower
    for wrong in ([StructField("id", LongType())], [StructField("id", StringType()), note]):
        with pytest.raises(Invalid, match=r"column '(note|id)' is"):
            spec_of("t", state, StructType(wrong), {})


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "no name"),
        ({"table": "t", "write": "merge"}, "none of append, upsert"),
        ({"table": "t", "colour": "red"}, "no option"),
    ],
)
def test_wrong_options_are_refused_when_a_read_is_defined(options: dict[str, str], wrong: str) -> None:
    """Before anything runs."""
    with pytest.raises(Invalid, match=wrong):
        TableSource(options)


def test_delta_is_configured_only_where_its_jars_are_named() -> None:
    """A session without them is as it was."""
    assert {} == delta_conf({"spark.jars.packages": "org.example:other:1.0"})
    wanted = {"spark.sql.extensions": EXTENSION, "spark.sql.catalog.spark_catalog": CATALOG}
    assert wanted == delta_conf({"spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0"})


class FakeSession:
    """A session that remembers how its frames are read; `classes` are those its JVM has."""

    def __init__(self, extensions: str, *classes: str) -> None:
        self.asked: list[Any] = []
        self.conf, self.read, self.catalog, self._jvm = self, self, self, self
        self.java, self.lang, self.Thread = self, self, self
        self._extensions, self._classes = extensions, classes

    def get(self, name: str, default: str = "") -> str:
        return self._extensions if name == "spark.sql.extensions" else default

    def currentThread(self) -> FakeSession:
        return self

    def getContextClassLoader(self) -> FakeSession:
        return self

    def loadClass(self, name: str) -> None:
        if name not in self._classes:
            raise Py4JError(f"there is no {name}")

    def __getattr__(self, name: str) -> Any:
        def said(*args: Any) -> FakeSession:
            self.asked.append((name, *args))
            return self

        return said

    def sql(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("extensions", "classes", "native"),
    [
        (EXTENSION, (CATALOG, S3A), True),
        (f"other.Extension,{EXTENSION}", (CATALOG, S3A), True),
        ("", (CATALOG, S3A), False),
        (EXTENSION, (CATALOG,), False),
        (EXTENSION, (), False),
    ],
)
def test_names_are_read_by_deltas_own_reader_where_the_session_has_it(
    monkeypatch: pytest.MonkeyPatch, extensions: str, classes: tuple[str, ...], native: bool
) -> None:
    """Chosen by itself: with Delta and Hadoop's S3 client, else `lakebed.table` with the columns of the statement."""
    spark: Any = FakeSession(extensions, *classes)
    context = context_of(clock=ManualClock())
    settings = load(sections(), flags={"store.url": "s3://lake"}, env={})
    spec = TableSpec("silver/acme/shop/or-d=e.rs", SCHEMA, keys=("id",))
    data = encode(Commit("WRITE", spec=spec, table_id="i"), attempt_id="a", now_ms=0)
    asyncio.run(context.store.create(log_key(spec.root, 0), data))
    given: list[Location] = []
    monkeypatch.setattr("lakebed.spark.register", lambda spark, settings: None)
    monkeypatch.setattr(sql, "make_context", lambda settings, role: context)
    monkeypatch.setattr(sql, "use_bucket", lambda spark, location: given.append(location))

    SqlTables(spark, settings).sql("select id from silver.shop.`or-d=e.rs`")

    (view,) = [one[1] for one in spark.asked if one[0] == "createOrReplaceTempView"]
    assert view.replace("_", "").isalnum()  # Spark takes no other name
    by = dict(one[:2] for one in spark.asked if one[0] in ("format", "load"))
    version = [one[2] for one in spark.asked if one[:2] == ("option", "versionAsOf" if native else "version")]
    chosen = [one[1].names for one in spark.asked if one[0] == "schema"]
    assert native == has_delta(spark)
    if native:
        assert {"format": "delta", "load": "s3a://lake/tables/silver/acme/shop/or-d=e.rs"} == by
        assert ([0], [], ["lake"]) == (version, chosen, [one.bucket for one in given])
    else:
        assert {"format": "lakebed.table", "load": "silver/acme/shop/or-d=e.rs"} == by
        assert ([0], [["id"]], []) == (version, chosen, given)


def test_views_of_earlier_statements_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same statement finds its view again, and a new one takes the place of the oldest; a refresh drops all."""
    spark: Any = FakeSession("")
    context = context_of(clock=ManualClock())
    for name in ("a", "b", "c"):
        spec = TableSpec(f"silver/acme/shop/{name}", SCHEMA)
        data = encode(Commit("WRITE", spec=spec, table_id="i"), attempt_id="a", now_ms=0)
        asyncio.run(context.store.create(log_key(spec.root, 0), data))
    monkeypatch.setattr("lakebed.spark.register", lambda spark, settings: None)
    monkeypatch.setattr(sql, "make_context", lambda settings, role: context)
    monkeypatch.setattr(sql, "VIEWS_MAX", 2)
    tables = SqlTables(spark, load(sections(), flags={"store.url": "s3://lake"}, env={}))

    def asked(word: str) -> list[str]:
        return [str(one[1]).split("_")[1] for one in spark.asked if one[0] == word]

    for name in ("a", "a", "b", "a", "c", "b", "a"):
        tables.sql(f"select id from silver.shop.{name}")
    made, dropped = asked("createOrReplaceTempView"), asked("dropTempView")
    tables.refresh()

    assert (["a", "b", "c", "a"], ["a", "b"]) == (made, dropped)
    assert ["a", "b", "c", "a"] == asked("dropTempView")


@pytest.mark.parametrize(
    ("options", "batch"),
    [({}, None), ({"application": "a", "batch": "0"}, ("a", 0)), ({"application": "a"}, ...), ({"batch": "7"}, ...)],
)
def test_a_write_is_idempotent_by_application_and_batch_or_not_at_all(options: dict[str, str], batch: Any) -> None:
    """One without the other would be written again with every repeat, and nobody would know."""
    applied: list[Any] = []
    writer = object.__new__(TableWriter)
    writer._source = TableSource({"table": "t", "store.url": "s3://lake", **options})
    writer.apply = lambda messages, batch: applied.append(batch)  # type: ignore[assignment, method-assign, return-value]

    if batch is ...:
        with pytest.raises(Invalid, match="belong together"):
            writer.commit([])
    else:
        writer.commit([])

    assert ([] if batch is ... else [batch and WriteBatch(*batch)]) == applied


class StreamedTable:
    """A table in a folder, written without Spark, and streams of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context, location = context_of(clock=ManualClock()), Folder.at(folder)
        self.spec = TableSpec("t", schema_json((("id", "long"),)), keys=("id",))
        self.table = Table(None, self.spec, self.context, location=location)  # type: ignore[arg-type]
        monkeypatch.setattr(source, "make_context", lambda settings, role: self.context)
        monkeypatch.setattr(source.Location, "of", lambda settings: location)

    def append(self, *ids: int) -> None:
        rows = pa.table({"id": pa.array(ids, pa.int64())})
        location = self.table.location
        self.table.append_files(files.write_files(rows, self.spec, location, location.filesystem()))

    def stream(self, **options: str) -> TableStreamReader:
        opened = TableSource({"table": "t", **options})
        return opened.streamReader(opened.schema())


def streamed(stream: TableStreamReader, after: int, until: int) -> list[tuple[Any, ...]]:
    tasks = stream.partitions({"version": after}, {"version": until})
    return sorted(tuple(row.values()) for task in tasks for batch in stream.read(task) for row in batch.to_pylist())


def test_a_stream_goes_from_version_to_version_and_reads_deletes_only_as_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the table as it is, then at most so many versions a batch; a run to the end has its end at its start."""
    world = StreamedTable(tmp_path, monkeypatch)
    for ids in ((1, 2, 3), (4,), (5, 6)):
        world.append(*ids)
    world.table.delete("id = 2")
    plain, changes = world.stream(max_versions="1"), world.stream(changes="true")
    limit = plain.getDefaultReadLimit()

    assert {"version": -1} == plain.initialOffset()
    assert [{"version": 3}, {"version": 1}] == [plain.latestOffset({"version": at}, limit) for at in (-1, 0)]
    assert [(1,), (2,), (3,)] == streamed(plain, -1, 0)
    assert [(4,), (5,), (6,)] == streamed(plain, 0, 2)
    with pytest.raises(Invalid, match="version 3 of t replaced or deleted rows"):
        streamed(plain, 2, 3)
    assert [(2, "delete", 3), (5, "insert", 2), (6, "insert", 2)] == streamed(changes, 1, 3)
    changes.prepareForTriggerAvailableNow()
    world.append(7)
    assert {"version": 3} == changes.latestOffset({"version": 1}, changes.getDefaultReadLimit())
    assert {"version": 4} == world.stream().latestOffset({"version": 1}, ReadAllAvailable())
