"""Consumer groups: how far each has come in each partition, and how much is left. One meta entry per partition."""

from __future__ import annotations

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import Invalid
from lakebed.log import paths
from lakebed.log.model import TOPIC, Committed, OffsetOutOfRange, TopicPartition
from lakebed.log.records import Records, decoded
from lakebed.meta.model import RANGE_LIMIT_MAX, prefix_end


class Progress(msgspec.Struct, frozen=True):
    group: str
    topic: str
    partition: int
    offset: int
    high_watermark: int
    lag: int
    committed_at_ms: int


class Groups:
    def __init__(self, records: Records, *, clock: Clock) -> None:
        self._records, self._clock = records, clock

    async def commit(self, group: str, tp: TopicPartition, offset: int, *, note: str = "") -> Committed:
        """Remembers the next offset the group wants. The last commit wins. Raises OffsetOutOfRange."""
        check_group(group)
        now = (await self._records.control(tp)).value
        if not 1 <= offset <= now.next_offset:
            raise OffsetOutOfRange(
                f"{tp} ends at {now.sequence_counter}; a group cannot be at {offset}",
                high_watermark=now.sequence_counter,
            )
        made = Committed(offset, now_ms(self._clock), note)
        await self._records.meta.put(
            paths.group_offset(tp, group), msgspec.json.encode(made), partition_key=tp.partition_key
        )
        return made

    async def committed(self, group: str, tp: TopicPartition) -> Committed | None:
        found = await self._records.find(tp, paths.group_offset(tp, check_group(group)), Committed)
        return found.value if found is not None else None

    async def progress(self, topic: str, group: str = "") -> list[Progress]:
        """Every partition of every group of the topic (or of one), with its lag."""
        folder = paths.group_folder(topic, check_group(group)) if group else paths.groups_folder(topic)
        rows: list[Progress] = []
        for entry in await self._records.meta.range(folder, prefix_end(folder), limit=RANGE_LIMIT_MAX):
            name, partition = entry.key.split("/")[-2:]
            tp = TopicPartition(topic, int(partition))
            now = (await self._records.control(tp)).value
            at = decoded(entry, Committed).value
            behind = now.next_offset - max(at.offset, now.log_start_offset)
            rows.append(
                Progress(name, topic, tp.partition, at.offset, now.sequence_counter, max(0, behind), at.committed_at_ms)
            )
        return rows

    async def forget(self, topic: str, group: str = "") -> None:
        """Drops a group's offsets in a topic, or those of all its groups."""
        folder = paths.group_folder(topic, check_group(group)) if group else paths.groups_folder(topic)
        for entry in await self._records.meta.range(folder, prefix_end(folder), limit=RANGE_LIMIT_MAX):
            tp = TopicPartition(topic, int(entry.key.rsplit("/", 1)[-1]))
            await self._records.meta.delete(entry.key, partition_key=tp.partition_key)


def check_group(group: str) -> str:
    if not TOPIC.fullmatch(group):
        raise Invalid(f"group {group[:80]!r} is not a name", hint="letters, digits, '.', '_' and '-', 200 at most")
    return group
