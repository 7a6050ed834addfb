"""The newest verdicts of a bucket: found wherever they lie, without reading the whole ledger."""

from __future__ import annotations

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.lifecycle import ledger
from lakebed.lifecycle.ledger import DeletionLedger, LedgerMover
from lakebed.lifecycle.model import ActionKind, ObjectIdentity
from lakebed.lifecycle.state import LedgerRow, LifecycleState
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject
from lakebed.store.runtime import StoreRuntime


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
        self.ledger = DeletionLedger(StoreRuntime(clock=self.clock, ids=self.ids, metrics=Metrics(), store=self.store))
        self.count = 0

    async def append(self, count: int, bucket: str = "b") -> None:
        """So many segments, each of an intent and its verdict, a second apart."""
        for _ in range(count):
            at_ns = self.clock.now_ns()
            intent = LedgerRow(at_ns, "run", bucket, f"k{self.count}", "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                               ObjectIdentity(1, 1), "ORIGINAL")  # fmt: skip
            done = LedgerRow(at_ns + 1, "run", bucket, f"k{self.count}", "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                             ObjectIdentity(1, 1), "ORIGINAL", outcome="DELETED")  # fmt: skip
            await self.ledger.append([intent, done])
            self.count += 1
            await self.clock.advance(1.0)

    async def fold(self) -> int:
        return await LedgerMover(
            LifecycleState(StoreRuntime(clock=self.clock, ids=self.ids, metrics=Metrics(), store=self.store))
        ).run()

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
    monkeypatch.setattr(ledger, "SEGMENTS_READ_MAX", 20)
    capped = await book.latest(1000)

    assert ("k299", "DELETED") == last[-1]
    assert 5 == needed
    assert 40 == len(capped)
    assert ("k280", "") == capped[0]


async def test_the_newest_rows_are_found_where_files_overlap_in_time() -> None:
    """A file with one late row does not hide the rows of another that lie between."""
    book = Book()
    for times in ((1, 10), (5, 6)):
        rows = [
            LedgerRow(
                at_ns, "run", "b", f"k{at_ns}", "hash", ActionKind.EXPIRATION_DAYS, "DELETE", ObjectIdentity(1, 1), "s"
            )
            for at_ns in times
        ]
        await book.ledger.append(rows)
        await book.fold()

    assert ["k6", "k10"] == [key for key, _ in await book.latest(2)]
    assert ["k10"] == [key for key, _ in await book.latest(1)]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 9])
async def test_the_newest_rows_of_a_key_come_in_order_after_retention_wrote_a_file_again(limit: int) -> None:
    """Its rows stand behind those of younger files then; what is in segments still is the newest."""
    book = Book()
    for times in ((1, 20, 30), (40, 50), (60,)):
        rows = [
            LedgerRow(
                at_ns, "run", "b", "k", "hash", ActionKind.EXPIRATION_DAYS, "DELETE", ObjectIdentity(1, 1), f"s{at_ns}"
            )
            for at_ns in times
        ]
        await book.ledger.append(rows)
        if 60 not in times:
            await book.fold()
    await book.ledger._table.expire(10)

    assert [20, 30, 40, 50, 60][-limit:] == [row.at_ns for row in await book.ledger.of_key("b", "k", limit)]
    assert [] == await book.ledger.of_key("b", "other", limit)
