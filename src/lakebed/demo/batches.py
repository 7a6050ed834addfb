"""Dozens of agents, two collectors, one killed in the middle, duplicates and a conflict: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import Accepted, read_record
from lakebed.batches.raw import verified
from lakebed.batches.workers import reconciler
from lakebed.context import Context
from lakebed.demo.stage import Stage
from lakebed.embedded.child import Child
from lakebed.errors import Unavailable
from lakebed.frame.codec import columns_of, encode
from lakebed.frame.model import Identity, Kind, Sample

if TYPE_CHECKING:
    import httpx2

TITLE = "Agents and collectors: active-active ingest"
NEXT = ("lakebed batches conflicts", "lakebed batches gc --dry-run", "lakebed bench batches --quick")

AGENTS = 24
BATCHES = 8  # by each agent
SAMPLES = 50  # in each batch
TRIES_MAX = 60


class Fleet:
    """Simulated agents: each sends its batches in order, to either collector, until it hears 200 or 409."""

    def __init__(self, stage: Stage, context: Context, clients: list[httpx2.AsyncClient]) -> None:
        self._stage, self._context, self._clients = stage, context, clients
        self._boot = context.ids.uuid()
        self.acknowledged: dict[str, str] = {}  # hash → what the agent was told
        self.fresh = self.duplicates = self.conflicts = self.retries = 0

    async def run(self, name: str, batches: int) -> None:
        for number in range(batches):
            frame = self.frame(name, number)
            await self.send(frame, number)
            if number % 3 == 0:
                await self.send(frame, number + 1)  # an agent that did not hear its answer sends again

    def frame(self, agent: str, number: int, shift: float = 0.0) -> bytes:
        start = number * SAMPLES
        now_ns = self._context.clock.now_ns()
        samples = [
            Sample("demo_temperature", now_ns - n * 1_000_000, 20 + shift + n % 7, Kind.GAUGE, {"site": agent})
            for n in range(SAMPLES)
        ]
        return encode(Identity(agent, self._boot, start, start + SAMPLES - 1), columns_of(samples))

    async def send(self, frame: bytes, lane: int) -> int:
        import httpx2

        for attempt in range(TRIES_MAX):
            client = self._clients[(lane + attempt) % len(self._clients)]
            try:
                answer = await client.post("/v1/batches", content=frame)
            except httpx2.HTTPError:  # killed, or its answer lost: the same bytes to the other
                self.retries += 1
                await self._context.clock.sleep(0.05)
                continue
            if answer.status_code == 200:
                duplicate = msgspec.json.decode(answer.content)["duplicate"]
                self.duplicates += duplicate
                self.fresh += not duplicate
                self.acknowledged[hashlib.sha256(frame).hexdigest()] = "200"
                return 200
            if answer.status_code == 409:
                self.conflicts += 1
                return 409
            self.retries += 1
            await self._context.clock.sleep(0.2)
        raise Unavailable(f"a batch was not taken in {TRIES_MAX} tries")


async def play(stage: Stage) -> None:
    import httpx2

    context = stage.context("demo-batches")
    doomed, first = await stage.gateway("collector-doomed", parts=("batches",))
    _, second = await stage.gateway("collector-steady", parts=("batches",))
    agents, batches = stage.scaled(AGENTS), stage.scaled(BATCHES)
    stage.tell(f"{agents} agents send {batches} batches each to two collectors; one is killed with -9 half-way")
    async with (
        httpx2.AsyncClient(base_url=first, timeout=30.0) as one,
        httpx2.AsyncClient(base_url=second, timeout=30.0) as other,
    ):
        fleet = Fleet(stage, context, [one, other])
        killing = asyncio.create_task(_kill_half_way(doomed, fleet, agents * batches // 2, context))
        await asyncio.gather(*(fleet.run(f"demo-agent-{n:02d}", batches) for n in range(agents)))
        await killing
        clash = await fleet.send(fleet.frame("demo-agent-00", 0, shift=5.0), 1)
        conflicts = msgspec.json.decode((await other.get("/v1/batches/conflicts?open=1")).content)
        await _judge(stage, context, fleet, agents * batches, clash, conflicts)


async def _kill_half_way(doomed: Child, fleet: Fleet, enough: int, context: Context) -> None:
    while len(fleet.acknowledged) < enough:
        await context.clock.sleep(0.01)
    doomed.kill()


async def _judge(
    stage: Stage, context: Context, fleet: Fleet, sent: int, clash: int, conflicts: list[dict[str, object]]
) -> None:
    repaired = (await reconciler(context).audit()).repaired
    manifests = [
        read_record(await context.store.get(info.key), Accepted)
        async for info in context.store.list(paths.ACCEPTED)
        if paths.identity_of(info.key).agent_id.startswith("demo-agent-")
    ]
    mine = [manifest for manifest in manifests if manifest.frame_sha256 in fleet.acknowledged]
    samples = 0
    for manifest in mine:
        batch = verified((await context.store.get(manifest.raw_blob_key)).data, manifest.frame_sha256)
        samples += batch.columns.samples
    told = f"{len(fleet.acknowledged)} acknowledged, {fleet.retries} tries failed on the way"
    stage.check("every batch was taken although a collector died", len(fleet.acknowledged) == sent, told)
    counted = f"{len(mine)} manifests, {samples:,} of {sent * SAMPLES:,} samples read back by hash"
    stage.check("nothing acknowledged is lost", len(mine) == sent and samples == sent * SAMPLES, counted)
    once = len({manifest.identity for manifest in mine}) == len(mine)
    stage.check("nothing is accepted twice", once and fleet.duplicates > 0, f"{fleet.duplicates} duplicates were told")
    hashes = {(row["record"]["accepted_frame_sha256"], row["record"]["submitted_frame_sha256"]) for row in conflicts}  # type: ignore[index]
    seen = clash == 409 and any(theirs in fleet.acknowledged for theirs, _ in hashes)
    stage.check("other bytes under one identity are a conflict", seen, "409, both hashes kept for an operator")
    listed = {paths.manifest_id(manifest.identity, manifest.accepted_at_unix_ns) for manifest in mine}
    indexed = {paths.parse_by_time(info.key)[0] async for info in context.store.list(paths.ACCEPTED_BY_TIME)}
    stage.check("every index is whole", listed <= indexed, f"the reconciler mended {sum(repaired.values())} entries")
