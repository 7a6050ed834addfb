"""Groups over two brokers: the state is in meta, so either of them serves, and one that dies loses nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import now_ms, settle
from lakebed.core.errors import AlreadyExists, LakebedError, NotFound, OutcomeUnknown, Stale
from lakebed.log.kafka import coordinator as coordinators
from lakebed.log.kafka import membership
from lakebed.log.kafka.coordinator import GroupCoordinator
from lakebed.log.kafka.membership import Group, GroupFault, GroupRefused, JoinWish
from lakebed.log.model import GroupFenced, TopicPartition
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)

RANGE = (("range", b"topics"),)


def coordinator(host: Host) -> GroupCoordinator:
    services = host.services()
    return GroupCoordinator(services.runtime, services.records)


def wish(member_id: str) -> JoinWish:
    return JoinWish(member_id, "client", "127.0.0.1", 10_000, 30_000, "consumer", RANGE)


async def until(host: Host, *working: asyncio.Future[Any], s: float = 40.0) -> None:
    for _ in range(round(s / 0.1)):
        if all(one.done() for one in working):
            return
        await host.clock.advance(0.1)
    raise AssertionError("still waiting")


async def formed(host: Host, *brokers: GroupCoordinator) -> list[Group]:
    """Members m0, m1 … of one generation, each joined through its broker; m0 leads."""
    joining = [asyncio.ensure_future(broker.join("g", wish(f"m{n}"))) for n, broker in enumerate(brokers)]
    await until(host, *joining)
    first = joining[0].result()
    given = {f"m{n}": f"part {n}".encode() for n in range(len(brokers))}
    syncing = [
        asyncio.ensure_future(broker.sync("g", f"m{n}", first.generation, given if f"m{n}" == first.leader else {}))
        for n, broker in enumerate(brokers)
    ]
    await until(host, *syncing)
    return [one.result() for one in syncing]


async def test_members_of_two_brokers_form_one_group(host: Host) -> None:
    """Joined at the same time through different brokers, they are in one generation with one leader."""
    first, second = await formed(host, coordinator(host), coordinator(host))

    assert first == second
    assert ("STABLE", 1, {"m0", "m1"}) == (first.phase, first.generation, set(first.members))
    assert [b"part 0", b"part 1"] == [first.members[f"m{n}"].assignment for n in range(2)]


async def test_another_broker_takes_over_without_a_rebalance(host: Host) -> None:
    """Members keep their generation and assignments: the coordinator that died kept nothing."""
    await formed(host, coordinator(host), coordinator(host))
    other = coordinator(host)

    await other.heartbeat("g", "m0", 1, None)
    synced = await other.sync("g", "m1", 1, {})

    assert (1, b"part 1") == (synced.generation, synced.members["m1"].assignment)
    await other.demand_commit("g", "m1", 1, None)


async def test_a_broker_that_dies_in_a_rebalance_is_replaced_in_the_middle_of_it(host: Host) -> None:
    """The member asks another broker with the same id, and both members get one generation."""
    dying, other = coordinator(host), coordinator(host)
    lost = asyncio.ensure_future(dying.join("g", wish("m0")))
    await host.clock.advance(0.1)
    lost.cancel()

    joining = [asyncio.ensure_future(other.join("g", wish(f"m{n}"))) for n in range(2)]
    await until(host, *joining)

    assert {1} == {one.result().generation for one in joining}
    assert {"m0", "m1"} == set(joining[0].result().members)


async def test_the_death_of_a_member_is_seen_by_the_heartbeats_of_the_others(host: Host) -> None:
    """Whichever broker looks first removes it; the next heartbeat anywhere reports the rebalance."""
    one, two = coordinator(host), coordinator(host)
    await formed(host, one, two)
    for _ in range(5):
        await host.clock.advance(3.0)
        try:
            await one.heartbeat("g", "m0", 1, None)
        except GroupRefused as refused:
            assert GroupFault.REBALANCING is refused.fault
            break
    else:
        raise AssertionError("the silent member is still there")

    with pytest.raises(GroupRefused) as late:
        await two.heartbeat("g", "m1", 1, None)
    assert GroupFault.UNKNOWN_MEMBER is late.value.fault
    rejoined = asyncio.ensure_future(two.join("g", wish("m0")))
    await until(host, rejoined)
    assert (2, ["m0"]) == (rejoined.result().generation, list(rejoined.result().members))


async def test_a_late_commit_of_an_earlier_generation_changes_nothing(host: Host) -> None:
    """Also when it passed the check before the rebalance: the stored offset has its generation."""
    broker = host.broker()
    await host.append(broker, b"a", b"b", b"c")

    await broker.groups.store("g", TP, 3, note="", generation=2)
    with pytest.raises(GroupFenced):
        await broker.groups.store("g", TP, 2, note="", generation=1)
    await broker.groups.store("g", TP, 1, note="back", generation=2)

    found = await broker.groups.committed("g", TP)
    assert found is not None and (1, "back", 2) == (found.offset, found.note, found.generation)


async def test_members_whose_offset_was_moved_begin_a_later_generation_and_commit_again(host: Host) -> None:
    """However often it was moved, and whichever member commits first: one that does not lead would otherwise be given
    the same generation again and again, and could never commit."""
    broker, kafka = host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b", b"c")
    await formed(host, kafka, kafka)
    await broker.groups.store("g", TP, 3, note="", generation=1)
    for offset in (1, 2, 1):
        await broker.groups.commit("g", TP, offset, seek=True)

    with pytest.raises(GroupFenced) as fenced:
        await broker.groups.store("g", TP, 3, note="", generation=1)
    await kafka.outdate("g", fenced.value.detail["generation"])
    with pytest.raises(GroupRefused) as refused:
        await kafka.heartbeat("g", "m0", 1, None)
    (again, _) = await formed(host, kafka, kafka)

    assert GroupFault.ILLEGAL_GENERATION is refused.value.fault
    assert (5, {"m0", "m1"}) == (again.generation, set(again.members))
    await broker.groups.store("g", TP, 2, note="", generation=again.generation)


async def test_a_late_commit_does_not_disturb_the_group(host: Host) -> None:
    """The group's generation is as late as the stored one: it stays as it is."""
    kafka = coordinator(host)
    (before,) = await formed(host, kafka)

    await kafka.outdate("g", before.generation)
    await kafka.outdate("unknown", 7)

    assert before == await kafka.find("g")
    assert None is await kafka.find("unknown")


