"""Consumers over HTTP: claim, ack, extend and reject at any gateway, in any language."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Denied, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.queue import codec
from lakebed.queue.consumer import Consumer
from lakebed.queue.model import Append, KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.routes import component
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject, Version, Written
from lakebed.wiring.parts import sections

CLAIMS = "/v1/queues/jobs/claims"


@pytest.fixture
def store(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


@asynccontextmanager
async def gateway(
    store: MemoryStore, clock: ManualClock, seed: int = 1, **flags: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, Context]]:
    settings = load(sections(), flags={f"queue.{name}": value for name, value in flags.items()})
    context = Context(node="node", settings=settings, store=store, clock=clock, ids=Ids.seeded(seed), metrics=Metrics())
    routes = component(context)
    transport = httpx2.ASGITransport(app=build(context, [routes]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client, context
    await routes.stop()


async def put(context: Context, *values: bytes) -> None:
    ingestor = Queue.of(context, "jobs").ingestor()
    for value in values:
        await ingestor.ingest([KeyValueEntry(b"k", value)])
        await ingestor.flush()
    await ingestor.close()


async def claim(client: httpx2.AsyncClient, **asked: Any) -> list[dict[str, Any]]:
    answer = await client.post(CLAIMS, json=asked)
    assert 200 == answer.status_code, answer.text
    return list(answer.json()["batches"])


def values(batches: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(entry["value"]) for batch in batches for entry in batch["entries"]]


async def test_a_claim_is_acked_at_another_gateway(store: MemoryStore, manual_clock: ManualClock) -> None:
    """The gateway that made it may be dead: nothing about it is in its memory. An ack twice is an ack once."""
    async with gateway(store, manual_clock) as (one, context), gateway(store, manual_clock, 2) as (other, _):
        await put(context, b"a", b"b", b"c")
        found = await claim(one, consumer="loader", max=2)
        codes = [
            (await client.post(f"{CLAIMS}/{batch['claim']}/ack")).status_code
            for client in (other, one)
            for batch in found
        ]
        rest = await claim(other, consumer="loader")

    assert ([b"a", b"b"], [1, 2]) == (values(found), [batch["sequence"] for batch in found])
    assert [200] * 4 == codes
    assert [b"c"] == values(rest)


async def test_an_ack_is_reported_although_the_clean_up_after_it_fails(manual_clock: ManualClock) -> None:
    """The batch is done; its consumer must not be told otherwise because old data could not be deleted."""

    class Undeletable(MemoryStore):
        async def delete(self, key: str) -> None:
            raise Denied(f"delete {key!r}: forbidden")

    async with gateway(Undeletable(clock=manual_clock), manual_clock, done_cleanup_threshold=1) as (client, context):
        await put(context, b"a", b"b")
        found = await claim(client, consumer="loader", max=2)
        codes = [(await client.post(f"{CLAIMS}/{batch['claim']}/ack")).status_code for batch in found]

        assert [200, 200] == codes
        assert [] == await claim(client, consumer="loader")


async def test_a_claim_whose_response_was_lost_is_given_to_the_same_consumer_again(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Unless it says that it has it; the first claim of that batch is void then. Another consumer waits."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a", b"b")
        (lost,) = await claim(client, consumer="loader")
        assert [] == await claim(client, consumer="other")
        (again,) = await claim(client, consumer="loader")
        (next_,) = await claim(client, consumer="loader", held=[again["claim"]])
        late = await client.post(f"{CLAIMS}/{lost['claim']}/ack")
        good = await client.post(f"{CLAIMS}/{again['claim']}/ack")

    assert ([b"a"], [b"a"], [b"b"]) == (values([lost]), values([again]), values([next_]))
    assert (409, 200) == (late.status_code, good.status_code)


async def test_a_claim_goes_stale_unless_it_is_extended(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Nobody sends heartbeats for it. A lost claim can be neither extended, acked nor rejected."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")
        (mine,) = await claim(client, consumer="slow")
        await manual_clock.advance(20.0)
        extended = await client.post(f"{CLAIMS}/{mine['claim']}/extend")
        await manual_clock.advance(20.0)
        assert [] == await claim(client, consumer="other")
        await manual_clock.advance(11.0)
        (theirs,) = await claim(client, consumer="other")
        verbs = [(await client.post(f"{CLAIMS}/{mine['claim']}/{verb}")).status_code for verb in VERBS]
        taken = await client.post(f"{CLAIMS}/{theirs['claim']}/ack")

    assert 20_000 + mine["expires_ms"] == extended.json()["expires_ms"]
    assert ([409] * 3, 200) == (verbs, taken.status_code)


class Slow(MemoryStore):
    """Takes this long to read a batch, and to answer a write."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._manual, self.read_s, self.write_s = clock, 0.0, 0.0

    async def get(self, key: str) -> StoredObject:
        if key.endswith(".batch"):
            await self._manual.advance(self.read_s)
        return await super().get(key)

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        written = await super().replace(key, data, etag)
        await self._manual.advance(self.write_s)
        return written


