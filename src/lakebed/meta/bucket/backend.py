"""The meta store on object storage alone: any number of processes on any number of hosts, no other server.

Each group of keys (a partition key) is one head object changed by compare-and-swap, with its older entries in
immutable leaves; see docs/decisions/004-meta-on-the-bucket.md. Requests that the store cannot answer raise
Unavailable with nothing changed, or OutcomeUnknown. A change whose response was lost is recognised, even when others
have changed the group since.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from lakebed.core.clock import now_ms
from lakebed.core.errors import Fenced, LakebedError, NotFound, Unavailable
from lakebed.meta.bucket import bins, decisions
from lakebed.meta.bucket.bins import BinPut, stored_key
from lakebed.meta.bucket.decisions import LoadedState
from lakebed.meta.bucket.group import SWEEP_MAX, Divided, KeyGroup, LeafCache
from lakebed.meta.bucket.model import BinPaths, BucketPaths, Head, decode_head, group_name
from lakebed.meta.bucket.sessions import BucketSessions
from lakebed.meta.bucket.tree import BinTree
from lakebed.meta.model import MetaEntry, Put, check_key, check_limit, check_value, prefix_end
from lakebed.meta.protocol import HeartbeatSession, MetaSession
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

GROUPS_MAX = 4096  # groups kept open in a process; another instance of one is slower, never wrong
SCANNED_MAX = 16  # groups a scan over all of them reads at once
HORIZON_S = 600.0  # age at which an unreferenced leaf is deleted: readers of older heads may still need it
NAMES_MAX = 100_000  # groups whose partition key is remembered; forgetting them costs a read each
SKEW_S = 1.0  # how far clocks may differ


R = TypeVar("R")
Layout = Literal["groups", "bins", "found"]


class BucketMeta:
    """The meta store below the folder `prefix` of the store.

    A group has a head of its own in the layout `groups`, and shares one with others in `bins`. `found` is what the
    folder has: `bins` where it is new.
    """

    def __init__(
        self,
        runtime: StoreRuntime,
        prefix: str,
        *,
        layout: Layout = "groups",
        horizon_s: float = HORIZON_S,
        skew_s: float = SKEW_S,
    ) -> None:
        self._runtime, self._store, self._clock = runtime, runtime.store, runtime.clock
        self._horizon_s, self._layout = horizon_s, layout
        self._paths, self._bin_paths = BucketPaths(prefix.strip("/")), BinPaths(prefix.strip("/"))
        self._cache = LeafCache()
        self._liveness = BucketSessions(runtime, self._paths, skew_s=skew_s)
        self._groups: OrderedDict[str, KeyGroup] = OrderedDict()
        self._tree = BinTree(lambda name, initial: self._opened(self._bin_paths, name, initial))
        self._partition_keys: dict[str, str] = {}
        self._open: list[HeartbeatSession] = []
        self._closed = False
        self._requests = runtime.metrics.counter("lakebed_meta_requests_total")

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        check_key(key)
        found = await self._answer("get", partition_key, lambda head, known, at: decisions.find(head, at + key, known))
        if found is None:
            raise NotFound(f"no meta entry at {key!r}")
        return found

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: MetaSession | None = None,
        partition_key: str = "",
    ) -> MetaEntry:
        value = bytes(check_value(check_key(key), value))
        owner = session.id if session is not None else ""
        self._demand_open()
        if owner and not await self._liveness.lives(owner):
            raise Fenced(f"session {owner} has ended, so {key!r} was not put")
        (made,) = await self._change(
            "put",
            partition_key,
            lambda head, known, at: bins.put_all(head, [BinPut(at + key, value, expected, owner)], known),
        )
        if isinstance(made, LakebedError):
            raise made
        return made

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        """One write for all puts of a head."""
        for put in puts:
            self._count("put")
            for key, value in [(put.key, put.value), *([put.first] if put.first else [])]:
                check_value(check_key(key), value)
        binned = await self._binned()
        made: dict[int, MetaEntry | LakebedError] = {}
        while len(made) < len(puts):
            by_head: dict[KeyGroup, list[int]] = {}
            for number, put in enumerate(puts):
                if number not in made:
                    of_key = self._tree.bin_of if binned else self._named
                    by_head.setdefault(of_key(put.partition_key), []).append(number)
            await asyncio.gather(*(self._put_in(group, puts, numbers, made) for group, numbers in by_head.items()))
        return [made[number] for number in range(len(puts))]

    async def _put_in(
        self, group: KeyGroup, puts: Sequence[Put], numbers: list[int], made: dict[int, MetaEntry | LakebedError]
    ) -> None:
        """Fills `made`, or learns that the bin was split."""
        wanted = [_bin_put(puts[number], binned=self._layout == "bins") for number in numbers]
        try:
            results = await group.change(lambda head, known: bins.put_all(head, wanted, known))
        except Divided as divided:
            await self._tree.learn(puts[numbers[0]].partition_key, divided.head)
        except LakebedError as error:
            made.update(dict.fromkeys(numbers, error))
        else:
            made.update(zip(numbers, results, strict=True))

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        check_key(key)
        await self._remove(
            "delete", partition_key, lambda head, known, at: decisions.delete(head, at + key, expected, known)
        )

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        start, end = max(key, prefix), prefix_end(prefix)
        found = await self._answer(
            "ceiling",
            partition_key,
            lambda head, known, at: decisions.scan(head, known, start=at + start, end=at + end, limit=1),
        )
        return found[0] if found else None

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        check_limit(limit)
        if not partition_key:
            self._count("range")
            return await self._range_of_all(start, end, limit)
        return await self._answer(
            "range",
            partition_key,
            lambda head, known, at: decisions.scan(head, known, start=at + start, end=at + end, limit=limit),
        )

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        await self._remove(
            "delete_range",
            partition_key,
            lambda head, known, at: decisions.delete_range(head, at + start, at + end, known),
        )

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        self._count("session")
        session = await self._liveness.open(timeout_s)
        self._open = [open for open in self._open if open.alive] + [session]
        return session

    async def close(self) -> None:
        if self._closed:
            return
        for session in self._open:
            await session.close()
        self._closed = True

    async def sweep(self) -> int:
        """Removes leaves and sessions that nothing refers to any more. Returns the number of deleted objects."""
        self._count("sweep")
        swept = await self._liveness.sweep(now_ms(self._clock) - round(self._horizon_s * 1000))
        if await self._binned():
            return swept + await self._sweep_bins()
        for partition_key in await self.groups():
            swept += await self._named(partition_key).sweep()
        return swept

    async def orphans(self) -> list[str]:
        """The leaves that a sweep would remove now."""
        if await self._binned():
            return await self._unreferenced(await self._old_leaves(), KeyGroup.whole)
        return [key for group in await self.groups() for key in await self._named(group).orphans()]

    async def head(self, partition_key: str) -> Head:
        """The head of a group, or of the bin that it is in, for inspection."""
        return await self._answer("head", partition_key, lambda head, known, at: head)

    async def groups(self) -> list[str]:
        """The partition keys of all groups, sorted. A group with a head of its own stays when it is empty.

        One read per bin; for groups with heads of their own one list, and one read per unknown one.
        """
        self._count("groups")
        if await self._binned():
            members = await self._tree.each(lambda group: group.answer(lambda head, known: head.members))
            return sorted(member for some in members for member in some)
        heads = await self._heads()
        known = [await self._partition_key(head) for head in heads]
        return sorted(key for key in known if key is not None)

    async def _range_of_all(self, start: str, end: str, limit: int) -> Sequence[MetaEntry]:
        """Group by group; what has been found so far limits the scan of the next groups.

        One list shows which heads have changed since they were last read; only those are read again.
        """
        found: list[MetaEntry] = []
        if await self._binned():
            scanning = partial(bins.scan_all, start=start, end=end, limit=limit)
            for in_bin in await self._tree.each(lambda group: group.answer(scanning)):
                found += in_bin
            return sorted(found, key=lambda entry: entry.key)[:limit]
        heads = await self._heads()
        for at in range(0, len(heads), SCANNED_MAX):
            before = found[-1].key if len(found) == limit else end
            scan = partial(decisions.scan, start=start, end=before, limit=limit)
            some = await asyncio.gather(*(self._scan_head(info, scan) for info in heads[at : at + SCANNED_MAX]))
            found = sorted([*found, *(entry for entries in some for entry in entries)], key=lambda entry: entry.key)
            found = found[:limit]
        return found

    async def _scan_head(
        self, info: ObjectInfo, scan: Callable[[Head, LoadedState], list[MetaEntry]]
    ) -> list[MetaEntry]:
        partition_key = await self._partition_key(info)
        return [] if partition_key is None else await self._named(partition_key).answer(scan, etag=info.etag)

    async def _heads(self) -> list[ObjectInfo]:
        return [info async for info in self._store.list(self._paths.heads)]

    async def _partition_key(self, head: ObjectInfo) -> str | None:
        """The partition key of a head. Read from it once: the name of a long partition key cannot be decoded."""
        name = self._paths.group(head.key)
        if name not in self._partition_keys:
            try:
                stored = await self._store.get(head.key)
            except NotFound:
                return None
            if len(self._partition_keys) >= NAMES_MAX:
                self._partition_keys.clear()
            key = decode_head(stored.data, head.key).partition_key
            self._partition_keys[name] = key
            self._named(key).saw(stored)
        return self._partition_keys[name]

    async def _binned(self) -> bool:
        """Whether this bucket has bins: a new one has, one with groups of their own keeps them."""
        if self._layout == "found":
            found: Layout = "bins"
            async for _ in self._store.list(self._paths.heads):
                found = "groups"
                break
            self._layout = found
        return self._layout == "bins"

    async def _answer(self, verb: str, partition_key: str, decide: Callable[[Head, LoadedState, str], R]) -> R:
        """The result of `decide` for the group's head. Its third argument stands before the group's keys in it."""
        self._count(verb)
        if not await self._binned():
            return await self._named(partition_key).answer(lambda head, known: decide(head, known, ""))
        at = stored_key(partition_key, "")
        return await self._tree.run(
            partition_key, lambda group: group.answer(lambda head, known: decide(head, known, at))
        )

    async def _change(
        self, verb: str, partition_key: str, decide: Callable[[Head, LoadedState, str], tuple[Head, R]]
    ) -> R:
        self._count(verb)
        if not await self._binned():
            return await self._named(partition_key).change(lambda head, known: decide(head, known, ""))
        at = stored_key(partition_key, "")
        return await self._tree.run(
            partition_key, lambda group: group.change(lambda head, known: decide(head, known, at))
        )

    async def _remove(
        self, verb: str, partition_key: str, decide: Callable[[Head, LoadedState, str], tuple[Head, None]]
    ) -> None:
        """A change after which a bin has no group without entries: nobody would look at it for nothing."""

        def removed(head: Head, known: LoadedState, at: str) -> tuple[Head, None]:
            after, _ = decide(head, known, at)
            return bins.without_empty(after, partition_key, known), None

        await self._change(verb, partition_key, removed)

    async def _sweep_bins(self) -> int:
        """Leaves of all bins, after a write of each bin that refuses spills planned before it."""
        old = await self._old_leaves()
        if not await self._unreferenced(old, KeyGroup.whole):
            return 0
        orphans = (await self._unreferenced(old, KeyGroup.raise_fence))[:SWEEP_MAX]
        for at in range(0, len(orphans), SCANNED_MAX):
            await asyncio.gather(*(self._store.delete(key) for key in orphans[at : at + SCANNED_MAX]))
        self._runtime.metrics.counter("lakebed_meta_swept_total").inc(len(orphans))
        return len(orphans)

    async def _old_leaves(self) -> list[str]:
        before_ms = now_ms(self._clock) - round(self._horizon_s * 1000)
        listed = self._store.list(self._bin_paths.leaves(""))
        return [info.key async for info in listed if info.modified_ms < before_ms]

    async def _unreferenced(self, leaves: list[str], head_of: Callable[[KeyGroup], Awaitable[Head]]) -> list[str]:
        heads = await self._tree.each(head_of)
        referenced = {self._bin_paths.leaf("", ref.id) for head in heads for ref in head.refs}
        return [key for key in leaves if key not in referenced]

    def _named(self, partition_key: str) -> KeyGroup:
        """The group that has a head of its own."""
        group = self._groups.get(partition_key)
        if group is None:
            name, initial = group_name(partition_key), Head(partition_key=partition_key)
            group = self._groups[partition_key] = self._opened(self._paths, name, initial)
            if len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)
        self._groups.move_to_end(partition_key)
        return group

    def _opened(self, paths: BucketPaths, name: str, initial: Head) -> KeyGroup:
        return KeyGroup(
            self._runtime,
            paths,
            name,
            initial,
            sessions=self._liveness,
            cache=self._cache,
            horizon_s=self._horizon_s,
            sweeping=self._sweep_bins if paths is self._bin_paths else None,
        )

    def _demand_open(self) -> None:
        if self._closed:
            raise Unavailable("this meta client is closed")

    def _count(self, verb: str) -> None:
        self._demand_open()
        self._requests.labels(verb=verb).inc()


def _bin_put(put: Put, *, binned: bool) -> BinPut:
    at = stored_key(put.partition_key, "") if binned else ""
    first = (at + put.first[0], put.first[1]) if put.first is not None else None
    return BinPut(at + put.key, bytes(put.value), put.expected, "", first)
