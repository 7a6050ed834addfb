"""Dozens of agents, two collectors, kills on both sides, a duplicate and a conflict: no sample is lost, and all are
counted.

The agents run as a program: `python -m lakebed.agent.demo FOLDER AGENTS SAMPLES COLLECTOR…`. Each has its own queue and
sends the numbers 0 to SAMPLES-1. It records how many are on disk, so that agents killed with -9 continue from there.
The program ends when every queue is empty.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx2
import msgspec

from lakebed.agent.alerts import Alerts
from lakebed.agent.batcher import Batcher, BatchLimits, make_frame
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.inspector import QueueInspector
from lakebed.agent.model import AppendResult, Frame
from lakebed.agent.sender import Sender
from lakebed.agent.transport import HttpTransport
from lakebed.agent.waiting import cancel, in_thread
from lakebed.batches import paths
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import BatchIdentity, Kind, Sample
from lakebed.batches.reader import RawBatches
from lakebed.batches.workers import reconciler
from lakebed.core import logs
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.demo.metrics import counting
from lakebed.demo.scenario import ScenarioContext, exited
from lakebed.embedded.child import Child

PACE = 20  # samples put at a time
PAUSE_S = 0.02
BATCH = BatchLimits(bytes_max=64 * 1024, samples_max=100, interval_s=0.5)
QUEUE = QueueLimits(bytes_max=64 * 1024 * 1024, batches_max=10_000)
ORDER = SendLimits(concurrency=2, base_s=0.1, cap_s=2.0, retry_after_max_s=5.0, denied_s=5.0, hedge_share_max=0.2)


class FleetAgent:
    """One agent: the parts of `lakebed agent run` with a source that counts."""

    def __init__(
        self,
        folder: Path,
        agent_id: str,
        total: int,
        collectors: list[str],
        transport: HttpTransport,
        runtime: Runtime,
    ) -> None:
        clock, ids, metrics = runtime.clock, runtime.ids, runtime.metrics
        self._clock, self._total, self._progress = clock, total, folder / "progress"
        boot_id = ids.uuid()
        self.disk_queue = DiskQueue.open(
            folder / "queue", agent_id=agent_id, boot_id=boot_id, limits=QUEUE, now_ms=lambda: now_ms(clock)
        )
        self._sender = Sender(
            runtime,
            self.disk_queue,
            SendOrder(collectors, ORDER, ids),
            transport,
            Alerts(folder / "queue" / "alerts", metrics=metrics, now_ms=lambda: now_ms(clock)),
            hedge_after_s=1.0,
            concurrency=ORDER.concurrency,
        )

        self._batcher = Batcher(runtime, agent_id, boot_id, BATCH, self._store)
        self._start = int(self._progress.read_text()) if self._progress.exists() else 0

    async def run(self) -> None:
        """Counts to the end and sends everything."""
        roles = [asyncio.ensure_future(self._batcher.run()), asyncio.ensure_future(self._sender.run())]
        noting = asyncio.ensure_future(self._note())
        try:
            for at in range(self._start, self._total, PACE):
                await self._batcher.put([self._sample(n) for n in range(at, min(at + PACE, self._total))])
                await self._clock.sleep(PAUSE_S)
            self._batcher.flush_now()
            await self._batcher.durable(max(0, self._total - self._start))
            while self.disk_queue.batches or not self._sender.idle:
                await self._clock.sleep(PAUSE_S)
        finally:
            await cancel([*roles, noting])
            self._progress.write_text(str(self._start + self._batcher.settled))
            self.disk_queue.close()

    async def _store(self, frames: Sequence[Frame]) -> AppendResult:
        stored = await in_thread(lambda: self.disk_queue.append(frames))
        self._sender.wake()
        return stored

    async def _note(self) -> None:
        while True:
            await self._clock.sleep(PAUSE_S)
            self._progress.with_suffix(".tmp").write_text(str(self._start + self._batcher.settled))
            self._progress.with_suffix(".tmp").replace(self._progress)

    def _sample(self, number: int) -> Sample:
        return Sample("demo_count", self._clock.now_ns(), float(number), Kind.GAUGE, {"shard": str(number % 4)})


async def run_fleet(folder: Path, agents: int, samples: int, collectors: list[str], runtime: Runtime) -> None:
    async with HttpTransport(timeout_s=10, connect_timeout_s=2, concurrency=agents) as transport:
        fleet = []
        for number in range(agents):
            agent_id = f"{folder.name}-{number:02d}"
            (folder / agent_id).mkdir(parents=True, exist_ok=True)
            fleet.append(FleetAgent(folder / agent_id, agent_id, samples, collectors, transport, runtime))
        await asyncio.gather(*(agent.run() for agent in fleet))


TITLE = "Agents and collectors, killed on both sides"
NEXT = ("lakebed agent run --host-interval-s 5", "lakebed batches conflicts", "lakebed batches sweep --dry-run")

AGENTS = 24
SAMPLES = 1200  # of each agent
DEADLINE_S = 120.0
UPLOAD = "/v1/batches"
CLONE = "boot-of-a-clone"


async def play(stage: ScenarioContext) -> None:
    context = stage.context()
    folder = stage.folder / "demo" / f"fleet-{context.ids.token()[:8]}"
    samples = stage.scaled(SAMPLES)
    second, url = await stage.gateway("collector-2", parts=("batches",))
    async with httpx2.AsyncClient(timeout=30.0) as client:
        ours, existing = await _plant_conflict(client, stage, folder)
    arguments = ["lakebed.agent.demo", str(folder), str(AGENTS), str(samples), url, stage.gateway_url]
    stage.fault("a clone has other bytes accepted under an identity that an agent is about to send")
    stage.expect("samples accepted", AGENTS * samples)
    stage.report(f"{AGENTS} agents send {samples} samples each to two collectors")
    fleet = stage.process("fleet", arguments)
    await _until(context, folder, samples // 5, fleet)
    fleet.kill()
    stage.fault("all agents were killed with -9, and are started again")
    fleet = stage.process("fleet-again", arguments)
    await _until(context, folder, samples // 2, fleet)
    second.kill()
    stage.fault("one of the two collectors was killed with -9")
    code = await exited(fleet, DEADLINE_S)
    stage.check("the agents sent all samples and exited", code == 0, f"exit code {code}")
    await _count(stage, context, folder, samples)
    await _indexed(stage, context)
    await _parked(stage, folder, ours, existing)
    async with httpx2.AsyncClient(timeout=30.0) as client:
        await _repeat(stage, context, client, folder)


async def _plant_conflict(client: httpx2.AsyncClient, stage: ScenarioContext, folder: Path) -> tuple[Frame, Frame]:
    """Queues a batch at the first agent, and has other bytes accepted under its identity before it is sent."""
    agent_id = f"{folder.name}-00"
    identity = BatchIdentity(agent_id, CLONE, 0, 0)
    ours, existing = (make_frame(identity, [Sample("demo_clone", 1, value)]) for value in (1.0, 2.0))
    queue = folder / agent_id / "queue"
    queue.parent.mkdir(parents=True)
    disk_queue = DiskQueue.open(queue, agent_id=agent_id, boot_id=identity.boot_id, limits=QUEUE, now_ms=lambda: 0)
    disk_queue.append([ours])
    disk_queue.close()
    answer = await client.post(stage.gateway_url + UPLOAD, content=existing.data)
    if answer.status_code != 200:
        raise Unavailable(f"the collector returned {answer.status_code}: {answer.text[:200]}")
    return ours, existing


async def _until(context: Context, folder: Path, least: int, fleet: Child) -> None:
    """Waits until the agents' disks have come so far, on average."""
    deadline = context.clock.monotonic_s() + DEADLINE_S
    while context.clock.monotonic_s() < deadline and fleet.running():
        if await asyncio.to_thread(_on_disk, folder) >= least * AGENTS:
            return
        await context.clock.sleep(0.05)


