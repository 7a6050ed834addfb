"""The deletion ledger: every verdict and the intent before it, so that a missing object can always be explained.

Intents are written before the first delete of a batch, verdicts after the last: an object that is gone has at least an
intent. Rows are immutable JSON lines under the bucket's name, in order of time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import groupby

import msgspec

from lakebed.clock import Clock
from lakebed.errors import Corrupt
from lakebed.ids import Ids
from lakebed.lifecycle.paths import ledger_folder, ledger_segment
from lakebed.lifecycle.state import LedgerRow
from lakebed.store.protocol import Store

_DECODER = msgspec.json.Decoder(LedgerRow)


class Ledger:
    def __init__(self, store: Store, clock: Clock, ids: Ids) -> None:
        self._store, self._clock, self._ids = store, clock, ids
        self._count = 0  # keeps segments of one instant in order

    async def append(self, rows: Sequence[LedgerRow]) -> None:
        """Stores the rows, one object per bucket. Raises what the store raises: without intents nothing is deleted."""
        for bucket, some in groupby(sorted(rows, key=lambda row: row.bucket), key=lambda row: row.bucket):
            data = b"".join(msgspec.json.encode(row) + b"\n" for row in some)
            self._count += 1
            name = f"{self._count:08d}-{self._ids.token()}"
            await self._store.create(ledger_segment(bucket, self._clock.now_ns(), name), data)

    async def rows(self, bucket: str, *, key: str | None = None, after_ns: int = 0) -> AsyncIterator[LedgerRow]:
        """The bucket's rows in order of time; only those of `key` when given. Raises Corrupt."""
        async for info in self._store.list(ledger_folder(bucket)):
            if int(info.key.rsplit("/", 1)[1][:20]) < after_ns:
                continue
            for row in decode((await self._store.get(info.key)).data, info.key):
                if key is None or row.key == key:
                    yield row


def decode(data: bytes, name: str) -> list[LedgerRow]:
    try:
        return [_DECODER.decode(line) for line in data.splitlines() if line]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{name!r} does not decode: {error}") from error
