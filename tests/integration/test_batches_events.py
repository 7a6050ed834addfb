"""The hot path: a manifest created by anybody is repaired as the filer reports of it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.events import EventFollower
from lakebed.batches.model import write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer.client import FilerClient
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on

DEADLINE_S = 100.0


def follower(store: Store, address: str, root: str, listen_s: float = 1.0) -> EventFollower:
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    runtime = runtime_on(store, clock, ids=ids, metrics=metrics)
    reconciler = Reconciler(runtime, overlap_s=900.0, concurrency=4)
    filer = FilerClient([address], Runtime(clock=clock, ids=ids, metrics=Metrics()))
    return EventFollower(runtime, filer, root, reconciler, listen_s=listen_s, grace_s=0.5, pace_s=0.0)


async def listen_until(store: Store, address: str, root: str, indexed: int) -> tuple[int, Counter[str]]:
    """One subscription after another until so many are indexed; gives what was checked, and what was repaired."""
    checked, repaired = 0, Counter[str]()
    async with asyncio.timeout(DEADLINE_S):
        while len([each async for each in RawBatches(store).entries(0, 2**62)]) < indexed:
            report = await follower(store, address, root).listen()
            checked += report.checked
            repaired.update(report.repaired)
    return checked, repaired


async def accept(store: Store, frame: bytes) -> None:
    submitted = submit(frame)
    await write_blob(store, submitted)
    at_ns = SystemClock().now_ns()
    accepted = acceptance.manifest(submitted, at_ns=at_ns, collector_id="dead", attempt_id="x")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))


async def test_an_acceptance_is_indexed_from_its_event_and_the_place_is_kept(
    bucket: Store, bucket_settings: StoreSettings, weed: BucketEndpoints
) -> None:
    """Without an audit or a scan the index entries appear; a later follower continues where the first one stopped."""
    root = f"/buckets/{weed.bucket}/{bucket_settings.prefix}/"
    await follower(bucket, weed.filer_grpc, root, listen_s=0.0).listen()  # from here on, whenever the next one begins
    listening = asyncio.create_task(listen_until(bucket, weed.filer_grpc, root, 3))
    for n in range(3):
        await accept(bucket, frame_of(n * 10, n * 10 + 9))
    checked, repaired = await listening
    await accept(bucket, frame_of(50, 59))

    later, mended = await listen_until(bucket, weed.filer_grpc, root, 4)

    assert (checked, repaired["indexed"]) == (3, 3)
    assert later <= 2
    assert mended == {"indexed": 1, "rollup_work": 1}


async def test_a_filer_that_is_not_there_is_unavailable(bucket: Store) -> None:
    """The hot path fails by itself; steady and cold paths do not need it."""
    with pytest.raises(Unavailable):
        await follower(bucket, "127.0.0.1:1", "/buckets/x/").listen()
