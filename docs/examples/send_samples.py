"""Send a batch of samples to a collector twice: python docs/examples/send_samples.py"""

from __future__ import annotations

import time

import httpx2

from lakebed.agent.batcher import make_frame
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.cli.where import Where
from lakebed.embedded.endpoints import find

gateway = find(Where().folder).gateway
now_ns = time.time_ns()
samples = [Sample("example_temperature", now_ns + n, 20.0 + n) for n in range(3)]
frame = make_frame(BatchIdentity("example-agent", f"boot-{now_ns}", 0, len(samples) - 1), samples)

with httpx2.Client(base_url=gateway, timeout=20.0) as client:
    for _ in range(2):
        answer = client.post("/v1/batches", content=frame.data).json()
        print("duplicate:", answer["duplicate"])
