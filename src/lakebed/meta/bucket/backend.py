"""The meta store on object storage alone: any number of processes on any number of hosts, no other server.

Each group of keys (a partition key) is one head object changed by compare-and-swap, with its older entries in
immutable leaves; see docs/decisions/004-meta-on-the-bucket.md. Requests that the store cannot answer raise
Unavailable with nothing changed, or OutcomeUnknown. A change whose response was lost is recognised, even when others
have changed the group since.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from lakebed.core.clock import now_ms
from lakebed.core.errors import Fenced, LakebedError, NotFound, Unavailable
from lakebed.meta.bucket import decisions
from lakebed.meta.bucket.decisions import LoadedState
from lakebed.meta.bucket.group import KeyGroup, LeafCache
from lakebed.meta.bucket.model import BucketPaths, Head, decode_head
from lakebed.meta.bucket.sessions import BucketSessions
from lakebed.meta.model import MetaEntry, Put, check_key, check_limit, check_value, prefix_end
from lakebed.meta.protocol import HeartbeatSession, MetaSession, put_each
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

GROUPS_MAX = 4096  # groups kept open in a process; another instance of one is slower, never wrong
SCANNED_MAX = 16  # groups a scan over all of them reads at once
HORIZON_S = 600.0  # age at which an unreferenced leaf is deleted: readers of older heads may still need it
NAMES_MAX = 100_000  # groups whose partition key is remembered; forgetting them costs a read each
SKEW_S = 1.0  # how far clocks may differ


class BucketMeta:
    """The meta store below the folder `prefix` of the store."""

    def __init__(
        self,
        runtime: StoreRuntime,
        prefix: str,
        *,
        horizon_s: float = HORIZON_S,
        skew_s: float = SKEW_S,
    ) -> None:
        self._runtime, self._store, self._clock = runtime, runtime.store, runtime.clock
        self._horizon_s = horizon_s
        self._paths = BucketPaths(prefix.strip("/"))
        self._cache = LeafCache()
        self._liveness = BucketSessions(runtime, self._paths, skew_s=skew_s)
        self._groups: OrderedDict[str, KeyGroup] = OrderedDict()
        self._partition_keys: dict[str, str] = {}
        self._open: list[HeartbeatSession] = []
        self._closed = False
        self._requests = runtime.metrics.counter("lakebed_meta_requests_total")

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        check_key(key)
        found = await self._group("get", partition_key).answer(lambda head, known: decisions.find(head, key, known))
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
        group = self._group("put", partition_key)
        owner = session.id if session is not None else ""
        if owner and not await self._liveness.lives(owner):
            raise Fenced(f"session {owner} has ended, so {key!r} was not put")
        return await group.change(lambda head, known: decisions.put(head, key, value, expected, owner, known))

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        return await put_each(self, puts)

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        check_key(key)
        await self._group("delete", partition_key).change(
            lambda head, known: decisions.delete(head, key, expected, known)
        )

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        start, end = max(key, prefix), prefix_end(prefix)
        found = await self._group("ceiling", partition_key).answer(
            lambda head, known: decisions.scan(head, known, start=start, end=end, limit=1)
        )
        return found[0] if found else None

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        check_limit(limit)
        if not partition_key:
            self._count("range")
            return await self._range_of_all(start, end, limit)
        return await self._group("range", partition_key).answer(
            lambda head, known: decisions.scan(head, known, start=start, end=end, limit=limit)
        )

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        await self._group("delete_range", partition_key).change(
            lambda head, known: decisions.delete_range(head, start, end, known)
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
        for partition_key in await self.groups():
            swept += await self._group("sweep", partition_key).sweep()
        return swept

    async def orphans(self) -> list[str]:
        """The leaves that a sweep would remove now."""
        return [key for group in await self.groups() for key in await self._group("sweep", group).orphans()]

    async def head(self, partition_key: str) -> Head:
        """A group's head as it is stored, for inspection."""
        return await self._group("head", partition_key).head()

    async def groups(self) -> list[str]:
        """The partition keys of all groups that were ever written, sorted: one list, and one read per unknown one."""
        self._count("groups")
        heads = await self._heads()
        known = [await self._partition_key(head) for head in heads]
        return sorted(key for key in known if key is not None)

    async def _range_of_all(self, start: str, end: str, limit: int) -> Sequence[MetaEntry]:
        """Group by group; what has been found so far limits the scan of the next groups.

        One list shows which heads have changed since they were last read; only those are read again.
        """
        found: list[MetaEntry] = []
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

    def _group(self, verb: str, partition_key: str) -> KeyGroup:
        self._count(verb)
        return self._named(partition_key)

    def _named(self, partition_key: str) -> KeyGroup:
        group = self._groups.get(partition_key)
        if group is None:
            group = self._groups[partition_key] = KeyGroup(
                self._runtime,
                self._paths,
                partition_key,
                sessions=self._liveness,
                cache=self._cache,
                horizon_s=self._horizon_s,
            )
            if len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)
        self._groups.move_to_end(partition_key)
        return group

    def _count(self, verb: str) -> None:
        if self._closed:
            raise Unavailable("this meta client is closed")
        self._requests.labels(verb=verb).inc()
