"""A small process that the store's scenario starts several times and kills: `python -m lakebed.store.demo_racer …`."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from lakebed.core.context import Context
from lakebed.core.settings import load
from lakebed.demo.metrics import counting
from lakebed.store.lease import Lease
from lakebed.store.register import Register
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections


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
    asyncio.run(counting(process.metrics, process.clock, work))
