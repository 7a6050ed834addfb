"""The queue in the bucket: a few registers, one for each shard of the projects, changed by compare-and-swap.

Messages are small and few (one for each tick), so they are stored inside the registers; concurrent sends of one process
share a write. A project's messages are all in one shard, in order. No message expires.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import LakebedError, Overloaded
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths
from lakebed.ticks.model import TickMessage
from lakebed.ticks.queue import BATCH_MAX, QueueDepth, ReceivedMessage, encode

SCHEMA = "lakebed.tick-queue.v1"


class QueuedMessage(msgspec.Struct, frozen=True):
    """A message at rest or in flight. `receipt` changes with each receive, so that an old one is invalid."""

    message_id: str
    body: str
    sent_at_ms: int
    visible_at_ms: int
    receive_count: int = 0
    receipt: str = ""


class Shard(msgspec.Struct, frozen=True):
    schema: str = SCHEMA
    entries: tuple[QueuedMessage, ...] = ()
    dead: tuple[QueuedMessage, ...] = ()


def send(now: Shard, entry: QueuedMessage, *, messages_max: int) -> tuple[Shard, None]:
    if len(now.entries) + len(now.dead) >= messages_max:
        raise Overloaded(
            f"{messages_max} messages wait in this shard already",
            hint="check that a dispatcher runs: lakebed silver status",
        )
    return msgspec.structs.replace(now, entries=(*now.entries, entry)), None


def receive(
    now: Shard, receipts: tuple[str, ...], *, now_ms: int, hidden_ms: int, receives_max: int
) -> tuple[Shard, list[ReceivedMessage]]:
    """Delivers visible messages, oldest first, one per receipt; those received too often become dead letters."""
    left = list(receipts)
    kept: list[QueuedMessage] = []
    dead = list(now.dead)
    taken: list[ReceivedMessage] = []
    for entry in now.entries:
        if entry.visible_at_ms > now_ms:
            kept.append(entry)
        elif entry.receive_count >= receives_max:
            dead.append(msgspec.structs.replace(entry, receipt=""))
        elif left:
            entry = msgspec.structs.replace(
                entry,
                visible_at_ms=now_ms + hidden_ms,
                receive_count=entry.receive_count + 1,
                receipt=left.pop(0),
            )
            kept.append(entry)
            taken.append(received(entry))
        else:
            kept.append(entry)
    if not taken and len(dead) == len(now.dead):
        return now, []
    return msgspec.structs.replace(now, entries=tuple(kept), dead=tuple(dead)), taken


def delete(now: Shard, receipt: str) -> tuple[Shard, None]:
    kept = tuple(entry for entry in now.entries if entry.receipt != receipt)
    return (now if len(kept) == len(now.entries) else msgspec.structs.replace(now, entries=kept)), None


def hide(now: Shard, receipt: str, *, until_ms: int) -> tuple[Shard, None]:
    if all(entry.receipt != receipt for entry in now.entries):
        return now, None
    moved = tuple(
        msgspec.structs.replace(entry, visible_at_ms=until_ms) if entry.receipt == receipt else entry
        for entry in now.entries
    )
    return msgspec.structs.replace(now, entries=moved), None


def replay(now: Shard, message_ids: frozenset[str], *, now_ms: int) -> tuple[Shard, int]:
    back = [
        msgspec.structs.replace(entry, receive_count=0, receipt="", visible_at_ms=now_ms)
        for entry in now.dead
        if entry.message_id in message_ids
    ]
    if not back:
        return now, 0
    dead = tuple(entry for entry in now.dead if entry.message_id not in message_ids)
    return msgspec.structs.replace(now, entries=(*now.entries, *back), dead=dead), len(back)


def received(entry: QueuedMessage) -> ReceivedMessage:
    return ReceivedMessage(entry.message_id, entry.receipt, entry.body, entry.receive_count, entry.sent_at_ms)


class BucketQueue:
    def __init__(
        self,
        runtime: StoreRuntime,
        *,
        shards: int,
        visibility_timeout_s: int,
        receives_max: int,
        messages_max: int,
    ) -> None:
        self._visibility_ms = visibility_timeout_s * 1000
        self._receives_max, self._messages_max = receives_max, messages_max
        self._clock, self._ids = runtime.clock, runtime.ids
        self._next = -1
        self._shards = [self._register(runtime, n) for n in range(shards)]

    @staticmethod
    def _register(runtime: StoreRuntime, shard: int) -> Register[Shard]:
        return Register(runtime, paths.queue(shard), Shard, Shard(), name="tick_queue")

    async def send(self, message: TickMessage) -> str:
        home = zlib.crc32(f"{message.org_id}/{message.project_id}".encode()) % len(self._shards)
        now = now_ms(self._clock)
        entry = QueuedMessage(self._ids.uuid(), encode(message), now, now)
        await self._shards[home].change(lambda shard: send(shard, entry, messages_max=self._messages_max))
        return entry.message_id

    async def receive(self, count: int = BATCH_MAX) -> Sequence[ReceivedMessage]:
        """A shard that fails keeps no other's messages back: its error is raised when there are none."""
        taken: list[ReceivedMessage] = []
        failed: LakebedError | None = None
        self._next += 1  # no shard is always the last
        for turn in range(len(self._shards)):
            number = (self._next + turn) % len(self._shards)
            receipts = tuple(f"{number}.{self._ids.token()}" for _ in range(count - len(taken)))
            if not receipts:
                break
            try:
                taken += await self._shards[number].change(
                    lambda shard, receipts=receipts: receive(  # type: ignore[misc]
                        shard,
                        receipts,
                        now_ms=now_ms(self._clock),
                        hidden_ms=self._visibility_ms,
                        receives_max=self._receives_max,
                    )
                )
            except LakebedError as error:
                failed = error
        if failed is not None and not taken:
            raise failed
        return taken

    async def delete(self, receipt: str) -> None:
        await self._home(receipt).change(lambda shard: delete(shard, receipt))

    async def hide(self, receipt: str, seconds: int) -> None:
        until_ms = now_ms(self._clock) + seconds * 1000
        await self._home(receipt).change(lambda shard: hide(shard, receipt, until_ms=until_ms))

    async def depth(self) -> QueueDepth:
        now = now_ms(self._clock)
        found = [(await register.read()).value for register in self._shards]
        entries = [entry for shard in found for entry in shard.entries]
        waiting = sum(entry.visible_at_ms <= now for entry in entries)
        return QueueDepth(waiting, len(entries) - waiting, sum(len(shard.dead) for shard in found))

    async def dead_letters(self, count: int = 100) -> Sequence[ReceivedMessage]:
        found = [(await register.read()).value for register in self._shards]
        return [received(entry) for shard in found for entry in shard.dead][:count]

    async def replay(self, count: int = 100, *, tick_id: str = "") -> int:
        chosen = frozenset(
            letter.message_id
            for letter in await self.dead_letters(count if not tick_id else self._messages_max * len(self._shards))
            if not tick_id or letter.is_of(tick_id)
        )
        return sum(
            [
                await register.change(lambda shard: replay(shard, chosen, now_ms=now_ms(self._clock)))
                for register in self._shards
            ]
        )

    def _home(self, receipt: str) -> Register[Shard]:
        number = receipt.partition(".")[0]
        return self._shards[int(number) % len(self._shards) if number.isascii() and number.isdigit() else 0]
