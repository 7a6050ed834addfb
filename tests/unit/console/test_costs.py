"""What looking costs: each page makes a bounded number of requests to the store, however many look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.console.pages import PAGES
from lakebed.core.clock import SystemClock
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from support.batch_frames import frame_of
from support.batches_gateway import collector
from support.console_site import site

REQUESTS_MAX = 100  # 16 of them the ranges of the reconciler
VIEWERS = 25


class CountedStore(MemoryStore):
    asked = 0

    async def get(self, key: str) -> Any:
        self.asked += 1
        return await super().get(key)

    async def head(self, key: str) -> Any:
        self.asked += 1
        return await super().head(key)

    async def children(self, prefix: str) -> Any:
        self.asked += 1
        return await super().children(prefix)

    async def list(self, prefix: str, **options: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        self.asked += 1
        async for info in super().list(prefix, **options):
            yield info


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_many_viewers_of_a_page_cost_what_one_costs(page: Any) -> None:
    """Also its JSON twin: 25 at once share what is read, and so does everybody within its time to live."""
    store = CountedStore(clock=SystemClock())
    async with site(store) as here:
        async with collector(store) as (client, part):
            for number in range(3):
                frame = frame_of(number * 10, number * 10 + 9, at_ns=here.context.clock.now_ns())
                assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await part.derived_writes.stop()
        for name in ("a", "b"):
            entry = KeyValueEntry(b"k", b"v")
            await (await Queue.of(here.context, name).ingestor().ingest([entry])).await_durable()
        store.asked = 0

        answers = await asyncio.gather(*(here.browser.client.get(page.path) for _ in range(VIEWERS)))
        many = store.asked
        again = [await here.browser.client.get(page.twin()) for _ in range(3)]

    assert {200} == {answer.status_code for answer in (*answers, *again)}
    assert many <= REQUESTS_MAX
    assert store.asked <= many + REQUESTS_MAX
