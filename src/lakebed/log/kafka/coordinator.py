"""The coordinator of consumer groups. It keeps nothing: a group is one entry in meta, changed by compare-and-swap.

So any broker can take over in the middle of a rebalance, and two brokers can serve the same group at once; members keep
their ids, generation and assignments. Members of one group are sent to one broker all the same, because a change that
this broker has made wakes its waiting members at once, and one of another broker is seen after `POLL_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, NotFound, OutcomeUnknown, Overloaded, Stale
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.admin import TopicAdmin
from lakebed.log.groups import Groups, check_group
from lakebed.log.kafka import membership
from lakebed.log.kafka.membership import Group, GroupFault, GroupRefused, JoinWish
from lakebed.log.records import PAGE, SWAPS_MAX, Records, Versioned, decoded
from lakebed.meta.model import ABSENT, prefix_end

POLL_S = 0.25
EMPTY = Group()


class GroupCoordinator:
    def __init__(self, runtime: Runtime, records: Records) -> None:
        self._records, self._meta, self._clock = records, records.meta, runtime.clock
        self._locks: dict[str, asyncio.Lock] = {}  # while in use: changes of this process wait instead of conflicting
        self._changed: dict[str, asyncio.Event] = {}

    async def find(self, group: str) -> Group | None:
        """The group as it is stored."""
        found = await self._find(check_group(group))
        return found.value if found is not None else None

    async def join(self, group: str, wish: JoinWish) -> Group:
        """Returns the group when the member's rebalance has ended. Raises GroupRefused."""
        now = await self._change(group, lambda at, ms: membership.join(at, wish, ms))
        while now.member(wish.member_id).joined:
            await self._wait(group)
            now = await self._change(group, lambda at, _: at)
        return now

    async def sync(self, group: str, member_id: str, generation: int, assignments: Mapping[str, bytes]) -> Group:
        """Returns when the leader has brought the assignments. Raises GroupRefused."""
        now = await self._change(group, lambda at, ms: membership.sync(at, member_id, generation, assignments, ms))
        while now.phase == "COMPLETING":
            await self._wait(group)
            now = await self._change(group, lambda at, ms: membership.alive(at, member_id, ms))
            now.member(member_id, generation)
        if now.phase != "STABLE":
            raise GroupRefused(GroupFault.REBALANCING, "the group rebalances")
        return now

    async def heartbeat(self, group: str, member_id: str, generation: int, instance_id: str | None) -> None:
        """Raises GroupRefused when the member must join again."""
        now = await self._change(group, lambda at, ms: membership.heartbeat(at, member_id, generation, instance_id, ms))
        if now.phase == "PREPARING":
            raise GroupRefused(GroupFault.REBALANCING, "the group rebalances")

    async def leave(self, group: str, member_ids: Sequence[str]) -> None:
        await self._change(group, lambda at, ms: membership.leave(at, member_ids, ms))

    async def demand_commit(self, group: str, member_id: str, generation: int, instance_id: str | None) -> None:
        """Raises GroupRefused unless this member may commit. A group without members is created where it is new."""
        found = await self._find(check_group(group))
        membership.may_commit(found.value if found is not None else EMPTY, member_id, generation, instance_id)
        if found is None:
            with suppress(AlreadyExists, OutcomeUnknown):
                await self._put(group, membership.emptied(EMPTY, now_ms(self._clock)), None)

    async def outdate(self, group: str, generation: int) -> None:
        """Has the members join again, to a generation after this one, unless their own is as late."""
        if await self._find(check_group(group)) is not None:
            await self._change(group, lambda at, ms: membership.outdated(at, generation, ms))

    async def unused(self, before_ms: int) -> list[str]:
        """The groups without members since before this time. Begins to count where nobody has."""
        found: list[str] = []
        for name in await self.groups():
            now = await self._change(name, lambda at, ms: at if at is EMPTY else membership.emptied(at, ms))
            if now is not EMPTY and not now.members and now.empty_since_ms <= before_ms:
                found.append(name)
        return found

    async def groups(self) -> dict[str, Group]:
        found: dict[str, Group] = {}
        start, end = paths.KAFKA_GROUPS, prefix_end(paths.KAFKA_GROUPS)
        while True:
            page = await self._meta.range(start, end, limit=PAGE)
            found |= {entry.key.removeprefix(paths.KAFKA_GROUPS): decoded(entry, Group).value for entry in page}
            if len(page) < PAGE:
                return found
            start = page[-1].key + "\0"

    async def delete(self, group: str) -> None:
        """Raises NotFound, and GroupRefused while it has members."""
        await self._change(group, lambda at, _: at)  # without those that are silent
        found = await self._find(check_group(group))
        if found is None:
            raise NotFound(f"group {group} does not exist")
        if found.value.members:
            raise GroupRefused(GroupFault.NOT_EMPTY, f"group {group} has {len(found.value.members)} members")
        await self._meta.delete(paths.kafka_group(group), expected=found.version, partition_key=_route(group))

    async def _change(self, group: str, decide: Callable[[Group, int], Group]) -> Group:
        """Changes the group by a pure decision, after what time has changed in it; retries after a conflict."""
        lock = self._locks.setdefault(check_group(group), asyncio.Lock())
        try:
            async with lock:
                return await self._swap(group, decide)
        finally:
            if not lock.locked() and self._locks.get(group) is lock:
                del self._locks[group]

    async def _swap(self, group: str, decide: Callable[[Group, int], Group]) -> Group:
        for attempt in range(SWAPS_MAX):
            found = await self._find(group)
            at_ms = now_ms(self._clock)
            before = found.value if found is not None else EMPTY
            aged = membership.advance(before, at_ms)
            try:
                after = decide(aged, at_ms)
            except GroupRefused:
                if aged is not before:  # what time has changed is stored all the same
                    with suppress(Stale, OutcomeUnknown):
                        await self._put(group, aged, found)
                raise
            try:
                return after if after is before else await self._put(group, after, found)
            except (AlreadyExists, Stale, OutcomeUnknown):
                await self._records.pause(attempt)
        raise Overloaded(f"group {group} changed {SWAPS_MAX} times during one request")

    async def _put(self, group: str, after: Group, found: Versioned[Group] | None) -> Group:
        expected = found.version if found is not None else ABSENT
        await self._meta.put(
            paths.kafka_group(group), msgspec.json.encode(after), expected=expected, partition_key=_route(group)
        )
        if (changed := self._changed.pop(group, None)) is not None:
            changed.set()
        return after

    async def _find(self, group: str) -> Versioned[Group] | None:
        try:
            return decoded(await self._meta.get(paths.kafka_group(group), partition_key=_route(group)), Group)
        except NotFound:
            return None

    async def _wait(self, group: str) -> None:
        """Returns when this broker has changed the group, or after `POLL_S`."""
        event = self._changed.setdefault(group, asyncio.Event())
        woken = asyncio.ensure_future(event.wait())
        slept = asyncio.ensure_future(self._clock.sleep(POLL_S))
        try:
            await asyncio.wait([woken, slept], return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            slept.cancel()


class GroupRetention:
    """Deletes groups of Kafka clients, with their offsets, that had neither a member nor a commit for `retention_s`.

    Offsets first, then the group: a group whose offsets outlive it could not commit, because their generation is later
    than any of its own. Each entry is deleted as it was read, so one that is used meanwhile stays.
    """

    def __init__(
        self, runtime: Runtime, coordinator: GroupCoordinator, offsets: Groups, admin: TopicAdmin, retention_s: float
    ) -> None:
        self._coordinator, self._offsets, self._admin = coordinator, offsets, admin
        self._clock, self._retention_ms = runtime.clock, round(retention_s * 1000)

    async def apply_once(self) -> list[str]:
        """One pass over all groups. Returns the names of those that are deleted."""
        before_ms = now_ms(self._clock) - self._retention_ms
        unused = dict.fromkeys(await self._coordinator.unused(before_ms), True)
        if not unused:
            return []
        topics = sorted({tp.topic for tp in await self._admin.partitions()})
        stored = [each for topic in topics for each in await self._offsets.stored(topic, unused)]
        unused |= {each.group: False for each in stored if each.offset.value.committed_at_ms > before_ms}
        for each in stored:
            if unused[each.group]:
                unused[each.group] = await self._offsets.delete(each)
        return [name for name, gone in unused.items() if gone and await self._delete(name)]

    async def _delete(self, name: str) -> bool:
        try:
            await self._coordinator.delete(name)
        except (NotFound, Stale, GroupRefused):
            return False  # deleted, or joined, meanwhile
        return True


def _route(group: str) -> str:
    return f"kafka-group/{group}"
