"""Produce to and consume from the log through a gateway: python docs/examples/log_over_http.py"""

from __future__ import annotations

import httpx2

from lakebed.cli.where import Where
from lakebed.embedded.endpoints import find

gateway = find(Where().folder).gateway

with httpx2.Client(base_url=gateway, timeout=20.0) as client:
    producer = client.post("/producers").json()["producer_id"]  # or your own UUID, version 7
    batch = {
        "topic": "example-log",
        "partition": 0,
        "records": ["one", "two"],
        "producer_id": producer,
        "sequence": 0,  # a retry with the same producer and sequence is not appended again
    }
    for _ in range(2):
        (produced,) = client.post("/produce", json={"topic_partitions": [batch]}).json()["results"]
    print("first offset:", produced["start_offset"])

    wanted = {"topic": "example-log", "partition": 0, "fetch_offset": produced["start_offset"]}
    (read,) = client.post("/consume", json={"topic_partitions": [wanted]}).json()["results"]
    print("records:", read["records"])
