"""The sink of `lakebed.table`: tasks write Parquet through Arrow, and one commit names the files.

A task that runs twice leaves files that nothing refers to. The commit runs in a process of Spark's that has no session,
so an upsert takes its keys out of the table's files there, in threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructField, StructType

from lakebed.core.errors import Invalid
from lakebed.delta.log import fields_of
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.types import arrow_type, widens
from lakebed.pipeline.tables import files, rewrite
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.tasks import freeze_modules
from lakebed.wiring.context import make_context

if TYPE_CHECKING:
    from lakebed.pipeline.tables.source import TableSource


class WrittenFiles(WriterCommitMessage):  # type: ignore[misc]
    """The files that one task wrote, as JSON; orphans until the commit names them."""

    def __init__(self, described: list[str]) -> None:
        self.described = described


class TableWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """One write: append, upsert by key, or the whole table."""

    def __init__(self, source: TableSource, schema: StructType, overwrite: bool) -> None:
        self._source, self._overwrite = source, overwrite
        own = source.given.own
        self._upserts = own.get("write", "append") == "upsert" and not overwrite
        self._spec = spec_of(source.table, source.snapshot(existing=False), schema, own, overwrite=overwrite)
        if self._upserts and not self._spec.keys:
            raise Invalid(f"table {source.table} has no keys to upsert by", hint="give the option keys")

    def write(self, iterator: Iterator[Any]) -> WrittenFiles:
        freeze_modules()
        return WrittenFiles(written(iterator, self._spec, self._source.location))

    def commit(self, messages: list[Any]) -> None:
        own = self._source.given.own
        number = self._source.number("batch")
        application = own.get("application", "")
        if (number is None) != (not application):
            raise Invalid("the options application and batch belong together")
        self.apply(messages, None if number is None else WriteBatch(application, number))

    def abort(self, messages: list[Any]) -> None:
        """Files that were written are orphans, which vacuum deletes."""

    def apply(self, messages: list[Any], batch: WriteBatch | None) -> CommitResult:
        texts = [text for message in messages if message is not None for text in message.described]
        made = [msgspec.json.decode(text, type=DataFile) for text in texts]
        assert self._source.settings is not None
        context = make_context(self._source.settings, role="spark")
        table = Table(None, self._spec, context, location=self._source.location)
        if self._overwrite:
            return table.replace_by(made, batch)
        if self._upserts:
            return rewrite.upsert_files(table, made, batch)
        return table.append_files(made, batch)


class TableStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Each micro-batch is one commit with the micro-batch's number: the same number again changes nothing."""

    def __init__(self, source: TableSource, schema: StructType, overwrite: bool) -> None:
        self._writer, self._application = TableWriter(source, schema, overwrite), source.given.own["application"]

    def write(self, iterator: Iterator[Any]) -> WrittenFiles:
        return self._writer.write(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        self._writer.apply(messages, WriteBatch(self._application, batchId))

    def abort(self, messages: list[Any], batchId: int) -> None:
        """Files that were written are orphans, which vacuum deletes."""


def written(batches: Iterator[Any], spec: TableSpec, location: Location) -> list[str]:
    """Writes rows under the table's own types, and describes each file."""
    import pyarrow as pa

    schema = pa.schema([(name, arrow_type(kind)) for name, kind in fields_of(spec.schema_json).items()])
    tables = (files.fitted(pa.Table.from_batches([batch]), schema) for batch in batches if batch.num_rows)
    rows = (batch for table in tables for batch in table.to_batches())
    return [text for one in files.writing(spec, location)(rows) for text in one["file"].to_pylist()]


def spec_of(
    name: str, state: Snapshot, schema: StructType, own: dict[str, str], *, overwrite: bool = False
) -> TableSpec:
    """The table after this write: its columns in their order, then new ones. Raises Invalid where rows do not fit."""
    coming = {field.name: StructField(field.name, field.dataType, True) for field in schema.fields}
    held = StructType.fromJson(msgspec.json.decode(state.schema_json)).fields if state.schema_json else []
    if not overwrite:
        for field in held:
            given = coming[field.name].dataType if field.name in coming else None
            if given is None or not (given == field.dataType or widens(given.jsonValue(), field.dataType.jsonValue())):
                kind = given.simpleString() if given is not None else "missing"
                raise Invalid(f"table {name}: column {field.name!r} is {field.dataType.simpleString()}, not {kind}")
        names = {field.name for field in held}
        coming = {field.name: field for field in held} | {n: f for n, f in coming.items() if n not in names}
    keys = _names(own, "keys") or tuple(key for key in state.keys if key in coming)
    partition_by = _names(own, "partition_by") if overwrite or state.version < 0 else state.partition_by
    cluster_by = tuple(column for column in state.cluster_by if column in coming)
    schema = StructType(list(coming.values())).json()
    return TableSpec(name, schema, keys=keys, partition_by=partition_by, cluster_by=cluster_by)


def _names(own: dict[str, str], option: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in own.get(option, "").split(","))))
