"""Fetch at the port: how long it waits for how much, and how much it gives at most. On a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from lakebed.log import kafka_batch
from support.kafka_client import KafkaClient, batch, sent
from support.kafka_port import KafkaPort
from support.log_host import Host

BATCH = batch("v" * 1000)  # of one record
SIZE = len(BATCH)
WAIT_S = 3.0
READ_UNCOMMITTED, READ_COMMITTED = 0, 1


@pytest.fixture
async def port(host: Host) -> AsyncIterator[KafkaPort]:
    async with KafkaPort(host) as made:
        yield made


async def produce(host: Host, client: KafkaClient, count: int, partition: int = 0) -> None:
    for _ in range(count):
        client.send("produce", 9, **sent(BATCH, partition=partition))
    await host.clock.advance(0.5)
    for _ in range(count):
        answer = await client.answer("produce", 9)
        assert ErrorCode.none is answer.responses[0].partition_responses[0].error_code


def wanted(*partitions: int, part_bytes: int = 10**6, **more: Any) -> dict[str, Any]:
    parts = [{"partition": n, "fetch_offset": 1, "partition_max_bytes": part_bytes} for n in partitions]
    limits = {"max_wait": timedelta(seconds=WAIT_S), "min_bytes": 1, "max_bytes": 10**6, "rack_id": "", **more}
    return {"topics": [{"topic": "orders", "partitions": parts}], **limits}


async def fetched(client: KafkaClient, *partitions: int, **limits: Any) -> list[Any]:
    answer = await client.ask("fetch", 12, **wanted(*partitions, **limits))
    return list(answer.responses[0].partitions)


def sizes(parts: list[Any]) -> list[int]:
    """How many batches each partition has in an answer."""
    return [len(part.records or b"") // SIZE for part in parts]


async def test_a_fetch_waits_until_it_has_the_fewest_bytes_that_it_asks_for(host: Host, port: KafkaPort) -> None:
    """Less is there: it waits for the rest, and answers as soon as that has come, over all its partitions."""
    client, producing = port.client(), port.client()
    await produce(host, producing, 2)
    await produce(host, producing, 1, partition=1)

    asking = asyncio.ensure_future(fetched(client, 0, 1, min_bytes=4 * SIZE))
    await host.clock.advance(WAIT_S / 2)
    early = asking.done()
    await produce(host, producing, 1, partition=1)
    enough = asking.done()

    assert (False, True) == (early, enough)
    assert [2, 2] == sizes(asking.result())


async def test_a_fetch_that_waits_in_vain_has_what_there_is(host: Host, port: KafkaPort) -> None:
    """After max_wait, and not before."""
    client, producing = port.client(), port.client()
    await produce(host, producing, 1)

    asking = asyncio.ensure_future(fetched(client, 0, min_bytes=2 * SIZE))
    await host.clock.advance(WAIT_S - 0.01)
    early = asking.done()
    await host.clock.advance(0.02)

    assert (False, True) == (early, asking.done())
    assert [1] == sizes(asking.result())


@pytest.mark.parametrize("bytes_min", [0, 1, SIZE])
async def test_a_fetch_with_enough_does_not_wait(host: Host, port: KafkaPort, bytes_min: int) -> None:
    """Also one that asks for nothing at least, and one byte."""
    client, producing = port.client(), port.client()
    await produce(host, producing, 1)
    began_s = host.clock.monotonic_s()

    parts = await fetched(client, 0, min_bytes=bytes_min)

    assert [1] == sizes(parts)
    assert began_s == host.clock.monotonic_s()


@pytest.mark.parametrize("cold", [False, True])
async def test_a_fetch_gives_no_more_than_its_maxima(host: Host, port: KafkaPort, cold: bool) -> None:
    """Of one partition, and of all; what does not fit comes next time. From the cache and from the bucket alike."""
    producing = port.client()
    for number in range(3):
        await produce(host, producing, 4, partition=number)
    async with KafkaPort(host, "b:9092") as other:
        client = (other if cold else port).client()

        by_partition = await fetched(client, 0, 1, 2, part_bytes=2 * SIZE + 100)
        by_all = await fetched(client, 0, 1, 2, max_bytes=6 * SIZE + 100)
        unlimited = await fetched(client, 0, 1, 2)

        assert [2, 2, 2] == sizes(by_partition)
        assert 6 <= sum(sizes(by_all)) <= (6 if cold else 7)  # a batch is given whole
        assert [4, 4, 4] == sizes(unlimited)
        assert {5} == {part.high_watermark for part in [*by_partition, *by_all, *unlimited]}


@pytest.mark.parametrize("limits", [{"part_bytes": 10}, {"max_bytes": 10}])
async def test_a_batch_that_is_larger_than_a_maximum_is_given_all_the_same(
    host: Host, port: KafkaPort, limits: dict[str, int]
) -> None:
    """One, or else its consumer would never get past it."""
    client, producing = port.client(), port.client()
    await produce(host, producing, 2)

    assert [1] == sizes(await fetched(client, 0, **limits))


async def test_a_consumer_that_reads_what_is_committed_gets_the_same(host: Host, port: KafkaPort) -> None:
    """There are no transactions: the last stable offset is the high watermark, and nothing was aborted."""
    client, producing = port.client(), port.client()
    await produce(host, producing, 3)

    (anything,) = await fetched(client, 0, isolation_level=READ_UNCOMMITTED)
    (committed,) = await fetched(client, 0, isolation_level=READ_COMMITTED)

    assert bytes(anything.records) == bytes(committed.records)
    assert 3 == len(list(kafka_batch.split(bytes(committed.records))))
    assert 4 == committed.high_watermark == committed.last_stable_offset == anything.last_stable_offset
    assert not committed.aborted_transactions
