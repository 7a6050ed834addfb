"""What the Oxia adapter makes of a server that is not there, and of a real one's own ways."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.model import TopicPartition
from lakebed.log.registry import GROUP, PartitionRegistry
from lakebed.meta.model import MetaEntry, prefix_end
from lakebed.meta.oxia.backend import OxiaMeta
from lakebed.meta.oxia.order import INTERNAL, KeyRange
from support.oxia_server import ADDRESS

needs_oxia = pytest.mark.skipif(not ADDRESS, reason="no Oxia server: make test-oxia starts one")


def connect(address: str, *, timeout_s: float = 10.0) -> OxiaMeta:
    return OxiaMeta(Runtime(SystemClock(), Ids(), Metrics()), address, timeout_s=timeout_s)


@pytest.fixture
async def meta() -> AsyncIterator[OxiaMeta]:
    made = connect(ADDRESS)
    yield made
    await made.close()


async def test_nobody_at_the_address_is_unavailable_at_once() -> None:
    """A refused connection is reported as such, and nothing continues trying behind our back."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    meta = connect(f"127.0.0.1:{port}", timeout_s=200.0)

    async with asyncio.timeout(100.0):
        with pytest.raises(Unavailable):
            await meta.get("llog/a")

    await meta.close()


async def test_an_address_without_a_port_is_invalid() -> None:
    """A mistake in the settings is named, not retried."""
    meta = connect("localhost")

    with pytest.raises(Invalid):
        await meta.get("llog/a")

    await meta.close()


async def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    """A peer that accepts and reports nothing costs no more than the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meta = connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)

        async with asyncio.timeout(100.0):
            with pytest.raises(Unavailable):
                await meta.get("llog/a")
            await meta.close()


async def test_a_session_that_the_server_would_refuse_is_refused_at_once() -> None:
    """The server's own limit is reported before anything is put under the session."""
    meta = connect("127.0.0.1:1")

    with pytest.raises(Invalid):
        await meta.open_session(timeout_s=1.9)

    await meta.close()


@needs_oxia
async def test_a_scan_over_everything_steps_around_the_servers_own_keys(meta: OxiaMeta) -> None:
    """The server keeps its own entries beside ours; a scan of all is not broken by them and never shows them."""
    topic = f"all-{Ids().token()}"
    await meta.put(f"llog/{topic}/x", b"1", partition_key=topic)

    found = await meta.range("", "zzzz", limit=10_000)

    assert f"llog/{topic}/x" in {entry.key for entry in found}
    assert not [entry.key for entry in found if entry.key.startswith(INTERNAL)]


@needs_oxia
async def test_many_large_entries_come_in_one_scan(meta: OxiaMeta) -> None:
    """A scan larger than one message of the wire comes whole."""
    topic = f"large-{Ids().token()}"
    for at in range(12):
        await meta.put(f"llog/{topic}/{at:02d}", bytes(512 * 1024), partition_key=topic)

    found = await meta.range(f"llog/{topic}/", prefix_end(f"llog/{topic}/"), limit=100, partition_key=topic)

    assert sum(len(entry.value) for entry in found) == 12 * 512 * 1024


@needs_oxia
async def test_all_partitions_are_discovered_in_one_request(meta: OxiaMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: their entries are one folder on one shard, which the server gives whole."""
    registry, topic = PartitionRegistry(meta), f"many-{Ids().token()}"
    tps = [TopicPartition(topic, number) for number in range(60)]
    for tp in tps:
        await registry.register(tp)
    requested = list[tuple[str, str]]()
    scan = meta._scan

    def counted(client: Any, keys: KeyRange, start: str, end: str, partition_key: str) -> Iterator[MetaEntry]:
        requested.append((keys.start, partition_key))
        return scan(client, keys, start, end, partition_key)

    monkeypatch.setattr(meta, "_scan", counted)
    found = [tp async for tp in registry.partitions("") if tp.topic == topic]

    assert (tps, [(paths.REGISTRY, GROUP)]) == (sorted(found), requested)
