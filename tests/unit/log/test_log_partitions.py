"""Which partitions there are, found the cheap way where the backend has one."""

from __future__ import annotations

import pytest
from log_host import Host

from lakebed.ids import Ids
from lakebed.log.broker import Broker
from lakebed.log.columns import columns
from lakebed.log.model import TopicConfig, TopicPartition
from lakebed.log.producers import Chunk
from lakebed.log.writer import Group
from lakebed.meta.bucket import BucketMeta
from lakebed.meta.protocol import Grouped, Meta
from lakebed.metrics import Metrics


@pytest.mark.parametrize("backend", ["memory", "bucket"])
async def test_partitions_are_found_and_nothing_else_is(host: Host, backend: str) -> None:
    """Topics' configs and groups' offsets are no partitions; a deleted topic's partitions do not exist."""
    meta: Meta = host.meta()
    if backend == "bucket":
        meta = BucketMeta(host.store, "llog-meta", clock=host.clock, ids=Ids.seeded("b"), metrics=Metrics())
    broker = Broker(host.context(), meta)
    tps = [TopicPartition(topic, number) for topic in ("a", "a-b", "gone") for number in (0, 7)]
    await broker.writer.append_shared([Group(tp, (Chunk(columns([b"x"])),)) for tp in tps])
    await broker.steward.configure("a", TopicConfig(retention_s=60.0))
    await broker.groups.commit("readers", tps[0], 1)
    await broker.steward.delete("gone", reason="test")

    assert (backend == "bucket") == isinstance(meta, Grouped)
    assert tps[:4] == await broker.steward.partitions()
    assert tps[:2] == await broker.steward.partitions("a")
    assert tps == sorted([tp async for tp in broker.records.partitions()])
