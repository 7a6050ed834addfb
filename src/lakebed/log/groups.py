"""Consumer groups: committed offset and lag of each partition. One meta entry per group and partition.

A committed offset only moves forward, except by a seek. A member that claims a partition gets its next generation. A
commit with another generation is refused, so a member that was replaced without noticing changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Invalid, OutcomeUnknown, Overloaded, Stale
from lakebed.core.runtime import Runtime
from lakebed.log import control, paths
from lakebed.log.model import (
    TOPIC,
    Control,
    GroupFenced,
    GroupOffset,
    OffsetMovedBack,
    OffsetOutOfRange,
    TopicPartition,
    check_topic,
)
from lakebed.log.records import PAGE, SWAPS_MAX, Records, Versioned, decoded
from lakebed.meta.model import MetaEntry, prefix_end

NO_OFFSET = GroupOffset(0, 0)  # of a group that has neither committed nor claimed


class GroupProgress(msgspec.Struct, frozen=True):
    group: str
    topic: str
    partition: int
    offset: int
    high_watermark: int
    lag: int
    committed_at_ms: int
    generation: int = 0


class StoredOffset(msgspec.Struct, frozen=True):
    """A group's entry of a partition, with its version."""

    group: str
    tp: TopicPartition
    offset: Versioned[GroupOffset]


