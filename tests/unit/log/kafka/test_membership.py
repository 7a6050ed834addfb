"""A group's members: who is in which generation, decided from values and a time that the test gives."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.log.kafka import membership
from lakebed.log.kafka.membership import INITIAL_DELAY_MS, Group, GroupFault, GroupRefused, JoinWish

SESSION_MS, REBALANCE_MS = 10_000, 30_000
START_MS = 1_000_000


def wish(member_id: str, *protocols: str, metadata: bytes = b"", instance_id: str | None = None) -> JoinWish:
    names = protocols or ("range",)
    return JoinWish(
        member_id=member_id,
        client_id="client",
        client_host="127.0.0.1",
        session_ms=SESSION_MS,
        rebalance_ms=REBALANCE_MS,
        protocol_type="consumer",
        protocols=tuple((name, metadata or member_id.encode()) for name in names),
        instance_id=instance_id,
    )


def joined(*member_ids: str, at_ms: int = START_MS) -> Group:
    """A new group of these members, whose leader has not assigned anything yet."""
    group = Group()
    for member_id in member_ids:
        group = membership.join(group, wish(member_id), at_ms)
    return membership.advance(group, at_ms + INITIAL_DELAY_MS)


def stable(*member_ids: str, at_ms: int = START_MS) -> Group:
    group = joined(*member_ids, at_ms=at_ms)
    assignments = {member_id: b"of " + member_id.encode() for member_id in member_ids}
    return membership.sync(group, group.leader, group.generation, assignments, at_ms + INITIAL_DELAY_MS)


def fault_of(error: pytest.ExceptionInfo[GroupRefused]) -> GroupFault:
    return error.value.fault


def test_the_first_members_of_a_group_join_one_generation() -> None:
    """A short delay, so that three consumers that start together rebalance once."""
    group = Group()
    for number, member_id in enumerate("abc"):
        group = membership.join(group, wish(member_id), START_MS + number)

    before = membership.advance(group, START_MS + INITIAL_DELAY_MS - 1)
    after = membership.advance(group, START_MS + INITIAL_DELAY_MS)

    assert ("PREPARING", 0) == (before.phase, before.generation)
    assert ("COMPLETING", 1, "a") == (after.phase, after.generation, after.leader)
    assert {"a": False, "b": False, "c": False} == {id: one.joined for id, one in after.members.items()}


def test_the_leader_gives_each_member_its_assignment() -> None:
    """Other members bring none; who is not named gets an empty one."""
    group = joined("a", "b")

    same = membership.sync(group, "b", 1, {"b": b"wrong"}, START_MS)
    done = membership.sync(group, "a", 1, {"b": b"x"}, START_MS)

    assert group is same
    assert ("STABLE", b"", b"x") == (done.phase, done.members["a"].assignment, done.members["b"].assignment)


def test_a_new_member_starts_a_rebalance_that_waits_for_the_others() -> None:
    """Members learn of it by their heartbeats, join again, and the generation grows."""
    group = membership.join(stable("a", "b"), wish("c"), START_MS + 1000)
    assert "PREPARING" == membership.advance(group, START_MS + 2000).phase

    group = membership.join(group, wish("a"), START_MS + 2000)
    assert "PREPARING" == group.phase
    group = membership.join(group, wish("b"), START_MS + 3000)

    assert ("COMPLETING", 2, {"a", "b", "c"}) == (group.phase, group.generation, set(group.members))


def test_who_does_not_join_in_time_is_out() -> None:
    """The rebalance ends at the longest rebalance timeout, without them; the leader is one of the others."""
    group = membership.join(stable("a", "b"), wish("b", metadata=b"other topics"), START_MS + 1000)
    group = membership.heartbeat(group, "a", 1, None, START_MS + 20_000)  # alive, and slow

    early = membership.advance(group, START_MS + 1000 + REBALANCE_MS - 1_001)
    late = membership.advance(
        membership.heartbeat(early, "a", 1, None, START_MS + 29_000), START_MS + 1000 + REBALANCE_MS
    )

    assert "PREPARING" == early.phase
    assert ("COMPLETING", ["b"], "b") == (late.phase, list(late.members), late.leader)


def test_a_rebalance_waits_as_long_as_its_most_patient_member_asks() -> None:
    """A member with a long rebalance timeout is not thrown out at the end of another one's short timeout."""
    patient = msgspec.structs.replace(wish("a"), session_ms=1_000_000, rebalance_ms=10 * REBALANCE_MS)
    group = membership.advance(membership.join(Group(), patient, START_MS), START_MS + INITIAL_DELAY_MS)
    group = membership.sync(group, "a", 1, {"a": b"all"}, START_MS + INITIAL_DELAY_MS)
    group = membership.join(group, wish("b"), START_MS + 1000)
    until_ms = START_MS + 1000 + 10 * REBALANCE_MS

    early, late = membership.advance(group, until_ms - 1), membership.advance(group, until_ms)

    assert ("PREPARING", {"a", "b"}) == (early.phase, set(early.members))
    assert ("COMPLETING", {"b"}) == (late.phase, set(late.members))


