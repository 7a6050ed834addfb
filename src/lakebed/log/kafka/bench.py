"""Load by a stock Kafka client, librdkafka: what `lakebed bench log` measures of it, and checks in a load test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable
from lakebed.log.checker import Anomaly, Operation, Poll, Send, check

KIB = 1024
FLUSH_S = 120.0
HANDED_OVER = 200  # records to a partition, in one call
SILENT_S = 30.0  # without a message after the end: what a group has not read until then, it has lost
SETTINGS = {
    "acks": "all",
    "batch.size": 1024 * 1024,
    "linger.ms": 5,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 512 * 1024,
    "delivery.report.only.error": True,
    "log_level": 0,
}


def librdkafka() -> Any:
    """The client's package, or None where it is not installed."""
    try:
        import confluent_kafka.admin
    except ImportError:
        return None
    return confluent_kafka


def create_topic(client: Any, servers: str, topic: str, partitions: int) -> None:
    admin = client.admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([client.admin.NewTopic(topic, partitions, 1)])[topic].result(FLUSH_S)


class LibrdkafkaLoad:
    """One producer of 1 KiB records to all partitions of a topic, connected before anything is measured."""

    def __init__(self, client: Any, servers: str, topic: str, partitions: int) -> None:
        self._topic, self._partitions, self._failed = topic, partitions, list[Any]()
        create_topic(client, servers, topic, partitions)
        self._producer = client.Producer({"bootstrap.servers": servers, "on_delivery": self._report, **SETTINGS})
        self._records = [{"value": os.urandom(KIB)}] * HANDED_OVER

    async def produce(self, records: int) -> float:
        """MiB acknowledged a second, of a multiple of `HANDED_OVER` records."""
        clock = SystemClock()
        began_s = clock.monotonic_s()
        await asyncio.to_thread(self._produce, records)
        return records / KIB / (clock.monotonic_s() - began_s)

    def _produce(self, count: int) -> None:
        """Records are handed over in batches: what Python costs for each of them is not librdkafka's."""
        for number in range(count // HANDED_OVER):
            partition = number % self._partitions
            if self._producer.produce_batch(self._topic, self._records, partition=partition) < HANDED_OVER:
                raise Unavailable("librdkafka's queue is full")
        if self._producer.flush(FLUSH_S) or self._failed:
            raise Unavailable(f"librdkafka did not deliver all records: {self._failed[:1]}")

    def _report(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failed.append(error)


class LibrdkafkaHistory:
    """Idempotent producers of 1 KiB records that have a name each, and one group that reads them all.

    What producers were answered and members got is a history for the checker. Each method is for a thread of its own.
    """

    def __init__(self, client: Any, servers: str, topics: Sequence[str], partitions: int) -> None:
        self._client, self._servers, self._topics, self._partitions = client, servers, list(topics), partitions
        self._operations = list[Operation]()
        places = [f"{topic}/{number}" for topic in topics for number in range(partitions)]
        self._read: dict[str, dict[int, str]] = {place: {} for place in places}  # what the group has read in all
        for topic in topics:
            create_topic(client, servers, topic, partitions)

    @property
    def acknowledged(self) -> int:
        return sum(isinstance(one, Send) and one.outcome == "ok" for one in self._operations)

    @property
    def consumed(self) -> int:
        return sum(map(len, self._read.values()))

    def anomalies(self) -> list[Anomaly]:
        """Of the whole history, when the group has ended: what it did not read is lost."""
        whole = [Poll("group", place, sorted(found.items()), final=True) for place, found in self._read.items()]
        return check([*self._operations, *whole])

    def produce(self, name: str, topic: str, records: int, ended: threading.Event) -> None:
        """Sends so many records and waits for their acknowledgement, again and again."""

        def report(error: Any, message: Any) -> None:
            outcome, offset = ("ok", message.offset()) if error is None else ("info", None)
            self._operations.append(Send(name, _place(message), _name_of(message), outcome, offset))  # type: ignore[arg-type]

        own = {"delivery.report.only.error": False, "enable.idempotence": True, "on_delivery": report}
        producer = self._client.Producer({"bootstrap.servers": self._servers, **SETTINGS, **own})
        sent = 0
        while not ended.is_set():
            for first in range(sent, sent + records, HANDED_OVER):
                values = [f"{name}-{number} ".encode().ljust(KIB, b".") for number in range(first, first + HANDED_OVER)]
                partition = first // HANDED_OVER % self._partitions
                producer.produce_batch(topic, [{"value": value} for value in values], partition=partition)
            sent += records
            if left := producer.flush(FLUSH_S):
                raise Unavailable(f"librdkafka did not deliver {left} records")

    def consume(self, name: str, ended: threading.Event) -> None:
        """A member of the group, until all that was acknowledged before the end is read, or nothing more comes."""
        began: set[str] = set()  # partitions assigned anew: the member goes on where the group has committed

        def assigned(_: Any, parts: Any) -> None:
            began.update(f"{part.topic}/{part.partition}" for part in parts)

        own = {"group.id": "load-kafka", "auto.offset.reset": "earliest", "log_level": 0}
        member, clock = self._client.Consumer({"bootstrap.servers": self._servers, **own}), SystemClock()
        member.subscribe(self._topics, on_assign=assigned)
        heard_s = clock.monotonic_s()
        while not ended.is_set() or (self.consumed < self.acknowledged and clock.monotonic_s() - heard_s < SILENT_S):
            got: dict[str, list[tuple[int, str]]] = defaultdict(list)
            for message in member.consume(HANDED_OVER, 0.2):
                if message.error() is None:
                    got[_place(message)].append((message.offset(), _name_of(message)))
            for place, records in got.items():
                self._operations.append(Poll(name, place, records, seek=place in began))
                self._read[place].update(records)
                began.discard(place)
            if got or not ended.is_set():
                heard_s = clock.monotonic_s()
        member.close()


def _place(message: Any) -> str:
    return f"{message.topic()}/{message.partition()}"


def _name_of(message: Any) -> str:
    return str(message.value().split(b" ", 1)[0], "utf-8")
