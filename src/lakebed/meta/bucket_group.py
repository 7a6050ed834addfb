"""One group of keys in the bucket: reads its head, changes it by compare-and-swap, spills it and sweeps its leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import LakebedError, NotFound, Overloaded
from lakebed.ids import Ids
from lakebed.meta import bucket_spill
from lakebed.meta.bucket_change import Change, Writer
from lakebed.meta.bucket_leaves import LeafCache, LeavesAtHand
from lakebed.meta.bucket_model import Head, Leaf, Paths, decode_head, decode_leaf, encode_leaf, group_name
from lakebed.meta.bucket_sessions import Sessions
from lakebed.meta.bucket_shard import Crowded, Known, Need
from lakebed.meta.bucket_spill import Plan, Replan
from lakebed.metrics import Metrics
from lakebed.store.model import StoredObject
from lakebed.store.protocol import Store
from lakebed.store.register import ABSENT, Register, Snapshot

R = TypeVar("R")
Out = TypeVar("Out", covariant=True)

NEEDS_MAX = 16  # times a call may find out that it needs another leaf or session
CROWDED_MAX = 4  # spills a put waits for
SPILLS_MAX = 4  # plans one spill may lose to others
FETCHES_MAX = 16  # requests under way at once for one call
SWEEP_EVERY = 8  # spills of a group between two sweeps of its leaves
SWEEP_MAX = 1_000  # leaves one sweep removes


class Decide(Protocol[Out]):
    def __call__(self, head: Head, known: Known) -> tuple[Head, Out]: ...


class Group:
    """The group of `partition_key`."""

    def __init__(
        self,
        store: Store,
        paths: Paths,
        partition_key: str,
        *,
        sessions: Sessions,
        cache: LeafCache,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        horizon_s: float,
    ) -> None:
        self._store, self._paths, self._name = store, paths, group_name(partition_key)
        self._sessions, self._cache, self._clock, self._ids = sessions, cache, clock, ids
        self._horizon_ms = round(horizon_s * 1000)
        self._register = Register(
            store,
            paths.head(self._name),
            Head,
            Head(partition_key=partition_key),
            clock=clock,
            ids=ids,
            metrics=metrics,
            name="meta",
        )
        self._writer = Writer(ids.token())
        self._seen = Snapshot(Head(), 0, ABSENT)
        self._reading: asyncio.Task[Head] | None = None
        self._next: asyncio.Task[Head] | None = None
        self._spilling = asyncio.Lock()
        self._spills = 0
        self._hopeless_refs = 0  # a head with this many references was found not worth a spill
        self._spill_count = metrics.counter("lakebed_meta_spills_total")
        self._load_count = metrics.counter("lakebed_meta_leaf_loads_total")
        self._swept_count = metrics.counter("lakebed_meta_swept_total")

    async def answer(self, decide: Callable[[Head, Known], R], *, etag: str = "") -> R:
        """What `decide` says of the head as it is now. Raises Corrupt or Unavailable; changes nothing.

        With the `etag` that a list has just given, a head that is known already is not read again.
        """
        seen = self._seen
        head, known = (seen.value if etag and seen.etag == etag else await self.head()), self._at_hand()
        for _ in range(NEEDS_MAX):
            try:
                return decide(head, known)
            except Need as need:
                known, complete = await self._fetched(known, need)
                if not complete:
                    head = await self.head()  # a leaf went: the head has moved on
        raise Overloaded(f"meta group {self._name!r} changes faster than it can be read")

    async def change(self, decide: Decide[R]) -> R:
        """Changes the head as `decide` says, in one write together with all that wait. Spills it when it has grown."""
        known, crowded = self._at_hand(), 0
        change = Change(self._writer)
        for _ in range(NEEDS_MAX):
            try:
                grown, result = await self._register.change(change.deciding(partial(decide, known=known)))
            except Need as need:
                known, _ = await self._fetched(known, need)
            except Crowded:
                crowded += 1
                if crowded > CROWDED_MAX:
                    break
                await self.spill()
            else:
                if grown is not None and self._worth_spilling(grown):
                    await self._spill_quietly()
                return result
        raise Overloaded(f"meta group {self._name!r} is full, or changes too fast", hint="is its compaction running?")

    async def head(self) -> Head:
        """The head as of an instant after this call. Calls that wait together share one request."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._reading))
        return await asyncio.shield(self._next)

    def saw(self, stored: StoredObject) -> Head:
        """Remembers a head that somebody has read, for as long as its etag stands."""
        self._seen = Snapshot(decode_head(stored.data, stored.key), 0, stored.etag)
        return self._seen.value

    async def spill(self) -> None:
        """Moves old entries from the head into leaves. Leaves come first; a lost race leaves orphans for the sweep."""
        async with self._spilling:
            for _ in range(SPILLS_MAX):
                head = await self.head()
                if not bucket_spill.due(head):
                    return
                plan = await self._plan(head)
                if plan is None:
                    self._hopeless_refs = len(head.refs)
                    return
                try:
                    await self._carry_out(plan)
                except Replan:
                    continue
                self._spill_count.inc()
                self._spills += 1
                if self._spills % SWEEP_EVERY == 0:
                    await self.sweep()
                return

    async def sweep(self) -> int:
        """Removes leaves that nothing refers to and that are older than the horizon. Gives how many.

        The fence is raised in the write that reads the references: a spill planned before it can no longer refer to
        a leaf that was found unreferenced.
        """
        old = await self._old_leaves()
        if not self._unreferenced(await self.head(), old):
            return 0

        def fence(head: Head) -> tuple[Head, Head]:
            return msgspec.structs.replace(head, fence=head.fence + 1), head

        _, before = await self._register.change(Change(self._writer).deciding(fence))
        orphans = self._unreferenced(before, old)[:SWEEP_MAX]
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

    async def _plan(self, head: Head) -> Plan | None:
        known, _ = await self._fetched(
            self._at_hand(), Need(sessions={hot.session for hot in head.hot.values()} - {""})
        )
        ended = [session for session, lives in known.sessions.items() if not lives]
        try:
            return bucket_spill.plan(head, known, ended, self._ids.uuid)
        except Need as need:
            known, complete = await self._fetched(known, need)
            return bucket_spill.plan(head, known, ended, self._ids.uuid) if complete else None

    async def _carry_out(self, plan: Plan) -> None:
        async def store(id: str, leaf: Leaf) -> None:
            key = self._paths.leaf(self._name, id)
            await self._store.create(key, encode_leaf(leaf.rows))
            self._cache.add(key, leaf)

        await asyncio.gather(*(store(id, leaf) for id, leaf in plan.leaves.items()))
        await self._register.change(Change(self._writer).deciding(lambda head: (bucket_spill.apply(head, plan), None)))

    def _worth_spilling(self, head: Head) -> bool:
        return bucket_spill.due(head) and (bucket_spill.overflowing(head) or len(head.refs) != self._hopeless_refs)

    async def _spill_quietly(self) -> None:
        """A spill that nobody waits for in particular: what it meets is left to the next one."""
        if self._spilling.locked():
            return
        try:
            await self.spill()
        except LakebedError:
            return

    async def _fetched(self, known: Known, need: Need) -> tuple[Known, bool]:
        """`known` with what is needed; False when a leaf is gone."""
        leaves, sessions = LeavesAtHand(self._cached, {}), dict(known.sessions)
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
        return Known(leaves, sessions), all(complete)

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

    def _at_hand(self) -> Known:
        return Known(LeavesAtHand(self._cached, {}), {})

    async def _read_after(self, earlier: asyncio.Task[Head] | None) -> Head:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        self._reading, self._next = self._next, None
        key = self._paths.head(self._name)
        try:
            stored = await self._store.get(key)
        except NotFound:
            return Head()
        self._seen = Snapshot(decode_head(stored.data, key), 0, stored.etag)
        return self._seen.value
