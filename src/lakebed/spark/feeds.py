"""A part's feed by the name of its source, and its pieces read as Arrow record batches.

Reading runs in processes without an event loop of their own: executors. Small pieces are joined, so that Spark is given
batches worth their overhead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.feed import Feed, FeedFilter, FeedSlice, SliceRead, read_all
from lakebed.core.logs import logger
from lakebed.core.settings import Settings
from lakebed.spark.options import Unreadable
from lakebed.wiring.context import make_context

ROWS_TOGETHER = 32_768
KEY, PROBLEM = "_key", "_problem"  # the columns that `unreadable=keep` adds

log = logger("spark")


def open_feed(name: str, where: Context | Settings, options: Mapping[str, str]) -> Feed:
    """The feed in this process. Settings travel to executors, where a context is made of them."""
    if name not in FEEDS:
        raise Invalid(f"there is no source {name!r}", hint=f"one of: {', '.join(FEEDS)}")
    context = where if isinstance(where, Context) else make_context(where, role="spark")
    return FEEDS[name](context, options)


# Imported inside, so that a read loads only the part that it reads.


def _batches(context: Context, options: Mapping[str, str]) -> Feed:
    from lakebed.batches.feed import open_feed

    return open_feed(context, options)


def _topic(context: Context, options: Mapping[str, str]) -> Feed:
    from lakebed.log.feed import open_feed

    return open_feed(context, options)


def _queue(context: Context, options: Mapping[str, str]) -> Feed:
    from lakebed.queue.feed import open_feed

    return open_feed(context, options)


FEEDS: dict[str, Callable[[Context, Mapping[str, str]], Feed]] = {
    "lakebed.batches": _batches,
    "lakebed.topic": _topic,
    "lakebed.queue": _queue,
}


def reads(feed: Feed, pieces: Sequence[FeedSlice], columns: Sequence[str], wanted: FeedFilter) -> Iterator[SliceRead]:
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
    feed: Feed, pieces: Sequence[FeedSlice], schema: Any, wanted: FeedFilter, unreadable: Unreadable = "fail"
) -> Iterator[Any]:
    """The rows as record batches of this Arrow schema. With `fail`, raises Corrupt at the first unreadable piece."""
    import pyarrow as pa

    columns = [name for name in schema.names if name not in (KEY, PROBLEM)]
    held: list[Any] = []
    rows = 0
    for read in reads(feed, pieces, columns, wanted):
        if read.problem:
            if unreadable == "fail":
                # Spark shows a message and no hint, so the message says what to do.
                message = f"{read.piece.key}: {read.problem} (the options unreadable=skip and keep continue without it)"
                raise Corrupt(message, key=read.piece.key)
            log.warning("an unreadable object was skipped", key=read.piece.key, error=read.problem)
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


def _problem(read: SliceRead, schema: Any) -> Any:
    import pyarrow as pa

    values = {KEY: read.piece.key, PROBLEM: read.problem}
    arrays = [pa.array([values.get(field.name)], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
