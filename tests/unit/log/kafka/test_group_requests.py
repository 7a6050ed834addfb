"""Requests of groups as a client sends them: leaving, and what an administrator does with committed offsets."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from lakebed.log.model import TopicPartition
from support.kafka_client import KafkaClient
from support.kafka_port import KafkaPort
from support.log_host import Host

SESSION = {"session_timeout": timedelta(seconds=30), "rebalance_timeout": timedelta(seconds=30)}
CONSUMERS = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b"orders"}]}


async def joined(host: Host, client: KafkaClient, **who: Any) -> Any:
    """The only member of a new generation, with its assignment."""
    member = await answered(host, client.ask("join_group", 5, group_id="g", **{**SESSION, **CONSUMERS, **who}))
    assert ErrorCode.none is member.error_code
    me = {"group_id": "g", "generation_id": member.generation_id, "member_id": member.member_id}
    given = [{"member_id": member.member_id, "assignment": b"orders 0"}]
    synced = await answered(host, client.ask("sync_group", 3, assignments=given, **me))
    assert (ErrorCode.none, b"orders 0") == (synced.error_code, synced.assignment)
    return member


async def answered(host: Host, asking: Any) -> Any:
    """The answer, for which time may have to pass."""
    waiting = asyncio.ensure_future(asking)
    for _ in range(400):
        await host.clock.advance(0.1)
        if waiting.done():
            return waiting.result()
    raise AssertionError("no answer")


async def described(client: KafkaClient) -> tuple[str, list[str]]:
    (found,) = (await client.ask("describe_groups", 5, groups=("g",))).groups
    return found.group_state, [each.member_id for each in found.members]


@pytest.mark.parametrize("version", [1, 4])
async def test_a_member_that_leaves_is_out_of_its_group_at_once(host: Host, version: int) -> None:
    """Nobody waits for its session to end: the group is empty when the answer comes."""
    async with KafkaPort(host) as port:
        client = port.client()
        member = await joined(host, client, member_id="one")
        before, began_s = await described(client), host.clock.monotonic_s()

        who = {"member_id": member.member_id, "members": [{"member_id": member.member_id}]}
        left = await client.ask("leave_group", version, group_id="g", **who)

        assert ErrorCode.none is left.error_code
        assert [ErrorCode.none] * (version >= 3) == [each.error_code for each in getattr(left, "members", ())]
        assert (("Stable", ["one"]), ("Empty", [])) == (before, await described(client))
        assert began_s == host.clock.monotonic_s()


async def test_a_static_member_is_removed_by_the_name_of_its_instance(host: Host) -> None:
    """As an administrator does, who does not know its id; of a member that is not there it is said."""
    async with KafkaPort(host) as port:
        client = port.client()
        await joined(host, client, member_id="", group_instance_id="machine-1")

        members = [{"member_id": "", "group_instance_id": name} for name in ("machine-1", "machine-2")]
        left = await client.ask("leave_group", 4, group_id="g", members=members)

        assert [ErrorCode.none, ErrorCode.unknown_member_id] == [each.error_code for each in left.members]
        assert ("Empty", []) == await described(client)


async def test_committed_offsets_are_deleted_where_the_group_has_no_members(host: Host) -> None:
    """Those that are named and no others. While it has members it is refused, and nothing changes."""
    async with KafkaPort(host) as port:
        client = port.client()
        for number in range(2):
            await host.append(port.services.broker, b"a", b"b", tp=TopicPartition("orders", number))

        async def committed() -> list[int]:
            wanted = [{"name": "orders", "partition_indexes": (0, 1)}]
            answer = await client.ask("offset_fetch", 7, group_id="g", topics=wanted)
            return [each.committed_offset for each in answer.topics[0].partitions]

        async def deleted() -> ErrorCode:
            topics = [{"name": "orders", "partitions": [{"partition_index": 0}]}]
            answer = await client.ask("offset_delete", 0, group_id="g", topics=topics)
            assert ErrorCode.none is answer.error_code
            return ErrorCode(answer.topics[0].partitions[0].error_code)

        member = await joined(host, client, member_id="one")
        parts = [{"partition_index": number, "committed_offset": 2, "committed_metadata": ""} for number in range(2)]
        who = {"generation_id_or_member_epoch": member.generation_id, "member_id": member.member_id}
        topics = [{"name": "orders", "partitions": parts}]
        await client.ask("offset_commit", 7, group_id="g", topics=topics, **who)

        of_a_running_group, kept = await deleted(), await committed()
        await client.ask("leave_group", 4, group_id="g", members=[{"member_id": member.member_id}])
        of_an_empty_group, left = await deleted(), await committed()

        assert (ErrorCode.group_subscribed_to_topic, [2, 2]) == (of_a_running_group, kept)
        assert (ErrorCode.none, [-1, 2]) == (of_an_empty_group, left)