@pytest.mark.parametrize(("read_s", "claimed_after_ms"), [(0.0, 0), (12.0, 0), (25.0, 25_000)])
async def test_a_response_says_when_the_claim_goes_stale_and_not_later(
    manual_clock: ManualClock, read_s: float, claimed_after_ms: int
) -> None:
    """The time that its batch was read, or its answer was on the way, is part of it; an old claim is renewed first."""
    store = Slow(manual_clock)
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")
        store.read_s, asked_ms = read_s, now_ms(manual_clock)
        (mine,) = await claim(client, consumer="loader")
        store.write_s, extended_ms = 5.0, now_ms(manual_clock)
        extended = (await client.post(f"{CLAIMS}/{mine['claim']}/extend")).json()

    assert asked_ms + claimed_after_ms + 30_000 == mine["expires_ms"]
    assert extended_ms + 30_000 == extended["expires_ms"]


VERBS = ("ack", "extend", "reject")


@pytest.mark.parametrize("verb", VERBS)
async def test_a_claim_that_is_lost_while_its_request_runs_is_lost(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Another consumer takes the batch over between the look at the manifest and the write: 409, never a success."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")
        (mine,) = await claim(client, consumer="slow")
        read, taken = Consumer.read, list[Any]()

        async def overtaken(self: Consumer) -> Any:
            found = await read(self)
            if not taken:
                taken.append(None)
                await manual_clock.advance(31.0)
                taken[:] = await claim(client, consumer="other")
            return found

        monkeypatch.setattr(Consumer, "read", overtaken)
        answer = await client.post(f"{CLAIMS}/{mine['claim']}/{verb}")
        good = await client.post(f"{CLAIMS}/{taken[0]['claim']}/ack")

    assert (409, 200) == (answer.status_code, good.status_code)


async def test_a_rejected_batch_comes_back_later_and_at_last_becomes_a_dead_letter(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """With the consumer's reason."""
    async with gateway(store, manual_clock, rejections_max=2) as (client, context):
        await put(context, b"bad")
        (first,) = await claim(client, consumer="loader")
        back = await client.post(f"{CLAIMS}/{first['claim']}/reject", json={"reason": "no schema"})
        assert [] == await claim(client, consumer="loader")
        await manual_clock.advance(1.0)
        (second,) = await claim(client, consumer="loader")
        dead = await client.post(f"{CLAIMS}/{second['claim']}/reject", json={"reason": "no schema"})
        letters = (await client.get("/v1/queues/jobs/dead-letters")).json()

    assert (False, True) == (back.json()["dead"], dead.json()["dead"])
    assert [("no schema", 2)] == [(letter["reason"], letter["rejections"]) for letter in letters]


async def test_a_token_of_another_batch_finishes_nothing(store: MemoryStore, manual_clock: ManualClock) -> None:
    """A manifest that was reset counts its epochs from 1 again: the old token names another batch."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")
        (mine,) = await claim(client, consumer="loader")
        shard, epoch, digest = mine["claim"].split("-")
        other = f"{shard}-{epoch}-{int(digest, 16) ^ 1:08x}"
        codes = [(await client.post(f"{CLAIMS}/{other}/{verb}")).status_code for verb in VERBS]
        done = (await Queue.of(context, "jobs").consumer.read()).done

    assert ([409] * 3, ()) == (codes, done)


async def test_batches_that_were_claimed_and_not_delivered_are_given_back(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three cannot be read now: the first is delivered, and nobody has to wait for the others."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a", b"b", b"c")
        queue = Queue.of(context, "jobs")
        places = (await queue.producer.read()).pending
        real = store.get

        async def get(key: str) -> Any:
            if key == places[1]:
                raise Unavailable("away")
            return await real(key)

        monkeypatch.setattr(store, "get", get)
        found = await claim(client, consumer="loader", max=3)
        claimed = (await queue.consumer.read()).claimed

    assert ([b"a"], {places[0]}) == (values(found), set(claimed))


async def test_a_claim_in_bytes_has_its_names_in_headers(store: MemoryStore, manual_clock: ManualClock) -> None:
    """For a shell script: one batch without base64, 204 when there is none, and no body is needed."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, bytes(range(256)))
        accept = {"accept": codec.CONTENT_TYPE}
        found = await client.post(CLAIMS, headers=accept)
        acked = await client.post(f"{CLAIMS}/{found.headers['lakebed-claim']}/ack")
        none = await client.post(CLAIMS, headers=accept)

    assert [KeyValueEntry(b"k", bytes(range(256)))] == codec.decode(found.content)
    assert ("1", "0") == (found.headers["lakebed-sequence"], found.headers["lakebed-shard"])
    assert (200, 204) == (acked.status_code, none.status_code)


async def test_a_claim_waits_for_a_batch(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Up to the time given; it answers as soon as there is one."""
    import asyncio

    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")
        (first,) = await claim(client, consumer="loader")
        waiting = asyncio.create_task(claim(client, consumer="loader", held=[first["claim"]], wait_s=10))
        await manual_clock.advance(1.0)
        assert not waiting.done()
        await put(context, b"b")
        await manual_clock.advance(0.5)
        found = await waiting
        idle = asyncio.create_task(claim(client, consumer="none", wait_s=2))
        await manual_clock.advance(2.0)

        assert ([b"b"], []) == (values(found), await idle)


async def test_a_batch_that_cannot_be_read_becomes_a_dead_letter_and_does_not_block(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Undecodable at once; missing after a minute, in which requests are answered 503."""
    async with gateway(store, manual_clock) as (client, context):
        queue = Queue.of(context, "jobs")
        bad = queue.settings.location(0, "bad")
        await store.create(bad, b"no batch")
        await queue.producer.append([Append("test", 1, 0, bad, 8, 1)])
        await put(context, b"gone", b"good")
        await store.delete((await queue.producer.read()).pending[1])
        first = await client.post(CLAIMS, json={"consumer": "loader"})
        await manual_clock.advance(61.0)
        found = await claim(client, consumer="loader")
        letters = (await client.get("/v1/queues/jobs/dead-letters")).json()

    assert 503 == first.status_code
    assert ([b"good"], 2) == (values(found), len(letters))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CLAIMS, {"max": 0}, 400),
        (CLAIMS, {"max": 101}, 400),
        (CLAIMS, {"wait_s": 31}, 400),
        (CLAIMS, {"consumer": "a b"}, 400),
        (CLAIMS, {"held": ["x"]}, 400),
        (f"{CLAIMS}/x/ack", {}, 400),
        (f"{CLAIMS}/0-7-00000000/ack", {}, 409),
        ("/v1/queues/none/claims", {}, 404),
    ],
)
async def test_what_is_wrong_with_a_claim_is_said(
    store: MemoryStore, manual_clock: ManualClock, path: str, body: dict[str, Any], status: int
) -> None:
    """Limits, names, tokens that are none, claims that nobody has, queues that do not exist."""
    async with gateway(store, manual_clock) as (client, context):
        await put(context, b"a")

        assert status == (await client.post(path, json=body)).status_code


