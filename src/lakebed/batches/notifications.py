"""Repairs accepted manifests shortly after they are created, from S3 event notifications in an SQS queue: the hot path
where the store is not SeaweedFS.

A message is deleted after its manifests were checked, so a crash delivers it again. Like the filer's stream it is a
fast path only: the incremental scan finds what a lost message would have reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import unquote_plus, urlsplit

import msgspec

from lakebed.batches import paths
from lakebed.batches.events import GRACE_S, PACE_S
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.core.clock import Clock
from lakebed.core.errors import LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.store.model import ObjectInfo
from lakebed.store.settings import StoreSettings

MESSAGES_MAX = 10  # what SQS returns at once
HELD_MAX = 5_000  # messages held at once; more are checked early
WAIT_S = 5  # of one long poll
HIDDEN_S = 120  # a message that is not deleted is delivered again after this
PAUSE_S = 2.0  # before retrying a queue that failed

log = logger("batches")


class Notification(msgspec.Struct, frozen=True):
    """A message: the manifests that it reports, and the receipt with which it is deleted."""

    receipt: str
    created: tuple[ObjectInfo, ...]


class NotificationQueue(Protocol):
    async def receive(self) -> list[Notification]:
        """The next messages, after a long poll. Raises Unavailable."""

    async def delete(self, receipts: list[str]) -> None: ...


class SqsNotifications:
    """The queue of S3 event notifications. Region and credentials are those of the store."""

    def __init__(self, settings: StoreSettings, queue_url: str) -> None:
        self._url, self._prefix = queue_url, f"{settings.prefix.strip('/')}/" if settings.prefix else ""
        self._settings = settings
        self._client: Any = None

    async def receive(self) -> list[Notification]:
        found = await self._call(
            "receive_message", MaxNumberOfMessages=MESSAGES_MAX, WaitTimeSeconds=WAIT_S, VisibilityTimeout=HIDDEN_S
        )
        return [
            Notification(each["ReceiptHandle"], tuple(created(each["Body"], self._prefix)))
            for each in found.get("Messages", [])
        ]

    async def delete(self, receipts: list[str]) -> None:
        for at in range(0, len(receipts), MESSAGES_MAX):
            entries = [
                {"Id": str(number), "ReceiptHandle": receipt}
                for number, receipt in enumerate(receipts[at : at + MESSAGES_MAX])
            ]
            await self._call("delete_message_batch", Entries=entries)

    async def _call(self, method: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return await asyncio.to_thread(lambda: getattr(self._open(), method)(QueueUrl=self._url, **arguments))
        except (ClientError, BotoCoreError) as error:
            raise Unavailable(f"SQS {method}: {error}", hint="check reconciler.events_queue_url") from error

    def _open(self) -> Any:
        if self._client is None:
            import boto3

            place = urlsplit(self._url)
            self._client = boto3.client(
                "sqs",
                endpoint_url=f"{place.scheme}://{place.netloc}",
                region_name=self._settings.region,
                aws_access_key_id=self._settings.access_key_id.reveal() or None,
                aws_secret_access_key=self._settings.secret_access_key.reveal() or None,
            )
        return self._client


def created(body: str, prefix: str) -> Iterator[ObjectInfo]:
    """The accepted manifests that a message reports as created, directly or through SNS. Others are passed over."""
    try:
        message = msgspec.json.decode(body)
        if isinstance(message, dict) and isinstance(message.get("Message"), str):
            message = msgspec.json.decode(message["Message"])
        records = message.get("Records", []) if isinstance(message, dict) else []
    except msgspec.DecodeError:
        return  # not a notification
    for record in records:
        try:
            key = unquote_plus(record["s3"]["object"]["key"])
            at = datetime.fromisoformat(record["eventTime"])
            made = record["eventName"].removeprefix("s3:").startswith("ObjectCreated:")
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        if made and key.startswith(prefix + paths.ACCEPTED) and key.endswith(".json"):
            key = key.removeprefix(prefix)
            yield ObjectInfo(key, size=0, etag="", modified_ms=round(at.timestamp() * 1000))


class NotificationFollower:
    """Checks each reported manifest a while after its event, so that its collector can write first."""

    def __init__(
        self,
        clock: Clock,
        queue: NotificationQueue,
        reconciler: Reconciler,
        *,
        grace_s: float = GRACE_S,
        pace_s: float = PACE_S,
    ) -> None:
        self._clock, self._queue, self._reconciler = clock, queue, reconciler
        self._grace_s, self._pace_s = grace_s, pace_s
        self._held: list[tuple[float, Notification]] = []

    async def run(self) -> None:
        report = ReconcileReport("hot")
        while True:
            try:
                await self.step(report)
            except LakebedError as error:
                log.warning("object notifications could not be handled", error=error.message)
                await self._clock.sleep(PAUSE_S)

    async def step(self, report: ReconcileReport) -> None:
        """Receives once, checks what is due, and deletes the messages of it."""
        now_s = self._clock.monotonic_s()
        self._held += [(now_s, each) for each in await self._queue.receive()]
        now_s = self._clock.monotonic_s()
        waits_s = now_s - self._held[0][0] if self._held else 0.0
        if not self._held or (waits_s < self._grace_s + self._pace_s and len(self._held) < HELD_MAX):
            return
        due = [each for since_s, each in self._held if now_s - since_s >= self._grace_s or len(self._held) >= HELD_MAX]
        self._held = self._held[len(due) :]
        await self._reconciler.check(list({info.key: info for each in due for info in each.created}.values()), report)
        await self._queue.delete([each.receipt for each in due])
