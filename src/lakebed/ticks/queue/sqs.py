"""The queue on SQS: a standard queue with a redrive policy, and its dead-letter queue beside it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.ticks import aws
from lakebed.ticks.model import TickMessage
from lakebed.ticks.queue import BATCH_MAX, QueueDepth, ReceivedMessage, encode
from lakebed.ticks.settings import TicksSettings

DEAD_RETENTION_S = 14 * 86_400  # SQS's longest
READ_HIDDEN_S = 30  # dead letters that are read become visible again at once, or after this
READ_WAIT_S = 1  # a short poll asks only some of SQS's hosts, and may find nothing where something is
GONE = ("ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight")


class SqsQueue:
    """The queues `<name>` and `<name>-dlq` are created on first use."""

    def __init__(self, settings: TicksSettings) -> None:
        self._settings = settings
        self._opened: tuple[Any, str, str] | None = None
        self._opening = asyncio.Lock()

    async def send(self, message: TickMessage) -> str:
        sqs, url, _ = await self._open()
        sent = await aws.call("send a message", sqs.send_message, QueueUrl=url, MessageBody=encode(message))
        return str(sent["MessageId"])

    async def receive(self, count: int = BATCH_MAX) -> Sequence[ReceivedMessage]:
        sqs, url, _ = await self._open()
        return await _receive(sqs, url, count, self._settings.visibility_timeout_s)

    async def delete(self, receipt: str) -> None:
        sqs, url, _ = await self._open()
        await _unless_gone(aws.call("delete a message", sqs.delete_message, QueueUrl=url, ReceiptHandle=receipt))

    async def hide(self, receipt: str, seconds: int) -> None:
        sqs, url, _ = await self._open()
        await _unless_gone(
            aws.call(
                "hide a message",
                sqs.change_message_visibility,
                QueueUrl=url,
                ReceiptHandle=receipt,
                VisibilityTimeout=min(seconds, 43_200),
            )
        )

    async def depth(self) -> QueueDepth:
        sqs, url, dead_url = await self._open()
        wanted = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        counts = [
            (await aws.call("count messages", sqs.get_queue_attributes, QueueUrl=each, AttributeNames=wanted))[
                "Attributes"
            ]
            for each in (url, dead_url)
        ]
        waiting, in_flight = (int(counts[0].get(name, 0)) for name in wanted)
        return QueueDepth(waiting, in_flight, sum(int(counts[1].get(name, 0)) for name in wanted))

    async def dead_letters(self, count: int = 100) -> Sequence[ReceivedMessage]:
        sqs, _, dead_url = await self._open()
        held = await self._take_dead(sqs, dead_url, count)
        for letter in held:
            await self._release(sqs, dead_url, letter)
        return [msgspec.structs.replace(letter, receipt="") for letter in held]

    async def replay(self, count: int = 100, *, tick_id: str = "") -> int:
        """Sends first, deletes after: a crash between them leaves a duplicate, never a loss."""
        sqs, url, dead_url = await self._open()
        moved = 0
        for letter in await self._take_dead(sqs, dead_url, count if not tick_id else sys.maxsize):
            if tick_id and not letter.is_of(tick_id):
                await self._release(sqs, dead_url, letter)
                continue
            await aws.call("replay a dead letter", sqs.send_message, QueueUrl=url, MessageBody=letter.body)
            await aws.call("delete a dead letter", sqs.delete_message, QueueUrl=dead_url, ReceiptHandle=letter.receipt)
            moved += 1
        return moved

    async def _take_dead(self, sqs: Any, dead_url: str, count: int) -> list[ReceivedMessage]:
        held: dict[str, ReceivedMessage] = {}
        while len(held) < count:
            page = await _receive(sqs, dead_url, min(BATCH_MAX, count - len(held)), READ_HIDDEN_S, wait_s=READ_WAIT_S)
            new = {letter.message_id for letter in page} - set(held)
            held |= {letter.message_id: letter for letter in page}
            if not new:
                break  # none is left, or the first are visible again
        return list(held.values())

    async def _release(self, sqs: Any, dead_url: str, letter: ReceivedMessage) -> None:
        await _unless_gone(
            aws.call(
                "release a dead letter",
                sqs.change_message_visibility,
                QueueUrl=dead_url,
                ReceiptHandle=letter.receipt,
                VisibilityTimeout=0,
            )
        )

    async def _open(self) -> tuple[Any, str, str]:
        async with self._opening:
            if self._opened is None:
                sqs = await asyncio.to_thread(aws.client, "sqs", self._settings)
                dead_url, dead_arn = await self._made(
                    sqs, f"{self._settings.sqs_queue}-dlq", {"MessageRetentionPeriod": str(DEAD_RETENTION_S)}
                )
                policy = {"deadLetterTargetArn": dead_arn, "maxReceiveCount": str(self._settings.receives_max)}
                url, _ = await self._made(
                    sqs,
                    self._settings.sqs_queue,
                    {
                        "VisibilityTimeout": str(self._settings.visibility_timeout_s),
                        "MessageRetentionPeriod": str(self._settings.message_retention_s),
                        "RedrivePolicy": msgspec.json.encode(policy).decode(),
                    },
                )
                self._opened = (sqs, url, dead_url)
            return self._opened

    async def _made(self, sqs: Any, name: str, attributes: dict[str, str]) -> tuple[str, str]:
        """The queue's URL and ARN; an existing queue keeps its attributes."""
        try:
            url = (await aws.call(f"find queue {name}", sqs.get_queue_url, QueueName=name))["QueueUrl"]
        except aws.AwsError as error:
            if "NonExistentQueue" not in error.detail["aws_code"] and "DoesNotExist" not in error.detail["aws_code"]:
                raise
            url = (await aws.call(f"create queue {name}", sqs.create_queue, QueueName=name, Attributes=attributes))[
                "QueueUrl"
            ]
        found = await aws.call(
            f"describe queue {name}", sqs.get_queue_attributes, QueueUrl=url, AttributeNames=["QueueArn"]
        )
        return url, found["Attributes"]["QueueArn"]


async def _receive(sqs: Any, url: str, count: int, hidden_s: int, *, wait_s: int = 0) -> list[ReceivedMessage]:
    found = await aws.call(
        "receive messages",
        sqs.receive_message,
        QueueUrl=url,
        MaxNumberOfMessages=min(count, BATCH_MAX),
        VisibilityTimeout=hidden_s,
        WaitTimeSeconds=wait_s,
        AttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
    )
    return [
        ReceivedMessage(
            one["MessageId"],
            one["ReceiptHandle"],
            one["Body"],
            int(one.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            int(one.get("Attributes", {}).get("SentTimestamp", 0)),
        )
        for one in found.get("Messages", ())
    ]


async def _unless_gone(call: Any) -> None:
    try:
        await call
    except aws.AwsError as error:
        if not any(code in error.detail["aws_code"] for code in GONE):
            raise
