"""The log: two brokers, one killed under load; every acknowledged record is stored once, compacted or not, and a stock
Kafka client reads it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lakebed.demo.scenario import ScenarioContext
from lakebed.embedded.endpoints import find
from lakebed.log.checker import Operation, Poll, Send, check
from lakebed.log.kafka.bench import librdkafka
from lakebed.log.services import LogServices

TITLE = "A log without a leader"
NEXT = ("lakebed topics list",)

TOPIC = "demo-log"
PRODUCERS = 4
ATTEMPTS_MAX = 120
KAFKA_S = 30.0  # for a Kafka client to send or to read
LEAST = 20  # records of each producer, at any scale: fewer appends would not be compacted


async def play(stage: ScenarioContext) -> None:
    import httpx2

    context = stage.context()
    topic = f"{TOPIC}-{context.ids.token()[:6]}"
    history: list[Operation] = []
    each = max(LEAST, stage.scaled(120))
    child, second = await stage.gateway("broker-2", parts=["log"])
    urls = [stage.gateway_url, second]
    stage.expect("log records", PRODUCERS * each)
    stage.report(f"{PRODUCERS} producers send {each} records each to two brokers; one broker is killed during the run")
    async with httpx2.AsyncClient(timeout=20.0) as client:
        sending = [
            asyncio.create_task(_produce(client, urls, topic, history, f"p{number}", each))
            for number in range(PRODUCERS)
        ]
        await _until(lambda: len(history) > PRODUCERS * each // 3, sending, context.clock)
        child.kill()
        stage.fault("one of the two brokers was killed with -9")
        await asyncio.gather(*sending)
        before = await _read(client, urls[0], topic)
        services = LogServices(context)
        entries = await _compact(services, topic)
        compacted = await _read_bucket(services, topic)
        await services.meta.close()
    history.append(Poll("reader", topic, before, final=True))
    anomalies = check(history)
    sent = sum(isinstance(one, Send) and one.outcome == "ok" for one in history)
    stage.counted("log records", "acknowledged", sent)
    stage.counted("log records", "read from the broker", len(before))
    stage.counted("log records", "read after compaction", len(compacted))
    stage.check(
        "every acknowledged record is there once, in order",
        not anomalies and sent == PRODUCERS * each == len(before),
        f"{len(before)} read, {sent} acknowledged, {len(anomalies)} anomalies",
    )
    stage.check(
        "compaction changes nothing a reader sees",
        [record for _, record in before] == compacted and entries > 0,
        f"{len(compacted)} records read from {entries} compacted blobs and newer WAL blobs",
    )
    await _kafka_client(stage, topic, each)


async def _kafka_client(stage: ScenarioContext, topic: str, count: int) -> None:
    """A stock Kafka client on the same topic, where one is installed: HTTP clients and it read each other's records."""
    import httpx2

    servers = find(stage.folder).kafka
    if (client := librdkafka()) is None or not servers:
        stage.report("a Kafka client is not installed: pip install confluent-kafka")
        return
    stage.report(f"librdkafka sends {count} records with keys to {servers}, and a consumer group reads the topic")
    sent, found = await asyncio.to_thread(_send_and_read, client, servers, topic, count, PRODUCERS * count)
    async with httpx2.AsyncClient(timeout=20.0) as http:
        over_http = await _read(http, stage.gateway_url, topic)
    stage.counted("kafka records", "acknowledged to librdkafka", sent)
    stage.counted("kafka records", "read over HTTP", len(over_http) - PRODUCERS * count)
    stage.check(
        "Kafka and HTTP clients read the same records at the same offsets",
        [(offset, _value(record)) for offset, record in over_http] == found and sent == count,
        f"{len(found)} records read by a consumer group, {len(over_http)} over HTTP",
    )


def _send_and_read(client: Any, servers: str, topic: str, count: int, before: int) -> tuple[int, list[tuple[int, str]]]:
    """How many records were acknowledged, and the whole topic as a group reads it."""
    errors: list[Any] = []
    producer = client.Producer({"bootstrap.servers": servers, "compression.type": "zstd", "log_level": 0})
    for number in range(count):
        producer.produce(topic, f"kafka-{number}", key=f"k{number}", on_delivery=lambda error, _: errors.append(error))
        producer.poll(0)
    producer.flush(KAFKA_S)
    group = {"group.id": f"{topic}-readers", "auto.offset.reset": "earliest", "log_level": 0}
    consumer = client.Consumer({"bootstrap.servers": servers, **group})
    consumer.subscribe([topic])
    found: list[tuple[Any, str]] = []
    idle = 0
    while len(found) < before + count and idle < KAFKA_S * 2:
        read = consumer.consume(500, 0.5)
        found += [(each.offset(), (each.value() or b"").decode()) for each in read if each.error() is None]
        idle = 0 if read else idle + 1
    consumer.close()
    return sum(error is None for error in errors), found


def _value(record: Any) -> str:
    return record if isinstance(record, str) else str(record["value"])


async def _produce(client: Any, urls: list[str], topic: str, history: list[Operation], name: str, count: int) -> None:
    """An idempotent producer: a batch without a response is sent again, to the other broker."""
    import httpx2

    for number in range(count):
        record = f"{name}-{number}"
        part = {"topic": topic, "partition": 0, "records": [record], "producer_id": name, "sequence": number}
        body = msgspec.json.encode({"topic_partitions": [part]})
        for attempt in range(ATTEMPTS_MAX):
            try:
                answer = await client.post(f"{urls[(number + attempt) % 2]}/v1/produce", content=body)
                (result,) = answer.json()["results"]
                if result["ok"]:
                    history.append(Send(name, topic, record, "ok", result["start_offset"]))
                    break
            except (httpx2.HTTPError, KeyError, ValueError):
                continue


async def _read(client: Any, url: str, topic: str) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    while True:
        part = {"topic": topic, "partition": 0, "fetch_offset": len(found) + 1}
        answer = await client.post(f"{url}/v1/consume", content=msgspec.json.encode({"topic_partitions": [part]}))
        (result,) = answer.json()["results"]
        if not result.get("count"):
            return found
        found += enumerate(result["records"], result["start_offset"])


async def _compact(services: LogServices, topic: str) -> int:
    """Compacts, concurrently with the stack's own compactor. Returns the number of compacted entries."""
    entries = 0
    async for tp in services.records.partitions(topic):
        await services.compactor.compact_once(tp, force=True)
        async for span in services.records.all_spans(tp):
            entries += span.entry.type == "COMPACTED"
    return entries


async def _read_bucket(services: LogServices, topic: str) -> list[str]:
    found: list[str] = []
    async for tp in services.records.partitions(topic):
        end = (await services.reader.control(tp)).sequence_counter
        while len(found) < end:
            read = await services.reader.read(tp, len(found) + 1, bytes_max=1 << 20)
            found += [record.decode() for part in read.parts for record in part]
    return found


async def _until(ready: Any, working: list[asyncio.Task[None]], clock: Any) -> None:
    while not ready() and not all(task.done() for task in working):
        await clock.sleep(0.02)
