"""The queue on SQS where a server of the tests does not behave like AWS: a short poll asks only some of its hosts."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.ticks.model import TickMessage
from lakebed.ticks.queue import encode
from lakebed.ticks.queue.sqs import SqsQueue
from lakebed.ticks.settings import TicksSettings

LETTERS = 150


class SampledSqs:
    """Two queues of bodies with the calls of boto3; a short poll of the dead letters finds nothing."""

    def __init__(self, dead: list[str]) -> None:
        self.queues: dict[str, dict[str, str]] = {"queue": {}, "dead": {f"m{n}": body for n, body in enumerate(dead)}}
        self.taken: set[str] = set()
        self.hides = True

    def receive_message(self, QueueUrl: str, MaxNumberOfMessages: int, WaitTimeSeconds: int, **_: Any) -> Any:
        if not WaitTimeSeconds:
            return {}
        found = [each for each in self.queues[QueueUrl] if each not in self.taken][:MaxNumberOfMessages]
        self.taken |= set(found) if self.hides else set()
        bodies = self.queues[QueueUrl]
        return {"Messages": [{"MessageId": each, "ReceiptHandle": each, "Body": bodies[each]} for each in found]}

    def send_message(self, QueueUrl: str, MessageBody: str) -> Any:
        self.queues[QueueUrl][f"s{len(self.queues[QueueUrl])}"] = MessageBody

    def delete_message(self, QueueUrl: str, ReceiptHandle: str) -> Any:
        del self.queues[QueueUrl][ReceiptHandle]

    def change_message_visibility(self, ReceiptHandle: str, **_: Any) -> Any:
        self.taken.discard(ReceiptHandle)

    def hidden(self, queue: str) -> int:
        return len(self.taken & set(self.queues[queue]))


@pytest.fixture
def sqs() -> SampledSqs:
    ticks = [f"t{number}" for number in range(LETTERS)]
    return SampledSqs([encode(TickMessage("o", "p", tick, "delta", "20261115", "k", "t=1", "now")) for tick in ticks])


def opened(sqs: Any) -> SqsQueue:
    queue = SqsQueue(TicksSettings())
    queue._opened = (sqs, "queue", "dead")
    return queue


async def test_a_tick_is_found_among_any_number_of_dead_letters(sqs: SampledSqs) -> None:
    """Beyond the first hundred too, as in the bucket's queue; the others stay, and are visible at once."""
    moved = await opened(sqs).replay(tick_id="t149")

    assert (1, LETTERS - 1, 0) == (moved, len(sqs.queues["dead"]), sqs.hidden("dead"))
    assert 1 == len(sqs.queues["queue"])


async def test_dead_letters_are_listed_though_a_short_poll_finds_none(sqs: SampledSqs) -> None:
    """A list that says there is none, while the alarm counts them, would leave an operator without a way on."""
    letters = await opened(sqs).dead_letters(20)

    assert (20, 0) == (len({each.message_id for each in letters}), sqs.hidden("dead"))


async def test_a_walk_over_dead_letters_ends_though_they_come_back(sqs: SampledSqs) -> None:
    """A walk that is slower than the letters are hidden sees the first again."""
    sqs.hides = False

    assert 0 == await opened(sqs).replay(tick_id="none")
