"""Two gateways as real processes on one bucket: what one of them changes, consumers of the other are reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from httpx2 import AsyncClient

from support.log_processes import DEADLINE_S, crew_of


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_an_append_a_trim_and_a_delete_are_seen_at_the_other_gateway_without_waiting(
    log_settings: dict[str, str], tmp_path: Path
) -> None:
    """Every poll has max_wait_ms 0; the other gateway has the records in its tail cache when they are taken away."""
    async with crew_of(tmp_path, log_settings) as (supervised, ports):
        for name, port in zip(("b0", "b1"), ports, strict=False):
            await supervised.start(name, "serve", port)
        for name in ("b0", "b1"):
            await supervised.ready(name)
        async with AsyncClient(timeout=60.0) as client:
            one, two = (Gateway(client, supervised.urls[name]) for name in ("b0", "b1"))
            await two.produce("a", "b")
            assert (await two.poll(1))["count"] == 2 and (await two.poll(3))["count"] == 0

            await one.produce("c")
            await until(lambda: two.poll(3), lambda reported: reported.get("records") == ["c"])
            await one.post("/v1/topics/t/partitions/0/trim", {"before_offset": 2})
            await until(lambda: two.poll(1), lambda reported: reported.get("error_type") == "OffsetOutOfRange")
            assert (await two.poll(2))["records"][0] == "b"
            await client.request("DELETE", f"{one.url}/v1/topics/t", content=b'{"reason":"test"}')
            await until(lambda: two.poll(2), lambda reported: reported.get("error_type") == "UnknownTopicPartition")
            await one.produce("new")
            await until(lambda: two.poll(4), lambda reported: reported.get("records") == ["new"])
            assert (await two.poll(2))["error_type"] == "OffsetOutOfRange"


@pytest.mark.timeout(300)
async def test_a_consumer_at_the_other_gateway_sees_a_record_long_before_its_poll(
    log_settings: dict[str, str], tmp_path: Path
) -> None:
    """The gateways find each other and send notices: with a poll each 10 s, a record is there within a second or so."""
    settings = {**log_settings, "log.poll_s": "10"}
    async with crew_of(tmp_path, settings) as (supervised, ports):
        for name, port in zip(("b0", "b1"), ports, strict=False):
            await supervised.start(name, "serve", port)
        for name in ("b0", "b1"):
            await supervised.ready(name)
        async with AsyncClient(timeout=60.0) as client:
            one, two = (Gateway(client, supervised.urls[name]) for name in ("b0", "b1"))
            await one.produce("0")
            await two.poll(1)
            took: list[float] = []
            deadline = time.monotonic() + DEADLINE_S / 2
            while time.monotonic() < deadline and (len(took) < 10 or sorted(took[-9:])[4] > 1.5):
                waiting = asyncio.ensure_future(two.poll(len(took) + 2, max_wait_ms=25_000))
                await asyncio.sleep(0.05)
                began = time.monotonic()
                await one.produce(str(len(took) + 1))
                assert [str(len(took) + 1)] == (await waiting)["records"]
                took.append(time.monotonic() - began)

    assert sorted(took[-9:])[4] <= 1.5, took


class Gateway:
    def __init__(self, client: AsyncClient, url: str) -> None:
        self._client, self.url = client, url

    async def post(self, path: str, body: Any) -> Any:
        return (await self._client.post(f"{self.url}{path}", content=msgspec.json.encode(body))).json()

    async def produce(self, *records: str) -> None:
        part = {"topic": "t", "partition": 0, "records": records}
        assert (await self.post("/v1/produce", {"topic_partitions": [part]}))["error_count"] == 0

    async def poll(self, offset: int, **more: Any) -> Any:
        part = {"topic": "t", "partition": 0, "fetch_offset": offset}
        return (await self.post("/v1/consume", {"topic_partitions": [part], **more}))["results"][0]


async def until(ask: Callable[[], Awaitable[Any]], seen: Callable[[Any], bool]) -> None:
    """The bound itself is shown with a manual clock; here a busy machine has all the time it needs."""
    deadline, reported = time.monotonic() + DEADLINE_S / 5, None
    while time.monotonic() < deadline:
        reported = await ask()
        if seen(reported):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never seen: {reported}")
