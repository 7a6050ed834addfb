"""Dozens of agents, two collectors, kills on both sides, a duplicate and a conflict: nothing lost, and counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx2
import msgspec

from lakebed.agent.batcher import make_frame
from lakebed.agent.keeper import Keeper
from lakebed.agent.model import Frame
from lakebed.agent.spool import Spool
from lakebed.batches import paths
from lakebed.batches.workers import reconciler
from lakebed.context import Context
from lakebed.demo.fleet import QUEUE
from lakebed.demo.stage import Stage, exited
from lakebed.embedded.child import Child
from lakebed.errors import Unavailable
from lakebed.frame.codec import decode
from lakebed.frame.model import Identity, Sample

TITLE = "Agents and collectors, killed on both sides"
NEXT = ("lakebed agent run --host-interval-s 5", "lakebed batches conflicts", "lakebed batches gc --dry-run")

AGENTS = 24
SAMPLES = 1200  # of each agent
DEADLINE_S = 120.0
UPLOAD = "/v1/batches"
CLONE = "boot-of-a-clone"


async def play(stage: Stage) -> None:
    context = stage.context()
    folder = stage.folder / "demo" / f"fleet-{context.ids.token()[:8]}"
    samples = stage.scaled(SAMPLES)
    second, url = await stage.gateway("collector-2", parts=("batches",))
    async with httpx2.AsyncClient(timeout=30.0) as client:
        ours, standing = await _plant_conflict(client, stage, folder)
    arguments = ["lakebed.demo.fleet", str(folder), str(AGENTS), str(samples), url, stage.gateway_url]
    stage.fault("a clone has other bytes accepted under an identity that an agent is about to send")
    stage.expect("samples accepted", AGENTS * samples)
    stage.tell(f"{AGENTS} agents send {samples} samples each to two collectors")
    fleet = stage.process("fleet", arguments)
    await _until(context, folder, samples // 5, fleet)
    fleet.kill()
    stage.fault("all agents were killed with -9, and are started again")
    fleet = stage.process("fleet-again", arguments)
    await _until(context, folder, samples // 2, fleet)
    second.kill()
    stage.fault("one of the two collectors was killed with -9")
    code = await exited(fleet, DEADLINE_S)
    stage.check("the agents sent everything and ended", code == 0, f"exit code {code}")
    await _count(stage, context, folder, samples)
    await _indexed(stage, context)
    await _parked(stage, folder, ours, standing)
    async with httpx2.AsyncClient(timeout=30.0) as client:
        await _repeat(stage, context, client, folder)


async def _plant_conflict(client: httpx2.AsyncClient, stage: Stage, folder: Path) -> tuple[Frame, Frame]:
    """Queues a batch at the first agent, and has other bytes accepted under its identity before it is sent."""
    agent_id = f"{folder.name}-00"
    identity = Identity(agent_id, CLONE, 0, 0)
    ours, standing = (make_frame(identity, [Sample("demo_clone", 1, value)]) for value in (1.0, 2.0))
    queue = folder / agent_id / "queue"
    queue.parent.mkdir(parents=True)
    spool = Spool.open(queue, agent_id=agent_id, boot_id=identity.boot_id, limits=QUEUE, now_ms=lambda: 0)
    spool.append([ours])
    spool.close()
    answer = await client.post(stage.gateway_url + UPLOAD, content=standing.data)
    if answer.status_code != 200:
        raise Unavailable(f"the collector answered {answer.status_code}: {answer.text[:200]}")
    return ours, standing


async def _until(context: Context, folder: Path, least: int, fleet: Child) -> None:
    """Waits until the agents' disks have come so far, on average."""
    deadline = context.clock.monotonic_s() + DEADLINE_S
    while context.clock.monotonic_s() < deadline and fleet.running():
        if await asyncio.to_thread(_on_disk, folder) >= least * AGENTS:
            return
        await context.clock.sleep(0.05)


def _on_disk(folder: Path) -> int:
    return sum(int(path.read_text() or 0) for path in folder.glob("*/progress"))


async def _count(stage: Stage, context: Context, folder: Path, samples: int) -> None:
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
    stage.counted("accepted samples", "in batches, those made again included", rows)
    stage.counted("counted samples", "in batches", sum(sum(values.values()) for values in seen.values()))
    stage.check("no sample is lost", lost == 0, f"{kept} of {AGENTS * samples} samples in {batches} accepted batches")
    stage.check("every manifest's blob is the batch it names", mismatched == 0, f"{mismatched} of {batches} differ")
    doubled = sum(count - 1 for values in seen.values() for count in values.values())
    # The source makes some again after the kill: they were on disk and its note of that was not. They get new numbers.
    again = sum(map(len, seen.values())) - kept
    stage.check("no sample is there twice", doubled == 0, f"{doubled} doubled, {again} made again after the kill")
    left = await asyncio.to_thread(lambda: len(list(folder.glob("*/queue/boots/*/*.lmbatch"))))
    stage.check("nothing is left in the agents' queues", left == 0, f"{left} batches")


async def _indexed(stage: Stage, context: Context) -> None:
    """Has the reconciler look at everything, as after any crash: what a killed collector left out is derived."""
    mended = sum((await reconciler(context).audit()).repaired.values())
    keys = [info.key async for info in context.store.list(paths.ACCEPTED)]
    by_time = [info.key async for info in context.store.list(paths.ACCEPTED_BY_TIME)]
    stage.check("every accepted batch is indexed", len(by_time) >= len(keys), f"the reconciler mended {mended} entries")


async def _parked(stage: Stage, folder: Path, ours: Frame, standing: Frame) -> None:
    queue = folder / ours.identity.agent_id / "queue"
    parked = await asyncio.to_thread(lambda: Keeper(queue, lambda: 0).parked())
    hashes = [(one.submitted_frame_sha256, one.accepted_frame_sha256) for one in parked]
    held = hashes == [(ours.sha256, standing.sha256)]
    stage.check("the conflict is parked at its agent, with both hashes", held, f"{len(parked)} parked")


async def _repeat(stage: Stage, context: Context, client: httpx2.AsyncClient, folder: Path) -> None:
    """Sends an accepted batch once more, as an agent does whose answer was lost."""
    prefix = f"accepted/v1/agent={f'{folder.name}-01'.encode().hex()}/"
    keys = [info.key async for info in context.store.list(prefix)]
    manifest = msgspec.json.decode((await context.store.get(keys[0])).data)
    frame = (await context.store.get(manifest["raw_blob_key"])).data
    answer = await client.post(stage.gateway_url + UPLOAD, content=frame)
    duplicate = answer.status_code == 200 and answer.json().get("duplicate") is True
    after = [info.key async for info in context.store.list(prefix)]
    stage.check("a batch sent twice is accepted once", duplicate and after == keys, f"duplicate={duplicate}")