async def test_a_group_with_members_is_not_deleted(host: Host) -> None:
    """An empty one is, and then it is not found."""
    broker = coordinator(host)
    await formed(host, broker)

    with pytest.raises(GroupRefused) as refused:
        await broker.delete("g")
    await broker.leave("g", ["m0"])
    await broker.delete("g")

    assert GroupFault.NOT_EMPTY is refused.value.fault
    assert {} == await broker.groups()
    with pytest.raises(NotFound):
        await broker.delete("g")


async def test_a_group_that_a_member_joins_while_it_is_deleted_stays(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete is of the group that was found empty."""
    deleting, other = coordinator(host), coordinator(host)
    await deleting.demand_commit("g", "", -1, None)
    find, looks = deleting._find, list[int]()

    async def joined_since(group: str) -> Any:
        found = await find(group)
        looks.append(1)
        if len(looks) == 2:  # the look before the delete
            await other._change("g", lambda at, ms: membership.join(at, wish("m0"), ms))
        return found

    monkeypatch.setattr(deleting, "_find", joined_since)
    with pytest.raises(Stale):
        await deleting.delete("g")

    left = await other.find("g")
    assert left is not None and {"m0"} == set(left.members)


DAY_S = 24 * 3600.0


async def test_a_group_without_members_and_commits_expires_with_its_offsets(host: Host) -> None:
    """After `log.group_retention_s`, counted from the last member's leave; then its name begins anew."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b", b"c")
    await formed(host, kafka)
    await broker.groups.store("g", TP, 3, note="", generation=1)
    await broker.groups.claim("of-http", TP)
    await host.clock.advance(3 * DAY_S)  # silent: the next look removes the member

    kept = await workers.group_retention.apply_once()
    await host.clock.advance(6 * DAY_S)
    kept += await workers.group_retention.apply_once()
    await host.clock.advance(2 * DAY_S)
    expired = await workers.group_retention.apply_once()

    assert ([], ["g"]) == (kept, expired)
    assert {} == await kafka.groups()
    assert ["llog/orders/groups/of-http/0"] == await host.meta_keys("/groups/")
    again = await formed(host, kafka)
    await broker.groups.store("g", TP, 2, note="", generation=again[0].generation)


async def test_a_group_that_is_deleted_while_groups_expire_stays_deleted(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the list of groups and the look at each of them: a look makes no group."""
    workers, kafka = host.services(group_retention_s=7 * DAY_S), coordinator(host)
    retention: Any = workers.group_retention
    await kafka.demand_commit("g", "", -1, None)
    listed = retention._coordinator.groups

    async def deleted_since() -> dict[str, Group]:
        found: dict[str, Group] = await listed()
        await kafka.delete("g")
        return found

    monkeypatch.setattr(retention._coordinator, "groups", deleted_since)

    assert [] == await retention.apply_once()
    assert {} == await kafka.groups()


async def test_a_group_in_use_does_not_expire(host: Host) -> None:
    """By members that send heartbeats, or by commits of a client without a group membership."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b", b"c")
    joining = asyncio.ensure_future(kafka.join("g", wish("m0")))
    await until(host, joining)
    await kafka.sync("g", "m0", 1, {"m0": b""})
    for offset in (1, 2, 3):
        await kafka.demand_commit("alone", "", -1, None)
        await broker.groups.store("alone", TP, offset, note="", generation=None)
        await broker.groups.store("g", TP, 1, note="", generation=1)
        await host.clock.advance(6 * DAY_S)
        await kafka._change("g", lambda at, ms: membership.join(at, wish("m0"), ms))

        assert [] == await workers.group_retention.apply_once()

    assert {"alone", "g"} == set(await kafka.groups())


@pytest.mark.parametrize("busy", [0, 1])
async def test_a_group_that_commits_one_of_its_partitions_keeps_the_offsets_of_all(host: Host, busy: int) -> None:
    """Whichever partition is the quiet one: its offset is as old as its last record, and still the group's place."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    tps = [TP, TopicPartition(TP.topic, 1)]
    await kafka.demand_commit("alone", "", -1, None)
    for tp in tps:
        await host.append(broker, b"a", b"b", b"c", tp=tp)
        await broker.groups.store("alone", tp, 1, note="", generation=None)
    await host.clock.advance(6 * DAY_S)
    await broker.groups.store("alone", tps[busy], 3, note="", generation=None)
    await host.clock.advance(6 * DAY_S)

    expired = await workers.group_retention.apply_once()

    found = [await broker.groups.committed("alone", tp) for tp in (tps[busy], tps[1 - busy])]
    assert ([], [3, 1]) == (expired, [each.offset if each is not None else None for each in found])


async def test_a_group_that_was_used_again_expires_after_its_last_member_left(host: Host) -> None:
    """Not counted from an earlier time without members: a consumer that reads for weeks commits nothing meanwhile."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b", b"c")
    await kafka.demand_commit("g", "", -1, None)
    await broker.groups.store("g", TP, 2, note="", generation=None)
    await host.clock.advance(6 * DAY_S)
    await formed(host, kafka)
    await host.clock.advance(3 * DAY_S)  # silent: the next look removes the member

    kept = await workers.group_retention.apply_once()
    await host.clock.advance(6 * DAY_S)
    kept += await workers.group_retention.apply_once()
    found = await broker.groups.committed("g", TP)
    await host.clock.advance(2 * DAY_S)
    expired = await workers.group_retention.apply_once()

    assert ([], ["g"]) == (kept, expired)
    assert found is not None and 2 == found.offset


