"""The deletion ledger: every verdict and the intent before it, so that a missing object can always be explained.

Intents are written before the first delete of a batch, verdicts after the last: an object that is gone has at least an
intent. Rows are immutable JSON lines under the bucket's name, in order of time; now and then they are moved into a
table (`ledger_table.py`), and are found here wherever they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import groupby

import msgspec

from lakebed.clock import Clock
from lakebed.errors import NotFound
from lakebed.ids import Ids
from lakebed.lifecycle.ledger_table import LedgerTable, decode
from lakebed.lifecycle.paths import LEDGER, ledger_folder, ledger_segment
from lakebed.lifecycle.state import LedgerRow
from lakebed.store.protocol import Store


class Ledger:
    def __init__(self, store: Store, clock: Clock, ids: Ids) -> None:
        self._store, self._clock, self._ids = store, clock, ids
        self._table = LedgerTable(store, clock=clock, ids=ids)
        self._count = 0  # keeps segments of one instant in order

    async def append(self, rows: Sequence[LedgerRow]) -> None:
        """Stores the rows, one object per bucket. Raises what the store raises: without intents nothing is deleted."""
        for bucket, some in groupby(sorted(rows, key=lambda row: row.bucket), key=lambda row: row.bucket):
            data = b"".join(msgspec.json.encode(row) + b"\n" for row in some)
            self._count += 1
            name = f"{self._count:08d}-{self._ids.token()}"
            await self._store.create(ledger_segment(bucket, self._clock.now_ns(), name), data)

    async def rows(self, bucket: str, *, key: str | None = None, after_ns: int = 0) -> AsyncIterator[LedgerRow]:
        """The bucket's rows, those of the table first, each part in order of time. Raises Corrupt.

        Segments are listed before the table is read, so a move meanwhile hides nothing and doubles nothing.
        """
        segments = [info.key async for info in self._store.list(ledger_folder(bucket))]
        moved: set[str] = set()
        async for segment, row in self._table.rows(bucket, key=key, after_ns=after_ns):
            moved.add(segment)
            yield row
        late: set[str] = set()
        for segment in segments:
            name = segment.removeprefix(LEDGER)
            if name in moved or int(segment.rsplit("/", 1)[1][:20]) < after_ns:
                continue
            try:
                found = decode((await self._store.get(segment)).data, segment)
            except NotFound:  # moved since we listed it
                late.add(name)
                continue
            for row in found:
                if key is None or row.key == key:
                    yield row
        if late:
            async for segment, row in self._table.rows(bucket, key=key, after_ns=after_ns):
                if segment in late:
                    yield row
