"""One group of keys in the bucket: reads its head, changes it by compare-and-swap, spills it and sweeps its leaves."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import LakebedError, NotFound, Overloaded
from lakebed.meta.bucket import bins
from lakebed.meta.bucket.decisions import (
    HeadChange,
    HeadFull,
    HeadWriter,
    LoadedState,
    NotLoaded,
    Replan,
    SpillPlan,
    apply_spill,
    overflowing,
    plan_spill,
    spill_due,
)
from lakebed.meta.bucket.model import BucketPaths, Head, Leaf, decode_head, decode_leaf, encode_leaf
from lakebed.meta.bucket.sessions import BucketSessions
from lakebed.store.model import StoredObject
from lakebed.store.register import ABSENT, Register, RegisterState
from lakebed.store.runtime import StoreRuntime

CACHE_BYTES_MAX = 64 * 1024 * 1024

R = TypeVar("R")
Out = TypeVar("Out", covariant=True)
NEEDS_MAX = 16  # times a call may find out that it needs another leaf or session
CROWDED_MAX = 4  # spills a put waits for
SPILLS_MAX = 4  # plans one spill may lose to others
FETCHES_MAX = 16  # requests under way at once for one call
SWEEP_EVERY = 8  # spills of a group between two sweeps of its leaves
SWEEP_MAX = 1_000  # leaves one sweep removes
CONTENTION_WINDOW = 64  # changes of which more than half follow another process's: the head is contended


class LeafCache:
    """Decoded leaves by object key, least recently used out first."""

    def __init__(self, size_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._leaves: OrderedDict[str, Leaf] = OrderedDict()
        self._size_bytes, self._size_bytes_max = 0, size_bytes_max

    def get(self, key: str) -> Leaf | None:
        found = self._leaves.get(key)
        if found is not None:
            self._leaves.move_to_end(key)
        return found

    def add(self, key: str, leaf: Leaf) -> None:
        if key not in self._leaves:
            self._leaves[key] = leaf
            self._size_bytes += leaf.size_bytes
        while self._size_bytes > self._size_bytes_max and len(self._leaves) > 1:
            _, oldest = self._leaves.popitem(last=False)
            self._size_bytes -= oldest.size_bytes


class LoadedLeaves(Mapping[str, Leaf]):
    """Leaves that were fetched for a call, and behind them those that happen to be in the cache."""

    def __init__(self, cached: Callable[[str], Leaf | None], fetched: dict[str, Leaf]) -> None:
        self._cached, self.fetched = cached, fetched

    def __getitem__(self, id: str) -> Leaf:
        found = self.fetched.get(id) or self._cached(id)
        if found is None:
            raise KeyError(id)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetched)

    def __len__(self) -> int:
        return len(self.fetched)


class Decide(Protocol[Out]):
    def __call__(self, head: Head, known: LoadedState) -> tuple[Head, Out]: ...


class Divided(Exception):
    """The bin was split: its groups are in other bins now."""

    def __init__(self, head: Head) -> None:
        super().__init__("the bin was split")
        self.head = head


class KeyGroup:
    """The head at `name`, with its leaves: one group, or a bin of many. An absent head is `initial`."""

    def __init__(
        self,
        runtime: StoreRuntime,
        paths: BucketPaths,
        name: str,
        initial: Head,
        *,
        sessions: BucketSessions,
        cache: LeafCache,
        horizon_s: float,
        sweeping: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._store, self._paths, self._name, self._initial = store, paths, name, initial
        self._sessions, self._cache, self._clock, self._ids = sessions, cache, clock, ids
        self._horizon_ms = round(horizon_s * 1000)
        self._sweeping = sweeping or self.sweep
        self._register = Register(
            runtime,
            paths.head(name),
            Head,
            initial,
            name="meta",
        )
        self._writer = HeadWriter(ids.token())
        self._seen = RegisterState(initial, 0, ABSENT)
        self._recent: deque[bool] = deque(
            maxlen=CONTENTION_WINDOW
        )  # of the last changes: which follow another process's
        self._reading: asyncio.Task[Head] | None = None
        self._next: asyncio.Task[Head] | None = None
        self._spilling = asyncio.Lock()
        self._spills = 0
        self._unmergeable_refs = 0  # with this many references, a spill of the head would save nothing
        self._spill_count = metrics.counter("lakebed_meta_spills_total")
        self._load_count = metrics.counter("lakebed_meta_leaf_loads_total")
        self._swept_count = metrics.counter("lakebed_meta_swept_total")

    async def answer(self, decide: Callable[[Head, LoadedState], R], *, etag: str = "") -> R:
        """The result of `decide` for the current head. Raises Corrupt, Unavailable or Divided; changes nothing.

        With the `etag` that a list has just given, a head that is known already is not read again.
        """
        seen = self._seen
        head, known = (seen.value if etag and seen.etag == etag else await self.head()), self._loaded()
        for _ in range(NEEDS_MAX):
            if head.split is not None:
                raise Divided(head)
            try:
                return decide(head, known)
            except NotLoaded as need:
                known, complete = await self._fetched(known, need)
                if not complete:
                    head = await self.head()  # a leaf went: the head has moved on
        raise Overloaded(f"meta group {self._name!r} changes faster than it can be read")

    async def change(self, decide: Decide[R]) -> R:
        """Changes the head by `decide`, in one write with all waiting changes. Spills or splits it when it has grown.

        Raises Divided, and nothing was changed, when the head is a bin that was split.
        """
        known, crowded = self._loaded(), 0
        change = HeadChange(self._writer)
        for _ in range(NEEDS_MAX):
            try:
                grown, result = await self._register.change(change.deciding(partial(_of_whole, decide, known)))
            except NotLoaded as need:
                known, _ = await self._fetched(known, need)
            except HeadFull:
                crowded += 1
                if crowded > CROWDED_MAX:
                    break
                await self.spill()
            else:
                if grown is not None:
                    self._recent.append(change.follows_other)
                    await self._tidied(grown)
                return result
        raise Overloaded(f"meta group {self._name!r} is full, or changes too fast", hint="is its compaction running?")

    async def head(self) -> Head:
        """The head as of an instant after this call. Calls that wait together share one request."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._reading))
        return await asyncio.shield(self._next)

    def saw(self, stored: StoredObject) -> Head:
        """Remembers a head that was read, while its etag is unchanged."""
        self._seen = RegisterState(decode_head(stored.data, stored.key), 0, stored.etag)
        return self._seen.value

    async def whole(self) -> Head:
        """The head. Raises Divided."""
        return await self.answer(lambda head, known: head)

    async def halves(self, head: Head) -> tuple[Head, Head]:
        """What the two bins begin with that this one was split into. Anybody finds the same."""
        known = self._loaded()
        for _ in range(NEEDS_MAX):
            try:
                return bins.half(head, known, left=True), bins.half(head, known, left=False)
            except NotLoaded as need:
                known, _ = await self._fetched(known, need)
        raise Overloaded(f"the halves of meta bin {self._name!r} cannot be read")

    async def raise_fence(self) -> Head:
        """The head before a write after which no spill that was planned earlier can succeed."""

        def fence(head: Head, known: LoadedState) -> tuple[Head, Head]:
            return msgspec.structs.replace(head, fence=head.fence + 1), head

        return await self.change(fence)

    async def _tidied(self, grown: Head) -> None:
        """Spills or splits what has grown, in the background of the call: an error is left to the next one."""
        contended = sum(self._recent) > CONTENTION_WINDOW // 2
        try:
            if bins.split_due(grown, contended=contended):
                ids = (self._ids.uuid(), self._ids.uuid())
                change = HeadChange(self._writer).deciding(lambda head: (bins.split(head, *ids, contended), None))
                await self._register.change(change)
                self._recent.clear()
            elif self._worth_spilling(grown) and not self._spilling.locked():
                await self.spill()
        except LakebedError:
            return

    async def spill(self) -> None:
        """Moves old entries from the head into leaves. Leaves are written first; a lost race leaves orphans."""
        async with self._spilling:
            for _ in range(SPILLS_MAX):
                head = await self.head()
                if not spill_due(head):
                    return
                plan = await self._plan(head)
                if plan is None:
                    self._unmergeable_refs = len(head.refs)
                    return
                try:
                    await self._carry_out(plan)
                except Replan:
                    continue
                self._spill_count.inc()
                self._spills += 1
                if self._spills % SWEEP_EVERY == 0:
                    await self._sweeping()
                return

    async def sweep(self) -> int:
        """Removes leaves that nothing refers to and that are older than the horizon. Gives how many.

        The fence is raised in the write that reads the references: a spill planned before it can no longer refer to
        a leaf that was found unreferenced.
        """
        old = await self._old_leaves()
        if not self._unreferenced(await self.head(), old):
            return 0
        orphans = self._unreferenced(await self.raise_fence(), old)[:SWEEP_MAX]
        for at in range(0, len(orphans), FETCHES_MAX):
            await asyncio.gather(*(self._store.delete(key) for key in orphans[at : at + FETCHES_MAX]))
        self._swept_count.inc(len(orphans))
        return len(orphans)

    async def orphans(self) -> list[str]:
        """The leaves a sweep would remove."""
        old = await self._old_leaves()
        return self._unreferenced(await self.head(), old)

    async def _old_leaves(self) -> list[str]:
        before_ms = now_ms(self._clock) - self._horizon_ms
        folder = self._paths.leaves(self._name)
        return [info.key async for info in self._store.list(folder) if info.modified_ms < before_ms]

    def _unreferenced(self, head: Head, keys: list[str]) -> list[str]:
        referenced = {self._paths.leaf(self._name, ref.id) for ref in head.refs}
        return [key for key in keys if key not in referenced]

    async def _plan(self, head: Head) -> SpillPlan | None:
        known, _ = await self._fetched(
            self._loaded(), NotLoaded(sessions={hot.session for hot in head.hot.values()} - {""})
        )
        ended = [session for session, lives in known.sessions.items() if not lives]
        try:
            return plan_spill(head, known, ended, self._ids.uuid)
        except NotLoaded as need:
            known, complete = await self._fetched(known, need)
            return plan_spill(head, known, ended, self._ids.uuid) if complete else None

    async def _carry_out(self, plan: SpillPlan) -> None:
        async def store(id: str, leaf: Leaf) -> None:
            key = self._paths.leaf(self._name, id)
            await self._store.create(key, encode_leaf(leaf.rows))
            self._cache.add(key, leaf)

        await asyncio.gather(*(store(id, leaf) for id, leaf in plan.leaves.items()))
        await self._register.change(HeadChange(self._writer).deciding(lambda head: (apply_spill(head, plan), None)))

    def _worth_spilling(self, head: Head) -> bool:
        return spill_due(head) and (overflowing(head) or len(head.refs) != self._unmergeable_refs)

    async def _fetched(self, known: LoadedState, need: NotLoaded) -> tuple[LoadedState, bool]:
        """`known` with what is needed; False when a leaf is gone."""
        leaves, sessions = LoadedLeaves(self._cached, {}), dict(known.sessions)
        leaves.fetched.update(known.leaves)
        places = asyncio.Semaphore(FETCHES_MAX)

        async def leaf(id: str) -> bool:
            async with places:
                try:
                    leaves.fetched[id] = await self._leaf(id)
                except NotFound:
                    return False
                return True

        async def session(id: str) -> bool:
            async with places:
                sessions[id] = await self._sessions.lives(id)
                return True

        complete = await asyncio.gather(*map(leaf, need.leaves), *map(session, need.sessions))
        return LoadedState(leaves, sessions), all(complete)

    async def _leaf(self, id: str) -> Leaf:
        found = self._cached(id)
        if found is None:
            key = self._paths.leaf(self._name, id)
            self._load_count.inc()
            found = decode_leaf((await self._store.get(key)).data, key)
            self._cache.add(key, found)
        return found

    def _cached(self, id: str) -> Leaf | None:
        return self._cache.get(self._paths.leaf(self._name, id))

    def _loaded(self) -> LoadedState:
        return LoadedState(LoadedLeaves(self._cached, {}), {})

    async def _read_after(self, earlier: asyncio.Task[Head] | None) -> Head:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        self._reading, self._next = self._next, None
        key = self._paths.head(self._name)
        try:
            stored = await self._store.get(key)
        except NotFound:
            return self._initial
        self._seen = RegisterState(decode_head(stored.data, key), 0, stored.etag)
        return self._seen.value


def _of_whole(decide: Decide[R], known: LoadedState, head: Head) -> tuple[Head, R]:
    if head.split is not None:
        raise Divided(head)
    return decide(head, known=known)
