"""Produce to and consume from the log: python docs/examples/topics.py"""

from __future__ import annotations

import lakebed

with lakebed.connect() as lake:
    topic = lake.topic("example-log")
    offsets = topic.produce([{"order": 1}, {"order": 2}])  # a retry after a lost response appends nothing twice
    print("first offset:", offsets.start)

    for record in topic.consume(group="billing"):
        print(record.offset, record.json())
        record.commit()  # the group continues here after a restart
