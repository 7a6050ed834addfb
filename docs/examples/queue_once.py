"""Use a queue without a broker: python docs/examples/queue_once.py"""

from __future__ import annotations

import asyncio

from lakebed.cli.where import Where
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue


async def main() -> None:
    queue = Queue.of(Where().context("example"), "example-orders")
    ingestor = queue.ingestor()
    watcher = await ingestor.ingest([KeyValueEntry(b"order-1", b"3 apples")])
    await watcher.await_durable()  # stored in the bucket and listed in the producer manifest
    await ingestor.close()

    collector = queue.collector("example")
    async for batch in collector.batches(idle_s=0.1):
        for entry in batch.entries:
            print(f"{batch.sequence}: {entry.key.decode()} = {entry.value.decode()}")
        await collector.ack(batch)
        break
    await collector.close()


asyncio.run(main())
