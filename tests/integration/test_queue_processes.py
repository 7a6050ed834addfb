"""The queue with real processes on the real bucket: killed with -9 anywhere, nothing durable is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Fenced, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings, env_name
from lakebed.embedded.ports import HeldPorts
from lakebed.queue import paths
from lakebed.queue.demo import durable_lines, in_order, open_queue, read_table
from lakebed.queue.model import KeyValueEntry
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

DEADLINE_S = 150.0
NAME, TABLE = "orders", "applied"


@pytest.fixture
def context(bucket: Store, clock: SystemClock, ids: Ids, metrics: Metrics) -> Context:
    return Context(node="test", settings=Settings({}, {}), store=bucket, clock=clock, ids=ids, metrics=metrics)


class Fleet:
    """Processes of the queue, each with its words in a file."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        self._folder = folder
        self._env = {env_name(key): str(value) for key, value in settings.as_layer().items()}
        self._running: list[asyncio.subprocess.Process] = []

    async def start(self, who: str, *arguments: str) -> asyncio.subprocess.Process:
        with self.log(who).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *arguments, env={**os.environ, **self._env}, stdout=log, stderr=log
            )
        self._running.append(process)
        return process

    async def producer(self, who: str, count: int) -> asyncio.subprocess.Process:
        return await self.start(who, "lakebed.queue.demo", "produce", NAME, who, str(count))

    async def collector(self, who: str) -> asyncio.subprocess.Process:
        return await self.start(who, "lakebed.queue.demo", "collect", NAME, who, TABLE)

    def log(self, who: str) -> Path:
        return self._folder / f"{who}.log"

    def durable(self, who: str) -> list[str]:
        return durable_lines(self.log(who).read_text())

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        process.kill()
        await process.wait()

    async def clear(self) -> None:
        for process in self._running:
            if process.returncode is None:
                await self.kill(process)


@pytest.fixture
async def fleet(tmp_path: Path, bucket_settings: StoreSettings) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path, bucket_settings)
    yield made
    await made.clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}") from None


async def test_nothing_durable_is_lost_when_anybody_is_killed(context: Context, fleet: Fleet) -> None:
    """Producers and collectors are killed at chance moments and replaced; the table has all, once, in order."""
    dice = random.Random(4)
    whole = await fleet.producer("whole", 40)
    collector = await fleet.collector("c0")
    promised: list[str] = []
    for number in range(3):
        victim = await fleet.producer(f"v{number}", 10**6)

        async def going(who: str = f"v{number}") -> bool:
            return len(fleet.durable(who)) >= dice.randint(2, 10)

        await until(going, "it ingests")
        await asyncio.sleep(dice.uniform(0.0, 0.05))
        await fleet.kill(victim)
        promised += fleet.durable(f"v{number}")
        if number < 2:
            await asyncio.sleep(dice.uniform(0.0, 0.3))
            await fleet.kill(collector)
            collector = await fleet.collector(f"c{number + 1}")

    assert await asyncio.wait_for(whole.wait(), DEADLINE_S) == 0
    queue = open_queue(context, NAME)

    async def drained() -> bool:
        return (await queue.status()).pending == 0

    await until(drained, "it is drained")
    found = [entry for batch in await read_table(context, TABLE) for entry in batch.entries]
    assert set(promised) | set(fleet.durable("whole")) <= set(found)
    assert len(set(found)) == len(found)
    assert in_order(found)


@pytest.mark.full
async def test_a_stopped_collector_wakes_up_to_nothing(context: Context, fleet: Fleet) -> None:
    """SIGSTOP for longer than its claims last: another goes on in order, and nothing is applied twice."""
    producer = await fleet.producer("whole", 60)
    sleeper = await fleet.collector("sleeper")

    async def applied() -> bool:
        return len(await read_table(context, TABLE)) >= 2

    await until(applied, "the first collector applies")
    sleeper.send_signal(signal.SIGSTOP)
    await fleet.collector("heir")
    assert await asyncio.wait_for(producer.wait(), DEADLINE_S) == 0
    queue = open_queue(context, NAME)

    async def drained() -> bool:
        return (await queue.status()).pending == 0

    await until(drained, "the heir drains it")
    sleeper.send_signal(signal.SIGCONT)
    await fleet.producer("after", 5)

    async def complete() -> bool:
        rows = await read_table(context, TABLE)
        return {f"after-{n}" for n in range(5)} <= {entry for batch in rows for entry in batch.entries}

    await until(complete, "both go on")
    found = [entry for batch in await read_table(context, TABLE) for entry in batch.entries]
    assert len(set(found)) == len(found)
    assert set(fleet.durable("whole")) <= set(found)
    assert in_order(found)
    assert sleeper.returncode is None


