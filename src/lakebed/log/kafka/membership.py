"""A consumer group's members, as one value: state in, state out. Pure; the caller stores it by compare-and-swap.

A rebalance has two halves. While it is PREPARING, members join; it ends when all have joined or its time is over, and
whoever has not joined is out. While it is COMPLETING, the leader, one of the members, brings each member's assignment;
then the group is STABLE. The generation grows with each rebalance, and commits and heartbeats of another one are
refused. A member that is silent for its session timeout is removed, by whichever broker looks next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

import msgspec

from lakebed.core.errors import Conflict

INITIAL_DELAY_MS = 500  # for the first members of a group, so that they do not rebalance one by one
SESSION_MS_MIN, SESSION_MS_MAX = 1_000, 1_800_000
ALIVE_PER_SESSION = 3  # signs of life that are stored within a session timeout
MEMBERS_MAX = 1_000
METADATA_BYTES_MAX = 256 * 1024  # of all members: the state is one entry of the meta store


class GroupFault(Enum):
    """Why a member is refused; the names are those of Kafka's error codes."""

    UNKNOWN_MEMBER = "unknown_member_id"
    ILLEGAL_GENERATION = "illegal_generation"
    REBALANCING = "rebalance_in_progress"
    INCONSISTENT_PROTOCOL = "inconsistent_group_protocol"
    FENCED_INSTANCE = "fenced_instance_id"
    INVALID_SESSION = "invalid_session_timeout"
    FULL = "group_max_size_reached"
    NOT_EMPTY = "non_empty_group"


class GroupRefused(Conflict):
    """A request that does not fit the group's state. `fault` is the answer to the client."""

    code = "group_refused"

    def __init__(self, fault: GroupFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """`joined`: waits for the rebalance in progress. `seen_ms`: last sign of life, as far as it is stored."""

    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    seen_ms: int
    joined: bool = False
    assignment: bytes = b""
    instance_id: str | None = None


class Group(msgspec.Struct, frozen=True, omit_defaults=True):
    phase: Literal["EMPTY", "PREPARING", "COMPLETING", "STABLE"] = "EMPTY"
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, Member] = {}
    prepared_from_ms: int = 0  # PREPARING: not complete before this time
    prepared_until_ms: int = 0  # PREPARING: complete at this time, whoever has joined
    empty_since_ms: int = 0  # EMPTY: since when; 0 where it was not recorded

    def member(self, member_id: str, generation: int | None = None, instance_id: str | None = None) -> Member:
        """Raises GroupRefused unless this is a member, and of this generation."""
        holder = next((id for id, one in self.members.items() if instance_id and one.instance_id == instance_id), None)
        if holder is not None and holder != member_id:
            raise GroupRefused(GroupFault.FENCED_INSTANCE, f"{instance_id} is now {holder}, not {member_id}")
        found = self.members.get(member_id)
        if found is None:
            raise GroupRefused(GroupFault.UNKNOWN_MEMBER, f"{member_id} is not a member")
        if generation is not None and generation != self.generation:
            raise GroupRefused(GroupFault.ILLEGAL_GENERATION, f"the generation is {self.generation}, not {generation}")
        return found


class JoinWish(msgspec.Struct, frozen=True):
    """What a member brings when it joins."""

    member_id: str
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    instance_id: str | None = None


def join(group: Group, wish: JoinWish, now_ms: int) -> Group:
    """The group with this member in it, waiting for a rebalance; unchanged where its current generation still fits it.

    An unknown member id is taken as a new member: what a removed member knew of the group is fenced by the generation.
    """
    _check(group, wish)
    group = _replaced(group, wish)
    known = group.members.get(wish.member_id)
    if known is not None and known.protocols == wish.protocols and not known.joined:
        settled = group.phase == "COMPLETING" or (group.phase == "STABLE" and wish.member_id != group.leader)
        if settled:
            return group
    member = Member(
        client_id=wish.client_id,
        client_host=wish.client_host,
        session_ms=wish.session_ms,
        rebalance_ms=max(wish.rebalance_ms, 1) if wish.rebalance_ms > 0 else wish.session_ms,
        protocols=wish.protocols,
        seen_ms=now_ms,
        joined=True,
        assignment=known.assignment if known is not None else b"",
        instance_id=wish.instance_id,
    )
    members = {**group.members, wish.member_id: member}
    if sum(len(data) for one in members.values() for _, data in one.protocols) > METADATA_BYTES_MAX:
        raise GroupRefused(GroupFault.FULL, f"the members' metadata exceeds {METADATA_BYTES_MAX} bytes")
    after = msgspec.structs.replace(group, members=members, protocol_type=wish.protocol_type, empty_since_ms=0)
    return advance(_preparing(after, now_ms), now_ms)


def advance(group: Group, now_ms: int) -> Group:
    """The group as time has changed it: silent members are removed, and a rebalance that is due is completed."""
    silent = [id for id, one in group.members.items() if not one.joined and one.seen_ms + one.session_ms <= now_ms]
    if silent:
        group = _without(group, silent, now_ms)
    if group.phase != "PREPARING":
        return group
    all_here = all(one.joined for one in group.members.values())
    if now_ms < group.prepared_from_ms or not (all_here or now_ms >= group.prepared_until_ms):
        return group
    return _completing(group, now_ms)


def sync(group: Group, member_id: str, generation: int, assignments: Mapping[str, bytes], now_ms: int) -> Group:
    """The group with the leader's assignments; unchanged for other members, which wait for them."""
    group.member(member_id, generation)
    if group.phase == "PREPARING":
        raise GroupRefused(GroupFault.REBALANCING, "the group rebalances")
    if group.phase != "COMPLETING" or member_id != group.leader:
        return group
    members = {
        id: msgspec.structs.replace(one, assignment=assignments.get(id, b""), seen_ms=now_ms)
        for id, one in group.members.items()
    }
    return msgspec.structs.replace(group, phase="STABLE", members=members)


