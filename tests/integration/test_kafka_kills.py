"""Brokers killed with -9 under librdkafka: idempotent producers and a group; the history stays clean."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from lakebed.log.checker import Send
from support.kafka_gateway import QUIET, KafkaHistory, consumer, producer
from support.log_processes import DEADLINE_S, Crew, crew_of

PARTITIONS, PRODUCERS, LEAST, KILLS = 4, 3, 100, 4
PAUSE_S = 0.004  # between two records of a producer


class KafkaLoad:
    """Producers that send one record after another, and members of a group that read all of it."""

    def __init__(self, servers: str) -> None:
        self.servers, self.history = servers, KafkaHistory()
        self.kills_over, self.done = threading.Event(), threading.Event()

    def produce(self, name: str) -> None:
        made = producer(self.servers, enable_idempotence=True, delivery_timeout_ms=200_000, linger_ms=0)
        number = 0
        while number < LEAST or not self.kills_over.is_set():
            record = f"{name}-{number}"
            made.produce("t", record, partition=number % PARTITIONS, on_delivery=self.history.report(name, record))
            made.poll(0)
            number += 1
            time.sleep(PAUSE_S)
        assert 0 == made.flush(DEADLINE_S)

    def consume(self, name: str) -> None:
        member = consumer(self.servers, "team", enable_auto_commit=False)
        self.history.subscribe(member, name, "t")
        while not self.done.is_set():
            message = member.poll(0.2)
            if message is not None and message.error() is None:
                self.history.take(member, message)
        member.close()


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_killed_brokers_lose_and_repeat_nothing_of_idempotent_producers(
    log_settings: dict[str, str], tmp_path: Path
) -> None:
    """Every record is acknowledged once, and a group of two reads each at its offset, whoever was killed meanwhile."""
    async with crew_of(tmp_path, log_settings) as (supervised, ports):
        names = {"b0": ports[:2], "b1": ports[2:]}
        for name, (http, kafka) in names.items():
            await supervised.start(name, "serve", http, "--kafka-port", str(kafka))
        for name in names:
            await supervised.ready(name)
        load = KafkaLoad(",".join(f"127.0.0.1:{kafka}" for _, kafka in names.values()))
        admin = AdminClient({"bootstrap.servers": load.servers, **QUIET})
        await asyncio.to_thread(admin.create_topics([NewTopic("t", PARTITIONS, 1)])["t"].result, 60)
        members = [asyncio.create_task(asyncio.to_thread(load.consume, f"m{n}")) for n in range(2)]
        sending = [asyncio.create_task(asyncio.to_thread(load.produce, f"p{n}")) for n in range(PRODUCERS)]
        await kill_in_turn(supervised, names)
        load.kills_over.set()
        await asyncio.gather(*sending)
        await until(lambda: load.history.counts[1] >= load.history.counts[0])
        load.done.set()
        await asyncio.gather(*members)

    sent, read = load.history.counts
    assert {"ok"} == {one.outcome for one in load.history.operations if isinstance(one, Send)}
    assert [] == load.history.anomalies()
    assert sent == read >= PRODUCERS * LEAST


async def kill_in_turn(supervised: Crew, names: dict[str, list[int]]) -> None:
    """One after another, each back before the next is killed."""
    for number in range(KILLS):
        name = f"b{number % 2}"
        http, kafka = names[name]
        supervised.children[name].kill()
        await asyncio.sleep(0.3)
        await supervised.start(name, "serve", http, "--kafka-port", str(kafka))
        await supervised.ready(name)


async def until(ready: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
