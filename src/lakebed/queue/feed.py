"""A queue for whoever reads it in bulk, beside its collectors: sequences are the offsets. Nothing is claimed or acked.

What a collector has finished and cleaned up is gone from here too: a queue that is to be read whole is read before it
is drained. Entries keep their place in their batch (`index`), so (`sequence`, `index`) names one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lakebed.context import Context
from lakebed.errors import Invalid
from lakebed.feed import Limit, Offset, Piece, Wanted, within
from lakebed.queue import codec, paths
from lakebed.queue.queue import Queue

SEQUENCE_MAX = 2**63 - 1


class Place(msgspec.Struct, frozen=True):
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
        pieces = await self.pieces(start, {"sequence": self._end - 1}, Wanted())
        last = max((_place(piece).sequence for piece in within(pieces, limit)), default=0)
        return {"sequence": max(last, start["sequence"])}

    async def pieces(self, start: Offset, end: Offset, wanted: Wanted) -> list[Piece]:
        manifest = await self._queue.producer.read()
        first = max(start["sequence"] + 1, wanted.low.get("sequence", 0))
        last = min(end["sequence"], wanted.high.get("sequence", SEQUENCE_MAX))
        found = []
        for location in manifest.pending:
            entry = manifest.entries[location]
            if first <= entry.sequence <= last and wanted.takes("sequence", entry.sequence):
                told = msgspec.json.encode(Place(entry.sequence, location, entry.enqueued_ms))
                found.append(Piece(location, entry.count, entry.size_bytes, told))
        return sorted(found, key=lambda piece: _place(piece).sequence)

    async def described(self, piece: Piece) -> Piece:
        return piece

    async def load(self, piece: Piece, columns: Sequence[str], wanted: Wanted) -> Any:
        import pyarrow as pa

        place, schema = _place(piece), self.schema()
        data = (await self._queue.store.get(place.location)).data
        entries = codec.decode(data, bytes_max=self._queue.settings.batch_bytes_max)
        count = len(entries)
        made = {
            "queue": lambda: pa.repeat(self._queue.name, count),
            "sequence": lambda: pa.repeat(pa.scalar(place.sequence, pa.int64()), count),
            "index": lambda: pa.array(range(count), pa.int32()),
            "time": lambda: pa.repeat(pa.scalar(place.enqueued_ms * 1000, pa.timestamp("us", "UTC")), count),
            "key": lambda: pa.array([entry.key for entry in entries], pa.binary()),
            "value": lambda: pa.array([entry.value for entry in entries], pa.binary()),
        }
        return pa.record_batch([made[name]() for name in columns], schema=pa.schema([schema.field(n) for n in columns]))


def _place(piece: Piece) -> Place:
    return msgspec.json.decode(piece.told, type=Place)


def _sequence(name: str, text: str) -> int:
    if text and not text.isdigit():
        raise Invalid(f"option {name}: {text!r} is no sequence")
    return int(text or 0)
