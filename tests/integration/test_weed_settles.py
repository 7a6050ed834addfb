"""The embedded bucket ends at once and loses no change: what the filer holds in memory is written first."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.embedded.program import BucketProgram
from lakebed.embedded.weed import Weed
from lakebed.filer.client import FilerClient
from lakebed.store.connect import connect
from support.runtimes import runtime_of

pytestmark = pytest.mark.full

OBJECTS = 30


async def changed(weed: Weed, since_ns: int) -> int:
    """How many of the test's objects the change log tells of."""
    clock = SystemClock()
    async with FilerClient([weed.endpoints.filer_grpc], Runtime(clock=clock, ids=Ids(), metrics=Metrics())) as filer:
        events = [event async for event in filer.subscribe(["/buckets/"], since_ns=since_ns, until_ns=clock.now_ns())]
    return sum(event.new is not None and event.new.name.startswith("kept-") for event in events)


async def test_the_last_minute_of_changes_outlives_a_quick_stop(tmp_path: Path) -> None:
    """Every change made until the stop is told after the next start, and nobody waited for the filer's listeners."""
    clock = SystemClock()
    weed = Weed(tmp_path, runtime=Runtime(clock, Ids(), Metrics()))
    bucket = BucketProgram(weed)
    try:
        await bucket.start()
        began_ns = clock.now_ns()
        store = connect(weed.endpoints.store_settings(), runtime_of(clock))
        for number in range(OBJECTS):
            await store.create(f"kept-{number}", b"x")
        before = await changed(weed, began_ns)

        await bucket.stop()

        said = (tmp_path / "weed.log").read_text()
        await bucket.start()
        after = await changed(weed, began_ns)
    finally:
        await weed.stop(0.0)

    assert OBJECTS == before == after
    assert "forcing stop" not in said, "the filer's own limit of 15 s was not waited for"


async def test_a_bucket_that_is_gone_settles_nothing(tmp_path: Path) -> None:
    """False, not an error: whoever stops it goes on stopping."""
    weed = Weed(tmp_path, runtime=system_runtime())
    await weed.start()
    weed.child.kill()

    assert not await weed.settle()
    await weed.stop(0.0)
