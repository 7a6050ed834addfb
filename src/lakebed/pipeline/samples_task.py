"""What an executor does for bronze: reads batches and writes their samples as Parquet, in Arrow from end to end.

No row passes through Java, and no Python loop runs over samples. A batch that cannot be read is told, not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from lakebed.delta.model import DataFile, TableSpec
from lakebed.feed import Piece, Wanted
from lakebed.pipeline.samples_plan import Range, Work
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.location import Location
from lakebed.settings import Settings
from lakebed.spark.feeds import open_feed
from lakebed.spark.rows import reads

ROWS_PER_FILE = 1_000_000  # what a task holds before it writes
BYTES_PER_FILE = 256 * 1024 * 1024  # the same, as Arrow memory


class Problem(msgspec.Struct, frozen=True):
    key: str
    problem: str
    id: str = ""
    rows: int = 0


class Told(msgspec.Struct, frozen=True):
    """What came of some of a task's batches."""

    files: tuple[DataFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    rows: int = 0
    doubled: int = 0


def ingesting(
    source: str, settings: Settings, options: dict[str, str], spec: TableSpec, location: Location
) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of Work a row, its output a JSON Told a row."""

    def ingest(batches: files.Batches) -> files.Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        feed = open_feed(source, settings, options)
        for batch in batches:
            for text in batch["works"].to_pylist():
                works = msgspec.json.decode(text, type=list[Work])
                for told in _ingested(feed, works, spec, location, filesystem):
                    yield pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(told).decode()])], ["told"])

    return ingest


def _ingested(feed: Any, works: Sequence[Work], spec: TableSpec, location: Location, filesystem: Any) -> Iterator[Told]:
    import pyarrow as pa

    doubled_of = {work.piece.id: work.doubled for work in works}
    held: list[Any] = []
    problems: list[Problem] = []
    size = rows = doubled = 0

    def flushed() -> Told:
        table = pa.Table.from_batches(held) if rows else None
        written = files.write_files(table, spec, location, filesystem, dense=True) if table else []
        return Told(tuple(written), tuple(problems), rows, doubled)

    for read in reads(feed, [work.piece for work in works], spec.columns, Wanted()):
        if read.problem:
            problems.append(_problem(read.piece, read.problem))
            continue
        taken = without(read.rows, doubled_of[read.piece.id])
        doubled += read.rows.num_rows - taken.num_rows
        held.append(taken)
        size, rows = size + taken.nbytes, rows + taken.num_rows
        if rows >= ROWS_PER_FILE or size >= BYTES_PER_FILE:
            yield flushed()
            held, problems, size, rows, doubled = [], [], 0, 0, 0
    if held or problems:
        yield flushed()


def without(rows: Any, doubled: Sequence[Range], column: str = "seq") -> Any:
    """The rows whose number lies in none of the ranges."""
    import pyarrow.compute as pc

    for first, last in doubled:
        number = rows.column(column)
        rows = rows.filter(pc.or_(pc.less(number, first), pc.greater(number, last)))
    return rows


def _problem(piece: Piece, problem: str) -> Problem:
    return Problem(piece.key, problem, piece.id, piece.rows)