def _on_disk(folder: Path) -> int:
    return sum(int(path.read_text() or 0) for path in folder.glob("*/progress"))


async def _count(stage: ScenarioContext, context: Context, folder: Path, samples: int) -> None:
    """Reads every accepted batch of the fleet back from the bucket, through its manifest."""
    seen: dict[str, Counter[tuple[str, float]]] = {}  # by agent: (boot, value)
    batches = mismatched = rows = 0
    for number in range(AGENTS):
        agent_id = f"{folder.name}-{number:02d}"
        values = seen[agent_id] = Counter()
        async for info in context.store.list(f"accepted/v1/agent={agent_id.encode().hex()}/"):
            manifest = msgspec.json.decode((await context.store.get(info.key)).data)
            batch = decode((await context.store.get(manifest["raw_blob_key"])).data)
            identity = batch.identity
            mismatched += (identity.seq_start, identity.seq_end) != (manifest["seq_start"], manifest["seq_end"])
            batches += 1
            rows += batch.columns.samples
            if identity.boot_id != CLONE:
                values.update((identity.boot_id, value) for value in batch.columns.values.tolist())
    wanted = {float(n) for n in range(samples)}
    found = [{value for _, value in values} for values in seen.values()]
    lost, kept = sum(len(wanted - each) for each in found), sum(map(len, found))
    stage.counted("samples", "sent by the agents", AGENTS * samples)
    stage.counted("samples", "in accepted batches", kept)
    stage.counted("accepted samples", "in batches, including samples sent again", rows)
    stage.counted("counted samples", "in batches", sum(sum(values.values()) for values in seen.values()))
    stage.check("no sample is lost", lost == 0, f"{kept} of {AGENTS * samples} samples in {batches} accepted batches")
    stage.check(
        "every manifest's blob holds the batch that it names", mismatched == 0, f"{mismatched} of {batches} differ"
    )
    doubled = sum(count - 1 for values in seen.values() for count in values.values())
    # The source makes some again after the kill: they were on disk and its note of that was not. They get new numbers.
    again = sum(map(len, seen.values())) - kept
    stage.check("no sample is stored twice", doubled == 0, f"{doubled} stored twice, {again} sent again after the kill")
    left = await asyncio.to_thread(lambda: len(list(folder.glob("*/queue/boots/*/*.lmbatch"))))
    stage.check("the agents' queues are empty", left == 0, f"{left} batches")


