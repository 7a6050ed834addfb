"""Large and hostile bytes: a part never is in memory whole, and no footer, however made, is anything but refused."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import AsyncIterator

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.ticks import verification
from lakebed.ticks.model import BadManifest, TickId
from lakebed.ticks.receiver import Receiver
from support.tick_fixtures import context_of, parquet

MIB = 1024 * 1024
PART = 48 * MIB


class Sink(MemoryStore):
    """Takes uploads as a bucket does: piece by piece, keeping none."""

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        self.size = 0
        async for chunk in chunks:
            self.size += len(chunk)
        return ObjectInfo(key, self.size, '"etag"')


async def test_a_part_is_never_whole_in_memory() -> None:
    """48 MiB stream through with a few hundred KiB in progress."""
    piece = bytes(256 * 1024)
    sha256 = hashlib.sha256(piece * (PART // len(piece))).hexdigest()
    store = Sink(clock=SystemClock())
    context: Context = context_of(store)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(PART // len(piece)):
            yield bytes(256 * 1024)

    tracemalloc.start()
    stored = await Receiver(context).put(TickId("o", "p", "t"), 1, sha256, body())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (PART, PART) == (stored.size_bytes, store.size)
    assert peak < 4 * MIB


def test_damaged_footers_are_refused_and_nothing_else() -> None:
    """Cut anywhere, bits flipped, numbers that lie: a typed refusal, or a footer that decodes."""
    whole, dice = parquet(range(100)), random.Random(7)
    tail = whole[-(int.from_bytes(whole[-8:-4], "little") + 8) :]
    refused = 0
    for _ in range(2000):
        damaged = bytearray(tail)
        for _ in range(dice.randint(1, 8)):
            damaged[dice.randrange(len(damaged) - 8)] = dice.randrange(256)
        if dice.random() < 0.3:
            damaged = damaged[dice.randrange(len(damaged) - 8) :]
        try:
            verification.decode_footer(bytes(damaged))
        except BadManifest as error:
            refused += 1
            assert "not_parquet" == error.detail["error_class"]

    assert refused > 200
