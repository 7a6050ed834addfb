"""A flight that failed leaves nothing behind: not its records, not its blob."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.log.batching import BatchingProducer
from lakebed.log.codec import columns
from lakebed.log.model import topic_partition
from lakebed.log.producers import RecordChunk
from lakebed.log.settings import LogSettings
from lakebed.log.writer import LogWriter, PartitionAppend


class Blob:
    """Represents the bytes that are uploaded."""


class Away:
    """A writer whose store is away, and what it had in progress when it failed."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Blob]] = []

    async def append_shared(self, groups: Sequence[PartitionAppend], *, uploaded: Callable[[], None]) -> Any:
        blob = Blob()
        self.held.append(weakref.ref(blob))
        await asyncio.sleep(0)
        raise Unavailable("the store is away")


async def test_what_a_failed_flight_carried_is_freed_with_its_answer() -> None:
    """Without the garbage collector: an outage that fails every flight does not fill the memory with them."""
    writer, reported = Away(), asyncio.Event()
    producer = BatchingProducer(
        Runtime(SystemClock(), Ids(), Metrics()), cast(LogWriter, writer), LogSettings(batch_max_delay_ms=1)
    )
    gc.collect()
    gc.disable()
    try:
        producer.append([(topic_partition("t", 0), RecordChunk(columns([b"x"]), None))], lambda _: reported.set())
        await asyncio.wait_for(reported.wait(), 60)
        await asyncio.sleep(0.01)

        assert [None] == [each() for each in writer.held]
    finally:
        gc.enable()
