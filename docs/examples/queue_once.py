"""Use a queue without a broker: python docs/examples/queue_once.py"""

from __future__ import annotations

import lakebed

with lakebed.connect() as lake:
    queue = lake.queue("example-orders")
    queue.put([("order-1", "3 apples")])  # returns when the entry is durable

    for batch in queue.collect(consumer="example"):
        for entry in batch.entries:
            print(f"{batch.sequence}: {entry.key.decode()} = {entry.value.decode()}")
        batch.ack()
