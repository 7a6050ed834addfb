"""Two gateways as real processes on one bucket: what one of them changes, consumers of the other are told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from httpx2 import AsyncClient

from lakebed.store.settings import StoreSettings
from support.log_processes import DEADLINE_S, crew_of, settings_of


@pytest.mark.timeout(600)
async def test_an_append_a_trim_and_a_delete_are_seen_at_the_other_gateway_without_waiting(
    bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Every poll has max_wait_ms 0; the other gateway has the records in its tail cache when they are taken away."""
    async with crew_of(tmp_path, settings_of(bucket_settings, tmp_path)) as (crew, ports):
        for name, port in zip(("b0", "b1"), ports, strict=False):
            await crew.start(name, "serve", port)
        for name in ("b0", "b1"):
            await crew.ready(name)
        async with AsyncClient(timeout=60.0) as client:
            one, two = (Gateway(client, crew.urls[name]) for name in ("b0", "b1"))
            await two.produce("a", "b")
            assert (await two.poll(1))["count"] == 2 and (await two.poll(3))["count"] == 0

            await one.produce("c")
            await until(lambda: two.poll(3), lambda told: told.get("records") == ["c"])
            await one.post("/topics/t/partitions/0/trim", {"before_offset": 2})
            await until(lambda: two.poll(1), lambda told: told.get("error_type") == "OffsetOutOfRange")
            assert (await two.poll(2))["records"][0] == "b"
            await client.request("DELETE", f"{one.url}/topics/t", content=b'{"reason":"test"}')
            await until(lambda: two.poll(2), lambda told: told.get("error_type") == "UnknownTopicPartition")
            await one.produce("new")
            await until(lambda: two.poll(4), lambda told: told.get("records") == ["new"])
            assert (await two.poll(2))["error_type"] == "OffsetOutOfRange"


class Gateway:
    def __init__(self, client: AsyncClient, url: str) -> None:
        self._client, self.url = client, url

    async def post(self, path: str, body: Any) -> Any:
        return (await self._client.post(f"{self.url}{path}", content=msgspec.json.encode(body))).json()

    async def produce(self, *records: str) -> None:
        part = {"topic": "t", "partition": 0, "records": records}
        assert (await self.post("/produce", {"topic_partitions": [part]}))["error_count"] == 0

    async def poll(self, offset: int) -> Any:
        part = {"topic": "t", "partition": 0, "fetch_offset": offset}
        return (await self.post("/consume", {"topic_partitions": [part]}))["results"][0]


async def until(ask: Callable[[], Awaitable[Any]], seen: Callable[[Any], bool]) -> None:
    """The bound itself is shown with a manual clock; here a busy machine has all the time it needs."""
    deadline, told = time.monotonic() + DEADLINE_S / 5, None
    while time.monotonic() < deadline:
        told = await ask()
        if seen(told):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never seen: {told}")
