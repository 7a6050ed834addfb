"""The log's records in meta, typed: read, create, swap. Everything that changes a partition goes through here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from lakebed.core.errors import AlreadyExists, Corrupt, LakebedError, NotFound, OutcomeUnknown, Overloaded, Stale
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.model import (
    Control,
    IndexEntry,
    IndexSpan,
    ProducerMark,
    ProducersSnapshot,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.registry import PartitionRegistry
from lakebed.meta.model import ABSENT, MetaEntry, Put, prefix_end
from lakebed.meta.protocol import GroupedMeta, Meta

T = TypeVar("T", bound=msgspec.Struct)

SWAPS_MAX = 30  # lost compare-and-swaps before a change is given up as Overloaded
SWAP_BASE_S, SWAP_CAP_S = 0.005, 0.5
PAGE = 512  # index entries read at once


class Versioned(msgspec.Struct, Generic[T], frozen=True, gc=False):
    value: T
    version: str


class Records:
    """Typed access to one meta store."""

    def __init__(self, runtime: Runtime, meta: Meta) -> None:
        self.meta, self._clock, self._ids = meta, runtime.clock, runtime.ids
        self.registry = PartitionRegistry(meta)

    async def control(self, tp: TopicPartition) -> Versioned[Control]:
        """Raises UnknownTopicPartition when the partition does not exist."""
        found = await self.find(tp, paths.control(tp), Control)
        if found is None:
            raise UnknownTopicPartition(f"{tp} does not exist", hint="the first produce creates it")
        return found

    async def find(self, tp: TopicPartition, key: str, kind: type[T]) -> Versioned[T] | None:
        try:
            return decoded(await self.meta.get(key, partition_key=tp.partition_key), kind)
        except NotFound:
            return None

    async def create(self, tp: TopicPartition, key: str, value: T) -> Versioned[T]:
        """Raises AlreadyExists."""
        put = await self.meta.put(key, msgspec.json.encode(value), expected=ABSENT, partition_key=tp.partition_key)
        return Versioned(value, put.version)

    async def swap(self, tp: TopicPartition, key: str, value: T, version: str) -> Versioned[T]:
        """Raises Stale when the stored version is another one."""
        put = await self.meta.put(key, msgspec.json.encode(value), expected=version, partition_key=tp.partition_key)
        return Versioned(value, put.version)

    async def producers(self, tp: TopicPartition, now: Control) -> dict[str, list[ProducerMark]] | None:
        """The snapshot that a control record names; None when it is gone, because the control record has changed."""
        if not now.producers_key:
            return {}
        found = await self.find(tp, paths.producers(tp, now.producers_key), ProducersSnapshot)
        return found.value.producers if found is not None else None

    async def change(self, tp: TopicPartition, decide: Callable[[Control], Control]) -> Versioned[Control]:
        """Changes the control record by a pure decision; retries after a conflict."""
        for attempt in range(SWAPS_MAX):
            found = await self.control(tp)
            after = decide(found.value)
            if after is found.value:
                return found
            try:
                return await self.swap(tp, paths.control(tp), after, found.version)
            except (Stale, OutcomeUnknown):
                await self.pause(attempt)
        raise Overloaded(f"the control record of {tp} changed {SWAPS_MAX} times during one change")

    async def pause(self, attempt: int) -> None:
        await self._clock.sleep(self._ids.jitter_s(attempt, base_s=SWAP_BASE_S, cap_s=SWAP_CAP_S))

    async def swap_all(
        self, changes: Sequence[tuple[TopicPartition, Versioned[Control], Control]]
    ) -> list[Versioned[Control] | LakebedError]:
        """Swaps several control records, each on its own; one call to meta for all of them.

        The pending append that a swap replaces or clears is put into the index first, unless something is there: then
        it, or a compaction of it, is.
        """
        puts = [
            Put(
                paths.control(tp),
                msgspec.json.encode(after),
                before.version,
                tp.partition_key,
                first=_indexed(tp, before.value),
            )
            for tp, before, after in changes
        ]
        try:
            made = await self.meta.put_all(puts) if puts else []
        except LakebedError as error:
            return [error] * len(puts)
        return [
            put if isinstance(put, LakebedError) else Versioned(after, put.version)
            for (_, _, after), put in zip(changes, made, strict=True)
        ]

    async def materialise(self, tp: TopicPartition, control: Control) -> None:
        """Puts the pending append into the index, unless something is there: then it, or a compaction of it, is."""
        entry = _indexed(tp, control)
        if entry is not None:
            with suppress(AlreadyExists):
                await self.meta.put(*entry, expected=ABSENT, partition_key=tp.partition_key)

    async def spans(self, tp: TopicPartition, offset: int, *, limit: int) -> list[IndexSpan]:
        """The index entries that end at `offset` or above, at most `limit`."""
        entries = await self.meta.range(
            paths.index(tp, offset), prefix_end(paths.index_folder(tp)), limit=limit, partition_key=tp.partition_key
        )
        return [span(entry) for entry in entries]

    async def all_spans(self, tp: TopicPartition, offset: int = 0) -> AsyncIterator[IndexSpan]:
        while True:
            page = await self.spans(tp, offset, limit=PAGE)
            for found in page:
                yield found
            if len(page) < PAGE:
                return
            offset = page[-1].end_offset + 1

    async def partitions(self, topic: str = "") -> AsyncIterator[TopicPartition]:
        """Every partition, of one topic or of all: from the registry, once it is complete."""
        found = self.registry.partitions(topic) if await self.registry.complete() else self.scan(topic)
        async for tp in found:
            yield tp

    async def scan(self, topic: str = "") -> AsyncIterator[TopicPartition]:
        """Every partition that has anything in meta: by the groups' names, or by skipping from one to the next."""
        if isinstance(self.meta, GroupedMeta):
            for name in await self.meta.groups():
                named = paths.partition_of(name)
                if named is not None and topic in ("", named.topic):
                    yield named
            return
        prefix = f"{paths.ROOT}{topic}/partitions/" if topic else paths.ROOT
        start, end = prefix, prefix_end(prefix)
        while True:
            found = await self.meta.range(start, end, limit=1)
            if not found:
                return
            tp = paths.owner_of(found[0].key)
            if tp is not None:
                yield tp
                start = prefix_end(paths.folder(tp))
            else:
                start = _behind(found[0].key)


def _indexed(tp: TopicPartition, control: Control) -> tuple[str, bytes] | None:
    """The index entry of the pending append."""
    if control.pending is None:
        return None
    return paths.index(tp, control.pending.end_offset), msgspec.json.encode(control.pending.entry())


def _behind(key: str) -> str:
    """Where the scan continues after a key that belongs to a topic, not to a partition."""
    segments = key.split("/")
    if segments[1].startswith("_"):  # no topic's
        return prefix_end(f"{paths.ROOT}{segments[1]}/")
    if len(segments) > 3 and segments[2] == "groups":
        return prefix_end(paths.groups_folder(segments[1]))
    return key + "\0"


def decoded(entry: MetaEntry, kind: type[T]) -> Versioned[T]:
    try:
        return Versioned(msgspec.json.decode(entry.value, type=kind), entry.version)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{entry.key!r} does not decode: {error}",
            hint="nothing was changed; inspect the entry with lakebed meta get",
            key=entry.key,
        ) from error


def span(entry: MetaEntry) -> IndexSpan:
    value = decoded(entry, IndexEntry).value
    end_offset = paths.index_offset(entry.key)
    return IndexSpan(end_offset - value.msg_count + 1, end_offset, value)
