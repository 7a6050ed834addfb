"""The agent's world: its real batcher, disk queue and sender, killed again and again, before failing collectors.

The collectors share one state: the first bytes under an identity are accepted, and now and then other bytes were
accepted before. The disk is a real folder; each operation takes a while, and a kill comes before it or after it (the
crash tests cover kills inside one).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from lakebed.agent import paths
from lakebed.agent.alerts import Alerts
from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.files import Files
from lakebed.agent.model import AppendResult, Frame
from lakebed.agent.sender import Sender
from lakebed.agent.verdict import PROBLEM_TYPE, CollectorResponse
from lakebed.batches.codec.frame import peek
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.core.errors import OutcomeUnknown, Unavailable
from lakebed.sim.process import Process
from lakebed.sim.world import World

T = TypeVar("T")
AGENT = "agent-a"
COLLECTORS = ("http://one", "http://two")
OTHER = "0" * 64  # the hash of somebody else's bytes
ORDER = SendLimits(concurrency=3, base_s=0.1, cap_s=2.0, retry_after_max_s=5.0, denied_s=3.0, hedge_share_max=0.5)
LIMITS = BatchLimits(bytes_max=4000, samples_max=5, interval_s=0.5)
SETTLE_S = 600.0


class QuietFiles(Files):
    """A folder whose fsync costs nothing: here only the order of things matters."""

    def sync_folder(self, path: Path) -> None:
        self.fsyncs += 1

    def _sync_write(self, fd: int, data: bytes) -> None:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)


class FaultyCollectors:
    """The accepted hash of each identity, behind a faulty network."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.fault_rng
        self.accepted: dict[BatchIdentity, str] = {}
        self.calm = False

    async def post(self, url: str, frame: bytes) -> CollectorResponse:
        """The transport of one agent."""
        identity, sha256 = peek(frame), hashlib.sha256(frame).hexdigest()
        await self._world.clock.sleep(self._latency_s())
        fate = "fine" if self.calm else self._rng.choices(FATES, SHARES)[0]
        if fate in ("unreached", "dropped"):
            self._step(url, identity, fate)
            raise Unavailable("refused") if fate == "unreached" else OutcomeUnknown("reset on the way")
        if fate in ("busy", "denied", "strange"):
            self._step(url, identity, fate)
            return STATUSES[fate]
        if not self.calm and identity not in self.accepted and self._rng.random() < 0.03:
            self.accepted[identity] = OTHER
        accepted_sha256 = self.accepted.setdefault(identity, sha256)
        self._step(url, identity, f"{fate}, {'ours' if accepted_sha256 == sha256 else 'other bytes'} stand")
        await self._world.clock.sleep(self._latency_s())
        if fate == "lost":
            raise OutcomeUnknown("reset on the way back")
        if accepted_sha256 != sha256:
            problem = PROBLEM_TYPE + "identity_conflict"
            return _response(409, type=problem, code="identity_conflict", accepted_frame_sha256=accepted_sha256)
        return _response(200, duplicate=False)

    def _latency_s(self) -> float:
        return self._rng.uniform(0.0, 0.05) if self._rng.random() < 0.9 else self._rng.uniform(0.5, 5.0)

    def _step(self, url: str, identity: BatchIdentity, outcome: str) -> None:
        self._world.step(url[-3:], "post", f"{identity.boot_id[:8]}/{identity.seq_start}-{identity.seq_end}", outcome)


FATES = ("fine", "lost", "dropped", "unreached", "busy", "denied", "strange")
SHARES = (60, 10, 8, 8, 8, 3, 3)


def _response(status: int, **body: object) -> CollectorResponse:
    return CollectorResponse(status, {}, msgspec.json.encode(body))


STATUSES = {
    "busy": CollectorResponse(503, {"retry-after": "1"}, b"{}"),
    "denied": _response(403, code="denied"),
    "strange": CollectorResponse(200, {}, b"<html>welcome</html>"),
}


