"""`lakebed.table`: tables as a source and a sink of Spark, batch and streaming, without jars.

    spark.read.format("lakebed.table").load("silver/acme/shop/orders").filter("order_id = 5")
    rows.write.format("lakebed.table").mode("append").option("write", "upsert").save("silver/acme/shop/orders")

Spark plans a read, and commits a write, in a Python process of its own that has no session: planning reads the table's
log, tasks read and write Parquet through Arrow, and the commit is the table's next log entry. A DataFrame, and a view
of it, keep the version that was the newest when they first ran; `lakebed.pipeline.tables.sql` follows the newest.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import LongType, StringType, StructField, StructType

from lakebed.core.errors import Invalid, NotFound
from lakebed.core.settings import Settings
from lakebed.delta import history
from lakebed.delta.log import fields_of
from lakebed.delta.model import DataFile, Snapshot
from lakebed.delta.predicate import FLOATS, Comparison, Operator, Predicate
from lakebed.pipeline.tables import changes
from lakebed.pipeline.tables.changes import FileChanges
from lakebed.pipeline.tables.frames import nullable
from lakebed.pipeline.tables.scan import FileScan, candidates, known
from lakebed.pipeline.tables.writers import TableStreamWriter, TableWriter
from lakebed.spark.location import Location
from lakebed.spark.options import read_options
from lakebed.spark.sources import settings_of
from lakebed.spark.tasks import freeze_modules
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context

FORMAT = "lakebed.table"
READ = ("table", "version", "changes", "after", "until", "max_versions")
WRITE = ("write", "keys", "partition_by", "application", "batch")
SPARKS = ("checkpointlocation", "queryname", "owner", "provider", "location")  # added by streams and by CREATE TABLE
TASK_BYTES, TASK_BYTES_MIN = 32 * 1024 * 1024, 1024 * 1024  # of Parquet, read by one task
TASKS_PER_CORE = 2  # of this machine, so that one slow task does not leave the other cores waiting
WRITES = ("append", "upsert")

OPERATORS: dict[str, Operator] = {
    "EqualTo": "=",
    "In": "in",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "IsNull": "is null",
    "IsNotNull": "is not null",
}


class FileTask(InputPartition):  # type: ignore[misc]
    """What one task reads: parts of files, or the changes of one version; `version` is that of the files."""

    def __init__(
        self, parts: Sequence[tuple[DataFile, int, int]], change: FileChanges | None = None, version: int | None = None
    ) -> None:
        super().__init__(None)
        self.parts, self.change, self.version = list(parts), change, version

    def __repr__(self) -> str:
        return f"FileTask({len(self.parts)} files)"


class TableSource(DataSource):  # type: ignore[misc]
    """Options are checked when a read or a write is defined, before anything runs."""

    settings: Settings | None = None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.given = read_options(options, (*READ, *WRITE), SPARKS)
        own = self.given.own
        self.table = own.get("table") or str(options.get("path") or "")
        if not self.table:
            raise Invalid("a table has no name", hint='load("silver/acme/shop/orders"), or the option table')
        if own.get("write", "append") not in WRITES:
            raise Invalid(f"option write: {own['write']!r} is none of {', '.join(WRITES)}")
        if self.settings is None or self.given.flags or self.given.config or self.given.dir:
            self.settings = settings_of(self.given)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @property
    def root(self) -> str:
        return f"tables/{self.table}"

    @property
    def location(self) -> Location:
        assert self.settings is not None
        return Location.of(self.settings.of(StoreSettings))

    @property
    def with_changes(self) -> bool:
        own = self.given.own
        return own.get("changes", "").lower() == "true" or bool({"after", "until"} & own.keys())

    def number(self, name: str) -> int | None:
        text = self.given.own.get(name, "")
        if text and not text.removeprefix("-").isdigit():
            raise Invalid(f"option {name}: {text!r} is no number")
        return int(text) if text else None

    def snapshot(self, version: int | None = None, *, existing: bool = True) -> Snapshot:
        """The table now, or at a version. Raises NotFound."""
        assert self.settings is not None
        store = make_context(self.settings, role="spark").store
        state = asyncio.run(history.snapshot(store, self.root, version=version))
        if existing and state.version < 0:
            raise NotFound(f"there is no table {self.table}", hint="lakebed tables list")
        return state

    def changes(self, after: int, until: int) -> list[FileChanges]:
        assert self.settings is not None
        store = make_context(self.settings, role="spark").store
        return asyncio.run(changes.file_changes(store, self.root, after, until))

    def schema(self) -> StructType:
        state = self.snapshot(self.number("version"))
        by_name = {field.name: field for field in _schema_of(state)}
        names = known(self.given.columns or list(by_name), by_name)
        fields = [by_name[name] for name in names]
        if self.with_changes:
            fields += [StructField(changes.TYPE, StringType()), StructField(changes.VERSION, LongType())]
        return StructType(fields)

    def reader(self, schema: StructType) -> TableReader:
        return TableReader(self, schema)

    def streamReader(self, schema: StructType) -> TableStreamReader:
        return TableStreamReader(self, schema)

    def writer(self, schema: StructType, overwrite: bool) -> TableWriter:
        return TableWriter(self, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TableStreamWriter:
        if overwrite:
            raise Invalid("a stream does not replace a table", hint="use append, or the option write=upsert")
        if not self.given.own.get("application"):
            raise Invalid("the option application names this stream in the table's log", hint="one name per stream")
        return TableStreamWriter(self, schema, overwrite)

    def scan(self, schema: StructType, state: Snapshot, predicate: Predicate = Predicate()) -> FileScan:
        """What tasks read of each file, with the table's own types. Raises Invalid for a column of another type."""
        kinds = fields_of(state.schema_json)
        have = {field.name: field.dataType for field in _schema_of(state)}
        names = [name for name in schema.names if not (self.with_changes and name in changes.COLUMNS)]
        for name in known(names, kinds):
            if have[name] != nullable(schema[name].dataType):
                kind = schema[name].dataType.simpleString()
                raise Invalid(f"{self.table}: column {name!r} is {have[name].simpleString()}, not {kind}")
        return FileScan.of(self.location, self.root, state, names, predicate)


