"""S3 event notifications: what a message reports is checked after a while, and then the message is deleted."""

from __future__ import annotations

import msgspec
import pytest
from botocore.exceptions import ClientError

from lakebed.batches import acceptance, paths
from lakebed.batches.model import AcceptedBatch, write_record
from lakebed.batches.notifications import Notification, NotificationFollower, SqsNotifications, created
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.settings import StoreSettings
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on

KEY = "accepted/v1/agent=61/boot=62/00000000000000000000-00000000000000000009.json"


def event(key: str, name: str = "ObjectCreated:Put") -> dict[str, object]:
    return {
        "eventName": name,
        "eventTime": "2026-11-17T08:00:00.500Z",
        "s3": {"bucket": {"name": "lake"}, "object": {"key": key.replace("=", "%3D")}},
    }


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"Records": [event(f"prod/{KEY}")]}, [KEY]),
        ({"Message": msgspec.json.encode({"Records": [event(f"prod/{KEY}")]}).decode()}, [KEY]),
        (
            {"Records": [event(f"prod/{KEY}", "ObjectRemoved:Delete"), event(f"prod/{KEY}", "s3:ObjectCreated:Put")]},
            [KEY],
        ),
        ({"Records": [event(KEY), event("prod/raw-blobs/v1/x"), {"s3": 3}]}, []),
        ({"Event": "s3:TestEvent"}, []),
        ([1], []),
    ],
    ids=["direct", "through SNS", "other events", "other keys", "test event", "foreign"],
)
def test_the_created_manifests_of_a_message(body: object, found: list[str]) -> None:
    """Below the deployment's prefix, with the time of the event; what is no such event is passed over."""
    infos = list(created(msgspec.json.encode(body).decode(), "prod/"))

    assert found == [info.key for info in infos]
    assert {1_794_902_400_500} >= {info.modified_ms for info in infos}
    assert [] == list(created("not json", ""))


class ScriptedQueue:
    def __init__(self, *messages: list[Notification]) -> None:
        self._messages, self.deleted = list(messages), list[str]()

    async def receive(self) -> list[Notification]:
        return self._messages.pop(0) if self._messages else []

    async def delete(self, receipts: list[str]) -> None:
        self.deleted += receipts


async def lost(store: MemoryStore, clock: ManualClock) -> AcceptedBatch:
    submitted = submit(frame_of())
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=clock.now_ns(), collector_id="dead", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    return accepted


async def test_a_reported_manifest_is_indexed_after_its_grace_and_its_message_deleted(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Not before: its collector may still write. A check that fails leaves the message for the next delivery."""
    accepted = await lost(store, manual_clock)
    info = ObjectInfo(paths.accepted_key(accepted.identity), 0, "", manual_clock.now_ns() // 1_000_000)
    queue = ScriptedQueue([Notification("r1", (info,)), Notification("r2", ())])
    role = Reconciler(runtime_on(store, manual_clock), overlap_s=900.0, concurrency=4)
    follower, report = NotificationFollower(manual_clock, queue, role), ReconcileReport("hot")

    await follower.step(report)
    early = (report.checked, list(queue.deleted))
    await manual_clock.advance(20)
    await follower.step(report)

    assert (0, []) == early
    assert ({"rollup_work": 1, "indexed": 1}, ["r1", "r2"]) == (report.repaired, queue.deleted)
    assert 1 == len([each async for each in RawBatches(store).entries(0, 2**62)])


async def test_a_message_whose_check_failed_is_not_deleted(store: MemoryStore, manual_clock: ManualClock) -> None:
    """SQS delivers it again."""

    class Failing(Reconciler):
        async def check(self, listed: object, report: object) -> None:
            raise Unavailable("away")

    queue = ScriptedQueue([Notification("r1", ())])
    role = Failing(runtime_on(store, manual_clock), overlap_s=900.0, concurrency=4)
    follower = NotificationFollower(manual_clock, queue, role, grace_s=0.0, pace_s=0.0)

    with pytest.raises(Unavailable):
        await follower.step(ReconcileReport("hot"))
    assert [] == queue.deleted


async def test_messages_that_come_later_wait_for_their_own_grace_and_too_many_are_checked_early(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is deleted once, behind its own check; a flood is not held in memory."""
    monkeypatch.setattr("lakebed.batches.notifications.HELD_MAX", 4)
    first, second, *flood = [Notification(f"r{number}", ()) for number in range(6)]
    queue = ScriptedQueue([first], [second], [], flood)
    role = Reconciler(runtime_on(store, manual_clock), overlap_s=900.0, concurrency=4)
    follower, deleted = NotificationFollower(manual_clock, queue, role, grace_s=10.0, pace_s=5.0), []
    for pause_s in (8.0, 8.0, 15.0, 0.0):
        await follower.step(ReconcileReport("hot"))
        deleted.append(list(queue.deleted))
        await manual_clock.advance(pause_s)
    await follower.step(ReconcileReport("hot"))

    assert [[], [], ["r0"]] == deleted[:3]
    assert [f"r{number}" for number in range(6)] == queue.deleted


class SqsClient:
    """What boto3 offers, without a network."""

    def __init__(self) -> None:
        self.deleted: list[list[str]] = []

    def receive_message(self, **_: object) -> dict[str, object]:
        body = msgspec.json.encode({"Records": [event(f"prod/{KEY}")]}).decode()
        return {"Messages": [{"ReceiptHandle": "r", "Body": body}]}

    def delete_message_batch(self, *, QueueUrl: str, Entries: list[dict[str, str]]) -> None:
        assert len({each["Id"] for each in Entries}) == len(Entries)
        self.deleted.append([each["ReceiptHandle"] for each in Entries])


async def test_messages_are_deleted_as_many_at_once_as_sqs_takes_and_each_once() -> None:
    """Keys lose the prefix of the deployment; a queue that fails is Unavailable."""
    settings = StoreSettings.of({"url": "s3://lake", "prefix": "prod/"})
    queue, client = SqsNotifications(settings, "https://sqs.example/1/q"), SqsClient()
    queue._client = client
    (found,) = await queue.receive()
    receipts = [f"r{number}" for number in range(25)]
    await queue.delete(receipts)

    assert [KEY] == [info.key for info in found.created]
    assert [receipts[:10], receipts[10:20], receipts[20:]] == client.deleted

    def refused(**_: object) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "ReceiveMessage")

    client.receive_message = refused  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        await queue.receive()
