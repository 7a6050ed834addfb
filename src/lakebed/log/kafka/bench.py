"""Load by a stock Kafka client, librdkafka: what `lakebed bench log` measures of it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable

KIB = 1024
FLUSH_S = 120.0
HANDED_OVER = 200  # records to a partition, in one call
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


class LibrdkafkaLoad:
    """One producer of 1 KiB records to all partitions of a topic, connected before anything is measured."""

    def __init__(self, client: Any, servers: str, topic: str, partitions: int) -> None:
        self._topic, self._partitions, self._failed = topic, partitions, list[Any]()
        admin = client.admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
        admin.create_topics([client.admin.NewTopic(topic, partitions, 1)])[topic].result(FLUSH_S)
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
