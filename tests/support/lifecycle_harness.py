"""A lifecycle worker over the in-memory twin and a manual clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from lakebed.core.clock import ManualClock
from lakebed.core.errors import LakebedError
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.lifecycle.cluster import SHARDS, WorkerShards
from lakebed.lifecycle.eligibility import due_at
from lakebed.lifecycle.enforcer import Enforcer, Round
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import ObjectEntry, Position, Rule, Verb
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seams import ChangeEvent, Family, Removal
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import (
    ActionState,
    BlockerState,
    BucketLifecycle,
    LedgerRow,
    LifecycleState,
    PendingItem,
    ReaderState,
    slowest,
)
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

DAY_S = 100.0
RESERVED = ReservedKeys("lakebed", "own/")
QUICK = LifecycleSettings(
    day_s=DAY_S, rounding="exact", small_delay_s=1.0, flush_lag_s=0.0, lookback_s=10.0, poll_s=5.0, policy_fresh_s=0.0
)


class Harness:
    """`lake` is the store rules run on; `shelf` keeps lifecycle's own state."""

    def __init__(self, **changed: Any) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.metrics = Metrics()
        self.registers = LifecycleState(
            StoreRuntime(clock=self.clock, ids=Ids.seeded(1), metrics=self.metrics, store=self.store)
        )
        self.lake = MemoryLake(self.clock)
        self.settings = msgspec.structs.replace(QUICK, **changed)
        self.worker = self.new_worker(self.lake)

    def new_worker(self, lake: Any) -> Enforcer:
        return Enforcer(lake, Seams(lake, lake, lake), self.registers, self.settings, node="test", reserved=RESERVED)

    async def policy(self, bucket: str, *rules: Rule) -> None:
        await self.lake.put(bucket, render_xml(rules) if rules else b"")

    async def run_round(self, days: float = 0.0) -> Round:
        """Time passes, then one round."""
        await self.clock.advance(days * DAY_S)
        return await self.worker.run_round()

    def left(self, bucket: str = "b") -> list[str]:
        return sorted(self.lake.objects.get(bucket, {}))

    async def state(self, bucket: str = "b") -> BucketLifecycle:
        return (await self.registers.bucket(bucket).read()).value

    async def action(self, kind: str, bucket: str = "b") -> ActionState:
        (found,) = [one for name, one in (await self.state(bucket)).actions.items() if name.endswith("/" + kind)]
        return found

    async def reader(self) -> ReaderState:
        """The cursors of all shards as one."""
        return slowest((await self.registers.cursors()).values())

    async def blockers(self) -> BlockerState:
        return (await self.registers.blockers.read()).value

    async def exceptions(self, *keys: str, bucket: str = "b", prefix: str = "") -> ActionRef:
        """These objects wait as exceptions of the bucket's first action: their own events are missing from the log."""
        snapshot = await self.worker.compile()
        action = next(one for one in snapshot.of_bucket(bucket) if one.rule.prefix == prefix and one.delays_ns)
        for key in keys:
            (entry,) = self.lake._entries(bucket, key)
            due_ns = due_at(action.rule, action.kind, entry, snapshot.calendar) or entry.mtime_ns + action.delays_ns[0]
            item = PendingItem(key, entry.version_id, due_ns, entry.identity)
            await self.worker.resolver._index(action.ref)
            await self.worker.resolver.pending.upsert(action.ref, [item])
        self.lake.log = [event for event in self.lake.log if event.key not in keys]
        return action.ref

    async def other_reader(self, alive: bool = True) -> None:
        """Another worker has every shard, or has given them up."""
        shards = WorkerShards(workers={"other": 1 << 62}, owners=dict.fromkeys(map(str, range(SHARDS)), "other"))
        await self.registers.shards.change(lambda _: (shards if alive else WorkerShards(), None))

    async def ledger(self, bucket: str = "b", key: str | None = None) -> list[LedgerRow]:
        return [row async for row in DeletionLedger(self.registers.runtime).rows(bucket, key=key)]


class Failing:
    """The lake, with scripted failures of looks and deletes by key."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.looks: dict[str, LakebedError] = {}
        self.deletes: dict[str, LakebedError] = {}
        self.tried: list[str] = []
        self.unreadable: set[str] = set()
        self.damaged: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        if key in self.looks:
            raise self.looks[key]
        found: Family = await self.inner.look(bucket, key, upload_id)
        return found

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        self.tried.append(entry.key)
        if entry.key in self.deletes:
            raise self.deletes[entry.key]
        removal: Removal = await self.inner.delete(entry, verb)
        return removal

    async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        async for family in self.inner.scan(bucket, after, **bounds):
            damaged = family.key in self.damaged
            yield msgspec.structs.replace(family, entries=(), unreadable="no entry") if damaged else family

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        async for event in self.inner.read(after, until_ns):
            yield msgspec.structs.replace(event, unreadable="no") if event.key in self.unreadable else event


def failing(**changed: Any) -> tuple[Harness, Failing]:
    world = Harness(**changed)
    store = Failing(world.lake)
    world.worker = world.new_worker(store)
    return world, store