async def test_a_group_that_is_used_while_it_expires_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit between the look and the delete keeps both the offset and the group."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b", b"c")
    await kafka.demand_commit("alone", "", -1, None)
    await broker.groups.store("alone", TP, 1, note="", generation=None)
    await host.clock.advance(8 * DAY_S)
    stored = workers.groups.stored

    async def used_since(topic: str, groups: Any) -> Any:
        found = await stored(topic, groups)
        await broker.groups.store("alone", TP, 3, note="", generation=None)
        return found

    monkeypatch.setattr(workers.groups, "stored", used_since)

    assert [] == await workers.group_retention.apply_once()
    found = await broker.groups.committed("alone", TP)
    assert found is not None and 3 == found.offset
    assert {"alone"} == set(await kafka.groups())


async def test_a_member_that_was_refused_as_silent_commits_nothing_more(host: Host) -> None:
    """Its removal is stored with the refusal, also where nobody else is in the group to store it."""
    broker = coordinator(host)
    await formed(host, broker)
    await host.clock.advance(60.0)

    with pytest.raises(GroupRefused) as beat:
        await broker.heartbeat("g", "m0", 1, None)
    with pytest.raises(GroupRefused) as commit:
        await coordinator(host).demand_commit("g", "m0", 1, None)

    assert [GroupFault.UNKNOWN_MEMBER] * 2 == [beat.value.fault, commit.value.fault]


