"""A process that forks one roller per crash point, each in a folder of its own, and has each killed behind a request.

Only this test's process wraps the store; nothing of it is in the roller itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pyarrow.compute  # noqa: F401  loaded once, before the forks

from lakebed.batches.model import Sample
from lakebed.core.clock import SystemClock
from lakebed.core.settings import load
from lakebed.store.connect import PrefixedStore
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.collector_crash_points import Killing
from support.rollup_fixtures import accept, frame, make_roller

HOUR_NS = 1_760_000_400_000_000_000


def samples(agent: int) -> list[Sample]:
    return [Sample("cpu", HOUR_NS + n * 10**10, agent + n / 10, labels={"c": str(n % 2)}) for n in range(20)]


class Listing(Killing):
    """Lists as it is, and dies at everything else."""

    def list(self, *args: Any, **kwargs: Any) -> Any:
        return self._store.list(*args, **kwargs)


async def roll(point: int) -> None:
    context = make_context(load(sections(), env=os.environ), role=f"doomed-{point}")
    store = PrefixedStore(context.store, f"point-{point}")
    clock = SystemClock()
    await accept(store, frame("a0", 0, samples(0)), clock.now_ns() - 10**9)
    await accept(store, frame("a1", 0, samples(1)), clock.now_ns() - 7200 * 10**9, late=True)
    doomed: Any = Listing(store, 2 * point)
    await make_roller(doomed, clock).run()


if __name__ == "__main__":
    for number in range(1, int(sys.argv[1]) + 1):
        child = os.fork()
        if not child:
            asyncio.run(roll(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{number} {'killed' if os.WIFSIGNALED(status) else 'ended'}", flush=True)
