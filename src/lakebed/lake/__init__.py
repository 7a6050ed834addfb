"""The Python API: `lakebed.connect()` for programs and notebooks, `lakebed.connect_async()` for asyncio.

import lakebed

lake = lakebed.connect()                                  # lakebed.toml, a running stack, or LAKEBED_*
lake.topic("orders").produce([{"id": 1}])
for record in lake.topic("orders").consume(group="billing"):
    print(record.json())
    record.commit()

One core speaks HTTP: to a gateway when there is one, and otherwise to the same routes inside this process, over the
bucket. So a program behaves the same in both places. Tables and SQL read the bucket itself.
"""
