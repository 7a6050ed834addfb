"""The latency half of `lakebed bench log`: one record against one bare create, and from one gateway to another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from statistics import median

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured, rounds_of
from lakebed.bench.load import LoadConnection, LoadRequest, post
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable

SINGLE_BAR = 1.6  # one acknowledged record ÷ one bare conditional create
ACROSS_P50_MS, ACROSS_P99_MS = 25.0, 80.0  # from a produce at one gateway to a consume at another
CREATE_BYTES = 400  # about a blob with one record of 100 bytes
TOPIC = "latency"


async def latency_checks(environment: BenchEnvironment, context: Context, one: str, other: str) -> list[Check]:
    """`one` and `other` are gateways of the same log."""
    count = 40 if environment.quick else 120
    environment.report("single records and bare creates, one at a time, in turn")
    connection, clock = LoadConnection(one), SystemClock()
    request = _produce(one)

    async def create() -> float:
        async def once() -> None:
            await context.store.create(f"bench/single/{context.ids.token()}", bytes(CREATE_BYTES))

        return await _median_ms(clock, count, once)

    async def produce() -> float:
        async def once() -> None:
            await _sent(connection, request)

        return await _median_ms(clock, count, once)

    await produce()  # warm-up: connection, topic, caches
    found = await rounds_of(environment.rounds, {"create": create, "produce": produce})
    connection.close()
    across = await _across(environment, clock, one, other, count)
    return [
        measured("one bare conditional create", found["create"], "ms"),
        measured("one record, acknowledged", found["produce"], "ms"),
        at_most("one record, acknowledged ÷ one bare create", found["produce"], found["create"], SINGLE_BAR),
        _under("from one gateway to another, p50", across, 0.5, ACROSS_P50_MS),
        _under("from one gateway to another, p99", across, 0.99, ACROSS_P99_MS),
    ]


async def _across(environment: BenchEnvironment, clock: SystemClock, one: str, other: str, count: int) -> list[float]:
    """Milliseconds from the begin of a produce at one gateway until a long poll at the other has the record."""
    environment.report("a record produced at one gateway, and a long poll at another")
    producing, consuming = LoadConnection(one), LoadConnection(other)
    request, took = _produce(one), list[float]()
    _, answer = await _sent(producing, request)
    offset = msgspec.json.decode(answer)["results"][0]["end_offset"] + 1
    await _sent(consuming, _consume(other, offset, 0))
    await clock.sleep(4.0)  # the gateways read the registry of brokers every 3 s
    for number in range(count):
        waiting = asyncio.ensure_future(_sent(consuming, _consume(other, offset + number, 5000)))
        await clock.sleep(0.03)
        began = clock.monotonic_s()
        await _sent(producing, request)
        await waiting
        took.append((clock.monotonic_s() - began) * 1e3)
    producing.close()
    consuming.close()
    return took


async def _median_ms(clock: SystemClock, count: int, work: Callable[[], Awaitable[None]]) -> float:
    took: list[float] = []
    for _ in range(count):
        began = clock.monotonic_s()
        await work()
        took.append((clock.monotonic_s() - began) * 1e3)
    return median(took)


def _under(name: str, values: Sequence[float], quantile: float, bar: float) -> Check:
    value = sorted(values)[min(len(values) - 1, int(len(values) * quantile))]
    return Check(name, round(value, 2), "ms", bar, value <= bar)


async def _sent(connection: LoadConnection, request: LoadRequest) -> tuple[int, bytes]:
    status, answer = await connection.request(request.data)
    if status != 200:
        raise Unavailable(f"the gateway answered {status}: {answer[:200]!r}")
    return status, answer


def _produce(url: str) -> LoadRequest:
    part = {"topic": TOPIC, "partition": 0, "records": ["x" * 100]}
    body = msgspec.json.encode({"topic_partitions": [part]})
    return post(url, "/v1/produce", body, 1, content_type="application/json")


def _consume(url: str, offset: int, wait_ms: int) -> LoadRequest:
    part = {"topic": TOPIC, "partition": 0, "fetch_offset": offset}
    body = msgspec.json.encode({"topic_partitions": [part], "max_wait_ms": wait_ms})
    return post(url, "/v1/consume", body, 1, content_type="application/json")
