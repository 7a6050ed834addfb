"""Supervision of workers: one that fails, or returns, is restarted after a pause; the others keep running.

The pause grows with each failure, up to a cap, and starts small again after a worker has run for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.core.context import Context, Health, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger

PAUSE_BASE_S = 0.5
PAUSE_CAP_S = 30.0
STEADY_S = 60.0  # a worker that ran this long has recovered: its next pause starts small again
DOWN_AFTER = 5  # failures in a row after which a worker is down, not degraded

log = logger("work")


class WorkerSupervisor:
    """Runs one worker, restarts it after a failure, and knows its health."""

    def __init__(self, worker: Worker, context: Context) -> None:
        self.name = worker.name
        self._worker = worker
        self._clock, self._ids = context.clock, context.ids
        self._restarts = context.metrics.counter("lakebed_worker_restarts_total").labels(worker=worker.name)
        self._failures = 0
        self._last = ""
        self._running = False
        self._started_s = 0.0

    async def keep(self) -> None:
        """Runs and restarts the worker until cancelled."""
        while True:
            self._started_s = self._clock.monotonic_s()
            self._running = True
            self._last = await self._once()
            if self._steady():
                self._failures = 0
            self._running = False
            pause_s = self._ids.jitter_s(self._failures, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S) + PAUSE_BASE_S
            self._failures += 1
            await self._clock.sleep(pause_s)
            self._restarts.inc()

    async def health(self) -> Health:
        """Ok while it runs and has not failed lately; degraded after a failure, down after several in a row."""
        if not self._failures or self._steady():
            return Health("ok")
        state = "running again" if self._running else "waiting for its restart"
        detail = f"{state} after {self._failures} failures: {self._last}"
        return Health("down" if self._failures >= DOWN_AFTER else "degraded", detail)

    def _steady(self) -> bool:
        return self._running and self._clock.monotonic_s() - self._started_s >= STEADY_S

    async def _once(self) -> str:
        try:
            await self._worker.run()
        except LakebedError as error:
            log.error("worker failed", worker=self.name, code=error.code, error=error.message, hint=error.hint)
            return error.message
        except Exception as error:
            log.error("worker failed", worker=self.name, error=type(error).__name__, exc_info=error)
            return type(error).__name__
        log.warning("worker returned", worker=self.name)
        return "it returned"


class SupervisedWorkers:
    """All worker supervisors as one component: started together, cancelled together."""

    name = "workers"
    reads = ()
    writes = ()

    def __init__(self, supervisors: Sequence[WorkerSupervisor]) -> None:
        self._supervisors = supervisors
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(supervisor.keep(), name=supervisor.name) for supervisor in self._supervisors]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def health(self) -> Health:
        ended = [task.get_name() for task in self._tasks if task.done()]
        return Health("down", f"no supervisor for {', '.join(ended)}") if ended else Health("ok")
