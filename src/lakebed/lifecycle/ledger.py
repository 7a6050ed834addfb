"""The deletion ledger: every verdict and the intent before it, so that a missing object can always be explained.

Intents are written before the first delete of a batch, verdicts after the last: an object that is gone has at least an
intent. Rows are immutable JSON lines under the bucket's name, in order of time; now and then they are moved into a
table (`ledger_table.py`), and are found here wherever they are.
"""

from __future__ import annotations

from collections import deque
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

SEGMENTS_READ_MAX = 200  # for the newest rows


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

    async def latest(self, bucket: str, limit: int) -> list[LedgerRow]:
        """The bucket's newest rows, in order of time. However long the ledger is, at most SEGMENTS_READ_MAX of its
        segments and a few files of its table are read. Raises Corrupt.

        Segments come first: one that is moved meanwhile is in the table when that is read, and is told once.
        """
        segments = deque[str](maxlen=SEGMENTS_READ_MAX)
        async for info in self._store.list(ledger_folder(bucket)):
            segments.append(info.key)
        found: list[tuple[str, LedgerRow]] = []
        read: set[str] = set()
        for segment in reversed(segments):
            if len(found) >= limit:
                break
            name = segment.removeprefix(LEDGER)
            try:
                found += [(name, row) for row in decode((await self._store.get(segment)).data, segment)]
            except NotFound:  # moved since we listed it
                continue
            read.add(name)
        if len(found) < limit:
            found += [one for one in await self._table.latest(bucket, limit) if one[0] not in read]
        return [row for _, row in sorted(found, key=lambda one: (one[1].at_ns, one[0]))[-limit:]]