class Groups:
    def __init__(self, runtime: Runtime, records: Records) -> None:
        self._records, self._clock = records, runtime.clock

    async def claim(self, group: str, tp: TopicPartition) -> GroupOffset:
        """Claims the partition: every commit with an earlier generation is refused from now on."""
        at_ms = now_ms(self._clock)

        def decide(now: GroupOffset, _: Control) -> GroupOffset:
            return msgspec.structs.replace(now, generation=now.generation + 1, committed_at_ms=at_ms)

        return await self._change(group, tp, decide)

    async def commit(
        self,
        group: str,
        tp: TopicPartition,
        offset: int,
        *,
        note: str = "",
        generation: int | None = None,
        seek: bool = False,
    ) -> GroupOffset:
        """Stores the next offset the group reads. Idempotent.

        Raises OffsetOutOfRange; GroupFenced for a generation that is not the last one; OffsetMovedBack for an offset
        below the committed one, unless `seek`. A seek without a generation starts a new one, so that a member which
        still reads elsewhere cannot overwrite it.
        """
        at_ms = now_ms(self._clock)

        def decide(now: GroupOffset, log: Control) -> GroupOffset:
            if not 1 <= offset <= log.next_offset:
                raise OffsetOutOfRange(
                    f"{tp} ends at {log.sequence_counter}; a group cannot commit {offset}",
                    high_watermark=log.sequence_counter,
                )
            if generation is not None and generation != now.generation:
                raise GroupFenced(
                    f"group {group} has generation {now.generation} of {tp}, not {generation}",
                    hint="another member has claimed it: stop, or claim a new generation and read from its offset",
                    generation=now.generation,
                )
            # A log that was deleted and created again may end below what a group had committed before.
            if not seek and offset < now.offset <= log.next_offset:
                raise OffsetMovedBack(
                    f"group {group} is at {now.offset} of {tp}; a commit of {offset} would move it back",
                    hint='set "seek": true to move back',
                    offset=now.offset,
                )
            following = now.generation + 1 if seek and generation is None else now.generation
            return GroupOffset(offset, at_ms, note, following)

        return await self._change(group, tp, decide)

    async def store(self, group: str, tp: TopicPartition, offset: int, *, note: str, generation: int | None) -> None:
        """Stores an offset as a Kafka client commits it: anywhere, also back.

        `generation` is that of the client's group. Raises GroupFenced when a later one has stored, or an operator has
        moved the offset since; the member joins again and reads from there.
        """
        at_ms = now_ms(self._clock)

        def decide(now: GroupOffset, _: Control) -> GroupOffset:
            if generation is not None and now.generation > generation:
                raise GroupFenced(
                    f"group {group} has generation {now.generation} of {tp}, not {generation}",
                    generation=now.generation,
                )
            return GroupOffset(max(0, offset), at_ms, note, max(now.generation, generation or 0))

        await self._change(group, tp, decide)

    async def committed(self, group: str, tp: TopicPartition) -> GroupOffset | None:
        found = await self._records.find(tp, paths.group_offset(tp, check_group(group)), GroupOffset)
        return found.value if found is not None else None

    async def progress(self, topic: str, group: str = "") -> list[GroupProgress]:
        """Every partition of every group of the topic (or of one), with its lag."""
        logs: dict[TopicPartition, Versioned[Control] | None] = {}
        rows: list[GroupProgress] = []
        async for entry in self._entries(topic, group):
            name, partition = entry.key.split("/")[-2:]
            tp = TopicPartition(topic, int(partition))
            if tp not in logs:
                logs[tp] = await self._records.find(tp, paths.control(tp), Control)
            found = logs[tp]
            if found is None:
                continue  # the log was deleted, and its groups are being deleted
            log, at = found.value, decoded(entry, GroupOffset).value
            behind = log.next_offset - max(at.offset, log.log_start_offset)
            rows.append(
                GroupProgress(
                    name,
                    topic,
                    tp.partition,
                    at.offset,
                    log.sequence_counter,
                    max(0, behind),
                    at.committed_at_ms,
                    at.generation,
                )
            )
        return rows

    async def stored(self, topic: str, groups: Container[str]) -> list[StoredOffset]:
        """The entries of these groups in the topic."""
        return await self._stored(topic, lambda group, _: group in groups)

    async def of_partition(self, tp: TopicPartition) -> list[StoredOffset]:
        """The entries of all groups in the partition, whether it exists or not."""
        return await self._stored(tp.topic, lambda _, partition: partition == tp.partition)

    async def delete(self, stored: StoredOffset) -> bool:
        """Deletes the entry as it was read; False where it was changed since."""
        key = paths.group_offset(stored.tp, stored.group)
        try:
            await self._records.meta.delete(key, expected=stored.offset.version, partition_key=stored.tp.partition_key)
        except Stale:
            return False
        return True

    async def forget(self, topic: str, group: str = "") -> None:
        """Deletes a group's offsets in a topic, or those of all its groups."""
        async for entry in self._entries(topic, group):
            tp = TopicPartition(topic, int(entry.key.rsplit("/", 1)[-1]))
            await self._records.meta.delete(entry.key, partition_key=tp.partition_key)

    async def _stored(self, topic: str, wanted: Callable[[str, int], bool]) -> list[StoredOffset]:
        found: list[StoredOffset] = []
        async for entry in self._entries(topic, ""):
            group, partition = entry.key.split("/")[-2:]
            if wanted(group, int(partition)):
                found.append(StoredOffset(group, TopicPartition(topic, int(partition)), decoded(entry, GroupOffset)))
        return found

    async def _entries(self, topic: str, group: str) -> AsyncIterator[MetaEntry]:
        """All of them, page by page."""
        check_topic(topic)
        folder = paths.group_folder(topic, check_group(group)) if group else paths.groups_folder(topic)
        start = folder
        while True:
            page = await self._records.meta.range(start, prefix_end(folder), limit=PAGE)
            for entry in page:
                yield entry
            if len(page) < PAGE:
                return
            start = page[-1].key + "\0"

    async def _change(
        self, group: str, tp: TopicPartition, decide: Callable[[GroupOffset, Control], GroupOffset]
    ) -> GroupOffset:
        """Changes a group's entry by a pure decision; retries after a conflict.

        The entry is read before the log, so no committed offset of this log is beyond the end that is read.
        """
        key = paths.group_offset(tp, check_group(group))
        for attempt in range(SWAPS_MAX):
            found = await self._records.find(tp, key, GroupOffset)
            log = (await self._records.control(tp)).value
            control.demand_existing(log, tp)
            after = decide(found.value if found is not None else NO_OFFSET, log)
            try:
                if found is None:
                    return (await self._records.create(tp, key, after)).value
                return (await self._records.swap(tp, key, after, found.version)).value
            except (AlreadyExists, Stale, OutcomeUnknown):
                await self._records.pause(attempt)
        raise Overloaded(f"the offset of group {group} in {tp} changed {SWAPS_MAX} times during one commit")


def check_group(group: str) -> str:
    if not TOPIC.fullmatch(group):
        raise Invalid(
            f"group {group[:80]!r} is not a valid name",
            hint="letters, digits, '.', '_' and '-', at most 200 characters",
        )
    return group
