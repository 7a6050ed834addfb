"""The store scenario: conditional writes hold, racing processes lose no update, a killed lease holder is replaced.

Run as a program (`python -m lakebed.store.demo …`), it is one of the processes that the scenario starts and kills.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Fenced, Unavailable
from lakebed.core.settings import load
from lakebed.demo.metrics import counting
from lakebed.demo.scenario import ScenarioContext, exited
from lakebed.embedded.child import Child
from lakebed.store import prover
from lakebed.store.connect import connect
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.register import Register
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections

TITLE = "One bucket, verified"
NEXT = ("lakebed doctor", "lakebed sim --seed 7 --steps 500")

RACERS = 3
TAKEOVER_S = 20.0


async def play(stage: ScenarioContext) -> None:
    context = stage.context()
    await _prove(stage, context)
    await _race(stage, context)
    await _take_over(stage, context)


async def _prove(stage: ScenarioContext, context: Context) -> None:
    settings = stage.settings.of(StoreSettings)
    racers = [connect(settings, context) for _ in range(4)]
    proof = await prover.prove(racers, context, rounds=2)
    for finding in proof.findings:
        stage.check(finding.name.replace("_", " "), finding.held, finding.seen)


async def _race(stage: ScenarioContext, context: Context) -> None:
    key, each = f"demo/{context.ids.token()}/tally.json", stage.scaled(10)
    stage.report(f"{RACERS} processes count to {each} in one object, all at once")
    racers = [
        stage.process(f"racer-{n}", ["lakebed.store.demo", "count", key, f"racer-{n}", str(each)])
        for n in range(RACERS)
    ]
    ended = [await exited(racer, 120.0) for racer in racers]
    counts = (await tally(context, key).read()).value.counts
    held = ended == [0] * RACERS and counts == {f"racer-{n}": each for n in range(RACERS)}
    stage.check("no update is lost", held, f"{sum(counts.values())} of {RACERS * each} counted")


async def _take_over(stage: ScenarioContext, context: Context) -> None:
    key = f"demo/{context.ids.token()}/lease.json"
    owner = stage.process("owner", ["lakebed.store.demo", "hold", key, "owner"])
    first = await _held_epoch(owner, context)
    owner.kill()
    stage.fault(f"the holder of a lease (epoch {first}) was killed with -9; another process waits for its expiry")
    successor = Lease(context, key, owner="successor", lease_s=5.0, skew_s=0.2)
    began = context.clock.monotonic_s()
    held = await _acquire(successor, context)
    waited = context.clock.monotonic_s() - began
    stage.check(
        "a dead lease holder is replaced", held.epoch > first, f"epoch {first} → {held.epoch} after {waited:.1f} s"
    )
    stage.check(
        "a late lease holder is fenced", await _late_is_fenced(context, held), "its write under the old epoch failed"
    )


async def _late_is_fenced(context: Context, held: HeldLease) -> bool:
    guarded = tally(context, f"demo/{context.ids.token()}/guarded.json")
    await guarded.change(lambda now: (type(now)({"successor": 1}), None), epoch=held.epoch)
    try:
        await guarded.change(lambda now: (type(now)({"owner": 1}), None), epoch=held.epoch - 1)
    except Fenced:
        return (await guarded.read()).value.counts == {"successor": 1}
    return False


async def _held_epoch(owner: Child, context: Context) -> int:
    deadline = context.clock.monotonic_s() + 30.0
    while context.clock.monotonic_s() < deadline and owner.running():
        for line in owner.tail().splitlines():
            if line.startswith("held "):
                return int(line.split()[1])
        await context.clock.sleep(0.05)
    raise Unavailable(f"the process never took its lease:\n{owner.tail()}")


async def _acquire(lease: Lease, context: Context) -> HeldLease:
    deadline = context.clock.monotonic_s() + TAKEOVER_S
    while True:
        try:
            return await lease.acquire()
        except HeldByAnother:
            if context.clock.monotonic_s() > deadline:
                raise
            await context.clock.sleep(0.2)


class Tally(msgspec.Struct, frozen=True):
    """How often each racer has counted."""

    counts: dict[str, int] = {}


def tally(context: Context, key: str) -> Register[Tally]:
    return Register(context, key, Tally, Tally(), name="demo")


async def count(context: Context, key: str, name: str, times: int) -> None:
    register = tally(context, key)

    def one_more(now: Tally) -> tuple[Tally, None]:
        return Tally({**now.counts, name: now.counts.get(name, 0) + 1}), None

    for _ in range(times):
        await register.change(one_more)


async def hold(context: Context, key: str, name: str, lease_s: float = 2.0) -> None:
    """Takes the lease, prints its epoch on stdout and holds it until killed."""
    lease = Lease(context, key, owner=name, lease_s=lease_s, skew_s=0.2)
    held = await lease.acquire()
    print(f"held {held.epoch}", flush=True)
    while True:
        await context.clock.sleep(0.5)
        held = await lease.renew(held)


if __name__ == "__main__":
    role, where, who, *rest = sys.argv[1:]
    process = make_context(load(sections(), env=os.environ), role=who)
    work = count(process, where, who, int(rest[0])) if role == "count" else hold(process, where, who, *map(float, rest))
    asyncio.run(counting(process, work))
