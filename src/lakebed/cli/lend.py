"""A bucket for a command that needs one: the one that was named, or a real one started for as long as it takes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lakebed.cli.output import say
from lakebed.cli.where import Where
from lakebed.clock import SystemClock
from lakebed.embedded.weed import Weed
from lakebed.ids import Ids
from lakebed.settings import Settings


@contextmanager
def lent(where: Where) -> Iterator[Settings]:
    """Settings whose store answers. What was started here is gone afterwards, with its data."""
    if where.names_a_bucket:
        yield where.settings()
        return
    with tempfile.TemporaryDirectory(prefix="lakebed-") as folder:
        clock = SystemClock()
        began = clock.monotonic_s()
        weed = Weed(Path(folder), clock=clock, ids=Ids())
        endpoints = asyncio.run(weed.start())
        try:
            say(f"a bucket of its own, ready in {clock.monotonic_s() - began:.1f} s")
            yield where.settings(stack=endpoints.as_settings())
        finally:
            asyncio.run(weed.stop(grace_s=0.0))