async def test_a_claim_covers_every_shard(store: MemoryStore, manual_clock: ManualClock) -> None:
    """And acks reach the shard of their batch."""
    async with gateway(store, manual_clock, shards=3) as (client, context):
        queue = Queue.of(context, "jobs")
        for shard in range(3):
            ingestor = queue.ingestor(shard)
            await ingestor.ingest([KeyValueEntry(b"k", b"%d" % shard)])
            await ingestor.close()
        found = await claim(client, consumer="loader", max=5)
        codes = [(await client.post(f"{CLAIMS}/{batch['claim']}/ack")).status_code for batch in found]
        status = (await client.get("/v1/queues/jobs")).json()

    assert ([b"0", b"1", b"2"], [200] * 3) == (sorted(values(found)), codes)
    assert (3, 0) == (status["shards"], status["pending"])


async def test_claims_of_one_batch_each_take_the_shards_in_turn(store: MemoryStore, manual_clock: ManualClock) -> None:
    """A shard with a backlog does not hold up the others, also not for consumers that claim one batch at a time."""
    async with gateway(store, manual_clock, shards=3) as (client, context):
        queue = Queue.of(context, "jobs")
        for shard in range(3):
            ingestor = queue.ingestor(shard)
            for _ in range(3 if shard else 9):
                await ingestor.ingest([KeyValueEntry(b"k", b"%d" % shard)])
                await ingestor.flush()
            await ingestor.close()
        found: list[bytes] = []
        for _ in range(9):
            (batch,) = await claim(client, consumer="loader")
            found += values([batch])
            await client.post(f"{CLAIMS}/{batch['claim']}/ack")

    assert [{b"0", b"1", b"2"}] * 3 == [set(found[at : at + 3]) for at in (0, 3, 6)]


async def test_a_call_with_a_key_is_enqueued_once_at_all_gateways(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """The response of the repeated call names the first one's sequence and shard."""
    import asyncio

    async def post(client: httpx2.AsyncClient, key: str) -> dict[str, Any]:
        entries = [{"key": "aw==", "value": "dg=="}]
        sent = client.post("/v1/queues/jobs/entries", json=entries, headers={"idempotency-key": key})
        task = asyncio.create_task(sent)
        for _ in range(20):
            await manual_clock.advance(0.05)
        return dict((await task).json())

    async with gateway(store, manual_clock, shards=4) as (one, context):
        async with gateway(store, manual_clock, 2, shards=4) as (other, _):
            told = [await post(client, "order-1") for client in (one, other, one)]
            long = await one.post(
                "/v1/queues/jobs/entries", json=[{"key": "", "value": ""}], headers={"idempotency-key": "k" * 201}
            )
        pending = (await Queue.of(context, "jobs").status()).pending

    assert [False, True, True] == [answer["repeated"] for answer in told]
    assert 1 == len({(answer["shard"], answer["sequence"]) for answer in told})
    assert (1, 413) == (pending, long.status_code)
