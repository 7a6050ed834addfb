"""The queue's scenario: producers and collectors as processes, killed with -9, and every durable entry applied once.

The processes are this module too: `python -m lakebed.queue.demo produce|collect …`. A collector applies a batch by
creating an object named by the batch's sequence, so applying it twice is impossible, as in an exactly-once consumer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import AlreadyExists, Fenced, Unavailable
from lakebed.core.settings import load
from lakebed.demo.metrics import counting
from lakebed.demo.scenario import ScenarioContext, exited
from lakebed.embedded.child import Child
from lakebed.queue.demo_http import over_http
from lakebed.queue.ingestor import WriteWatcher
from lakebed.queue.model import CollectedBatch, KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections

TITLE = "A queue in the bucket while its producers and collectors are killed"
NEXT = ("lakebed queue put --value hello", "lakebed queue status", "lakebed bench queue --quick")

POISON = b"poison"
DEADLINE_S = 90.0
SETTINGS = QueueSettings(
    flush_interval_s=0.02,
    heartbeat_timeout_s=3.0,
    done_cleanup_threshold=10,
    prefetch_batches=2,
    rejections_max=2,
    redelivery_delay_s=0.2,
)


class AppliedBatch(msgspec.Struct, frozen=True):
    """One batch in the consumer's own store."""

    by: str
    sequence: int
    entries: list[str]


def open_queue(context: Context, name: str) -> Queue:
    return Queue(name, SETTINGS, context)


async def play(stage: ScenarioContext) -> None:
    context = stage.context()
    name, table = f"demo-{context.ids.token()[:8]}", f"demo/{context.ids.token()}/applied"
    each = stage.scaled(150)
    stage.expect("queue entries", 2 * each)
    arguments = ["lakebed.queue.demo"]
    producers = [stage.process(f"producer-{n}", [*arguments, "produce", name, f"p{n}", str(each)]) for n in range(2)]
    victim = stage.process("producer-victim", [*arguments, "produce", name, "victim", "1000000"])
    first = stage.process("collector-first", [*arguments, "collect", name, "first", table])
    await _until(context, lambda: len(durable(victim)) >= 10, "the producer that is to be killed made nothing durable")
    victim.kill()
    stage.fault("a producer was killed with -9")
    await _until_applied(context, table, 5)
    first.kill()
    stage.fault("the collector was killed with -9; another one fails over")
    successor = stage.process("collector-successor", [*arguments, "collect", name, "successor", table])
    codes = [await exited(producer, DEADLINE_S) for producer in producers]
    await _through_the_gateway(stage, name)
    await _poison(context, name)
    stage.fault("a batch that no consumer can process was enqueued")
    promised = [entry for producer in (*producers, victim) for entry in durable(producer)] + ["broker-0", "broker-1"]
    await _until_empty(context, name)
    await successor.stop(grace_s=5.0)
    applied = await read_table(context, table)
    found = [entry for batch in applied for entry in batch.entries]
    lost = set(promised) - set(found)
    stage.counted("queue entries", "acknowledged as durable", len(promised))
    stage.counted("queue entries", "of them applied", len(set(promised) & set(found)))
    stage.check("the other producers finished", codes == [0, 0], f"exit codes {codes}")
    stage.check("every durable entry was applied", not lost, f"{len(promised)} durable, {len(lost)} lost")
    stage.check("no entry was applied twice", len(set(found)) == len(found), f"{len(found)} applied")
    stage.check("the order of each producer was kept", in_order(found), f"{len(applied)} batches by {_by(applied)}")
    await _letters(stage, context, name)
    await over_http(stage, f"{name}-http")


async def _through_the_gateway(stage: ScenarioContext, name: str) -> None:
    """Two remote producers post to the stack's own gateway."""
    import httpx2

    async with httpx2.AsyncClient(base_url=stage.gateway_url, timeout=20.0) as client:
        for n in range(2):
            entry = msgspec.json.encode([KeyValueEntry(b"k", f"broker-{n}".encode())])
            answer = await client.post(
                f"/v1/queues/{name}/entries", content=entry, headers={"content-type": "application/json"}
            )
            stage.check("the gateway responds when entries are durable", answer.status_code == 200, answer.text)


async def _poison(context: Context, name: str) -> None:
    ingestor = open_queue(context, name).ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", POISON)])
    await ingestor.close()


