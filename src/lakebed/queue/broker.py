"""The stateless broker: one ingestor per queue, shared by all remote producers, so that their appends are grouped.

It holds nothing that was acknowledged: an answer is sent only when the entries are durable. It can be killed at any
time, and any number may run beside each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lakebed.context import Context
from lakebed.errors import Overloaded
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import Durable, KeyValueEntry
from lakebed.queue.queue import Queue
from lakebed.queue.settings import QueueSettings


class Broker:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(QueueSettings)
        self._open: OrderedDict[str, tuple[Queue, Ingestor]] = OrderedDict()  # least recently used first

    @property
    def queues(self) -> list[str]:
        return list(self._open)

    def queue(self, name: str) -> Queue:
        """A queue to look at; nothing is opened for it. Raises Invalid for what is not a name."""
        return self._open[name][0] if name in self._open else Queue.of(self._context, name)

    async def put(self, name: str, entries: Sequence[KeyValueEntry]) -> Durable:
        """Enqueues the entries, together with those of other callers; returns when they are durable.

        Raises Invalid, or Overloaded at once where an ingestor would wait: a remote producer can wait better.
        """
        ingestor = await self._ingestor(name)
        if ingestor.unflushed_bytes > self._settings.max_unflushed_bytes:
            raise Overloaded(f"queue {name}: {ingestor.unflushed_bytes} bytes are not durable yet", retry_after_s=1.0)
        watcher = await ingestor.ingest(entries)
        return await watcher.await_durable()

    async def close(self) -> None:
        """Makes everything durable that was taken in."""
        while self._open:
            _, (_, ingestor) = self._open.popitem()
            await ingestor.close()

    async def _ingestor(self, name: str) -> Ingestor:
        if name not in self._open:
            queue = Queue.of(self._context, name)
            await self._make_room()
            self._open.setdefault(name, (queue, queue.ingestor()))
        self._open.move_to_end(name)
        return self._open[name][1]

    async def _make_room(self) -> None:
        if len(self._open) < self._settings.queues_max:
            return
        for name, (_, ingestor) in self._open.items():
            if ingestor.unflushed_bytes == 0:
                del self._open[name]
                await ingestor.close()
                return
        raise Overloaded(f"{len(self._open)} queues are busy, the limit is {self._settings.queues_max}")
