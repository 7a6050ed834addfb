"""Reads the files of a table as Arrow: only the files, row groups and columns that a read needs. No Spark.

A file that the log excludes is not opened. In an open file, row groups that its statistics exclude are not fetched, and
of the others the columns of the predicate are fetched first: the rest only where a row matches.
The same code reads in a command, in the console and in Spark's executors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt, Invalid
from lakebed.delta.log import fields_of
from lakebed.delta.model import DataFile, Snapshot, key_of
from lakebed.delta.predicate import Predicate, chosen, value_of
from lakebed.delta.protocol import mapping
from lakebed.delta.types import arrow_type
from lakebed.pipeline.tables.columns import ColumnMapping, fetching, fit, fragment_of, kept_rows, only_kept, opened
from lakebed.spark.location import Location

BATCH_ROWS = 65_536
FILE_COLUMN = "_file"
THREADS_MAX = 8  # files that one process reads at once


class FileScan(msgspec.Struct, frozen=True):
    """What is read of each file of a table: these columns, and the rows that match. Plain values, so that it travels.

    `kinds` are Delta's types of the table's columns, `types` the Arrow types of the columns that are wanted. `mapped`
    are the files' own names of columns; `version` is that of the table whose deletion vectors are obeyed.
    """

    location: Location
    root: str
    kinds: dict[str, Any]
    types: dict[str, Any]
    predicate: Predicate = Predicate()
    mapped: ColumnMapping = ColumnMapping()
    version: int | None = None

    @classmethod
    def of(
        cls, location: Location, root: str, state: Snapshot, names: Sequence[str], predicate: Predicate = Predicate()
    ) -> FileScan:
        """A scan of this version of a table. Raises Invalid for an unknown column."""
        kinds = fields_of(state.schema_json)
        types = {name: arrow_type(kinds[name]) for name in known(names, kinds)}
        tested = {name: arrow_type(kinds[name]) for name in predicate.columns}
        vectors = state.version if any(file.vector for file in state.files) else None
        return cls(location, root, kinds, types, predicate, ColumnMapping.of(state, {**types, **tested}), vectors)

    def batches(
        self, file: DataFile, filesystem: Any, *, batch_rows: int = BATCH_ROWS, part: tuple[int, int] = (0, 1)
    ) -> Iterator[Any]:
        """The rows of one file as record batches of `types`. Raises FileNotFoundError after a vacuum.

        `part` (n, of) gives every `of`-th row group, from the n-th on: tasks share a large file.
        """
        left = self._left(file)
        if not self.predicate and left is None:
            yield from self._whole(file, filesystem, batch_rows, part)
            return
        with opened(self.location, filesystem, key_of(self.root, file.path)) as source:
            mine = range(part[0], source.metadata.num_row_groups, part[1])
            stored = None if self.mapped.names else self.predicate  # statistics are found by the table's own names
            for group in row_groups(source.metadata, file, stored or Predicate(), self.kinds):
                if group in mine:
                    yield from self._matching(source, group, file, left).to_batches(max_chunksize=batch_rows)

    def _whole(self, file: DataFile, filesystem: Any, batch_rows: int, part: tuple[int, int]) -> Iterator[Any]:
        """Every row of the part: columns that are near each other in the file are fetched in one request."""
        fragment = fragment_of(self.location, filesystem, key_of(self.root, file.path))
        names = _stored(fragment.physical_schema, self.types, self.mapped, file)
        if part[1] > 1:
            fragment = fragment.subset(row_group_ids=range(part[0], fragment.num_row_groups, part[1]))
        found = fragment.to_batches(
            columns=list(names.values()),
            batch_size=batch_rows,
            use_threads=False,
            fragment_scan_options=fetching(),
        )
        for rows in found:
            if rows.num_rows:
                yield self._fitted(rows, self.types, names, file, rows.num_rows).to_batches()[0]

    def _left(self, file: DataFile) -> Any:
        """Which rows a deletion vector has left; None: all."""
        if not file.vector:
            return None
        assert self.version is not None
        found = kept_rows(self.location, self.root, self.version).get(key_of(self.root, file.path))
        if found is None:
            raise Corrupt(f"version {self.version} of {self.root} has no deletion vector of {file.path}")
        return found

    def _matching(self, source: Any, group: int, file: DataFile, left: Any) -> Any:
        """The matching rows of a row group, with the wanted columns."""
        import pyarrow as pa

        size = source.metadata.row_group(group).num_rows
        types = {name: self.types.get(name) or arrow_type(self.kinds[name]) for name in self.predicate.columns}
        held = self._group(source, group, types, file, size).append_column(_AT, pa.arange(0, size))
        if left is not None:
            begin = sum(source.metadata.row_group(n).num_rows for n in range(group))
            held = only_kept(held, begin, left)
        hits = held.filter(self.predicate.expression(types)) if types else held
        if not hits.num_rows:
            return _schema(self.types).empty_table()
        rest = {name: kind for name, kind in self.types.items() if name not in types}
        more = self._group(source, group, rest, file, size).take(hits.column(_AT)) if rest else hits
        columns = [more.column(name) if name in rest else hits.column(name) for name in self.types]
        return pa.Table.from_arrays(columns, schema=_schema(self.types))

    def _group(self, source: Any, group: int, types: Mapping[str, Any], file: DataFile, size: int) -> Any:
        names = _stored(source.schema_arrow, types, self.mapped, file)
        rows = source.read_row_group(group, columns=list(names.values()), use_threads=False)
        return self._fitted(rows, types, names, file, size)

    def _fitted(self, rows: Any, types: Mapping[str, Any], names: Mapping[str, str], file: DataFile, size: int) -> Any:
        """A table of exactly these columns: cast where the file has other types, null where it has none."""
        import pyarrow as pa

        def column(name: str, kind: Any) -> Any:
            if name in names:
                found = rows.column(names[name])
                whole = found.combine_chunks() if self.mapped.types and isinstance(found, pa.ChunkedArray) else found
                return fit(whole, kind, self.mapped.types.get(name))
            physical = self.mapped.names.get(name, name)
            text = file.partition.get(name, file.partition.get(physical))
            return pa.repeat(pa.scalar(None if text is None else value_of(text, self.kinds[name]), kind), size)

        arrays = [column(name, kind) for name, kind in types.items()]
        return pa.Table.from_arrays(arrays, schema=_schema(types)) if arrays else _without_columns(size)


_AT = "_at"


def reading(wanted: FileScan, *, with_file: bool = False) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The task that reads files, for `mapInArrow`: its input is a JSON DataFile a row, its output their rows, with the
    path of each one's file where it is asked for.
    """

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        filesystem = wanted.location.filesystem()
        for batch in batches:
            for text in batch["file"].to_pylist():
                file = msgspec.json.decode(text, type=DataFile)
                for rows in wanted.batches(file, filesystem):
                    named = [pa.repeat(pa.scalar(file.path), rows.num_rows)] if with_file else []
                    names = [*wanted.types, *([FILE_COLUMN] if with_file else [])]
                    yield pa.RecordBatch.from_arrays([*rows.columns, *named], names)

    return read


