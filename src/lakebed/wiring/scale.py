"""`lakebed bench scale`: the loop of every part on its own code, over a store that answers like S3, at three sizes.

Requests take virtual time (GET 20 ms, PUT and a page of LIST 40 ms, meta 3 ms), so a run takes as long as its code
needs. The time of a loop is the virtual time of its requests and the CPU time of its code, added: as if they never
overlapped. `limit` is what the named processes do in a second, `load` what the size asks for, `headroom` limit ÷ load.
What no process count divides (one register, one query collector) is marked as shared. `docs/scale.md` is made from it.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check
from lakebed.core.clock import Clock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Settings
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.sim.loop import SimClock, SimLoop, seeded_loop
from lakebed.store.bucket import BucketStore
from lakebed.store.memory import MemoryBucket
from lakebed.store.model import ObjectInfo, StoredObject, Version

GET_S, PUT_S, LIST_S, META_S = 0.02, 0.04, 0.04, 0.003
PAGE = 1000  # keys, or folders, of one LIST request
TURNS_MAX = 50_000_000
LAST = chr(0x10FFFF)  # sorts behind every name
HEADROOM_BAR = 2.0  # at M, for the loops of batches and rollups


class Size(msgspec.Struct, frozen=True):
    """A deployment. `batches_s` batches of samples a second, each of 11.6 KB at M."""

    name: str
    batches_s: float
    agents: int
    gateways: int
    partitions: int
    appends_s: float
    ticks_s: float


S = Size("S", 10, 100, 1, 10, 10, 100 / 600)
M = Size("M", 1_000, 10_000, 50, 2_000, 11_600, 10_000 / 600)
L = Size("L", 100_000, 1_000_000, 5_000, 200_000, 1_160_000, 1_000_000 / 600)
SIZES = (S, M, L)


def few(at_s: int, at_m: int, at_l: int) -> Callable[[Size], int]:
    """Processes, or tasks of Spark, by size."""
    return lambda size: {"S": at_s, "M": at_m, "L": at_l}[size.name]


def gateways(size: Size) -> int:
    return size.gateways


def batches_s(size: Size) -> float:
    return size.batches_s


class LoopRun(msgspec.Struct, frozen=True):
    """What one measurement did: units of work, the virtual time of its requests, the CPU time of its code."""

    units: float
    waited_s: float
    cpu_s: float
    alone_s: float | None = None  # of both, what only one process can do; None: all of it is divided

    def per_s(self, processes: int) -> float:
        """Units a second of that many processes."""
        total_s = self.waited_s + self.cpu_s
        alone_s = 0.0 if self.alone_s is None else min(self.alone_s, total_s)
        return self.units / (alone_s + (total_s - alone_s) / processes)


class Loop(msgspec.Struct, frozen=True):
    """A loop of a part: its load at a size, the processes that share it, and how one of them is measured.

    `own`: a loop of batches or rollups, which must have headroom at M. `shared`: more processes do not raise the limit.
    """

    name: str
    unit: str
    load: Callable[[Size], float]
    processes: Callable[[Size], int]
    measure: Callable[[Testbed, Size], Awaitable[LoopRun]]
    own: bool = False
    shared: bool = False
    sized: bool = False  # what is measured depends on the size; otherwise once is enough


class ScaleRow(msgspec.Struct, frozen=True):
    loop: str
    size: str
    unit: str
    load: float
    processes: int
    limit: float
    headroom: float
    cpu_share: float
    own: bool


class SlowBucket(MemoryBucket):
    """A bucket in memory that takes as long as S3 for each request. `free`: requests take no time."""

    free = False

    def take(self, objects: dict[str, StoredObject]) -> None:
        """Has these objects from now on, and no others."""
        self.objects, self._order = dict(objects), sorted(tuple(key.split("/")) for key in objects)

    async def _take(self, seconds: float) -> None:
        if not self.free:
            await self._clock.sleep(seconds)

    async def get(self, key: str) -> StoredObject:
        await self._take(GET_S)
        return await super().get(key)

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        while True:
            await self._take(LIST_S)
            page = self.page(prefix, after, PAGE)
            if page:
                yield page
            if len(page) < PAGE:
                return
            after = page[-1].key

    async def children(self, prefix: str) -> Sequence[str]:
        folder = tuple(prefix.split("/")[:-1])
        depth, found, at = len(folder), [], bisect_right(self._order, folder)
        while at < len(self._order) and self._order[at][:depth] == folder:
            if len(self._order[at]) > depth + 1:
                found.append(self._order[at][depth])
            at = bisect_right(self._order, (*folder, self._order[at][depth], LAST))
        await self._take(LIST_S * max(1, -(-len(found) // PAGE)))
        return found

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        await self._take(PUT_S)
        return await super().put(key, data, instead_of)

    async def delete(self, key: str) -> None:
        await self._take(GET_S)
        await super().delete(key)


class SlowMeta:
    """The meta store in memory, 3 ms a call."""

    def __init__(self, inner: MemoryMeta, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        async def slow(*given: Any, **named: Any) -> Any:
            await self._clock.sleep(META_S)
            return await call(*given, **named)

        return slow


class Testbed:
    """One measurement: a fresh bucket, a clock of virtual time, and processes on them."""

    __test__ = False  # no test class, whatever its name suggests

    def __init__(self, loop: SimLoop, *, quick: bool) -> None:
        self.clock = SimClock(loop)
        self.bucket = SlowBucket(clock=self.clock)
        self.quick = quick
        self._ids = 0
        self._state = MemoryState()
        self._began: tuple[float, float] = (0.0, 0.0)

    def context(self, *sections: Any, node: str = "") -> Context:
        """A process of its own on the shared bucket."""
        self._ids += 1
        ids, metrics = Ids.seeded(self._ids), Metrics()
        store = BucketStore(self.bucket, Runtime(self.clock, ids, metrics))
        return Context(
            node=node or f"node-{self._ids}",
            settings=Settings({type(each): each for each in sections}, {}),
            store=store,
            clock=self.clock,
            ids=ids,
            metrics=metrics,
        )

    def meta(self) -> Any:
        return SlowMeta(MemoryMeta(Runtime(self.clock, Ids.seeded("meta"), Metrics()), self._state), self.clock)

    def begin(self) -> None:
        """What came before was preparation."""
        self.bucket.free = False
        self._began = (self.clock.monotonic_s(), _cpu_s())

    async def skip(self, seconds: float) -> None:
        """Time in which the loop has nothing to do."""
        await self.clock.sleep(seconds)
        self._began = (self._began[0] + seconds, self._began[1])

    def spent_s(self) -> float:
        """Virtual time and CPU time, added, since anything began."""
        return self.clock.monotonic_s() + _cpu_s()

    def end(self, units: float, *, divided_s: float | None = None) -> LoopRun:
        """`divided_s`: of the time, what several processes share; all of it where none is given."""
        waited_s, cpu_s = self.clock.monotonic_s() - self._began[0], _cpu_s() - self._began[1]
        return LoopRun(units, waited_s, cpu_s, None if divided_s is None else waited_s + cpu_s - divided_s)


def run_loop(loop: Loop, size: Size, *, quick: bool) -> LoopRun:
    """One measurement, on an event loop of virtual time. Call it in a thread of its own."""
    events = seeded_loop(f"scale/{loop.name}", turns_max=TURNS_MAX)
    asyncio.set_event_loop(events)
    try:
        return events.run_until_complete(loop.measure(Testbed(events, quick=quick), size))
    finally:
        for task in events.tasks:
            task.cancel()
        asyncio.set_event_loop(None)
        events.close()


def row_of(loop: Loop, size: Size, done: LoopRun) -> ScaleRow:
    count = loop.processes(size)
    limit = done.per_s(1 if loop.shared else count)
    load = loop.load(size)
    share = done.cpu_s / (done.waited_s + done.cpu_s)
    return ScaleRow(loop.name, size.name, loop.unit, load, count, limit, limit / load, share, loop.own)


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    """The rows of S and M, measured; of L, what the same process does under L's load."""
    from lakebed.wiring.scale_loops import LOOPS

    checks: list[Check] = []
    for loop in LOOPS:
        for row in await asyncio.to_thread(rows_of, loop, quick=environment.quick):
            environment.report(shown(row))
            bar = HEADROOM_BAR if row.own and row.size == M.name else None
            value = round(row.headroom, 3)
            checks.append(Check(f"{row.loop}, {row.size}", value, "x", bar, bar is None or value >= bar))
    return checks


def rows_of(loop: Loop, *, quick: bool) -> list[ScaleRow]:
    """The loop at every size. Call it in a thread of its own."""
    done = None
    rows = []
    for size in SIZES:
        if done is None or loop.sized:
            done = run_loop(loop, size, quick=quick)
        rows.append(row_of(loop, size, done))
    return rows


def shown(row: ScaleRow) -> str:
    return (
        f"{row.loop} {row.size}: load {row.load:,.1f}, limit {row.limit:,.1f} {row.unit}, {row.processes} processes, "
        f"headroom {row.headroom:,.2f}, CPU {row.cpu_share:.0%} of the time"
    )


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system
