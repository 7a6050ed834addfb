"""The Oxia server that tests share, where there is one: `make test-oxia` starts it."""

from __future__ import annotations

import os

from lakebed.meta.model import prefix_end
from lakebed.meta.protocol import Meta

ADDRESS = os.environ.get("OXIA_ADDRESS", "")
ROOTS = ("llog/", "llog-kafka/", "log-brokers/")  # of all entries of the log


async def empty(meta: Meta) -> None:
    """Deletes what other tests of the log have left."""
    for root in ROOTS:
        await meta.delete_range(root, prefix_end(root))