def test_a_rebalance_of_members_that_all_joined_is_over_at_once() -> None:
    """Only the first members of a group wait for others; later rebalances stop no consumer longer than they must."""
    group = membership.join(stable("a"), wish("b"), START_MS + 1000)

    group = membership.join(group, wish("a"), START_MS + 1001)

    assert ("COMPLETING", 2) == (group.phase, group.generation)


def test_a_member_that_leaves_ends_the_wait_for_it() -> None:
    """The others have joined, so their generation begins with its leaving."""
    group = membership.join(stable("a", "b"), wish("b", metadata=b"other topics"), START_MS + 1000)

    group = membership.leave(group, ["a"], START_MS + 2000)

    assert ("COMPLETING", {"b"}, "b") == (group.phase, set(group.members), group.leader)


def test_who_waited_for_its_assignment_is_not_silent_when_it_comes() -> None:
    """Members send no heartbeats while they wait for the leader: their sessions begin again when it has assigned."""
    group = joined("a", "b")
    synced_ms = START_MS + INITIAL_DELAY_MS + SESSION_MS - 1

    group = membership.sync(group, group.leader, group.generation, {}, synced_ms)

    assert {"a", "b"} == set(membership.advance(group, synced_ms + SESSION_MS - 1).members)
    assert {"a": synced_ms, "b": synced_ms} == {id: one.seen_ms for id, one in group.members.items()}


def test_a_silent_member_is_removed_after_its_session_and_the_others_rebalance() -> None:
    """Signs of life of the others keep them in."""
    group = stable("a", "b")
    for at_ms in range(START_MS + 3000, START_MS + 12_000, 3000):
        group = membership.heartbeat(group, "a", 1, None, at_ms)

    after = membership.advance(group, START_MS + INITIAL_DELAY_MS + SESSION_MS)

    assert ("PREPARING", ["a"]) == (after.phase, list(after.members))


def test_a_group_whose_last_member_left_is_empty_and_its_generation_is_over() -> None:
    """What a former member still sends is refused."""
    group = membership.leave(stable("a"), ["a"], START_MS + 1000)

    assert ("EMPTY", 2, {}) == (group.phase, group.generation, group.members)
    with pytest.raises(GroupRefused) as refused:
        membership.may_commit(group, "a", 1)
    assert GroupFault.UNKNOWN_MEMBER is fault_of(refused)
    assert group is membership.leave(group, ["a"], START_MS + 1001)


