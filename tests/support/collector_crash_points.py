"""A process that forks one collector per crash point and has each killed at its own place.

Only this test's process wraps the store; nothing of it is in the collector itself. Crash point 2k+1 is before the
k-th call to the store, 2k+2 right behind it, before the collector hears of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from lakebed.batches.acceptor import Acceptor
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.core.settings import load
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.batch_frames import frame_of, submit


class Killing:
    """A store whose process dies at one of its calls."""

    def __init__(self, store: Any, point: int) -> None:
        self._store, self._point, self._calls = store, point, 0

    def __getattr__(self, verb: str) -> Any:
        async def call(*args: Any) -> Any:
            before, self._calls = 2 * self._calls + 1, self._calls + 1
            if before == self._point:
                os.kill(os.getpid(), signal.SIGKILL)
            result = await getattr(self._store, verb)(*args)
            if before + 1 == self._point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


async def upload(point: int) -> None:
    context = make_context(load(sections(), env=os.environ), role=f"doomed-{point}")
    store: Any = Killing(context.store, point)
    derived_writes = DerivedWrites(context.on(store), waiting_max=100)
    derived_writes.start()
    acceptor = Acceptor(
        context.on(store),
        derived_writes,
        collector_id=context.node,
        on_accepted=lambda accepted, submitted: None,
        accepting_max=10,
        known_max=10,
        timeout_s=30.0,
        retry_after_s=1.0,
    )
    answer = await acceptor.accept(submit(frame_of(agent=f"agent-{point}")))
    print(f"{point} answered {answer.duplicate}", flush=True)
    await derived_writes.drain()


if __name__ == "__main__":
    for number in range(1, int(sys.argv[1]) + 1):
        child = os.fork()
        if not child:
            asyncio.run(upload(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{number} {'killed' if os.WIFSIGNALED(status) else 'ended'}", flush=True)
