"""An upsert of few rows, file by file: each task takes the rows that come out of one file of the table, in Arrow.

Spark only spreads the files over tasks: no row passes through the JVM. The rows that come are held whole by every task,
so this is for upserts whose rows fit there; larger ones are joins of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lakebed.delta.model import DataFile, TableSpec
from lakebed.pipeline.tables.files import Batches, read_file, write_files
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
