"""Consumer groups: generations, offsets that go forward, and entries that are many."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import OutcomeUnknown
from lakebed.log import paths
from lakebed.log.broker import Broker
from lakebed.log.model import (
    GroupFenced,
    GroupOffset,
    OffsetMovedBack,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.records import PAGE
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)


async def filled(host: Host, count: int = 10) -> Broker:
    broker = host.broker()
    await host.append(broker, *[b"%d" % number for number in range(count)])
    return broker


async def test_a_zombie_cannot_move_an_offset_whichever_way(host: Host) -> None:
    """A member that was replaced commits nothing, back or forward, on any broker; the one that replaced it does."""
    one, two = await filled(host), host.broker()
    zombie = await one.groups.claim("g", TP)
    await one.groups.commit("g", TP, 4, generation=zombie.generation)
    successor = await two.groups.claim("g", TP)
    await two.groups.commit("g", TP, 8, generation=successor.generation)

    for broker, offset in ((one, 2), (two, 6), (one, 10)):
        with pytest.raises(GroupFenced):
            await broker.groups.commit("g", TP, offset, generation=zombie.generation)
    with pytest.raises(GroupFenced):
        await one.groups.commit("g", TP, 2, generation=zombie.generation, seek=True)

    assert (successor.offset, await one.groups.committed("g", TP)) == (
        4,
        GroupOffset(8, host.clock.now_ns() // 1_000_000, "", 2),
    )


async def test_a_member_of_a_group_that_was_forgotten_cannot_commit_into_the_new_one(host: Host) -> None:
    """Generations begin anew with the group: a high one of before is as wrong as a low one."""
    broker = await filled(host)
    for _ in range(3):
        zombie = await broker.groups.claim("g", TP)
    await broker.groups.forget("orders", "g")
    member = await broker.groups.claim("g", TP)
    await broker.groups.commit("g", TP, 4, generation=member.generation)

    with pytest.raises(GroupFenced):
        await broker.groups.commit("g", TP, 9, generation=zombie.generation)

    assert 4 == (await broker.groups.commit("g", TP, 4, generation=member.generation)).offset


async def test_without_a_generation_an_offset_goes_forward_only(host: Host) -> None:
    """A plain commit works as before, but for a step back, which has to report that it is one."""
    broker = await filled(host)
    await broker.groups.commit("g", TP, 4)
    await broker.groups.commit("g", TP, 4)
    with pytest.raises(OffsetMovedBack):
        await broker.groups.commit("g", TP, 2)
    assert (await broker.groups.commit("g", TP, 2, seek=True)).offset == 2
    assert (await broker.groups.commit("g", TP, 11)).offset == 11


async def test_a_seek_fences_the_member_that_still_reads_elsewhere(host: Host) -> None:
    """An operator resets a group under way: its member cannot commit over the reset, and learns of it."""
    broker = await filled(host)
    member = await broker.groups.claim("g", TP)
    await broker.groups.commit("g", TP, 9, generation=member.generation)

    await broker.groups.commit("g", TP, 1, seek=True, note="again")

    with pytest.raises(GroupFenced):
        await broker.groups.commit("g", TP, 10, generation=member.generation)
    assert (await broker.groups.claim("g", TP)).offset == 1


async def test_racing_commits_end_at_the_highest_offset(host: Host) -> None:
    """Commits are swaps: none overwrites another one that went further."""
    broker, others = await filled(host), [host.broker() for _ in range(4)]

    working = asyncio.gather(
        *(other.groups.commit("g", TP, offset) for other, offset in zip(others, (3, 9, 5, 7), strict=True)),
        return_exceptions=True,
    )
    while not working.done():
        await host.clock.advance(0.1)

    assert {OffsetMovedBack} >= {type(one) for one in working.result() if isinstance(one, Exception)}
    assert (await broker.groups.committed("g", TP)) is not None
    found = await broker.groups.committed("g", TP)
    assert found is not None and found.offset == 9


async def test_a_commit_that_was_held_up_while_the_log_and_the_group_went_on_does_not_move_it_back(host: Host) -> None:
    """What it knew of the log's end is old by then: an offset beyond that end is not one of a former life."""
    broker, other = await filled(host), host.broker()
    await broker.groups.commit("g", TP, 2)
    find, held = broker.records.find, []

    async def slow(tp: TopicPartition, key: str, kind: Any) -> Any:
        if "/groups/" in key and not held:
            held.append(key)
            await host.append(other, *[b"x"] * 10)
            await other.groups.commit("g", TP, 20)
        return await find(tp, key, kind)

    broker.records.find = slow  # type: ignore[method-assign, assignment]
    with pytest.raises(OffsetMovedBack):
        await broker.groups.commit("g", TP, 5)


