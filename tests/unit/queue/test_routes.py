"""The broker over HTTP: it answers when entries are durable, groups its callers, and says clearly what is wrong."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Overloaded, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.queue import codec, workers
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.routes import QueueBroker, component
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections


def made(**flags: Any) -> Context:
    clock = SystemClock()
    settings = load(sections(), flags={"queue.flush_interval_s": 0.005} | flags)
    return Context(
        node="node",
        settings=settings,
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(3),
        metrics=Metrics(),
    )


@pytest.fixture
def context() -> Context:
    return made()


@pytest.fixture
async def client(context: Context) -> AsyncIterator[httpx2.AsyncClient]:
    routes = component(context)
    transport = httpx2.ASGITransport(app=build(context, [routes]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    await routes.stop()


def as_json(*values: bytes) -> list[dict[str, str]]:
    return [{"key": "aw==", "value": base64.b64encode(value).decode()} for value in values]


async def test_entries_are_durable_when_answered(client: httpx2.AsyncClient, context: Context) -> None:
    """The answer names a location that is in the manifest, and the entries are there."""
    answer = await client.post("/v1/queues/orders/entries", json=as_json(b"one", b"two"))

    told = answer.json()
    assert (answer.status_code, told["queue"], told["sequence"], told["entries"]) == (200, "orders", 1, 2)
    assert (await Queue.of(context, "orders").producer.read()).pending == (told["location"],)
    assert [entry.value for entry in codec.decode((await context.store.get(told["location"])).data)] == [b"one", b"two"]


async def test_the_binary_form_is_taken_too(client: httpx2.AsyncClient) -> None:
    """One batch as bytes, without base64."""
    body = codec.encode([KeyValueEntry(b"k", bytes(range(256)))])

    answer = await client.post("/v1/queues/default/entries", content=body, headers={"content-type": codec.CONTENT_TYPE})

    assert answer.status_code == 200
    assert answer.json()["location"].startswith("ingest/00000000-")


async def test_callers_at_one_time_share_a_batch_and_a_write() -> None:
    """Forty remote producers cost a handful of stored objects, not eighty."""
    context = made(**{"queue.flush_interval_s": 0.2})
    routes = component(context)
    transport = httpx2.ASGITransport(app=build(context, [routes]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answers = await asyncio.gather(
            *(client.post("/v1/queues/orders/entries", json=as_json(b"%d" % n)) for n in range(40))
        )

    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["location"] for answer in answers}) <= 4
    assert context.metrics.value("lakebed_queue_entries_total") == 40
    assert context.metrics.value("lakebed_register_conflicts_total", register="queue_producer") == 0
    await routes.stop()


@pytest.mark.parametrize(
    ("name", "body", "kind", "status"),
    [
        ("orders", b"[", "application/json", 400),
        ("orders", b'{"key": "aw==", "value": ""}', "application/json", 400),
        ("orders", b'[{"key": "aw=="}]', "application/json", 400),
        ("orders", b'[{"key": "not base64", "value": ""}]', "application/json", 400),
        ("orders", b"LBQ1 but no more", codec.CONTENT_TYPE, 400),
        ("orders", b"[]", "application/json", 422),
        ("orders", b"a line", "text/plain", 415),
        ("Orders!", b"[]", "application/json", 400),
        ("orders", codec.encode([KeyValueEntry(b"", b"x" * 2000)]), codec.CONTENT_TYPE, 413),
        ("orders", codec.encode([KeyValueEntry(b"", bytes(10**6))]), codec.CONTENT_TYPE, 413),
    ],
)
async def test_what_is_wrong_is_told_by_its_status(name: str, body: bytes, kind: str, status: int) -> None:
    """Malformed, empty, of an unknown kind, misnamed, too large: each has its own status, and nothing is stored."""
    context = made(**{"queue.entry_bytes_max": 1000, "queue.ingest_bytes_max": 10_000})
    transport = httpx2.ASGITransport(app=build(context, [component(context)]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post(f"/v1/queues/{name}/entries", content=body, headers={"content-type": kind})

    assert answer.status_code == status
    assert answer.json()["message"]
    assert [info async for info in context.store.list("")] == []


async def test_a_store_that_is_away_is_told_as_503() -> None:
    """Not durable, not acknowledged: come again."""
    context = made(**{"queue.flush_timeout_s": 0.01})

    async def away(key: str, data: bytes) -> Any:
        raise Unavailable("the store is away")

    context.store.create = away  # type: ignore[method-assign]
    transport = httpx2.ASGITransport(app=build(context, [component(context)]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/queues/orders/entries", json=as_json(b"x"))

    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_busy_broker_refuses_instead_of_gathering(context: Context) -> None:
    """Beyond what may be in memory a remote producer is told to come again; too many queues likewise."""
    broker = QueueBroker(
        made(**{"queue.max_unflushed_bytes": 10, "queue.flush_interval_s": 1000.0, "queue.queues_max": 1})
    )
    first = asyncio.ensure_future(broker.put("a", [KeyValueEntry(b"k", b"v" * 100)]))
    await asyncio.sleep(0)

    with pytest.raises(Overloaded, match="not durable yet"):
        await broker.put("a", [KeyValueEntry(b"k", b"v")])
    with pytest.raises(Overloaded, match="queues are busy"):
        await broker.put("b", [KeyValueEntry(b"k", b"v")])

    await broker.close()
    assert (await first).sequence == 1


async def test_an_idle_queue_makes_room(context: Context) -> None:
    """The limit on open queues is not a limit on names."""
    broker = QueueBroker(made(**{"queue.queues_max": 2}))

    for name in ("a", "b", "c"):
        await broker.put(name, [KeyValueEntry(b"k", b"v")])

    assert broker.queues == ["b", "c"]
    await broker.close()


async def test_queues_and_letters_can_be_looked_at(client: httpx2.AsyncClient, context: Context) -> None:
    """Status of all and of one, dead letters; what is not there is 404."""
    await client.post("/v1/queues/orders/entries", json=as_json(b"x"))

    listed = (await client.get("/v1/queues")).json()
    one = (await client.get("/v1/queues/orders")).json()

    assert [row["queue"] for row in listed] == ["orders"]
    assert (one["pending"], one["claimed"], one["dead"]) == (1, 0, 0)
    assert (await client.get("/v1/queues/orders/dead-letters")).json() == []
    assert (await client.get("/v1/queues/nothing")).status_code == 404


async def test_the_keeper_tidies_every_queue(context: Context) -> None:
    """One round cleans, sweeps and shows; a queue that is broken does not hold up the rest."""
    for name in ("default", "orders"):
        queue = Queue.of(context, name)
        ingestor, collector = queue.ingestor(), queue.collector()
        for _ in range(queue.settings.done_cleanup_threshold):
            await ingestor.ingest([KeyValueEntry(b"k", b"v")])
            await ingestor.flush()
        collector._settings = queue.settings.of({"done_cleanup_threshold": 10_000})
        while (batch := await collector.next_batch()) is not None:
            await collector.ack(batch)
        await collector.close()
    await context.store.create("ingest/broken/manifest.json", b"not a manifest")

    await workers.QueueMaintenance(context).round()

    assert [(await Queue.of(context, name).status()).done for name in ("default", "orders")] == [0, 0]
    assert context.metrics.value("lakebed_queue_cleaned_total") == 200
    assert context.metrics.value("lakebed_queue_length", queue="orders") == 0
    assert [worker.name for worker in workers.workers(context)] == ["queue-maintenance"]


async def test_the_keeper_does_not_let_the_last_done_batches_lie(manual_clock: ManualClock) -> None:
    """Fewer than the threshold, but older than a horizon: they are removed too."""
    context = msgspec.structs.replace(made(), clock=manual_clock, store=MemoryStore(clock=manual_clock))
    queue = Queue.of(context)
    ingestor, collector = queue.ingestor(), queue.collector()
    await ingestor.ingest([KeyValueEntry(b"k", b"v")])
    await ingestor.close()
    await collector.ack(await collector.next_batch())  # type: ignore[arg-type]
    await collector.close()
    keeper = workers.QueueMaintenance(context)

    await keeper.round()
    before = (await queue.status()).done
    await manual_clock.advance(queue.settings.horizon_s + 1.0)
    await keeper.round()

    assert (before, (await queue.status()).done) == (1, 0)


async def test_the_keeper_sweeps_every_shard(manual_clock: ManualClock) -> None:
    """Done batches of a later shard are removed like those of the first."""
    context = msgspec.structs.replace(
        made(**{"queue.shards": 2}), clock=manual_clock, store=MemoryStore(clock=manual_clock)
    )
    queue = Queue.of(context)
    collector = queue.collector()
    for shard in range(2):
        ingestor = queue.ingestor(shard)
        await ingestor.ingest([KeyValueEntry(b"k", b"v")])
        await ingestor.close()
        await collector.ack(await collector.next_batch())  # type: ignore[arg-type]
    await collector.close()
    before = [(await shard.consumer.read()).done for shard in await queue.shards()]
    await manual_clock.advance(queue.settings.horizon_s + 1.0)

    await workers.QueueMaintenance(context).round()

    assert [1, 1] == [len(done) for done in before]
    assert [(), ()] == [(await shard.consumer.read()).done for shard in await queue.shards()]


async def test_a_key_opens_what_its_rights_name() -> None:
    """Reading, writing and each queue are rights of their own."""
    key = {"name": "app", "secret": "0123456789abcdef0123", "rights": ["queue:write:orders", "queue:read:*"]}
    context = made(**{"gateway.keys": [key]})
    routes = component(context)
    transport = httpx2.ASGITransport(app=build(context, [routes]))
    headers = {"authorization": f"Bearer {key['secret']}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        orders = await client.post("/v1/queues/orders/entries", json=as_json(b"x"))
        others = await client.post("/v1/queues/others/entries", json=as_json(b"x"))
        read = await client.get("/v1/queues/orders")
        listed = await client.get("/v1/queues")
        nobody = await client.get("/v1/queues/orders", headers={"authorization": ""})

    assert [answer.status_code for answer in (orders, others, read, listed, nobody)] == [200, 403, 200, 403, 401]
    await routes.stop()