async def _letters(stage: ScenarioContext, context: Context, name: str) -> None:
    letters = open_queue(context, name).dead_letters
    found = [letter async for letter in letters.letters()]
    seen = f"{found[0].reason} after {found[0].rejections} rejections" if found else "no dead letter"
    stage.check("a batch that cannot be processed becomes a dead letter", len(found) == 1, seen)
    for letter in found:
        await letters.discard(letter.id, "the demo is over")


async def _until_empty(context: Context, name: str) -> None:
    queue = open_queue(context, name)

    async def empty() -> bool:
        return (await queue.status()).pending == 0

    deadline = context.clock.monotonic_s() + DEADLINE_S
    while not await empty():
        if context.clock.monotonic_s() > deadline:
            raise Unavailable(f"queue {name} was not drained within {DEADLINE_S:.0f} s")
        await context.clock.sleep(0.2)


async def _until_applied(context: Context, table: str, count: int) -> None:
    deadline = context.clock.monotonic_s() + DEADLINE_S
    while len(await read_table(context, table)) < count:
        if context.clock.monotonic_s() > deadline:
            raise Unavailable(f"fewer than {count} batches were applied within {DEADLINE_S:.0f} s")
        await context.clock.sleep(0.1)


async def _until(context: Context, holds: Callable[[], bool], otherwise: str) -> None:
    deadline = context.clock.monotonic_s() + DEADLINE_S
    while not holds():
        if context.clock.monotonic_s() > deadline:
            raise Unavailable(otherwise)
        await context.clock.sleep(0.05)


def durable(child: Child) -> list[str]:
    """The entries that this producer reported as durable."""
    return durable_lines(child.log.read_text(encoding="utf-8"))


def durable_lines(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("durable ")]


async def read_table(context: Context, table: str) -> list[AppliedBatch]:
    """What was applied, in order of sequence."""
    found = [await context.store.get(info.key) async for info in context.store.list(f"{table}/")]
    return sorted((msgspec.json.decode(one.data, type=AppliedBatch) for one in found), key=lambda one: one.sequence)


def in_order(entries: list[str]) -> bool:
    last: dict[str, int] = {}
    for entry in entries:
        who, _, number = entry.rpartition("-")
        if int(number) <= last.get(who, -1):
            return False
        last[who] = int(number)
    return True


def _by(applied: list[AppliedBatch]) -> str:
    return ", ".join(sorted({batch.by for batch in applied}))


async def produce(context: Context, name: str, who: str, count: int) -> None:
    """Ingests numbered entries, several at once, and prints which are durable."""
    ingestor = open_queue(context, name).ingestor()
    window = asyncio.Semaphore(8)

    async def watch(watcher: WriteWatcher, entry: str) -> None:
        try:
            await watcher.await_durable()
            print(f"durable {entry}", flush=True)
        finally:
            window.release()

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await window.acquire()
            entry = f"{who}-{number}"
            group.create_task(watch(await ingestor.ingest([KeyValueEntry(b"k", entry.encode())]), entry))
            await context.clock.sleep(0.005)
    await ingestor.close()


async def collect(context: Context, name: str, who: str, table: str) -> None:
    """Applies batches until it is stopped; rejects poison entries."""
    collector = open_queue(context, name).collector(who)
    async for batch in collector.batches(idle_s=0.1):
        try:
            if any(entry.value == POISON for entry in batch.entries):
                await collector.reject(batch, "this value cannot be processed")
                continue
            await apply(context, batch, who, table)
            await collector.ack(batch)
        except Fenced:
            continue


async def apply(context: Context, batch: CollectedBatch, who: str, table: str) -> None:
    """The consumer's own transaction: entries and sequence in one create. The second one changes nothing."""
    row = AppliedBatch(who, batch.sequence, [entry.value.decode() for entry in batch.entries])
    try:
        await context.store.create(f"{table}/{batch.sequence:012d}.json", msgspec.json.encode(row))
    except AlreadyExists:
        return


if __name__ == "__main__":
    role, queue_name, whose, rest = sys.argv[1:]
    process = make_context(load(sections(), env=os.environ), role=whose)
    given = (process, queue_name, whose)
    work = produce(*given, int(rest)) if role == "produce" else collect(*given, rest)
    asyncio.run(counting(process, work))
