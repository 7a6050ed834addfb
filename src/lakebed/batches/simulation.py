"""A world of agents, collectors, reconcilers and sweepers on one bucket, where anything may fail or die at any await.

Checked after every step: one manifest per identity and it never changes; no answer 200 without a manifest whose blob is
there and matches; nothing accepted ever loses its blob; a batch reaches live state at most once per collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.incremental import IncrementalScan
from lakebed.batches.model import AcceptedBatch, BatchIdentity, Compression, IdentityConflict, Sample
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settled import SettledBoots
from lakebed.batches.sweeper import BlobSweeper
from lakebed.core.errors import LakebedError
from lakebed.sim.faults import CALM
from lakebed.sim.world import Process, World

CRASH = 0.006
HORIZON_S = 20.0  # short enough that writers stall past it


def submission(agent: str, number: int, value: float) -> Submission:
    frame = encode(
        BatchIdentity(agent, "boot", number, number), columns_of([Sample("m", number, value)]), Compression.NONE
    )
    return acceptance.submission(frame, decode(frame))


def stored_frame(world: World, accepted: AcceptedBatch) -> bytes | None:
    """The frame that a manifest refers to, in its own blob or in a pack; None when that is gone."""
    blob = world.peek(accepted.raw_blob_key)
    if blob is None:
        return None
    if not accepted.raw_blob_offset:
        return blob.data
    return blob.data[accepted.raw_blob_offset : accepted.raw_blob_offset + accepted.frame_bytes]


class AcceptanceInvariants:
    """What acceptance guarantees, checked after every step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._manifests: dict[str, tuple[str, AcceptedBatch]] = {}
        self.acknowledged: dict[BatchIdentity, str] = {}
        self.refused: dict[BatchIdentity, set[str]] = {}
        world.invariant("batches", self.complaint)

    def complaint(self) -> str | None:
        found = {info.key: info for info in self._world.keys(paths.ACCEPTED)}
        for key, (etag, _) in self._manifests.items():
            if key not in found or found[key].etag != etag:
                return f"the accepted manifest {key} changed or went away"
        for key, info in found.items():
            if key not in self._manifests:
                stored = self._world.peek(key)
                assert stored is not None
                self._manifests[key] = (info.etag, msgspec.json.decode(stored.data, type=AcceptedBatch))
            frame = stored_frame(self._world, self._manifests[key][1])
            if frame is None:
                return f"{key} is accepted and its blob is gone"
            if hashlib.sha256(frame).hexdigest() != self._manifests[key][1].frame_sha256:
                return f"{key} is accepted and its blob is not what was accepted"
        return None

    def answered(self, submitted: Submission) -> None:
        """Called at every 200: a manifest with these bytes must exist now."""
        stored = self._world.peek(paths.accepted_key(submitted.batch.identity))
        self._world.check(stored is not None, "200 was answered and nothing is accepted")
        assert stored is not None
        existing = msgspec.json.decode(stored.data, type=AcceptedBatch)
        self._world.check(existing.frame_sha256 == submitted.sha256, "200 was answered for other bytes than accepted")
        self._world.check(stored_frame(self._world, existing) is not None, "200 was answered without a blob")
        self.acknowledged[submitted.batch.identity] = submitted.sha256

    def conflicted(self, submitted: Submission, error: IdentityConflict) -> None:
        stored = self._world.peek(paths.accepted_key(submitted.batch.identity))
        assert stored is not None
        existing = msgspec.json.decode(stored.data, type=AcceptedBatch)
        self._world.check(existing.frame_sha256 != submitted.sha256, "a conflict with the very bytes accepted")
        if error.detail["quarantined"]:
            key = paths.quarantine_key(submitted.batch.identity, submitted.sha256)
            self._world.check(
                self._world.peek(key) is not None, "a conflict was reported as quarantined and no record is stored"
            )
        self.refused.setdefault(submitted.batch.identity, set()).add(submitted.sha256)


