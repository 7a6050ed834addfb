"""Which partitions there are, found the cheap way where the backend has one."""

from __future__ import annotations

import pytest

from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicConfig, TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import PartitionAppend
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.protocol import GroupedMeta, Meta
from support.log_host import Host


@pytest.mark.parametrize("backend", ["memory", "bucket"])
async def test_partitions_are_found_and_nothing_else_is(host: Host, backend: str) -> None:
    """Topics' configs and groups' offsets are no partitions; a deleted topic's partitions do not exist."""
    meta: Meta = host.meta()
    if backend == "bucket":
        meta = BucketMeta(host.context(), "llog-meta")
    broker = Broker(host.context(), meta)
    tps = [TopicPartition(topic, number) for topic in ("a", "a-b", "gone") for number in (0, 7)]
    await broker.writer.append_shared([PartitionAppend(tp, (RecordChunk(columns([b"x"])),)) for tp in tps])
    await broker.admin.configure("a", TopicConfig(retention_s=60.0))
    await broker.groups.commit("readers", tps[0], 1)
    await broker.admin.delete("gone", reason="test")

    assert (backend == "bucket") == isinstance(meta, GroupedMeta)
    assert tps[:4] == await broker.admin.partitions()
    assert tps[:2] == await broker.admin.partitions("a")
    assert tps == sorted([tp async for tp in broker.records.partitions()])