def _schema_of(state: Snapshot) -> StructType:
    """The table's columns; inner values may be null, whatever it says of them."""
    whole = StructType.fromJson(msgspec.json.decode(state.schema_json))
    return StructType([StructField(field.name, nullable(field.dataType), True) for field in whole.fields])


def predicate_of(filters: Iterable[Any], schema_json: str) -> Predicate:
    """The filters of Spark that leave out files and rows here. Spark applies every one of them once more.

    Comparisons that Arrow and Spark decide differently (NaN is above every number in Spark) are left to Spark.
    """
    kinds = fields_of(schema_json)
    terms: list[Comparison] = []
    for each in filters:
        operator, path = OPERATORS.get(type(each).__name__), list(getattr(each, "attribute", ()))
        if operator is None or len(path) != 1 or path[0] not in kinds:
            continue
        value = getattr(each, "value", None)
        if operator == "in":
            value = tuple(one for one in value or () if one is not None)
        if operator not in ("is null", "is not null") and (value is None or value == ()):
            continue
        if kinds[path[0]] in FLOATS and operator not in ("<", "<=", "is null", "is not null"):
            continue
        try:
            terms += Predicate((Comparison(path[0], operator, value),)).typed(schema_json).terms
        except Invalid:
            continue
    return Predicate(tuple(terms))