def described(file: DataFile) -> str:
    """What a task needs to read the file."""
    slim = DataFile(file.path, file.size, file.rows, file.partition, vector=file.vector)
    return msgspec.json.encode(slim).decode()


def _stored(schema: Any, types: Mapping[str, Any], mapped: ColumnMapping, file: DataFile) -> dict[str, str]:
    """The file's names of these columns, as far as it has them; values of partitions are in the log."""
    found = {name: mapped.stored(name, schema) for name in types}
    return {name: stored for name, stored in found.items() if stored is not None and name not in file.partition}


def _without_columns(size: int) -> Any:
    import pyarrow as pa

    return pa.Table.from_struct_array(pa.array([{}] * size, pa.struct([])))


def scan(
    location: Location,
    root: str,
    state: Snapshot,
    *,
    columns: Sequence[str] = (),
    predicate: Predicate = Predicate(),
    limit: int = 0,
) -> Any:
    """The matching rows of a snapshot as one Arrow table, in the order of its files. Blocks: call it in a thread.

    Raises Invalid for an unknown column or a value that its column cannot have.
    """
    import pyarrow as pa

    predicate = predicate.typed(state.schema_json)
    wanted = FileScan.of(location, root, state, columns or list(fields_of(state.schema_json)), predicate)
    files = candidates(state, predicate)
    filesystem = location.filesystem()

    def read(file: DataFile) -> list[Any]:
        found, rows = [], 0
        for batch in wanted.batches(file, filesystem):
            found.append(batch)
            rows += batch.num_rows
            if limit and rows >= limit:
                break
        return found

    held: list[Any] = []
    if files:
        with ThreadPoolExecutor(min(THREADS_MAX, len(files), 2 * (os.cpu_count() or 1))) as pool:
            for batches in pool.map(read, files):
                held += batches
                if limit and sum(batch.num_rows for batch in held) >= limit:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    rows = pa.Table.from_batches(held, _schema(wanted.types))
    return rows.slice(0, limit) if limit else rows


def candidates(state: Snapshot, predicate: Predicate) -> list[DataFile]:
    """The files that may hold a matching row; all where columns are mapped, as the log has ranges by other names then.

    The predicate must be typed.
    """
    return list(state.files) if mapping(state) != "none" else chosen(state.files, predicate, state.schema_json)


def known(columns: Sequence[str], kinds: Mapping[str, Any]) -> list[str]:
    """The columns, if the table has them. Raises Invalid."""
    if unknown := [name for name in columns if name not in kinds]:
        raise Invalid(f"there is no column {unknown[0]!r}", hint=f"columns: {', '.join(kinds)}")
    return list(columns)


def row_groups(metadata: Any, file: DataFile, predicate: Predicate, kinds: Mapping[str, Any]) -> list[int]:
    """The row groups of a file that may hold a matching row, by the statistics in the file itself."""
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        low: dict[str, Any] = {}
        high: dict[str, Any] = {}
        nulls: dict[str, int] = {}
        for at in range(group.num_columns):
            column = group.column(at)
            name, stats = column.path_in_schema, column.statistics
            if name in predicate.columns and stats is not None:
                if stats.has_min_max:
                    with suppress(OverflowError, ValueError):  # a moment outside Python's years 1 to 9999
                        low[name], high[name] = stats.min, stats.max
                if stats.has_null_count:
                    nulls[name] = stats.null_count
        if predicate.may_match(DataFile("", 0, group.num_rows, file.partition, low, high, nulls), kinds):
            found.append(number)
    return found


def _schema(types: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(name, kind) for name, kind in types.items()])