async def _indexed(stage: ScenarioContext, context: Context) -> None:
    """Has the reconciler look at everything, as after any crash: what a killed collector left out is derived."""
    repaired = sum((await reconciler(context).audit()).repaired.values())
    keys = [info.key async for info in context.store.list(paths.ACCEPTED)]
    found = RawBatches(context.store).entries(0, context.clock.now_ns() + paths.HOUR_NS)
    indexed = len([each async for each in found])
    stage.check("every accepted batch is indexed", indexed >= len(keys), f"the reconciler repaired {repaired} entries")


async def _parked(stage: ScenarioContext, folder: Path, ours: Frame, existing: Frame) -> None:
    queue = folder / ours.identity.agent_id / "queue"
    parked = await asyncio.to_thread(lambda: QueueInspector(queue, lambda: 0).parked())
    hashes = [(one.submitted_frame_sha256, one.accepted_frame_sha256) for one in parked]
    held = hashes == [(ours.sha256, existing.sha256)]
    stage.check("the conflict is parked at its agent, with both hashes", held, f"{len(parked)} parked")


async def _repeat(stage: ScenarioContext, context: Context, client: httpx2.AsyncClient, folder: Path) -> None:
    """Sends an accepted batch once more, as an agent does whose answer was lost."""
    prefix = f"accepted/v1/agent={f'{folder.name}-01'.encode().hex()}/"
    keys = [info.key async for info in context.store.list(prefix)]
    manifest = msgspec.json.decode((await context.store.get(keys[0])).data)
    frame = (await context.store.get(manifest["raw_blob_key"])).data
    answer = await client.post(stage.gateway_url + UPLOAD, content=frame)
    duplicate = answer.status_code == 200 and answer.json().get("duplicate") is True
    after = [info.key async for info in context.store.list(prefix)]
    stage.check("a batch sent twice is accepted once", duplicate and after == keys, f"duplicate={duplicate}")


if __name__ == "__main__":
    logs.configure("error")
    own = system_runtime()
    work = run_fleet(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:], own)
    asyncio.run(counting(own, work))
