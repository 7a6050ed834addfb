"""Limits of a key: 429 with Retry-After, for that key alone; and what strangers cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.core.auth import KeyLimits, Principal
from lakebed.core.clock import ManualClock
from lakebed.core.context import Health
from lakebed.core.errors import Throttled
from lakebed.core.quotas import BURST_S, KeyQuotas, RateBucket
from lakebed.gateway.app import build
from lakebed.gateway.health import EVERY_S as HEALTH_EVERY_S
from lakebed.store.authority import claim
from lakebed.wiring.parts import components
from support.batch_frames import frame_of
from support.counting_store import count_requests
from support.gateway_fixtures import Sample, client_of, context_with

SECRET, OTHER = "0123456789abcdef-small", "0123456789abcdef-other"
TOPIC = {"topic": "t", "partition": 0}


def keys(**limits: float) -> list[dict[str, Any]]:
    return [
        {"name": "small", "secret": SECRET, "rights": ["*"], "limits": limits},
        {"name": "other", "secret": OTHER, "rights": ["*"]},
    ]


@asynccontextmanager
async def gateway(clock: Any = None, parts: Any = None, **limits: float) -> AsyncIterator[httpx2.AsyncClient]:
    context = context_with(clock, keys=keys(**limits))
    app = build(context, [Sample()] if parts is None else components(context, parts))
    async with app.router.lifespan_context(app), client_of(app, headers={"x-api-key": SECRET}, timeout=60) as client:
        yield client


async def statuses(client: httpx2.AsyncClient, count: int, **options: Any) -> list[int]:
    return [(await client.get("/sample", **options)).status_code for _ in range(count)]


async def test_requests_over_the_rate_are_429_for_that_key_alone() -> None:
    """A burst of two seconds, then the rate; another key is served meanwhile; Retry-After names when."""
    clock = ManualClock()
    async with gateway(clock, requests_per_s=2.0) as client:
        burst = await statuses(client, 5)
        over = await client.get("/sample")
        others = await statuses(client, 10, headers={"x-api-key": OTHER})
        await clock.advance(1.0)
        later = await statuses(client, 3)

    assert [200, 200, 200, 200, 429] == burst
    assert (429, "throttled", "1") == (over.status_code, over.json()["code"], over.headers["retry-after"])
    assert {200} == set(others)
    assert [200, 200, 429] == later


async def test_each_gateway_counts_for_itself() -> None:
    """As Kafka's brokers do: a key with a limit of R has up to N times R on N gateways, and no gateway asks another."""
    clock = ManualClock()
    one = context_with(clock, keys=keys(requests_per_s=1.0))
    two = msgspec.structs.replace(one, node="node-2")
    served = []
    for context in (one, two):
        async with client_of(build(context, [Sample()]), headers={"x-api-key": SECRET}) as client:
            served.append(await statuses(client, 3))

    assert [[200, 200, 429]] * 2 == served


async def test_bytes_over_the_rate_delay_the_next_request() -> None:
    """Also of a body without a declared length: what came counts."""
    clock = ManualClock()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 100

    async with gateway(clock, bytes_per_s=100.0) as client:
        first = await client.post("/sample", content=chunks())
        second = await client.post("/sample", content=b"x")
        await clock.advance(float(second.headers["retry-after"]))
        third = await client.post("/sample", content=b"x")

    assert [200, 429, 200] == [first.status_code, second.status_code, third.status_code]
    assert "8" == second.headers["retry-after"]  # 1,000 bytes, of which 200 were in the bucket


async def test_records_and_samples_count_in_every_part() -> None:
    """Records of a topic, entries of a queue and samples of a batch are one rate."""
    entries = [{"key": "aw==", "value": "dg=="}] * 50
    records = {"topic_partitions": [TOPIC | {"records": ["x"] * 50}]}
    for send in (
        lambda client: client.post("/v1/produce", json=records),
        lambda client: client.post("/v1/queues/q/entries", json=entries),
        lambda client: client.post("/v1/batches", content=frame_of(0, 49)),
    ):
        async with gateway(parts=["log", "queue", "batches"], records_per_s=1.0) as client:
            first, second = await send(client), await send(client)

        assert (200, 429) == (first.status_code, second.status_code), (first.text, second.text)


async def test_a_key_creates_no_more_topics_than_it_may() -> None:
    """Topics that exist are appended to."""
    async with gateway(parts=["log"], topics_max=2) as client:
        made = [
            (await client.post("/v1/produce", json={"topic_partitions": [TOPIC | {"topic": name, "records": ["x"]}]}))
            for name in ("a", "b", "c", "a", "b")
        ]

    assert [200, 200, 429, 200, 200] == [answer.status_code for answer in made]
    assert "topics" in made[2].json()["message"]


async def test_a_batch_has_no_more_series_than_its_key_may() -> None:
    async with gateway(parts=["batches"], series_max=1) as client:
        two = await client.post("/v1/batches", content=frame_of(0, 9))
        one = await client.post("/v1/batches", content=frame_of(0, 0))

    assert (429, 200) == (two.status_code, one.status_code)


async def test_uploads_at_once_are_limited() -> None:
    """A request with a body that is not answered yet takes one place; without a body none."""
    go = asyncio.Event()

    async def wait(request: Request) -> Response:
        await request.body()
        await go.wait()
        return Response("done")

    context = context_with(keys=keys(uploads_max=2))
    app = build(context, [Sample(more=[Route("/wait", wait, methods=["POST"])])])
    async with client_of(app, headers={"x-api-key": SECRET}) as client:
        waiting = [asyncio.create_task(client.post("/wait", content=b"x")) for _ in range(2)]
        await asyncio.sleep(0.05)
        over = await client.post("/wait", content=b"x")
        read = await client.get("/sample")
        go.set()
        done = [(await task).status_code for task in waiting]
        after = await client.post("/wait", content=b"x")

    assert (429, 200, [200, 200], 200) == (over.status_code, read.status_code, done, after.status_code)