async def test_a_late_process_cannot_ack_what_another_took_over(context: Context) -> None:
    """On the real bucket: a silent collector's batch goes to another, and its own ack is fenced."""
    queue, other = open_queue(context, NAME), open_queue(context, NAME)
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"v")])
    await ingestor.close()
    silent, heir = queue.collector("silent"), other.collector("heir")
    mine = await silent.next_batch()
    assert mine is not None
    silent._heart.cancel()  # type: ignore[union-attr]

    async def taken() -> bool:
        return await heir.next_batch() is not None

    await until(taken, "it is taken over")

    with pytest.raises(Fenced):
        await silent.ack(mine)
    await heir.close()


async def test_clean_up_on_the_bucket_leaves_only_the_manifests(context: Context, bucket: Store) -> None:
    """After everything is acked and cleaned, no batch is left in the bucket."""
    queue = open_queue(context, NAME)
    ingestor, collector = queue.ingestor(), queue.collector()
    for number in range(12):
        await ingestor.ingest([KeyValueEntry(b"k", b"%d" % number)])
        await ingestor.flush()
    while (batch := await collector.next_batch()) is not None:
        await collector.ack(batch)
    await collector.close()
    await queue.sweeper.sweep_done()

    left = [info.key async for info in bucket.list(f"{paths.home(NAME)}/")]
    assert sorted(left) == [f"ingest/{NAME}/manifest.consumer.json", f"ingest/{NAME}/manifest.json"]
    assert (await queue.producer.read()).pending == ()


async def test_a_killed_broker_had_answered_only_what_is_durable(
    context: Context, fleet: Fleet, stack: ExitStack
) -> None:
    """Its callers keep their answers: each answered entry is in the queue, and a second broker goes on."""
    held = stack.enter_context(HeldPorts(Ids()))  # until the end: nobody else gets them before the brokers listen
    ports = [held.take(), held.take()]
    answered: list[str] = []

    async def post(client: httpx2.AsyncClient, entry: str) -> None:
        body = msgspec.json.encode([KeyValueEntry(b"k", entry.encode())])
        try:
            answer = await client.post(
                f"/v1/queues/{NAME}/entries", content=body, headers={"content-type": "application/json"}
            )
        except httpx2.HTTPError:
            return
        if answer.status_code == 200:
            answered.append(entry)

    for number, port in enumerate(ports):
        url = f"http://127.0.0.1:{port}"
        broker = await fleet.start(f"broker-{number}", "lakebed", "serve", "--port", str(port), "--parts", "queue")
        async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:

            async def ready(client: httpx2.AsyncClient = client) -> bool:
                try:
                    return (await client.get("/healthz")).status_code == 200
                except httpx2.HTTPError:
                    return False

            await until(ready, fleet.log(f"broker-{number}").read_text())
            posts = [asyncio.ensure_future(post(client, f"b{number}-{n}")) for n in range(40)]

            async def some(number: int = number) -> bool:
                return any(entry.startswith(f"b{number}-") for entry in answered)

            await until(some, "it answers")
            if number == 0:
                await fleet.kill(broker)
            await asyncio.gather(*posts)

    queue = open_queue(context, NAME)
    collector = queue.collector()
    found: list[str] = []
    while (batch := await collector.next_batch()) is not None:
        found += [entry.value.decode() for entry in batch.entries]
        await collector.ack(batch)
    await collector.close()
    assert set(answered) <= set(found)
    assert len(found) == len(set(found))
    assert len([entry for entry in answered if entry.startswith("b1-")]) == 40


async def test_a_seed_manifest_on_the_bucket_is_taken_up(context: Context, bucket: Store) -> None:
    """A queue that another wrote in the seed's plain form is read, in order, and goes on from there."""
    for letter in "abc":
        await bucket.create(f"data/{letter}.json", msgspec.json.encode([KeyValueEntry(b"k", letter.encode())]))
    await bucket.create(f"ingest/{NAME}/manifest.json", b'{"pending": ["data/a.json", "data/b.json", "data/c.json"]}')
    await bucket.create(f"ingest/{NAME}/manifest.consumer.json", b'{"claimed": {}, "done": ["data/a.json"]}')
    queue = open_queue(context, NAME)
    ingestor, collector = queue.ingestor(), queue.collector()
    await ingestor.ingest([KeyValueEntry(b"k", b"d")])
    await ingestor.close()

    found = []
    while (batch := await collector.next_batch()) is not None:
        found.append((batch.sequence, batch.entries[0].value.decode()))
        await collector.ack(batch)
    await collector.close()
    await queue.sweeper.sweep_done()

    assert found == [(2, "b"), (3, "c"), (4, "d")]
    with pytest.raises(NotFound):
        await bucket.get("data/a.json")
