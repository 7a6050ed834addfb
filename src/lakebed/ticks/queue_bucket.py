"""The queue in the bucket: a few registers, one for each shard of the projects, changed by compare-and-swap.

Messages are small and few (one for each tick), so they lie inside the registers; sends of one process that meet are
one write. A project's messages are all in one shard, in order. Nothing expires: a message is deleted or a dead letter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from lakebed.clock import Clock, now_ms
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register
from lakebed.ticks import paths, queueing
from lakebed.ticks.model import Message
from lakebed.ticks.queue import BATCH_MAX, Depth, Received, encode
from lakebed.ticks.queueing import Entry, Shard


class BucketQueue:
    def __init__(
        self,
        store: Store,
        *,
        shards: int,
        visibility_timeout_s: int,
        receives_max: int,
        messages_max: int,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
    ) -> None:
        self._visibility_ms = visibility_timeout_s * 1000
        self._receives_max, self._messages_max = receives_max, messages_max
        self._clock, self._ids = clock, ids
        self._next = 0
        self._shards = [
            Register(store, paths.queue(n), Shard, Shard(), clock=clock, ids=ids, metrics=metrics, name="tick_queue")
            for n in range(shards)
        ]

    async def send(self, message: Message) -> str:
        home = zlib.crc32(f"{message.org_id}/{message.project_id}".encode()) % len(self._shards)
        now = now_ms(self._clock)
        entry = Entry(self._ids.uuid(), encode(message), now, now)
        await self._shards[home].change(lambda shard: queueing.send(shard, entry, messages_max=self._messages_max))
        return entry.message_id

    async def receive(self, count: int = BATCH_MAX) -> Sequence[Received]:
        taken: list[Received] = []
        for turn in range(len(self._shards)):
            number = (self._next + turn) % len(self._shards)
            receipts = tuple(f"{number}.{self._ids.token()}" for _ in range(count - len(taken)))
            if receipts:
                taken += await self._shards[number].change(
                    lambda shard, receipts=receipts: queueing.receive(  # type: ignore[misc]
                        shard,
                        receipts,
                        now_ms=now_ms(self._clock),
                        hidden_ms=self._visibility_ms,
                        receives_max=self._receives_max,
                    )
                )
        self._next += 1  # no shard is always the last to be asked
        return taken

    async def delete(self, receipt: str) -> None:
        await self._home(receipt).change(lambda shard: queueing.delete(shard, receipt))

    async def hide(self, receipt: str, seconds: int) -> None:
        until_ms = now_ms(self._clock) + seconds * 1000
        await self._home(receipt).change(lambda shard: queueing.hide(shard, receipt, until_ms=until_ms))

    async def depth(self) -> Depth:
        now = now_ms(self._clock)
        found = [(await register.read()).value for register in self._shards]
        entries = [entry for shard in found for entry in shard.entries]
        waiting = sum(entry.visible_at_ms <= now for entry in entries)
        return Depth(waiting, len(entries) - waiting, sum(len(shard.dead) for shard in found))

    async def dead_letters(self, count: int = 100) -> Sequence[Received]:
        found = [(await register.read()).value for register in self._shards]
        return [queueing.look(entry) for shard in found for entry in shard.dead][:count]

    async def redrive(self, count: int = 100, *, tick_id: str = "") -> int:
        chosen = frozenset(
            letter.message_id
            for letter in await self.dead_letters(count if not tick_id else self._messages_max * len(self._shards))
            if not tick_id or letter.is_of(tick_id)
        )
        return sum(
            [
                await register.change(lambda shard: queueing.redrive(shard, chosen, now_ms=now_ms(self._clock)))
                for register in self._shards
            ]
        )

    def _home(self, receipt: str) -> Register[Shard]:
        number = receipt.partition(".")[0]
        return self._shards[int(number) % len(self._shards) if number.isdigit() else 0]
