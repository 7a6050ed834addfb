"""Reads pieces into Arrow record batches, in a process that has no event loop of its own: an executor's.

Small pieces are joined, so that Spark is handed batches worth their overhead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from lakebed.errors import Corrupt
from lakebed.feed import Feed, Piece, Read, Wanted, read_all
from lakebed.logs import logger
from lakebed.spark.options import Unreadable

ROWS_TOGETHER = 32_768
KEY, PROBLEM = "_key", "_problem"  # the columns that `unreadable=keep` adds

log = logger("spark")


def reads(feed: Feed, pieces: Sequence[Piece], columns: Sequence[str], wanted: Wanted) -> Iterator[Read]:
    """Every piece with its rows or its problem, in order. Runs a loop of its own from one read to the next."""
    loop = asyncio.new_event_loop()
    found = read_all(feed, pieces, columns, wanted)
    try:
        while (read := loop.run_until_complete(anext(found, None))) is not None:
            yield read
    finally:
        loop.run_until_complete(found.aclose())  # type: ignore[attr-defined]
        loop.close()


def batches(
    feed: Feed, pieces: Sequence[Piece], schema: Any, wanted: Wanted, unreadable: Unreadable = "fail"
) -> Iterator[Any]:
    """The rows as record batches of this Arrow schema. Raises Corrupt at the first unreadable piece if so asked."""
    import pyarrow as pa

    columns = [name for name in schema.names if name not in (KEY, PROBLEM)]
    held: list[Any] = []
    rows = 0
    for read in reads(feed, pieces, columns, wanted):
        if read.problem:
            if unreadable == "fail":
                # Spark shows a message and no hint, so what to do stands in the message.
                told = f"{read.piece.key}: {read.problem} (the options unreadable=skip and keep go on without it)"
                raise Corrupt(told, key=read.piece.key)
            log.warning("set aside", key=read.piece.key, problem=read.problem)
            if unreadable == "keep":
                held.append(_problem(read, schema))
        elif read.rows is not None and read.rows.num_rows:
            held.append(_fitted(read.rows, schema))
            rows += read.rows.num_rows
        if rows >= ROWS_TOGETHER:
            yield from pa.Table.from_batches(held, schema).combine_chunks().to_batches()
            held, rows = [], 0
    if held:
        yield from pa.Table.from_batches(held, schema).combine_chunks().to_batches()


def _fitted(rows: Any, schema: Any) -> Any:
    import pyarrow as pa

    names = rows.schema.names
    arrays = [
        rows.column(field.name).cast(field.type) if field.name in names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _problem(read: Read, schema: Any) -> Any:
    import pyarrow as pa

    told = {KEY: read.piece.key, PROBLEM: read.problem}
    arrays = [pa.array([told.get(field.name)], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
