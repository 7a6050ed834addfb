"""S3 event notifications through a local SQS server feed the reconciler's hot path."""

from __future__ import annotations

import asyncio
import json

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.model import write_record
from lakebed.batches.notifications import NotificationFollower, SqsNotifications
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.core.clock import SystemClock
from lakebed.core.settings import Secret
from lakebed.store.memory import MemoryStore
from lakebed.store.settings import StoreSettings
from support.aws_servers import aws_server
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on

DEADLINE_S = 60.0


@pytest.mark.parametrize("kind", ["ministack", pytest.param("moto", marks=pytest.mark.full)])
async def test_a_notified_manifest_is_indexed_and_its_message_is_gone(kind: str) -> None:
    """A collector died before its flush: the notification is enough, and it is handled once."""
    import boto3

    clock = SystemClock()
    store = MemoryStore(clock=clock)
    submitted = submit(frame_of())
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=clock.now_ns(), collector_id="dead", attempt_id="a")
    key = paths.accepted_key(accepted.identity)
    await store.create(key, write_record(accepted))
    keys = {"access_key_id": Secret("test"), "secret_access_key": Secret("test")}
    settings = StoreSettings.of({"url": "s3://lake", "prefix": "prod", **keys})
    with aws_server(kind) as url:
        sqs = boto3.client(
            "sqs", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        created = sqs.create_queue(QueueName="events")["QueueUrl"]
        queue_url = f"{url}/{created.split('/', 3)[3]}"
        record = {
            "eventName": "ObjectCreated:Put",
            "eventTime": "2026-11-17T08:00:00.000Z",
            "s3": {"object": {"key": f"prod/{key}".replace("=", "%3D")}},
        }
        sqs.send_message(QueueUrl=created, MessageBody=json.dumps({"Records": [record]}))
        role = Reconciler(runtime_on(store, clock), overlap_s=900.0, concurrency=4)
        queue = SqsNotifications(settings, queue_url)
        follower, report = NotificationFollower(clock, queue, role, grace_s=0.2, pace_s=0.0), ReconcileReport("hot")

        async with asyncio.timeout(DEADLINE_S):
            while not report.repaired:
                await follower.step(report)
        counts = sqs.get_queue_attributes(QueueUrl=created, AttributeNames=["All"])["Attributes"]

    assert {"rollup_work": 1, "indexed": 1} == report.repaired
    assert 1 == len([each async for each in RawBatches(store).entries(0, 2**62)])
    assert ("0", "0") == (
        counts["ApproximateNumberOfMessages"],
        counts["ApproximateNumberOfMessagesNotVisible"],
    )
