"""The queue on SQS where a server of the tests does not behave like AWS: a short poll asks only some of its hosts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from botocore.exceptions import ClientError

from lakebed.core.errors import Denied
from lakebed.ticks import aws
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


def refused(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "any")


class BareAccount:
    """An account without queues. `made` holds the attributes that each was created with."""

    def __init__(self, missing: str = "AWS.SimpleQueueService.NonExistentQueue") -> None:
        self.missing = missing
        self.made: dict[str, dict[str, str]] = {}
        self.fails = ""

    def get_queue_url(self, QueueName: str) -> Any:
        if QueueName not in self.made:
            raise refused(self.missing)
        return {"QueueUrl": QueueName}

    def create_queue(self, QueueName: str, Attributes: dict[str, str]) -> Any:
        assert QueueName not in self.made
        self.made[QueueName] = Attributes
        return {"QueueUrl": QueueName}

    def get_queue_attributes(self, QueueUrl: str, **_: Any) -> Any:
        return {"Attributes": {"QueueArn": f"arn:{QueueUrl}"}}

    def delete_message(self, **_: Any) -> None:
        raise refused(self.fails)

    change_message_visibility = delete_message


SETTINGS = TicksSettings(
    sqs_queue="ticks", visibility_timeout_s=60, receives_max=3, message_retention_s=7200, batch_window_s=0
)


@pytest.mark.parametrize("missing", ["AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"])
async def test_queues_are_created_once_with_their_times_and_their_dead_letters(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A letter stays for SQS's longest time, as it begins to age with the message; what exists keeps its attributes."""
    account = BareAccount(missing)
    monkeypatch.setattr(aws, "client", lambda kind, settings: account)
    for _ in range(2):
        await SqsQueue(SETTINGS).depth()

    redrive = msgspec.json.decode(account.made["ticks"].pop("RedrivePolicy"))
    assert {"deadLetterTargetArn": "arn:ticks-dlq", "maxReceiveCount": "3"} == redrive
    assert {
        "ticks-dlq": {"MessageRetentionPeriod": "1209600"},
        "ticks": {"VisibilityTimeout": "60", "MessageRetentionPeriod": "7200"},
    } == account.made


@pytest.mark.parametrize(("code", "error"), [("AccessDenied", Denied), ("InternalError", aws.AwsError)])
async def test_a_queue_that_cannot_be_looked_up_is_not_created(
    monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception]
) -> None:
    """It may exist, with other attributes."""
    account = BareAccount(code)
    monkeypatch.setattr(aws, "client", lambda kind, settings: account)

    with pytest.raises(error):
        await SqsQueue(SETTINGS).depth()
    assert {} == account.made


@pytest.mark.parametrize("code", ["ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight"])
async def test_a_message_that_is_gone_needs_no_delete_and_no_hiding(code: str) -> None:
    """Its receipt is over: another receiver has it, or it was deleted. Any other answer is an error."""
    account = BareAccount()
    queue = opened(account)
    account.fails = code
    await queue.delete("r")
    await queue.hide("r", 5)

    account.fails = "ServiceUnavailable"
    for work in (queue.delete("r"), queue.hide("r", 5)):
        with pytest.raises(aws.AwsError):
            await work
