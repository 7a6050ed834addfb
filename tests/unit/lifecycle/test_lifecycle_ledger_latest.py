"""The newest verdicts of a bucket: found wherever they lie, without reading the whole ledger."""

from __future__ import annotations

import pytest

from lakebed.clock import ManualClock
from lakebed.ids import Ids
from lakebed.lifecycle import ledger as ledger_file
from lakebed.lifecycle.ledger import Ledger
from lakebed.lifecycle.ledger_table import Mover
from lakebed.lifecycle.model import ActionKind, Identity
from lakebed.lifecycle.shelf import Shelf
from lakebed.lifecycle.state import LedgerRow
from lakebed.metrics import Metrics
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject


class Watched(MemoryStore):
    """Counts what is read."""

    gets = 0

    async def get(self, key: str) -> StoredObject:
        self.gets += 1
        return await super().get(key)


class Book:
    def __init__(self) -> None:
        self.clock, self.ids = ManualClock(), Ids.seeded(1)
        self.store = Watched(clock=self.clock)
        self.ledger = Ledger(self.store, self.clock, self.ids)
        self.count = 0

    async def append(self, count: int, bucket: str = "b") -> None:
        """So many segments, each of an intent and its verdict, a second apart."""
        for _ in range(count):
            at_ns = self.clock.now_ns()
            intent = LedgerRow(at_ns, "run", bucket, f"k{self.count}", "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                               Identity(1, 1), "ORIGINAL")  # fmt: skip
            done = LedgerRow(at_ns + 1, "run", bucket, f"k{self.count}", "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                             Identity(1, 1), "ORIGINAL", outcome="DELETED")  # fmt: skip
            await self.ledger.append([intent, done])
            self.count += 1
            await self.clock.advance(1.0)

    async def fold(self) -> int:
        return await Mover(Shelf(self.store, clock=self.clock, ids=self.ids, metrics=Metrics())).run()

    async def latest(self, limit: int) -> list[tuple[str, str]]:
        return [(row.key, row.outcome) for row in await self.ledger.latest("b", limit)]


async def test_the_newest_rows_come_in_order_from_segments_and_the_table() -> None:
    """Some were moved, some not: the last ones are told, each once, and nothing of another bucket."""
    book = Book()
    await book.append(3)
    await book.fold()
    await book.append(3)
    await book.fold()
    await book.append(2)
    await book.append(1, bucket="other")

    few, more, all_of_them = await book.latest(3), await book.latest(7), await book.latest(100)

    whole = [(f"k{n}", outcome) for n in range(8) for outcome in ("", "DELETED")]
    assert whole[-3:] == few
    assert whole[-7:] == more
    assert whole == all_of_them


async def test_a_long_ledger_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many segments as are needed, and never more than the limit says, however many there are."""
    book = Book()
    await book.append(300)
    book.store.gets = 0

    last = await book.latest(10)
    needed = book.store.gets
    monkeypatch.setattr(ledger_file, "SEGMENTS_READ_MAX", 20)
    capped = await book.latest(1000)

    assert ("k299", "DELETED") == last[-1]
    assert 5 == needed
    assert 40 == len(capped)
    assert ("k280", "") == capped[0]
