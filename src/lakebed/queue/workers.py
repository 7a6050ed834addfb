"""What runs beside the gateway: clean-up and sweep of every queue, and the gauges that show how they stand."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.context import Context, Worker
from lakebed.errors import LakebedError
from lakebed.logs import logger
from lakebed.queue.queue import Queue, names
from lakebed.queue.settings import QueueSettings
from lakebed.traces import traced

log = logger("queue")


def workers(context: Context) -> Sequence[Worker]:
    return [Worker("queue-keeper", Keeper(context).run)]


class Keeper:
    """Keeps every queue of the bucket tidy. Several may run: each step is safe beside itself."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queues: dict[str, Queue] = {}
        self._settings = context.settings.of(QueueSettings)

    async def run(self) -> None:
        while True:
            await self.round()
            await self._context.clock.sleep(self._settings.sweep_interval_s)

    @traced("queue round")
    async def round(self) -> None:
        """One round over all queues; a queue that fails is logged and does not hold up the others."""
        for name in await names(self._context.store, self._settings):
            if name not in self._queues:
                self._queues[name] = Queue.of(self._context, name)
            try:
                await self._keep(self._queues[name])
            except LakebedError as error:
                log.warning("a queue could not be kept tidy", queue=name, error=error.message)

    async def _keep(self, queue: Queue) -> None:
        status = await queue.status()
        idle = (status.done_age_s or 0.0) > queue.settings.horizon_s  # too few for a clean-up, but they wait for long
        if status.done >= queue.settings.done_cleanup_threshold or idle:
            await queue.cleaner.clean()
        await queue.sweeper.sweep()
