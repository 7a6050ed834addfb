"""An upsert of few rows, file by file: each task takes the rows that come out of one file of the table, in Arrow.

Spark only spreads the files over tasks: no row passes through the JVM. The rows that come are held whole by every task,
so this is for upserts whose rows fit there; larger ones are joins of frames.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from lakebed.core.errors import Invalid
from lakebed.delta.log import fields_of, overlapping
from lakebed.delta.model import DataFile, TableSpec
from lakebed.delta.types import arrow_type
from lakebed.pipeline.tables.files import Batches, read_file, write_files
from lakebed.pipeline.tables.scan import FileScan
from lakebed.spark.location import Location

ROWS_MAX = 500_000  # of what comes, in each task's memory
FILES_MAX = 256  # of the table, each read by one task
COMING = ""  # in place of a path: the rows that come are written by this task

Load = Callable[[Any], Any]  # a file system in, the rows that come out: the spec's columns, each key once


class Merged(msgspec.Struct, frozen=True):
    """What became of one file: the rows that were taken out, and what was written for the rest of it."""

    path: str
    rows: int
    files: tuple[DataFile, ...] = ()


def merging(spec: TableSpec, location: Location, load: Load, schema: Any) -> Callable[[Batches], Batches]:
    """The task: its input is a path a row, its output a JSON Merged a row. `schema` is the spec's, in Arrow."""

    def merge(batches: Batches) -> Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        coming = None
        for batch in batches:
            results = []
            for path in batch["path"].to_pylist():
                coming = load(filesystem) if coming is None else coming
                if path == COMING:
                    written = write_files(coming, spec, location, filesystem) if coming.num_rows else []
                    results.append(Merged(path, coming.num_rows, tuple(written)))
                    continue
                held = read_file(location, filesystem, spec.root, path, schema)
                rest = without(held, coming, spec.keys)
                gone = held.num_rows - rest.num_rows
                written = write_files(rest, spec, location, filesystem) if gone and rest.num_rows else []
                results.append(Merged(path, gone, tuple(written)))
            yield pa.RecordBatch.from_arrays(
                [pa.array([msgspec.json.encode(one).decode() for one in results])], ["file"]
            )

    return merge


def without(held: Any, coming: Any, keys: Sequence[str]) -> Any:
    """The rows of `held` whose key does not come, in their order."""
    import pyarrow as pa

    names = list(keys)
    numbered = held.select(names).append_column("_at", pa.arange(0, held.num_rows))
    left = numbered.join(coming.select(names), keys=names, join_type="left anti")
    return held.take(left.column("_at").combine_chunks().sort())


def last_of_each(rows: Any, keys: Sequence[str]) -> Any:
    """Of rows with one key the last one, in their order."""
    import pyarrow as pa

    numbered = rows.select(list(keys)).append_column("_at", pa.arange(0, rows.num_rows))
    last = numbered.group_by(list(keys)).aggregate([("_at", "max")])
    return rows if last.num_rows == rows.num_rows else rows.take(last.column("_at_max").combine_chunks().sort())


def overlapping_files(held: Sequence[DataFile], written: Sequence[DataFile], key: str) -> list[DataFile]:
    """The files whose bounds of this key meet those of the written files; all where bounds are missing."""
    lows, highs = [file.low.get(key) for file in written], [file.high.get(key) for file in written]
    if any(value is None for value in (*lows, *highs)):
        return list(held)
    return overlapping(held, key, min(lows), max(highs))  # type: ignore[type-var]


def twice(spec: TableSpec) -> Invalid:
    return Invalid(
        f"table {spec.name}: rows to upsert have the same {', '.join(spec.keys)} more than once",
        hint="keep one row for each key",
    )


def keys_of(spec: TableSpec, location: Location, written: Iterable[DataFile]) -> Any:
    """The keys of rows in files. Raises Invalid when one comes twice."""
    import pyarrow as pa

    kinds = fields_of(spec.schema_json)
    types = {name: arrow_type(kinds[name]) for name in spec.keys}
    wanted, filesystem = FileScan(location, spec.root, kinds, types), location.filesystem()
    batches = [batch for file in written for batch in wanted.batches(file, filesystem)]
    keys = pa.Table.from_batches(batches, pa.schema(list(types.items())))
    if keys.group_by(list(spec.keys)).aggregate([]).num_rows != keys.num_rows:
        raise twice(spec)
    return keys


def holding(held: Sequence[DataFile], keys: Any, spec: TableSpec) -> list[DataFile]:
    """The files whose bounds of the first key include one of these keys; those without bounds may hold any."""
    first = sorted(value for value in keys.column(0).to_pylist() if value is not None)
    name = spec.keys[0]
    if not first or not isinstance(first[0], (int, str)):
        return list(held)

    def may(file: DataFile) -> bool:
        low, high = file.low.get(name), file.high.get(name)
        if type(low) is not type(first[0]) or type(high) is not type(first[0]):
            return True
        at = bisect_left(first, low)
        return at < len(first) and first[at] <= high

    return [file for file in held if may(file)]