def test_most_heartbeats_change_nothing() -> None:
    """A sign of life is stored a few times per session, not each time."""
    group = stable("a")
    seen_ms = group.members["a"].seen_ms

    assert group is membership.heartbeat(group, "a", 1, None, seen_ms + SESSION_MS // 3)
    assert group is not membership.heartbeat(group, "a", 1, None, seen_ms + SESSION_MS // 3 + 1)


@pytest.mark.parametrize(
    ("member_id", "generation", "expected"),
    [
        ("x", 1, GroupFault.UNKNOWN_MEMBER),
        ("a", 0, GroupFault.ILLEGAL_GENERATION),
        ("a", 2, GroupFault.ILLEGAL_GENERATION),
    ],
)
def test_another_member_or_generation_is_refused(member_id: str, generation: int, expected: GroupFault) -> None:
    """In heartbeats, in sync and in commits alike."""
    group = stable("a")

    for ask in (
        lambda: membership.heartbeat(group, member_id, generation, None, START_MS),
        lambda: membership.sync(group, member_id, generation, {}, START_MS),
        lambda: membership.may_commit(group, member_id, generation),
    ):
        with pytest.raises(GroupRefused) as refused:
            ask()
        assert expected is fault_of(refused)


def test_a_member_that_asks_again_with_nothing_new_keeps_its_generation() -> None:
    """Its answer was lost. The leader, or a member with other topics, starts a rebalance."""
    group = stable("a", "b")

    assert group is membership.join(group, wish("b"), START_MS + 1000)
    assert "PREPARING" == membership.join(group, wish("a"), START_MS + 1000).phase
    assert "PREPARING" == membership.join(group, wish("b", metadata=b"other"), START_MS + 1000).phase
    completing = joined("a", "b")
    assert completing is membership.join(completing, wish("a"), START_MS + 1000)


def test_the_protocol_that_most_members_prefer_and_all_have_is_chosen() -> None:
    """A member that has none of them is refused."""
    group = Group()
    for member_id, names in (("a", ("sticky", "range")), ("b", ("range", "sticky")), ("c", ("range",))):
        group = membership.join(group, wish(member_id, *names), START_MS)

    assert "range" == membership.advance(group, START_MS + INITIAL_DELAY_MS).protocol
    with pytest.raises(GroupRefused) as refused:
        membership.join(group, wish("d", "sticky"), START_MS)
    assert GroupFault.INCONSISTENT_PROTOCOL is fault_of(refused)


def test_a_static_member_that_starts_again_fences_its_former_self() -> None:
    """The same instance id under a new member id."""
    group = membership.join(Group(), wish("a-1", instance_id="a"), START_MS)
    group = membership.advance(group, START_MS + INITIAL_DELAY_MS)

    after = membership.join(group, wish("a-2", instance_id="a"), START_MS + 1000)

    assert ["a-2"] == list(after.members)
    with pytest.raises(GroupRefused) as refused:
        membership.heartbeat(after, "a-1", 1, "a", START_MS + 1000)
    assert GroupFault.FENCED_INSTANCE is fault_of(refused)


def test_anybody_commits_to_a_group_without_members_and_nobody_else_to_one_with_members() -> None:
    """A program that assigns its partitions itself has no generation."""
    membership.may_commit(Group(), "", -1)

    with pytest.raises(GroupRefused):
        membership.may_commit(stable("a"), "", -1)
    membership.may_commit(stable("a"), "a", 1)


def test_a_member_commits_before_it_joins_again_and_not_before_it_has_its_assignment() -> None:
    """What it read of the last generation counts while others join; in the next it has read nothing yet."""
    group = stable("a")
    preparing = membership.join(group, wish("b"), START_MS + 1000)
    completing = joined("a", "b")

    assert ("PREPARING", "COMPLETING") == (preparing.phase, completing.phase)
    membership.may_commit(preparing, "a", 1)
    for member_id in ("a", "b"):
        with pytest.raises(GroupRefused) as refused:
            membership.may_commit(completing, member_id, 1)
        assert GroupFault.REBALANCING is fault_of(refused)


@pytest.mark.parametrize("session_ms", [0, 999, 1_800_001])
def test_a_session_timeout_out_of_bounds_is_refused(session_ms: int) -> None:
    """A group must not keep a dead member for days."""
    with pytest.raises(GroupRefused) as refused:
        membership.join(Group(), msgspec.structs.replace(wish("a"), session_ms=session_ms), START_MS)
    assert GroupFault.INVALID_SESSION is fault_of(refused)


def test_what_the_members_bring_is_bounded() -> None:
    """The group is one entry of the meta store."""
    group = membership.join(Group(), wish("a", metadata=b"x" * (membership.METADATA_BYTES_MAX - 10)), START_MS)

    with pytest.raises(GroupRefused) as refused:
        membership.join(group, wish("b", metadata=b"y" * 11), START_MS)
    assert GroupFault.FULL is fault_of(refused)


def test_a_group_is_stored_and_read_as_it_is() -> None:
    """Bytes of clients included."""
    group = stable("a", "b")

    assert group == msgspec.json.decode(msgspec.json.encode(group), type=Group)


def test_who_waited_longer_than_its_session_for_a_rebalance_is_in_its_generation() -> None:
    """A member that waits sends no heartbeats: its session counts from the end of the rebalance."""
    group = stable("a")
    group = membership.join(group, wish("b"), START_MS + 3_000)
    for at_ms in range(START_MS + 8_000, START_MS + 28_001, 5_000):
        group = membership.alive(membership.advance(group, at_ms), "a", at_ms)
    late_ms = START_MS + 30_000
    group = membership.join(group, wish("a"), late_ms)

    after = membership.advance(group, late_ms + SESSION_MS - 1)

    assert ("COMPLETING", ["a", "b"]) == (after.phase, sorted(after.members))
