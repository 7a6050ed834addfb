"""Works through the exceptions of one action whose instant has come; each goes when it is resolved, or is stale."""

from __future__ import annotations

from lakebed.lifecycle import troubles
from lakebed.lifecycle.engine import CompiledAction
from lakebed.lifecycle.model import StreamKind
from lakebed.lifecycle.resolver import Resolver, Work
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.shelf import Shelf
from lakebed.lifecycle.state import PendingItem, Stream


class Drainer:
    def __init__(self, resolver: Resolver, shelf: Shelf, settings: LifecycleSettings) -> None:
        self._resolver, self._shelf, self._settings = resolver, shelf, settings
        self._size = shelf.metrics.gauge("lakebed_lifecycle_pending_size")

    async def next_due(self, action: CompiledAction) -> int | None:
        """When the next item is due; None when nothing waits or the drain is blocked."""
        name = str(action.ref.key)
        log = await self._resolver.pending.load(action.ref)
        self._size.labels(bucket=action.ref.bucket, action=name).set(len(log.items))
        if not log.items:
            return None
        held = (await self._shelf.troubles.read()).value
        blocked = troubles.blocks(held, StreamKind.PENDING, bucket=action.ref.bucket, action=name)
        return None if blocked else log.next_due_ns

    async def run(self, action: CompiledAction) -> None:
        """Drains what is due, up to the first item that cannot be resolved now."""
        due = (await self._resolver.pending.load(action.ref)).due(self._shelf.clock.now_ns())
        for first in range(0, len(due), self._settings.batch):
            items = due[first : first + self._settings.batch]
            answers = await self._resolver.settle([self._work(action, item) for item in items])
            done = [item.id for item, answer in zip(items, answers, strict=True) if answer.resolved]
            await self._resolver.pending.remove(action.ref, done)
            if len(done) < len(items):
                break

    def _work(self, action: CompiledAction, item: PendingItem) -> Work:
        """Everything is looked at anew: an item whose object has changed is resolved by what stands there now."""
        stream = Stream(
            StreamKind.PENDING,
            bucket=action.ref.bucket,
            action=str(action.ref.key),
            key=item.key,
            version_id=item.version_id,
            upload_id=item.upload_id,
        )
        return Work(stream, action.ref.bucket, item.key, (action,), item.upload_id)