class SimCollector:
    """A collector process: what agents reach, as long as it lives."""

    def __init__(self, world: World, process: Process, kind: type[Acceptor] = Acceptor, *, pack_s: float = 0.0) -> None:
        self.process = process
        self.live: dict[BatchIdentity, str] = {}
        self._world = world
        derived_writes = DerivedWrites(process.context(), waiting_max=50, writer=process.node)
        self.acceptor = kind(
            process.context(),
            derived_writes,
            collector_id=process.node,
            on_accepted=self._on_accepted,
            accepting_max=20,
            known_max=3,
            timeout_s=world.rng.choice((2.0, 30.0, 200.0)),
            retry_after_s=1.0,
            pack_s=pack_s,
        )
        self.derived_writes = derived_writes

    def _on_accepted(self, accepted: AcceptedBatch, submitted: Submission) -> None:
        self._world.check(accepted.identity not in self.live, "a batch reached live state twice")
        self.live[accepted.identity] = submitted.sha256


def reconciler(process: Process) -> Reconciler:
    return Reconciler(process.context(), overlap_s=HORIZON_S, concurrency=2)


def sweeper(process: Process, undecided: Any) -> BlobSweeper:
    return BlobSweeper(process.context(), horizon_s=HORIZON_S, undecided=undecided, name=process.node)


async def packed(world: World, acceptor: type[Acceptor] = Acceptor) -> None:
    """The same world where some collectors pack the frames of several agents into one blob, and others do not."""
    await batches(world, acceptor, packs_s=(0.0, 0.05, 1.0))


async def batches(world: World, acceptor: type[Acceptor] = Acceptor, *, packs_s: Sequence[float] = ()) -> None:
    """Agents send the same and different bytes to several collectors, which die; reconcilers and sweepers run too."""
    watch = AcceptanceInvariants(world)
    rng = world.rng
    stall = rng.choice((0.01, 0.1))  # a request that hangs for longer than the horizon, between blob and manifest too
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, slow=stall, slow_s=4 * HORIZON_S)
    run = SimRun(world, watch, acceptor, packs_s)
    serving = [asyncio.ensure_future(world.keep(f"c{n}", run.serve, skew_s=rng.uniform(-1, 1))) for n in range(2)]
    tending = [asyncio.ensure_future(world.keep(f"r{n}", run.maintain)) for n in range(rng.randint(0, 2))]
    await asyncio.sleep(0.1)
    await asyncio.gather(*(run.agent(f"agent-{n}") for n in range(rng.randint(1, 3))))
    run.over.set()
    await asyncio.gather(*serving, *tending)
    await asyncio.sleep(world.faults.late_s)
    await _settle(world, watch)


