"""Gateways with a port for Kafka clients, as processes; and librdkafka, driven to the end of what it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka

from lakebed.log.checker import Anomaly, Operation, Poll, Send, check

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


class KafkaHistory:
    """What producers were answered and what the members of one group got, for the checker of the log's histories.

    Partitions of one topic. A member takes its messages one by one (`poll`): none of an assignment that has ended is
    among them then.
    """

    def __init__(self) -> None:
        self.operations = list[Operation]()
        self.read: dict[int, dict[int, str]] = {}
        self._names: dict[Any, str] = {}
        self._assigned: set[tuple[str, int]] = set()  # begins where the group has committed, with the next message

    def report(self, client: str, record: str) -> Callable[[Any, Any], None]:
        """The delivery report of one record."""

        def done(error: Any, message: Any) -> None:
            place, offset = _place(message), None if error is not None else message.offset()
            self.operations.append(Send(client, place, record, "info" if error is not None else "ok", offset))

        return done

    def subscribe(self, member: confluent_kafka.Consumer, name: str, topic: str) -> None:
        self._names[member] = name
        member.subscribe([topic], on_assign=lambda _, parts: self._assigned.update((name, p.partition) for p in parts))

    def take(self, member: confluent_kafka.Consumer, message: Any) -> None:
        at, record = message.partition(), message.value().decode()
        place = (self._names[member], at)
        first = place in self._assigned
        self._assigned.discard(place)
        self.operations.append(Poll(place[0], _place(message), [(message.offset(), record)], seek=first))
        self.read.setdefault(at, {})[message.offset()] = record

    @property
    def counts(self) -> tuple[int, int]:
        """How many records were acknowledged, and how many the group has read."""
        acknowledged = sum(isinstance(one, Send) and one.outcome == "ok" for one in self.operations)
        return acknowledged, sum(map(len, self.read.values()))

    def anomalies(self) -> list[Anomaly]:
        """After the end: the group has read everything, so what it read is complete."""
        whole = [Poll("group", f"{at}", sorted(found.items()), final=True) for at, found in self.read.items()]
        return check([*self.operations, *whole])


def _place(message: Any) -> str:
    return f"{message.partition()}"


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    return {name if name.endswith("_cb") else name.replace("_", "."): value for name, value in settings.items()}
