"""The registry of partitions: one range finds them all, and a partition that exists is in it."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.log import paths
from lakebed.log.model import TopicPartition
from lakebed.log.registry import GROUP
from lakebed.log.services import LogServices
from support.log_host import METAS, TP, WITH_REGISTRY, Host

pytestmark = pytest.mark.metas(*METAS)


async def found(services: LogServices, topic: str = "") -> list[TopicPartition]:
    return sorted([tp async for tp in services.records.partitions(topic)])


async def filled(host: Host, count: int) -> list[TopicPartition]:
    tps = [TopicPartition("orders", number) for number in range(count)] + [TopicPartition("orders-2", 7)]
    broker = host.broker()
    for tp in tps:
        await host.append(broker, b"x", tp=tp)
    return tps


@pytest.mark.metas(*WITH_REGISTRY)
@pytest.mark.parametrize("count", [3, 60])
async def test_one_range_finds_all_partitions_however_many_there_are(host: Host, count: int) -> None:
    """Of all topics and of one, once the compactor has seen the lake."""
    tps = await filled(host, count)
    await host.services().scheduler.pass_once()
    services, ranges = host.services(), list[str]()
    look = services.meta.range

    async def counted(start: str, end: str, **options: Any) -> Any:
        ranges.append(start)
        return await look(start, end, **options)

    services.meta.range = counted  # type: ignore[method-assign]

    assert tps == await found(services)
    assert tps[:-1] == await found(services, "orders") and [] == await found(services, "order")
    assert 3 == len(ranges)


@pytest.mark.metas(*WITH_REGISTRY)
async def test_partitions_of_an_older_version_are_registered_by_the_first_pass(host: Host) -> None:
    """Until then everybody scans; nothing is missing at any time."""
    tps = await filled(host, 4)
    for key in await host.meta_keys("_partitions/"):
        await host.meta_remove(key, GROUP)
    services = host.services()
    assert tps == await found(services)

    await services.scheduler.pass_once()

    assert len(tps) == len(await host.meta_keys("_partitions/")) and 1 == len(await host.meta_keys("_registry/"))
    assert tps == await found(host.services())


async def test_the_vacuum_misses_no_partition_and_registers_those_that_are_not(host: Host) -> None:
    """A process of an older version created it: its blobs are referred to, and the compactor sees it from then on."""
    tps = await filled(host, 2)
    services = host.services()
    await services.scheduler.pass_once()
    await host.meta_remove(paths.registered(TP), GROUP)
    await host.clock.advance(1000)

    swept = await services.sweeper.sweep_once()

    assert [] == swept.orphans and tps == await found(services)


@pytest.mark.metas(*WITH_REGISTRY)
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
        there.append(paths.control(TP) in await host.meta_keys())

    assert [True, True, False] == there


async def test_a_partition_that_is_created_again_while_it_is_removed_stays_registered(host: Host) -> None:
    """Between the removal of its control record and that of its entry, a produce creates it."""
    await filled(host, 1)
    await host.services().scheduler.pass_once()
    await host.broker().admin.delete("orders", reason="test")
    await host.clock.advance(200)

    services = host.services()
    delete = services.meta.delete

    async def overtaken(key: str, **options: Any) -> None:
        await delete(key, **options)
        if key == paths.control(TP):
            await host.append(host.broker(), b"new")

    services.meta.delete = overtaken  # type: ignore[method-assign]
    await services.retention.apply_once(TP)

    assert TP in await found(host.services())
    assert [b"new"] == await host.read_all(host.broker())