async def test_an_offset_that_is_stored_without_a_generation_keeps_the_one_it_had(host: Host) -> None:
    """A tool sets an offset while the group is empty: a zombie of an earlier generation is still refused."""
    broker = host.broker()
    await host.append(broker, b"a", b"b", b"c")
    await broker.groups.store("g", TP, 3, note="", generation=2)

    await broker.groups.store("g", TP, 2, note="tool", generation=None)

    with pytest.raises(GroupFenced):
        await broker.groups.store("g", TP, 1, note="", generation=1)
    found = await broker.groups.committed("g", TP)
    assert found is not None and (2, 2) == (found.offset, found.generation)


async def test_groups_beyond_one_page_are_listed_and_expire(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, however many pages they take: one that is passed over would stay in meta for ever."""
    monkeypatch.setattr(coordinators, "PAGE", 2)
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a")
    names = ["g0", "g1", "g1.a", "g2", "g3"]
    for name in names:
        await kafka.demand_commit(name, "", -1, None)

    listed = list(await kafka.groups())
    await host.clock.advance(8 * DAY_S)
    expired = await workers.group_retention.apply_once()

    assert (names, names) == (listed, expired)
    assert {} == await kafka.groups()


async def test_a_member_that_syncs_before_its_leader_waits_for_its_assignment(host: Host) -> None:
    """It is woken at once by the leader's sync at the same broker; nothing is kept of the group afterwards."""
    kafka = coordinator(host)
    joining = [asyncio.ensure_future(kafka.join("g", wish(f"m{n}"))) for n in range(2)]
    await until(host, *joining)
    group = joining[0].result()
    (follower,) = {"m0", "m1"} - {group.leader}

    waiting = asyncio.ensure_future(kafka.sync("g", follower, group.generation, {}))
    await settle()
    assert not waiting.done()
    await kafka.sync("g", group.leader, group.generation, {follower: b"mine", group.leader: b"other"})
    await settle()

    assert waiting.done() and b"mine" == waiting.result().member(follower).assignment
    assert {} == kafka._locks


async def test_a_member_that_waits_for_a_leader_that_never_comes_joins_again(host: Host) -> None:
    """The leader is silent for its session: the group rebalances, and who waits is told."""
    kafka = coordinator(host)
    joining = [asyncio.ensure_future(kafka.join("g", wish(f"m{n}"))) for n in range(2)]
    await until(host, *joining)
    group = joining[0].result()
    (follower,) = {"m0", "m1"} - {group.leader}
    waiting = asyncio.ensure_future(kafka.sync("g", follower, group.generation, {}))
    await until(host, waiting)

    with pytest.raises(GroupRefused) as refused:
        waiting.result()
    assert GroupFault.REBALANCING is refused.value.fault


@pytest.mark.parametrize("error", [Stale, AlreadyExists, OutcomeUnknown])
async def test_a_change_that_met_another_one_is_decided_again(host: Host, error: type[LakebedError]) -> None:
    """On the group as it is by then; one whose answer was lost is not made twice."""
    kafka = coordinator(host)
    put, failures = kafka._meta.put, list[str]()

    async def failing(key: str, value: bytes, **more: Any) -> Any:
        if not failures:
            failures.append(key)
            if error is OutcomeUnknown:
                await put(key, value, **more)
            raise error("not this time")
        return await put(key, value, **more)

    kafka._meta.put = failing  # type: ignore[method-assign]
    joining = asyncio.ensure_future(kafka.join("g", wish("m0")))
    await until(host, joining)

    assert failures
    assert (1, ["m0"]) == (joining.result().generation, list(joining.result().members))


async def test_the_offsets_of_a_group_with_members_stay_though_it_commits_nothing(host: Host) -> None:
    """Nothing may come for longer than offsets are kept: who waits for it goes on where it was."""
    workers, broker, kafka = host.services(group_retention_s=7 * DAY_S), host.broker(), coordinator(host)
    await host.append(broker, b"a", b"b")
    await formed(host, kafka)
    await broker.groups.store("g", TP, 2, note="", generation=1)
    await host.clock.advance(8 * DAY_S)
    at_ms = now_ms(host.clock)
    group = (await kafka.groups())["g"]
    alive = {id: msgspec.structs.replace(one, seen_ms=at_ms) for id, one in group.members.items()}  # by heartbeats
    await kafka._put("g", msgspec.structs.replace(group, members=alive), await kafka._find("g"))

    assert [] == await workers.group_retention.apply_once()
    found = await broker.groups.committed("g", TP)
    assert found is not None and 2 == found.offset
