"""The queue's worker: sweeps every queue and sets its gauges."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.core.context import Context, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.settings import QueueSettings

log = logger("queue")


def workers(context: Context) -> Sequence[Worker]:
    return [Worker("queue-maintenance", QueueMaintenance(context).run)]


class QueueMaintenance:
    """Sweeps every queue of the bucket. Several may run: each step is safe beside itself."""

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
        """One round over all queues; a queue that fails is logged and does not block the others."""
        for name in await queue_names(self._context.store, self._settings):
            if name not in self._queues:
                self._queues[name] = Queue.of(self._context, name)
            try:
                await self._sweep(self._queues[name])
            except LakebedError as error:
                log.warning("queue could not be swept", queue=name, error=error.message)

    async def _sweep(self, queue: Queue) -> None:
        status = await queue.status()
        idle = (status.done_age_s or 0.0) > queue.settings.horizon_s  # fewer than the threshold, but old
        for shard in await queue.shards():
            if status.done >= queue.settings.done_cleanup_threshold or idle:
                await shard.sweeper.sweep_done()
            await shard.sweeper.sweep_orphans()
