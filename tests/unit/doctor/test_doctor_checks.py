"""The doctor's own checks, where the store does not do what is asked."""

from __future__ import annotations

import asyncio

from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.doctor.checks import clock_skew
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo


class StuckStore(MemoryStore):
    """A store that reads and never ends a write, as a cluster with too few servers for its copies."""

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_store_that_takes_no_write_is_told_of_and_not_waited_for() -> None:
    """The doctor ends with what to look at, where a command would wait through all its retries."""
    clock = ManualClock()
    context = Context("node", Settings({}, {}), StuckStore(clock=clock), clock, Ids.seeded(1), Metrics())

    found = await clock_skew(context, write_s=0.05)

    assert (found.name, found.verdict) == ("store", "fail")
    assert "took no write" in found.seen
    assert "copies" in found.fix