async def test_a_commit_whose_answer_was_lost_is_made_once_more_and_stands(host: Host) -> None:
    """The answer is lost, the commit is repeated, and nothing moves back."""
    broker = await filled(host)
    put, lost = broker.meta.put, []

    async def losing(key: str, value: bytes, **options: Any) -> Any:
        done = await put(key, value, **options)
        if "/groups/" in key and not lost:
            lost.append(key)
            raise OutcomeUnknown("lost")
        return done

    broker.meta.put = losing  # type: ignore[method-assign]
    working = asyncio.ensure_future(broker.groups.commit("g", TP, 5))
    await host.clock.advance(1.0)

    assert lost and (await working).offset == 5


async def test_a_group_of_an_older_version_is_read_and_goes_on(host: Host) -> None:
    """A stored offset without a generation has generation 0."""
    broker = await filled(host)
    await host.meta_put(paths.group_offset(TP, "g"), b'{"offset":4,"committed_at_ms":7,"note":""}')

    assert await broker.groups.committed("g", TP) == GroupOffset(4, 7)
    assert (await broker.groups.claim("g", TP)).generation == 1


async def test_a_deleted_log_takes_no_commit_and_a_new_one_is_not_held_by_old_offsets(host: Host) -> None:
    """An offset beyond the end belongs to a former life of the log."""
    broker = await filled(host)
    await broker.admin.delete("orders", reason="test")
    with pytest.raises(UnknownTopicPartition):
        await broker.groups.commit("g", TP, 3)
    with pytest.raises(UnknownTopicPartition):
        await broker.groups.claim("g", TP)
    await host.clock.advance(200)
    await host.services().retention.apply_once(TP)
    left = msgspec.json.encode(GroupOffset(9, 1))
    await host.meta_put(paths.group_offset(TP, "g"), left)
    assert await broker.groups.progress("orders") == []

    again = host.broker()
    await host.append(again, b"a", b"b")
    assert (await again.groups.commit("g", TP, 2)).offset == 2


async def test_an_offset_that_was_stored_after_its_topic_was_deleted_does_not_outlive_the_tombstone(host: Host) -> None:
    """Its commit had seen the log before. A new topic has offsets from 1 again: its first records would be skipped."""
    broker, late, kept = await filled(host), host.broker(), TopicPartition("orders", 1)
    await host.append(broker, b"x", tp=kept)
    put = late.meta.put

    async def behind_the_delete(key: str, *arguments: Any, **options: Any) -> Any:
        await broker.admin.delete("orders", reason="test")
        await host.append(broker, b"y", tp=kept)
        await broker.groups.commit("g", kept, 2)
        return await put(key, *arguments, **options)

    late.meta.put = behind_the_delete  # type: ignore[method-assign]
    await late.groups.commit("g", TP, 9)
    await host.clock.advance(200)
    for tp in (TP, kept):
        await host.services().retention.apply_once(tp)
    await host.append(host.broker(), *[b"x"] * 10)

    assert await broker.groups.committed("g", TP) is None
    found = await broker.groups.committed("g", kept)
    assert found is not None and found.offset == 2


async def test_groups_beyond_one_page_are_shown_and_forgotten(host: Host) -> None:
    """No limit of one request to meta cuts the list, or leaves offsets behind when a topic is deleted."""
    broker = await filled(host)
    for number in range(PAGE + 5):
        await broker.groups.commit(f"g{number}", TP, 2)

    assert len(await broker.groups.progress("orders")) == PAGE + 5
    await broker.admin.delete("orders", reason="test")
    assert await host.meta_keys("/groups/") == []


async def test_other_partitions_of_a_group_have_their_own_generations(host: Host) -> None:
    """Taking over one partition leaves the members of the others alone."""
    broker, other = await filled(host), TopicPartition("orders", 1)
    await host.append(broker, b"x", tp=other)
    mine, theirs = await broker.groups.claim("g", TP), await broker.groups.claim("g", other)

    await broker.groups.claim("g", TP)

    assert (await broker.groups.commit("g", other, 2, generation=theirs.generation)).offset == 2
    with pytest.raises(GroupFenced):
        await broker.groups.commit("g", TP, 2, generation=mine.generation)


async def test_a_member_that_seeks_under_its_own_generation_keeps_it(host: Host) -> None:
    """Only a seek without a generation makes a new one."""
    broker = await filled(host)
    member = await broker.groups.claim("g", TP)
    await broker.groups.commit("g", TP, 8, generation=member.generation)

    back = await broker.groups.commit("g", TP, 2, generation=member.generation, seek=True)

    assert (2, member.generation) == (back.offset, back.generation)
    assert 5 == (await broker.groups.commit("g", TP, 5, generation=member.generation)).offset


async def test_an_offset_of_a_partition_that_is_gone_hides_no_other(host: Host) -> None:
    """It is left of a deleted partition until it is deleted too; the other partitions have their lag."""
    broker, other = await filled(host), TopicPartition(TP.topic, 1)
    await host.append(broker, b"a", b"b", tp=other)
    for tp in (TP, other):
        await broker.groups.commit("g", tp, 1)
    await broker.records.meta.delete(paths.control(TP), partition_key=TP.partition_key)

    rows = await broker.groups.progress(TP.topic)

    assert [("g", 1, 2)] == [(row.group, row.partition, row.lag) for row in rows]
