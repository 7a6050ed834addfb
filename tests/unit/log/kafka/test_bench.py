"""The history of librdkafka's clients in a load test, with a client that loses what the test wants."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.log.kafka import bench
from lakebed.log.kafka.bench import HANDED_OVER, LibrdkafkaHistory

RECORDS = 3 * HANDED_OVER


class Message:
    def __init__(self, partition: int, offset: int, value: bytes) -> None:
        self._partition, self._offset, self._value = partition, offset, value

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value

    def error(self) -> None:
        return None


class Client:
    """As much of confluent-kafka as is used: one topic in memory, and one member that is assigned all of it."""

    def __init__(self, ended: threading.Event, lost: set[int], twice: set[int]) -> None:
        self._ended, self._lost, self._twice = ended, lost, twice
        self._stored = list[Message]()
        self.admin = SimpleNamespace(AdminClient=lambda _: self, NewTopic=lambda *_: None)

    def create_topics(self, _: Any) -> dict[str, Future[None]]:
        done: Future[None] = Future()
        done.set_result(None)
        return {"t": done}

    def Producer(self, settings: dict[str, Any]) -> Any:
        def produce_batch(_: str, records: list[dict[str, bytes]], partition: int) -> None:
            for record in records:
                offset = 1 + sum(one.partition() == partition for one in self._stored)
                self._stored.append(Message(partition, offset, record["value"]))
                settings["on_delivery"](None, self._stored[-1])

        def flush(_: float) -> int:
            self._ended.set()
            return 0

        return SimpleNamespace(produce_batch=produce_batch, flush=flush)

    def Consumer(self, _: dict[str, Any]) -> Any:
        left = [one for number, one in enumerate(self._stored) if number not in self._lost]
        left += [
            Message(one.partition(), RECORDS, one.value()) for n, one in enumerate(self._stored) if n in self._twice
        ]

        def subscribe(_: Any, on_assign: Any) -> None:
            on_assign(None, [SimpleNamespace(topic="t", partition=number) for number in range(2)])

        def consume(most: int, _: float) -> list[Message]:
            some, left[:] = left[:most], left[most:]
            return some

        return SimpleNamespace(subscribe=subscribe, consume=consume, close=lambda: None)


@pytest.mark.parametrize(
    ("lost", "twice", "kinds"),
    [
        (set[int](), set[int](), set[str]()),
        ({5}, set(), {"lost write", "skipped"}),
        ({2 * HANDED_OVER - 1}, set(), {"unseen"}),
        ({2 * HANDED_OVER - 1}, {7}, {"unseen", "duplicate"}),  # as many as were sent
    ],
)
def test_what_a_group_of_a_load_test_loses_or_gets_twice_is_an_anomaly(
    monkeypatch: pytest.MonkeyPatch, lost: set[int], twice: set[int], kinds: set[str]
) -> None:
    """Each record has a name, so one that is missing or at two offsets is found; a good run has no anomaly."""
    monkeypatch.setattr(bench, "SystemClock", lambda: SimpleNamespace(monotonic_s=partial(next, count(0.0, 1.0))))
    ended = threading.Event()
    history = LibrdkafkaHistory(Client(ended, lost, twice), "nowhere:1", ["t"], 2)

    history.produce("p0", "t", RECORDS, ended)
    history.consume("c0", ended)

    assert (RECORDS, RECORDS - len(lost) + len(twice)) == (history.acknowledged, history.consumed)
    assert kinds == {one.kind for one in history.anomalies()}
