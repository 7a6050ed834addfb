"""A collector of a queue as a process: prints each batch that it was given, and each that it has acknowledged.

`python queue_collector.py QUEUE NAME`, with the settings in the environment. Runs until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Fenced, LakebedError
from lakebed.core.settings import load
from lakebed.queue.collector import Collector
from lakebed.queue.model import CollectedBatch
from lakebed.queue.roles import Queue
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections


async def collect(context: Context, name: str) -> None:
    collector = Queue.of(context, name).collector(context.node)
    while True:
        try:
            batch = await collector.next_batch()
        except LakebedError as error:
            say(failed=error.code)
            continue
        if batch is None:
            await asyncio.sleep(0.02)
            continue
        say(given=batch.sequence, values=[entry.value.decode() for entry in batch.entries])
        await acknowledge(collector, batch)


async def acknowledge(collector: Collector, batch: CollectedBatch) -> None:
    """Asks until it is told yes, or that another has the batch."""
    while True:
        try:
            await collector.ack(batch)
        except Fenced:
            return say(fenced=batch.sequence)
        except LakebedError as error:
            say(failed=error.code)
            continue
        return say(acked=batch.sequence, by=collector.id)


def say(**words: object) -> None:
    print(msgspec.json.encode(words).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(collect(make_context(load(sections(), env=os.environ), role=sys.argv[2]), sys.argv[1]))
