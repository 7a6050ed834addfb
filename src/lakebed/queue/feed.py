"""A queue read in bulk, beside its collectors: sequences are the offsets. Nothing is claimed or acked.

Batches that are done and swept cannot be read here: to read a whole queue, read it before it is drained. `index` is an
entry's position in its batch, so (`sequence`, `index`) identifies one entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset, within
from lakebed.queue import codec, paths
from lakebed.queue.roles import Queue

SEQUENCE_MAX = 2**63 - 1


class PendingFeedBatch(msgspec.Struct, frozen=True):
    """One pending batch, as a piece of the feed."""

    sequence: int
    location: str
    enqueued_ms: int


def open_feed(context: Context, options: Mapping[str, str]) -> QueueFeed:
    """`queue` (the default one unless named), `start` and `end` (sequences; end exclusive)."""
    queue = Queue.of(context, options.get("queue", paths.DEFAULT))
    start, end = (_sequence(name, options.get(name, "")) for name in ("start", "end"))
    return QueueFeed(queue, start=start or 1, end=end or SEQUENCE_MAX)


class QueueFeed:
    def __init__(self, queue: Queue, *, start: int = 1, end: int = SEQUENCE_MAX) -> None:
        self._queue, self._start, self._end = queue, start, end

    def schema(self) -> Any:
        import pyarrow as pa

        return pa.schema(
            [
                pa.field("queue", pa.string()),
                pa.field("sequence", pa.int64()),
                pa.field("index", pa.int32()),
                pa.field("time", pa.timestamp("us", "UTC")),
                pa.field("key", pa.binary()),
                pa.field("value", pa.binary()),
            ]
        )

    async def begin(self) -> Offset:
        return {"sequence": self._start - 1}

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        pieces = await self.slices(start, {"sequence": self._end - 1}, FeedFilter())
        last = max((_batch_of(piece).sequence for piece in within(pieces, limit)), default=0)
        return {"sequence": max(last, start["sequence"])}

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        first = max(start["sequence"] + 1, wanted.low.get("sequence", 0))
        last = min(end["sequence"], wanted.high.get("sequence", SEQUENCE_MAX))
        found = []
        async for location, entry in self._queue.producer.pending(first):
            if entry.sequence > last:
                break
            if wanted.takes("sequence", entry.sequence):
                encoded = msgspec.json.encode(PendingFeedBatch(entry.sequence, location, entry.enqueued_ms))
                found.append(FeedSlice(location, entry.count, entry.size_bytes, encoded))
        return sorted(found, key=lambda piece: _batch_of(piece).sequence)

    async def described(self, piece: FeedSlice) -> FeedSlice:
        return piece

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        import pyarrow as pa

        batch, schema = _batch_of(piece), self.schema()
        data = (await self._queue.store.get(batch.location)).data
        entries = codec.decode(data, bytes_max=self._queue.settings.batch_bytes_max)
        count = len(entries)
        made = {
            "queue": lambda: pa.repeat(self._queue.name, count),
            "sequence": lambda: pa.repeat(pa.scalar(batch.sequence, pa.int64()), count),
            "index": lambda: pa.array(range(count), pa.int32()),
            "time": lambda: pa.repeat(pa.scalar(batch.enqueued_ms * 1000, pa.timestamp("us", "UTC")), count),
            "key": lambda: pa.array([entry.key for entry in entries], pa.binary()),
            "value": lambda: pa.array([entry.value for entry in entries], pa.binary()),
        }
        return pa.record_batch([made[name]() for name in columns], schema=pa.schema([schema.field(n) for n in columns]))


def _batch_of(piece: FeedSlice) -> PendingFeedBatch:
    return msgspec.json.decode(piece.locator, type=PendingFeedBatch)


def _sequence(name: str, text: str) -> int:
    if text and (not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > SEQUENCE_MAX):
        raise Invalid(f"option {name}: {text[:40]!r} is not a sequence", hint=f"a number from 1 to {SEQUENCE_MAX}")
    return int(text or 0)