class SimRun:
    """The processes of one run: collectors, agents that send to them, reconcilers and sweepers."""

    def __init__(
        self, world: World, watch: AcceptanceInvariants, acceptor: type[Acceptor], packs_s: Sequence[float] = ()
    ) -> None:
        self._packs_s = packs_s
        self._world, self._watch, self._acceptor, self._rng = world, watch, acceptor, world.rng
        self._collectors: dict[str, SimCollector] = {}
        self.over = asyncio.Event()

    async def serve(self, process: Process) -> None:
        pack_s = self._rng.choice(self._packs_s) if self._packs_s else 0.0
        mine = SimCollector(self._world, process, self._acceptor, pack_s=pack_s)
        mine.derived_writes.start()
        self._collectors[process.name] = mine
        while not self.over.is_set():
            await process.clock.sleep(0.5)

    async def agent(self, name: str) -> None:
        rng = self._rng
        for number in range(rng.randint(1, 3)):
            copies = [submission(name, number, 1.0)]
            if rng.random() < 0.4:
                copies.append(submission(name, number, 2.0))  # a cloned disk: the same identity, other bytes
            if rng.random() < 0.3:
                copies.append(copies[0])
            await asyncio.gather(*(self._persist(one) for one in copies))

    async def maintain(self, process: Process) -> None:
        rng = self._rng
        undecided = rng.choice(("finish", "keep"))
        while not self.over.is_set():
            try:
                if rng.random() < 0.5:
                    await IncrementalScan(
                        process.context(), reconciler(process), interval_s=1.0, owner=process.node
                    ).scan()
                else:
                    source: Any = rng.choice(("all", "by_time"))
                    await sweeper(process, undecided).sweep(dry_run=False, source=source)
            except LakebedError:
                pass
            await process.clock.sleep(rng.uniform(1.0, 15.0))

    async def _persist(self, one: Submission) -> None:
        for _ in range(12):
            if await self._send(one):
                return
            await asyncio.sleep(self._rng.uniform(0.1, 8.0))

    async def _send(self, one: Submission) -> bool:
        """One try at one collector; True when the agent may stop sending."""
        alive = [c for c in self._collectors.values() if c.process.alive]
        if not alive:
            return False
        target = self._rng.choice(alive)
        answered = asyncio.Event()
        settled: list[bool] = []

        async def request() -> None:
            try:
                await target.acceptor.accept(one)
                self._watch.answered(one)
                settled.append(True)
            except IdentityConflict as error:
                self._watch.conflicted(one, error)
                settled.append(True)
            except LakebedError:
                pass
            answered.set()

        target.process.spawn(request())
        try:
            async with asyncio.timeout(self._rng.choice((0.3, 5.0, 40.0))):  # an agent hedges, gives up, or waits
                await answered.wait()
        except TimeoutError:
            return False
        return bool(settled)


async def _settle(world: World, watch: AcceptanceInvariants) -> None:
    """When faults are over, one audit derives everything, and every acknowledged batch can be read."""
    world.heal(CALM)
    last = world.process("last")

    async def audit() -> None:
        await reconciler(last).audit()

    await last.spawn(audit())
    accepted = [info.key for info in world.keys(paths.ACCEPTED)]
    for identity, sha256 in watch.acknowledged.items():
        manifest = msgspec.json.decode(_bytes(world, paths.accepted_key(identity)), type=AcceptedBatch)
        frame = stored_frame(world, manifest) or b""
        world.check(hashlib.sha256(frame).hexdigest() == sha256, f"{identity} was acknowledged and cannot be read")
    indexed: set[str] = set()

    async def read_index() -> None:
        index = RawBatches(last.context().store).index
        indexed.update([each.manifest_id async for each in index.entries(0, last.clock.now_ns() + 10**12)])

    await last.spawn(read_index())
    digests = {paths.digest_of(key) for key in accepted}
    world.check(
        digests == {each.partition("-")[2] for each in indexed}, "the index is not that of all accepted batches"
    )
    for identity, refused in watch.refused.items():
        for sha256 in refused:
            world.check(watch.acknowledged.get(identity) != sha256, f"{identity} was acknowledged and refused")


def _bytes(world: World, key: str) -> bytes:
    stored = world.peek(key)
    assert stored is not None, key
    return stored.data


RETAIN_DAYS, DAY_S = 15.0, 86_400.0
SENDS, EVERY_S = 30, 3 * DAY_S  # three months
STOPPED_S = 25 * DAY_S  # a reconciler that stands still for longer than batches are kept


