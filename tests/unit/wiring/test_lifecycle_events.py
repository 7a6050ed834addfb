"""Expiration events arrive in a topic of the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Overloaded
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction, load
from lakebed.lifecycle.events import expiration_events
from lakebed.lifecycle.model import ActionKind, ObjectIdentity
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LedgerRow
from lakebed.log.broker import Broker
from lakebed.log.fetcher import Fetched, FetchRequest
from lakebed.log.model import FIRST_OFFSET, topic_partition
from lakebed.store.memory import MemoryStore
from lakebed.wiring.lifecycle import EVENTS_MAX, publisher
from lakebed.wiring.parts import sections

ROW = LedgerRow(
    at_ns=1,
    run="w",
    bucket="b",
    key="k",
    rule_hash="0" * 16,
    kind=ActionKind.EXPIRATION_DAYS,
    verb="CURRENT",
    identity=ObjectIdentity(1, 2),
    stream="s",
    outcome="DELETED",
)


def context(**flags: str) -> Context:
    clock = SystemClock()
    settings = load(sections(), flags={"meta.backend": "bucket"} | flags)
    store = MemoryStore(clock=clock)
    return Context(node="n", settings=settings, store=store, clock=clock, ids=Ids(), metrics=Metrics())


async def test_events_are_acknowledged_by_the_topic() -> None:
    """All of them, in their order, in as many appends as their number needs."""
    lake = context(**{"lifecycle.events_topic": "expired"})
    events = expiration_events("b/1.jsonl", [ROW] * (EVENTS_MAX + 1))

    async with publisher(lake) as publish:
        assert publish is not None
        await publish(events)

    broker = Broker(lake)
    wanted = FetchRequest(topic_partition("expired", 0), FIRST_OFFSET, 1 << 30)
    (found,) = await broker.consume([wanted], bytes_max=1 << 30, bytes_min=0, wait_s=0)
    await broker.stop()
    assert isinstance(found, Fetched) and len(events) == found.count
    assert "b/1.jsonl#0" == msgspec.json.decode(events[0])["id"]


async def test_events_that_the_topic_refuses_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is moved only behind events that were acknowledged, so a refused append of several is raised."""
    refused, asked = Overloaded("the buffer is full"), list[int]()

    async def produce(self: Broker, chunks: Any) -> Any:
        asked.append(len(asked))
        return [refused if len(asked) == 2 else None]

    monkeypatch.setattr(Broker, "produce", produce)
    async with publisher(context(**{"lifecycle.events_topic": "expired"})) as publish:
        assert publish is not None
        with pytest.raises(Overloaded, match="full"):
            await publish([b"{}"] * (2 * EVENTS_MAX + 1))

    assert [0, 1] == asked


async def test_without_a_topic_nothing_is_published() -> None:
    """And no broker is opened."""
    async with publisher(context()) as publish:
        assert publish is None


def test_events_need_the_moves_of_the_ledger() -> None:
    """A ledger that is never moved publishes nothing, so the two settings contradict each other."""
    with pytest.raises(Contradiction):
        LifecycleSettings(events_topic="t", fold_s=0.0).check()
