"""A world of ticks: replicas that die and stall receive the same ticks, dispatchers send them to silver.

Always: a commit record never changes, every result of a tick is the same, bronze has each tick's rows once. Without
faults every tick is committed and reaches silver.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.core.errors import LakebedError
from lakebed.core.settings import Settings
from lakebed.sim.faults import CALM
from lakebed.sim.world import Process, World
from lakebed.ticks import paths
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.fakes import FakeBronze, FakeSilverJob
from lakebed.ticks.finalizer import Finalizer
from lakebed.ticks.model import FinalizeResult, TickId
from lakebed.ticks.ownership import Ownership
from lakebed.ticks.receiver import Receiver, register_of
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.sweeper import TickSweeper

CRASH = 0.01
PAUSE = 0.01
LEASE_S = 10.0
SEND_TIMEOUT_S = 120.0
SETTINGS = TicksSettings(
    lease_s=LEASE_S,
    idle_ttl_s=5.0,
    visibility_timeout_s=30,
    batch_window_s=0.5,
    queue_shards=2,
    receives_max=1000,
    finalizing_s=LEASE_S,
)


@cache
def part(first: int, rows: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(range(first, first + rows), pa.int64())}), out)
    return out.getvalue()


class SimulatedTick:
    """A tick of two parts; neighbours share half of their keys, so that some rows are replaced."""

    def __init__(self, org_id: str, number: int) -> None:
        self.id = TickId(org_id, "p", f"t{number}")
        self.parts = {1: part(number * 3, 3), 2: part(number * 3 + 3, 3)}
        listed = [
            {"file_seq": seq, "sha256": hashlib.sha256(data).hexdigest(), "rows": 3, "bytes": len(data)}
            for seq, data in self.parts.items()
        ]
        table = {
            "name": "rows",
            "mode": "delta",
            "primary_keys": ["id"],
            "row_count": 6,
            "schema": [{"name": "id", "type": "long"}],
            "parquets": listed,
        }
        self.manifest = msgspec.json.encode({"dt": "20261115", "tables": [table]})


class TickInvariants:
    def __init__(self, world: World, ticks: list[SimulatedTick]) -> None:
        self._world, self._ticks = world, ticks
        self._records: dict[str, bytes] = {}
        self.results: dict[TickId, FinalizeResult] = {}
        world.invariant("ticks", self.complaint)

    def complaint(self) -> str | None:
        for tick in self._ticks:
            key = paths.commit(tick.id)
            stored = self._world.peek(key)
            if stored is not None and self._records.setdefault(key, stored.data) != stored.data:
                return f"the commit record of {tick.id.path} changed"
            if stored is None and (key in self._records or tick.id in self.results):
                return f"{tick.id.path} has a result but no commit record"
        return None

    def answered(self, tick: SimulatedTick, result: FinalizeResult) -> None:
        first = self.results.setdefault(tick.id, result)
        self._world.check(first == result, f"ticks: {tick.id.path} got the result {first}, then {result}")
        counted = result.rows_inserted + result.rows_replaced
        self._world.check(counted == 6, f"ticks: {counted} of 6 rows were counted")


class Replica:
    """The roles of one process, without HTTP."""

    def __init__(self, process: Process) -> None:
        self.context = process.context(Settings({TicksSettings: SETTINGS}, {}))
        queue, self.dispatched = open_queue(self.context), open_audit(self.context, DISPATCHED)
        committed = open_audit(self.context, COMMITTED)
        self.ownership = Ownership(self.context)
        self.receiver = Receiver(self.context)
        self.finalizer = Finalizer(
            self.context, bronze=FakeBronze(self.context), queue=queue, committed=committed, ownership=self.ownership
        )
        self.dispatcher = Dispatcher(
            self.context, queue=queue, dispatched=self.dispatched, job=FakeSilverJob(self.context)
        )
        self.sweeper = TickSweeper(self.context, finish=self.finalizer.finalize)
        self.auditor = DispatchAuditor(self.context, queue=queue, committed=committed, dispatched=self.dispatched)

    async def send(self, tick: SimulatedTick) -> FinalizeResult:
        for seq, data in tick.parts.items():

            async def chunks(data: bytes = data) -> AsyncIterator[bytes]:
                yield data[:100]
                yield data[100:]

            await self.receiver.put(tick.id, seq, hashlib.sha256(data).hexdigest(), chunks())
        return await self.finalizer.finalize(tick.id, tick.manifest)


async def ticks(world: World) -> None:
    """Two or three replicas, one or two orgs, a few ticks: agents send each to any replica until it is committed."""
    rng = world.rng
    orgs = ["a", "b"][: rng.randint(1, 2)]
    made = [SimulatedTick(org, number) for org in orgs for number in range(rng.randint(1, 2))]
    watch = TickInvariants(world, made)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, pause=PAUSE)

    async def agent(process: Process, replica: Replica, mine: list[SimulatedTick]) -> None:
        for tick in mine:
            for _ in range(rng.randint(1, 4)):
                try:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        watch.answered(tick, await replica.send(tick))
                    break
                except (LakebedError, TimeoutError):
                    await process.clock.sleep(rng.uniform(0.0, LEASE_S))

    async def body(process: Process) -> None:
        replica = Replica(process)
        replica.ownership.start()
        agents = [agent(process, replica, rng.sample(made, len(made))) for _ in range(rng.randint(1, 2))]
        await asyncio.gather(
            *agents, dispatch(process, replica, rng.randint(0, 3)), sweep(process, replica, rng.randint(0, 2))
        )
        await replica.ownership.stop()

    async def dispatch(process: Process, replica: Replica, rounds: int) -> None:
        for _ in range(rounds):
            with suppress(LakebedError):
                await replica.dispatcher.round()
            await process.clock.sleep(rng.uniform(0.0, 5.0))

    async def sweep(process: Process, replica: Replica, rounds: int) -> None:
        """Finishes abandoned finalizes while agents retry."""
        for _ in range(rounds):
            await process.clock.sleep(rng.uniform(0.0, 3 * LEASE_S))
            with suppress(LakebedError):
                await replica.sweeper.round()

    await asyncio.gather(*(world.keep(f"r{number}", body) for number in range(rng.randint(2, 3))))
    await asyncio.sleep(world.faults.late_s)
    world.heal(CALM)
    await _settle(world, watch, made)


async def _settle(world: World, watch: TickInvariants, made: list[SimulatedTick]) -> None:
    """Without faults: the sweeper finishes abandoned finalizes, the agents retry the rest, all ticks reach silver."""
    last = world.process("last")
    replica = Replica(last)

    async def finish() -> None:
        replica.ownership.start()
        await last.clock.sleep(2 * LEASE_S)
        await replica.sweeper.round()
        for tick in made:
            state = (await register_of(replica.context, tick.id).read()).value.state
            world.check(
                state != "finalizing", f"ticks: {tick.id.path} was finalizing, and the sweeper did not finish it"
            )
            while True:
                try:
                    watch.answered(tick, await replica.send(tick))
                    break
                except LakebedError:
                    await last.clock.sleep(1.0)
        while await replica.auditor.undispatched():
            await replica.dispatcher.round()
            await last.clock.sleep(1.0)
        for org in sorted({tick.id.org_id for tick in made}):
            await _check_silver(world, watch, replica, org)
        await replica.ownership.stop()

    ended = last.spawn(finish())
    await asyncio.sleep(600.0)
    world.check(ended.done(), "ticks: a tick did not reach silver without faults")


async def _check_silver(world: World, watch: TickInvariants, replica: Replica, org: str) -> None:
    rows = (await FakeBronze(replica.context).register(org, "p").read()).value.rows["rows"]
    results = [result for tick, result in watch.results.items() if tick.org_id == org]
    inserted = sum(result.rows_inserted for result in results)
    world.check(len(rows) == inserted, f"ticks: {inserted} rows were counted as inserted, {len(rows)} are there")
    silver = (await FakeSilverJob(replica.context).register(org, "p").read()).value
    ran, wanted = {tick for run in silver.runs for tick in run}, {result.tick_id for result in results}
    world.check(ran == wanted, f"ticks: {sorted(wanted)} were committed, silver has {sorted(ran)}")
