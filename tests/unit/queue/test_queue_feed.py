"""A queue in bulk: sequences are offsets; nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lakebed.feed import Limit, Read, Wanted, read_all
from lakebed.queue.feed import QueueFeed
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue


async def filled(queue: Queue, running: Any, batches: int) -> None:
    ingestor = queue.ingestor()
    for n in range(batches):
        watcher = await ingestor.ingest([KeyValueEntry(b"k%d" % n, b"v%d-%d" % (n, i)) for i in range(2)])
        await ingestor.flush()
        await running(watcher.await_durable())
    await running(ingestor.close())


async def test_entries_come_in_sequence_and_nothing_is_claimed(open_queue: Callable[..., Queue], running: Any) -> None:
    """Steps by sequence give every entry once, and the queue is as it was."""
    queue = open_queue()
    await filled(queue, running, 3)
    feed = QueueFeed(open_queue())
    start = await feed.begin()

    first = await feed.reach(start, Limit(objects=2))
    end = await feed.reach(first, Limit())
    pieces = [*await feed.pieces(start, first, Wanted()), *await feed.pieces(first, end, Wanted())]
    reads: list[Read] = [r async for r in read_all(feed, pieces, ["sequence", "index", "value"], Wanted())]

    assert ({"sequence": 2}, {"sequence": 3}) == (first, end)
    found = [tuple(row.values()) for read in reads for row in read.rows.to_pylist()]
    assert [(n + 1, i, b"v%d-%d" % (n, i)) for n in range(3) for i in range(2)] == found
    assert end == await feed.reach(end, Limit())
    assert (await open_queue().status()).claimed == 0


async def test_a_bound_on_the_sequence_leaves_out_batches(open_queue: Callable[..., Queue], running: Any) -> None:
    """Options and filters prune before anything is read."""
    queue = open_queue()
    await filled(queue, running, 4)

    bounded = QueueFeed(open_queue(), start=2, end=4)

    assert 2 == len(
        await bounded.pieces(await bounded.begin(), await bounded.reach({"sequence": 1}, Limit()), Wanted())
    )
    everything = ({"sequence": 0}, {"sequence": 4})
    assert 1 == len(await QueueFeed(open_queue()).pieces(*everything, Wanted(low={"sequence": 4})))