class SimAgent:
    """One boot of the agent, as far as the world may look into it."""

    def __init__(self, process: Process, folder: Path, authority: FaultyCollectors, world: World) -> None:
        self._process, self._world = process, world
        runtime = process.context()
        ids, metrics = process.ids, process.metrics
        self.boot_id = ids.uuid()
        limits = QueueLimits(bytes_max=world.rng.choice((30, 200)) * 4096, batches_max=1000)
        self.disk_queue = DiskQueue.open(
            folder, agent_id=AGENT, boot_id=self.boot_id, limits=limits, now_ms=lambda: 0, files=QuietFiles()
        )
        self.sender = Sender(
            runtime,
            self.disk_queue,
            SendOrder(COLLECTORS, ORDER, ids),
            authority,
            Alerts(folder / paths.ALERTS, metrics=metrics, now_ms=lambda: 0),
            hedge_after_s=0.4,
            concurrency=ORDER.concurrency,
            offload=self._offload,
        )
        self.batcher = Batcher(runtime, AGENT, self.boot_id, LIMITS, self._store, offload=self._offload)

    async def run(self, samples: int) -> None:
        """Reads so many samples, stops in order and waits until the queue is empty."""
        batching, sending = self._process.spawn(self.batcher.run()), self._process.spawn(self.sender.run())
        for number in range(samples):
            await self.batcher.put([Sample("m", number + 1, float(number))])
            await self._process.clock.sleep(self._world.rng.uniform(0.0, 0.3))
        self.batcher.stop()
        await batching
        while self.disk_queue.batches:
            await self._process.clock.sleep(0.1)
        self.sender.stop()
        await sending

    async def _store(self, frames: Sequence[Frame]) -> AppendResult:
        stored = await self._offload(lambda: self.disk_queue.append(frames))
        self.sender.wake()
        return stored

    async def _offload(self, call: Callable[[], T], /) -> T:
        """A disk that takes its time, before and after: a kill may come on either side."""
        await self._process.clock.sleep(self._world.rng.uniform(0.0, 0.02))
        result = call()
        await self._process.clock.sleep(self._world.rng.uniform(0.0, 0.02))
        return result


async def agent(world: World) -> None:
    """Every sample that was promised to be on disk is accepted once, or lies on the disk; conflicts keep their copy."""
    authority = FaultyCollectors(world)
    lives: list[SimAgent] = []
    with tempfile.TemporaryDirectory(prefix="lakebed-sim-") as home:
        folder = Path(home) / "queue"
        world.invariant("promises", lambda: broken_promise(folder, lives, authority))

        async def body(process: Process) -> None:
            if lives:
                lives[-1].disk_queue.close()  # the kernel lets go of a dead process's lock
            lives.append(SimAgent(process, folder, authority, world))
            await lives[-1].run(world.rng.randint(0, 40))

        for _ in range(world.rng.randint(1, 5)):  # boots that are killed somewhere
            process = world.process("agent")
            process.spawn(body(process))
            await world.clock.sleep(world.rng.uniform(0.0, 8.0))
            world.crash(process)
        authority.calm = True
        world.note("world", "heal")
        last = world.process("agent")
        ended = last.spawn(body(last))
        began_s = world.clock.monotonic_s()
        while not ended.done() and world.clock.monotonic_s() < began_s + SETTLE_S:
            await world.clock.sleep(1.0)
        world.check(ended.done(), "the queue was not empty long after the faults ended")
        complaint = broken_promise(folder, lives, authority)
        world.check(complaint is None, complaint or "")
        lives[-1].disk_queue.close()


def broken_promise(folder: Path, lives: Sequence[SimAgent], authority: FaultyCollectors) -> str | None:
    """What is wrong between durable samples, accepted batches and the disk; None when nothing is."""
    on_disk = _on_disk(folder)
    for life in lives:
        accepted = [
            (i.seq_start, i.seq_end)
            for i, sha256 in authority.accepted.items()
            if i.boot_id == life.boot_id and sha256 != OTHER
        ]
        numbers = [n for start, end in accepted for n in range(start, end + 1)]
        if len(numbers) != len(set(numbers)):
            return f"a sample of {life.boot_id} was accepted under two identities"
        kept = {n for boot, start, end in on_disk if boot == life.boot_id for n in range(start, end + 1)}
        lost = set(range(life.batcher.settled)) - set(numbers) - kept
        if lost:
            return f"samples {sorted(lost)[:5]} of {life.boot_id} were reported as durable and are lost"
    for identity, sha256 in authority.accepted.items():
        mine = (identity.boot_id, identity.seq_start, identity.seq_end)
        if sha256 == OTHER and mine not in on_disk:
            return f"the conflict {mine} made the agent lose its copy"
    return None


def _on_disk(folder: Path) -> set[tuple[str, int, int]]:
    found = set()
    for path in folder.glob(f"{paths.BOOTS}/*/*{paths.BATCH}"):
        boot, name = paths.parse_boot(path.parent.name), paths.parse_batch(path.name)
        if boot and name:
            found.add((boot[1], name[0], name[1]))
    for path in folder.glob(f"{paths.PARKED}/*{paths.BATCH}"):
        place = paths.parse_parked(path.name)
        name = paths.parse_batch(place[1]) if place else None
        if place and name:
            found.add((place[0], name[0], name[1]))
    return found
