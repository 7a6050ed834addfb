"""Joins lifecycle with the log: expiration events go to a topic, where `lifecycle.events_topic` names one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lakebed.core.context import Context, Worker
from lakebed.core.errors import LakebedError
from lakebed.lifecycle.ledger import Publish
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import workers as lifecycle_workers
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import topic_partition
from lakebed.log.producers import RecordChunk

EVENTS_MAX = 500  # of one append: some 300 KB


@asynccontextmanager
async def publisher(context: Context) -> AsyncIterator[Publish | None]:
    """Appends events to partition 0 of the topic; returns when they are acknowledged. None without a topic."""
    topic = context.settings.of(LifecycleSettings).events_topic
    if not topic:
        yield None
        return
    tp, broker = topic_partition(topic, 0), Broker(context)

    async def publish(events: Sequence[bytes]) -> None:
        for first in range(0, len(events), EVENTS_MAX):
            (outcome,) = await broker.produce([(tp, RecordChunk(columns(list(events[first : first + EVENTS_MAX]))))])
            if isinstance(outcome, LakebedError):
                raise outcome

    try:
        yield publish
    finally:
        await broker.stop()


def workers(context: Context) -> Sequence[Worker]:
    return lifecycle_workers(context, publisher)
