"""How many topics a key may have: its own are counted, and those that exist always take records."""

from __future__ import annotations

import pytest

from lakebed.core.auth import KeyLimits, Principal
from lakebed.core.errors import Throttled
from lakebed.log.model import TopicPartition
from lakebed.log.topic_quota import TopicQuota
from support.log_host import Host


async def quota_with(host: Host, *topics: str) -> TopicQuota:
    """On a lake with these topics, of two partitions each."""
    broker = host.broker()
    for topic in topics:
        for number in range(2):
            await broker.writer.ensure(TopicPartition(topic, number))
    return TopicQuota(broker.admin)


def key(topics_max: int) -> Principal:
    return Principal("acme", ("log:produce:acme.*",), limits=KeyLimits(topics_max=topics_max))


async def test_the_topics_of_others_are_not_counted(host: Host) -> None:
    """Only those that the key may append to, each once however many partitions it has."""
    quota = await quota_with(host, "acme.a", "rival.a", "rival.b", "rival.c")

    await quota.check(key(2), {"acme.b"})
    with pytest.raises(Throttled, match="may have 2 topics"):
        await quota.check(key(2), {"acme.b", "acme.c"})


async def test_topics_that_exist_take_records_though_there_are_more_than_the_limit(host: Host) -> None:
    """Where a limit is lowered, nothing that was written before stops."""
    quota = await quota_with(host, "acme.a", "acme.b", "acme.c")

    await quota.check(key(1), {"acme.a", "acme.c"})
    with pytest.raises(Throttled):
        await quota.check(key(1), {"acme.a", "acme.d"})


async def test_of_several_topics_only_the_new_ones_are_refused(host: Host) -> None:
    """Each with the reason; a key without a limit is refused none, and nothing is listed for it."""
    quota = await quota_with(host, "acme.a", "acme.b")

    over = await quota.over(key(2), {"acme.a", "acme.x", "acme.y"})

    assert {"acme.x", "acme.y"} == set(over)
    assert {} == await quota.over(key(4), {"acme.a", "acme.x", "acme.y"})
    assert {} == await quota.over(key(0), {"acme.a", "acme.x", "acme.y"})


async def test_a_topic_that_was_deleted_is_counted_when_it_is_made_again(host: Host) -> None:
    """A key may replace a topic by another; it does not keep a place for each name that it ever had."""
    broker = host.broker()
    await broker.writer.ensure(TopicPartition("acme.a", 0))
    await broker.topic_quota.check(key(1), {"acme.a"})
    await broker.admin.delete("acme.a", reason="replaced")
    await broker.topic_quota.check(key(1), {"acme.b"})
    await broker.writer.ensure(TopicPartition("acme.b", 0))

    with pytest.raises(Throttled, match="may have 1 topics; this would be 2"):
        await broker.topic_quota.check(key(1), {"acme.a"})
    assert {"acme.a"} == set(await broker.topic_quota.over(key(1), {"acme.a", "acme.b"}))
