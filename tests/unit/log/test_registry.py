"""The registry of partitions: one range finds them all, and a partition that exists is in it."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.model import TopicPartition
from lakebed.log.services import LogServices
from lakebed.meta.memory import MemoryMeta
from support.log_host import TP, Host


class CountingMeta(MemoryMeta):
    def __init__(self, host: Host) -> None:
        super().__init__(Runtime(host.clock, Ids.seeded("counting"), Metrics()), host.state)
        self.ranges = 0

    async def range(self, *arguments: Any, **options: Any) -> Any:
        self.ranges += 1
        return await super().range(*arguments, **options)


async def found(services: LogServices, topic: str = "") -> list[TopicPartition]:
    return sorted([tp async for tp in services.records.partitions(topic)])


async def filled(host: Host, count: int) -> list[TopicPartition]:
    tps = [TopicPartition("orders", number) for number in range(count)] + [TopicPartition("orders-2", 7)]
    broker = host.broker()
    for tp in tps:
        await host.append(broker, b"x", tp=tp)
    return tps


@pytest.mark.parametrize("count", [3, 60])
async def test_one_range_finds_all_partitions_however_many_there_are(host: Host, count: int) -> None:
    """Of all topics and of one, once the compactor has seen the lake."""
    tps = await filled(host, count)
    await host.services().scheduler.pass_once()
    meta = CountingMeta(host)
    services = LogServices(host.context(), meta)

    assert tps == await found(services)
    assert tps[:-1] == await found(services, "orders") and [] == await found(services, "order")
    assert 3 == meta.ranges


async def test_partitions_of_an_older_version_are_registered_by_the_first_pass(host: Host) -> None:
    """Until then everybody scans; nothing is missing at any time."""
    tps = await filled(host, 4)
    for key in host.meta_keys("_partitions/"):
        host.state.remove(key)
    services = host.services()
    assert tps == await found(services)

    await services.scheduler.pass_once()

    assert len(tps) == len(host.meta_keys("_partitions/")) and 1 == len(host.meta_keys("_registry/"))
    assert tps == await found(host.services())


async def test_the_vacuum_misses_no_partition_and_registers_those_that_are_not(host: Host) -> None:
    """A process of an older version created it: its blobs are referred to, and the compactor sees it from then on."""
    tps = await filled(host, 2)
    services = host.services()
    await services.scheduler.pass_once()
    host.state.remove(paths.registered(TP))
    await host.clock.advance(1000)

    swept = await services.sweeper.sweep_once()

    assert [] == swept.orphans and tps == await found(services)


async def test_a_partition_that_is_removed_leaves_the_registry(host: Host) -> None:
    """With its tombstone; an entry that a crash left goes with the next pass."""
    tps, services = await filled(host, 1), host.services()
    await services.scheduler.pass_once()
    await host.broker().admin.delete("orders", reason="test")
    await host.clock.advance(200)
    await services.retention.apply_once(TP)
    assert tps[1:] == await found(services)

    await services.records.registry.register(TP)
    assert tps == await found(services)
    await services.scheduler.pass_once()
    assert tps[1:] == await found(services)


async def test_a_tombstone_stays_as_long_as_a_slow_writer_may_be_left(host: Host) -> None:
    """For the horizon of the vacuum: without it, a late append would begin a new log at the offsets of the old one."""
    broker, services = host.broker(), host.services(vacuum_horizon_s=100.0)
    await host.append(broker, b"a")
    await broker.admin.delete(TP.topic, reason="done")

    there = []
    for after_s in (1.0, 98.0, 1.0):
        await host.clock.advance(after_s)
        await services.retention.apply_once(TP)
        there.append(paths.control(TP) in host.meta_keys())

    assert [True, True, False] == there


async def test_a_partition_that_is_created_again_while_it_is_removed_stays_registered(host: Host) -> None:
    """Between the removal of its control record and that of its entry, a produce creates it."""
    await filled(host, 1)
    await host.services().scheduler.pass_once()
    await host.broker().admin.delete("orders", reason="test")
    await host.clock.advance(200)

    class Overtaken(MemoryMeta):
        async def delete(self, key: str, **options: Any) -> None:
            await super().delete(key, **options)
            if key == paths.control(TP):
                await host.append(host.broker(), b"new")

    meta = Overtaken(Runtime(host.clock, Ids.seeded("overtaken"), Metrics()), host.state)
    await LogServices(host.context(), meta).retention.apply_once(TP)

    assert TP in await found(host.services())
    assert [b"new"] == await host.read_all(host.broker())