class RetentionRun:
    """Months of an agent that sends a batch every few days and old ones again, while retention removes what is old."""

    def __init__(self, world: World, *, pack_s: float = 0.0) -> None:
        self._world, self._rng, self._pack_s = world, world.rng, pack_s
        self.acknowledged: set[BatchIdentity] = set()
        self._collectors: dict[str, tuple[SimCollector, SettledBoots]] = {}
        self.over = asyncio.Event()

    async def serve(self, process: Process) -> None:
        mine = SimCollector(self._world, process, pack_s=self._pack_s)
        mine.derived_writes.start()
        self._collectors[process.name] = mine, SettledBoots(process.context())
        while not self.over.is_set():
            await process.clock.sleep(3600.0)

    async def maintain(self, process: Process) -> None:
        while not self.over.is_set():
            with contextlib.suppress(LakebedError):
                await maintain_once(process)
            stops = self._rng.random() < 0.02
            await process.clock.sleep(STOPPED_S if stops else self._rng.uniform(1.0 * DAY_S, 2.5 * DAY_S))

    async def agent(self) -> None:
        for number in range(SENDS):
            sent = [submission("agent", number, 1.0)]
            if self._pack_s:  # another agent's frame is in the same pack
                sent.append(submission("other", number, 1.0))
            await asyncio.gather(*map(self._persist, sent))
            if self._rng.random() < 0.5:  # a queue that was restored from a copy sends an old batch again
                await self._persist(submission("agent", self._rng.randint(0, number), 1.0))
            await asyncio.sleep(EVERY_S)

    async def _persist(self, one: Submission) -> None:
        for _ in range(20):
            alive = [each for each in self._collectors.values() if each[0].process.alive]
            if alive and await self._send(*self._rng.choice(alive), one):
                return
            await asyncio.sleep(self._rng.uniform(1.0, 60.0))

    async def _send(self, collector: SimCollector, settled: SettledBoots, one: Submission) -> bool:
        done: list[bool] = []

        async def request() -> None:
            try:
                identity = one.batch.identity
                duplicate = await settled.find(identity) is not None
                duplicate = duplicate or (await collector.acceptor.accept(one)).duplicate
                again = identity in self.acknowledged and not duplicate
                self._world.check(not again, f"{identity} was acknowledged and then accepted anew")
                self.acknowledged.add(identity)
                done.append(True)
            except LakebedError:
                pass

        await collector.process.spawn(request())
        return bool(done)


async def maintain_once(process: Process) -> None:
    context = process.context()
    await IncrementalScan(context, reconciler(process), interval_s=1.0, owner=process.node).scan()
    await BatchRetention(context, retention_days=RETAIN_DAYS, owner=process.node).run()


async def packed_retention(world: World) -> None:
    """The same months with the frames of two agents in one blob: it goes when neither needs it."""
    await retention(world, pack_s=1.0)


async def retention(world: World, *, pack_s: float = 0.0) -> None:
    """Months pass, and reconcilers stand still for weeks: old batches go, with their blobs and rows, and none that was
    acknowledged is ever accepted anew."""
    run = RetentionRun(world, pack_s=pack_s)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH / 4)
    serving = [asyncio.ensure_future(world.keep(f"c{n}", run.serve)) for n in range(2)]
    tending = [asyncio.ensure_future(world.keep(f"r{n}", run.maintain)) for n in range(2)]
    await asyncio.sleep(0.1)
    await run.agent()
    run.over.set()
    await asyncio.gather(*serving, *tending)
    world.heal(CALM)
    last = world.process("last")
    for _ in range(3):  # settle, wait, remove
        await last.spawn(maintain_once(last))
        await asyncio.sleep(2 * 3600.0)
    if pack_s:  # a duplicate leaves its frame in another blob than the accepted one: garbage collection deletes it

        async def sweep() -> None:
            await sweeper(last, "keep").sweep(dry_run=False)

        await last.spawn(sweep())
    now_ns, kept_ns = last.clock.now_ns(), round((RETAIN_DAYS + 1) * DAY_S * 1e9)
    for prefix in (paths.ACCEPTED, paths.RAW_BLOBS, paths.ACCEPTED_INDEX):
        old = [info.key for info in world.keys(prefix) if info.modified_ms * 1_000_000 < now_ns - kept_ns]
        world.check(not old, f"retention left {old[:3]}")
    found = {paths.identity_of(info.key) for info in world.keys(paths.ACCEPTED)}
    settled = SettledBoots(last.context())

    async def known() -> None:
        for identity in sorted(run.acknowledged - found, key=paths.accepted_key):
            world.check(await settled.find(identity) is not None, f"{identity} is neither there nor settled")

    await last.spawn(known())