def heartbeat(group: Group, member_id: str, generation: int, instance_id: str | None, now_ms: int) -> Group:
    """Raises GroupRefused unless this is a current member. While the group is PREPARING, it must join again."""
    group.member(member_id, generation, instance_id)
    return alive(group, member_id, now_ms)


def alive(group: Group, member_id: str, now_ms: int) -> Group:
    """A sign of life. Changes the group only when the last one grows old: most cost no write."""
    member = group.members.get(member_id)
    if member is None or now_ms - member.seen_ms <= member.session_ms // ALIVE_PER_SESSION:
        return group
    return msgspec.structs.replace(
        group, members={**group.members, member_id: msgspec.structs.replace(member, seen_ms=now_ms)}
    )


def leave(group: Group, member_ids: Sequence[str], now_ms: int) -> Group:
    """Idempotent: who is not a member has left."""
    gone = [id for id in member_ids if id in group.members]
    return advance(_without(group, gone, now_ms), now_ms) if gone else group


def outdated(group: Group, generation: int, now_ms: int) -> Group:
    """The group in a rebalance to a generation after this one; unchanged where its own is as late, or nobody is in it.

    An offset was moved by an operator or an HTTP client, or is left of a deleted group, and has a later generation than
    the group: no member could commit it.
    """
    if group.generation >= generation or not group.members:
        return group
    return _preparing(msgspec.structs.replace(group, generation=generation), now_ms)


def emptied(group: Group, now_ms: int) -> Group:
    """The group with the time since which it has no members; unchanged where that is known, or where it has some."""
    if group.members or group.empty_since_ms:
        return group
    return msgspec.structs.replace(group, empty_since_ms=now_ms)


def may_commit(group: Group, member_id: str, generation: int, instance_id: str | None = None) -> None:
    """Raises GroupRefused for a commit that is not a current member's. Without members, anybody may commit."""
    if generation < 0 and not group.members:
        return
    group.member(member_id, generation, instance_id)
    if group.phase == "COMPLETING":
        raise GroupRefused(GroupFault.REBALANCING, "the group rebalances")


def _check(group: Group, wish: JoinWish) -> None:
    if not SESSION_MS_MIN <= wish.session_ms <= SESSION_MS_MAX:
        raise GroupRefused(
            GroupFault.INVALID_SESSION, f"a session timeout must be {SESSION_MS_MIN} to {SESSION_MS_MAX} ms"
        )
    if not wish.protocols or not wish.protocol_type:
        raise GroupRefused(GroupFault.INCONSISTENT_PROTOCOL, "a member needs a protocol")
    others = [one for id, one in group.members.items() if id != wish.member_id]
    if len(others) >= MEMBERS_MAX:
        raise GroupRefused(GroupFault.FULL, f"a group has at most {MEMBERS_MAX} members")
    if others and group.protocol_type != wish.protocol_type:
        raise GroupRefused(GroupFault.INCONSISTENT_PROTOCOL, f"the group has members of type {group.protocol_type}")
    if not _common([*(one.protocols for one in others), wish.protocols]):
        raise GroupRefused(GroupFault.INCONSISTENT_PROTOCOL, "no protocol is common to all members")


def _replaced(group: Group, wish: JoinWish) -> Group:
    """A static member that starts again takes the place of its former self, which is fenced from now on."""
    holder = next((id for id, m in group.members.items() if wish.instance_id and m.instance_id == wish.instance_id), "")
    if not holder or holder == wish.member_id:
        return group
    members = {id: one for id, one in group.members.items() if id != holder}
    return msgspec.structs.replace(group, members=members)


def _preparing(group: Group, now_ms: int) -> Group:
    """The group in a rebalance; one that is in progress goes on."""
    if group.phase == "PREPARING":
        return group
    until_ms = now_ms + max(one.rebalance_ms for one in group.members.values())
    from_ms = now_ms + INITIAL_DELAY_MS if group.phase == "EMPTY" else now_ms
    return msgspec.structs.replace(group, phase="PREPARING", prepared_from_ms=from_ms, prepared_until_ms=until_ms)


def _without(group: Group, member_ids: Sequence[str], now_ms: int) -> Group:
    members = {id: one for id, one in group.members.items() if id not in member_ids}
    after = msgspec.structs.replace(group, members=members)
    if not members:
        after = msgspec.structs.replace(
            after, phase="EMPTY", generation=group.generation + 1, leader="", protocol="", protocol_type=""
        )
        return emptied(after, now_ms)
    return _preparing(after, now_ms)


def _completing(group: Group, now_ms: int) -> Group:
    """The next generation, of those who have joined."""
    members = {
        id: msgspec.structs.replace(one, joined=False, seen_ms=now_ms)
        for id, one in group.members.items()
        if one.joined
    }
    if not members:
        return _without(group, list(group.members), now_ms)
    return msgspec.structs.replace(
        group,
        phase="COMPLETING",
        generation=group.generation + 1,
        protocol=_chosen([one.protocols for one in members.values()]),
        leader=group.leader if group.leader in members else next(iter(members)),
        members=members,
    )


def _common(offers: Sequence[Sequence[tuple[str, bytes]]]) -> set[str]:
    return set.intersection(*[{name for name, _ in offer} for offer in offers])


def _chosen(offers: Sequence[Sequence[tuple[str, bytes]]]) -> str:
    """The protocol that most members prefer among those that all have."""
    common = _common(offers)
    votes = Counter(next(name for name, _ in offer if name in common) for offer in offers)
    return max(sorted(votes), key=lambda name: votes[name])