def task_bytes(held: Sequence[DataFile], tasks: int = 0) -> int:
    """What one task reads: a share of all, for so many tasks or a few for each core here, within limits."""
    total = sum(file.size for file in held)
    wanted = tasks or TASKS_PER_CORE * (os.cpu_count() or 1)
    return max(1 if tasks else TASK_BYTES_MIN, min(TASK_BYTES, -(-total // wanted)))


def file_tasks(held: Sequence[DataFile], tasks: int = 0, version: int | None = None) -> list[InputPartition]:
    """Small files together, large files in parts: about as many bytes for each task."""
    return [FileTask(parts, version=version) for parts in _shared(held, task_bytes(held, tasks))]


def _shared(held: Sequence[DataFile], limit: int) -> list[list[tuple[DataFile, int, int]]]:
    tasks: list[list[tuple[DataFile, int, int]]] = []
    group: list[tuple[DataFile, int, int]] = []
    size = 0
    for file in held:
        parts = max(1, round(file.size / limit))
        if parts > 1:
            tasks += [[(file, n, parts)] for n in range(parts)]
            continue
        if group and size + file.size > limit:
            tasks.append(group)
            group, size = [], 0
        group.append((file, 0, 1))
        size += file.size
    return [*tasks, *([group] if group else [])]


class TableReader(DataSourceReader):  # type: ignore[misc]
    """One read of a version, or of the changes between two."""

    def __init__(self, source: TableSource, schema: StructType) -> None:
        self._source, self._state = source, source.snapshot(source.number("version"))
        self._keys = self._state.keys
        self._scan = source.scan(schema, self._state)

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        if not self._source.with_changes:
            wanted = predicate_of(filters, self._state.schema_json)
            names = list(self._scan.types)
            self._scan = FileScan.of(self._scan.location, self._scan.root, self._state, names, wanted)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        source, state = self._source, self._state
        if source.with_changes:
            after, until = source.number("after"), source.number("until")
            found = source.changes(-1 if after is None else after, state.version if until is None else until)
            tasks: list[InputPartition] = [FileTask([], change) for change in found if change.adds or change.removes]
        else:
            tasks = file_tasks(candidates(state, self._scan.predicate), source.given.tasks)
        self._state = Snapshot()  # not sent to tasks: they have what they read
        return tasks or [FileTask([])]

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self._scan, partition, self._keys)


class TableStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Micro-batches between versions: first the table as it is, then what each version adds, or changes."""

    def __init__(self, source: TableSource, schema: StructType) -> None:
        self._source = source
        state = source.snapshot()
        self._scan, self._keys = source.scan(schema, state), state.keys
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:
        after = self._source.number("after")
        return {"version": -1 if after is None else after}

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._source.number("max_versions")
        return ReadMaxFiles(most) if most else ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        newest = self._source.snapshot().version if self._target is None else self._target
        most = self._source.number("max_versions")
        if most and start["version"] >= 0 and not isinstance(limit, ReadAllAvailable):
            newest = min(newest, start["version"] + most)
        return {"version": max(newest, start["version"])}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._source.snapshot().version

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        after, until = start["version"], end["version"]
        if after == until:
            return []
        if after < 0:
            # Other versions than the stream began with have other deletion vectors.
            held = self._source.snapshot(until).files
            if self._source.with_changes:
                return [FileTask([], FileChanges(until, (file,)), until) for file in held]
            return file_tasks(held, self._source.given.tasks, until)
        found = self._source.changes(after, until)
        if self._source.with_changes:
            return [FileTask([], change) for change in found if change.adds or change.removes]
        for change in found:
            if change.removes:
                raise Invalid(
                    f"version {change.version} of {self._source.table} replaced or deleted rows (the option "
                    "changes=true reads them as changes)"
                )
        return file_tasks([file for change in found for file in change.adds], self._source.given.tasks)

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self._scan, partition, self._keys)


def _read(scan: FileScan, partition: Any, keys: Sequence[str]) -> Iterator[Any]:
    if not isinstance(partition, FileTask):
        return
    freeze_modules()
    filesystem = scan.location.filesystem()
    if partition.version is not None:
        scan = msgspec.structs.replace(scan, version=partition.version)
    if partition.change is not None:
        yield from changes.changed(scan, partition.change, keys, filesystem)
    for file, number, parts in partition.parts:
        yield from scan.batches(file, filesystem, part=(number, parts))