async def test_a_stranger_learns_the_status_and_nothing_else_and_causes_no_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Health is checked on a timer where there are keys: a hundred requests without one cost the store nothing, and see
    a component that went down at the next check."""
    clock, part = ManualClock(), Sample()
    context = context_with(clock, keys=keys())
    await claim(context, expected="")
    app = build(context, [part])
    async with app.router.lifespan_context(app), client_of(app) as client:
        first = await client.get("/healthz")
        asked = count_requests(monkeypatch, context.store)
        part.told = Health("down", "no disk")
        await clock.advance(2.0)
        seen = {(await client.get("/healthz")).status_code for _ in range(100)}
        cost = list(asked)
        known = await client.get("/healthz", headers={"x-api-key": OTHER})
        part.told = Health("degraded", "a slow disk")
        await clock.advance(HEALTH_EVERY_S)
        later = await client.get("/healthz")

    assert ({"status": "ok"}, {200}, []) == (first.json(), seen, cost)
    assert (503, "no disk") == (known.status_code, known.json()["components"]["sample"]["detail"])
    assert (200, {"status": "degraded"}) == (later.status_code, later.json())


def test_a_key_that_was_idle_has_a_burst_and_no_more() -> None:
    """What was not used for an hour is not saved up."""
    bucket = RateBucket(10.0, now_s=0.0)

    assert 0.0 == bucket.wait_s(3600.0, 1.0)
    bucket.take(10.0 * BURST_S)

    assert 0.1 == pytest.approx(bucket.wait_s(3600.0, 1.0))


@pytest.mark.parametrize("per_s", [0.1, 1 / 3600])
async def test_a_rate_of_less_than_one_request_in_a_burst_admits_one_after_another(per_s: float) -> None:
    """A key with six requests a minute, or one an hour, is not shut out: it waits for a whole one."""
    clock = ManualClock()
    usage = KeyQuotas(clock).of(Principal("small", ("*",), limits=KeyLimits(requests_per_s=per_s)))
    assert usage is not None

    usage.begin(upload=False)
    with pytest.raises(Throttled) as over:
        usage.begin(upload=False)
    await clock.advance(1.001 / per_s)
    usage.begin(upload=False)

    assert 1 / per_s == pytest.approx(over.value.retry_after_s)
    with pytest.raises(Throttled):
        usage.begin(upload=False)


def test_limits_that_changed_are_in_force_at_once() -> None:
    """The operator raises or lowers a limit in the bucket: no gateway has to start again."""
    quotas = KeyQuotas(ManualClock())
    strict = Principal("small", ("*",), limits=KeyLimits(uploads_max=1))
    usage = quotas.of(strict)
    assert usage is not None and usage is quotas.of(strict)
    usage.begin(upload=True)
    with pytest.raises(Throttled):
        usage.begin(upload=True)

    raised = quotas.of(Principal("small", ("*",), limits=KeyLimits(uploads_max=2)))

    assert raised is not None
    raised.begin(upload=True)
    raised.begin(upload=True)
    assert quotas.of(Principal("small", ("*",))) is None


def test_an_upload_that_is_refused_takes_nothing_from_the_rate() -> None:
    """Who tries again until its other upload ends is then admitted: only what was admitted counts."""
    limits = KeyLimits(requests_per_s=2.0, uploads_max=1)
    usage = KeyQuotas(ManualClock()).of(Principal("small", ("*",), limits=limits))
    assert usage is not None
    usage.begin(upload=True)
    for _ in range(10):
        with pytest.raises(Throttled, match="uploads_max"):
            usage.begin(upload=True)
    usage.end(upload=True, size=1)

    usage.begin(upload=True)


async def test_who_waits_for_an_upload_waits_until_the_next_one_ends() -> None:
    """An upload that ended earlier made room for another one: it lets nobody else in."""
    usage = KeyQuotas(ManualClock()).of(Principal("small", ("*",), limits=KeyLimits(uploads_max=1)))
    assert usage is not None
    usage.begin(upload=True)
    usage.end(upload=True, size=1)
    usage.begin(upload=True)
    with pytest.raises(Throttled) as over:
        usage.begin(upload=True)
    waiting = asyncio.create_task(usage.wait(over.value))
    for _ in range(5):
        await asyncio.sleep(0)
    early = waiting.done()
    usage.end(upload=True, size=1)
    await asyncio.wait_for(waiting, 10)

    assert not early
    usage.begin(upload=True)


async def test_who_waits_for_a_rate_waits_as_long_as_it_takes() -> None:
    """The longest of the rates decides, and after that time the request is admitted."""
    clock = ManualClock()
    limits = KeyLimits(requests_per_s=10.0, bytes_per_s=100.0, records_per_s=1.0)
    usage = KeyQuotas(clock).of(Principal("small", ("*",), limits=limits))
    assert usage is not None
    usage.begin(upload=True)
    usage.end(upload=True, size=500)  # 200 were there: 3 s
    usage.count_records(7)  # 2 were there: 5 s

    assert pytest.approx(5.0) == usage.wait_s()
    await clock.advance(3.5)
    with pytest.raises(Throttled) as over:
        usage.begin(upload=True)
    waiting = asyncio.create_task(usage.wait(over.value))
    await clock.advance(1.4)
    early = waiting.done()
    await clock.advance(0.1)
    await waiting

    assert (False, 0.0) == (early, usage.wait_s())
    usage.begin(upload=True)
