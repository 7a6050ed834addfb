"""Gateways with a port for Kafka clients, as processes; and librdkafka, driven to the end of what it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka

QUIET = {"log_level": 0, "socket.timeout.ms": 10_000}


def producer(servers: str, **more: Any) -> confluent_kafka.Producer:
    return confluent_kafka.Producer({"bootstrap.servers": servers, **QUIET, **_dotted(more)})


def consumer(servers: str, group: str, **more: Any) -> confluent_kafka.Consumer:
    own = {"group.id": group, "auto.offset.reset": "earliest", "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    return confluent_kafka.Consumer({"bootstrap.servers": servers, **own, **QUIET, **_dotted(more)})


def produce(made: confluent_kafka.Producer, topic: str, records: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The partition and the offset of each record. Fails where one is not acknowledged."""
    placed: dict[int, tuple[int, int]] = {}
    failed: list[Any] = []

    def report(number: int) -> Callable[[Any, Any], None]:
        def done(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(error)
            else:
                placed[number] = (message.partition(), message.offset())

        return done

    for number, record in enumerate(records):
        made.produce(topic, **record, on_delivery=report(number))
        made.poll(0)
    assert 0 == made.flush(60)
    assert [] == failed
    return [placed[number] for number in range(len(records))]


def consume(made: confluent_kafka.Consumer, count: int, *, s: float = 60.0) -> list[Any]:
    """As many messages, or an AssertionError with what came instead."""
    found: list[Any] = []
    deadline = time.monotonic() + s
    while len(found) < count:
        message = made.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages"
    return found


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    return {name if name.endswith("_cb") else name.replace("_", "."): value for name, value in settings.items()}
