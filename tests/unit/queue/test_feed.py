"""A queue in bulk: sequences are offsets; nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.core.feed import FeedFilter, Limit, SliceRead, read_all
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.queue.feed import SEQUENCE_MAX, QueueFeed, open_feed
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryStore


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
    pieces = [*await feed.slices(start, first, FeedFilter()), *await feed.slices(first, end, FeedFilter())]
    reads: list[SliceRead] = [r async for r in read_all(feed, pieces, ["sequence", "index", "value"], FeedFilter())]

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
        await bounded.slices(await bounded.begin(), await bounded.reach({"sequence": 1}, Limit()), FeedFilter())
    )
    everything = ({"sequence": 0}, {"sequence": 4})
    assert 1 == len(await QueueFeed(open_queue()).slices(*everything, FeedFilter(low={"sequence": 4})))


@pytest.mark.parametrize("text", ["²", "-1", "x", " 1", "٣", str(SEQUENCE_MAX + 1), "9" * 5000])
@pytest.mark.parametrize("option", ["start", "end"])
def test_an_option_that_is_not_a_sequence_is_invalid(
    memory: MemoryStore, manual_clock: ManualClock, metrics: Metrics, option: str, text: str
) -> None:
    """Superscript digits and numbers beyond 64 bits too: a caller gets Invalid, never ValueError."""
    context = Context(
        clock=manual_clock, ids=Ids.seeded(1), metrics=metrics, store=memory, node="n",
        settings=Settings({QueueSettings: QueueSettings()}, {}),
    )  # fmt: skip

    with pytest.raises(Invalid, match=option):
        open_feed(context, {option: text})
    open_feed(context, {option: str(SEQUENCE_MAX)})
