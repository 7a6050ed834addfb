"""A small table without Spark: Parquet through the store, committed like every other table.

For a part that writes a few megabytes at a time. Any Delta reader reads it; Spark may write to it at the same time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Overloaded
from lakebed.delta import history
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import DataFile, Snapshot, TableSpec, key_of
from lakebed.delta.stats import measured
from lakebed.store.runtime import StoreRuntime

if TYPE_CHECKING:
    import pyarrow as pa

RACES_MAX = 30  # commits that others may make before ours gives up


class PlainTable:
    def __init__(self, runtime: StoreRuntime, spec: TableSpec) -> None:
        self.spec, self._store, self._clock, self._ids = spec, runtime.store, runtime.clock, runtime.ids
        self._known: Snapshot | None = None

    async def snapshot(self) -> Snapshot:
        """The table as it is now; version -1 when it was never written."""
        self._known = await history.snapshot(self._store, self.spec.root, known=self._known)
        return self._known

    async def write(self, rows: pa.Table) -> DataFile:
        """Stores the rows as one file under a fresh name. An orphan until a commit names it."""
        data, metadata = _parquet(rows)
        path = f"part-{self._ids.uuid()}.parquet"
        await self._store.create(f"{self.spec.root}/{path}", data)
        found = measured(rows, metadata, (*self.spec.keys, *self.spec.stats))
        return DataFile(path, len(data), rows.num_rows, {}, found.low, found.high, found.nulls, found.text)

    async def read(self, file: DataFile, *, where: Any = None) -> pa.Table:
        """The rows of one file; `where` is an expression of pyarrow. Raises NotFound when vacuum has deleted it."""
        data = (await self._store.get(key_of(self.spec.root, file.path))).data
        return _rows(data, where)

    async def commit(self, plan: Callable[[Snapshot], Commit | None]) -> Snapshot:
        """Creates the next version as planned on the last; plans again on what won a race. None changes nothing."""
        attempt = self._ids.token()
        for _ in range(RACES_MAX):
            state = await self.snapshot()
            planned = plan(state)
            if planned is None:
                return state
            if state.version == -1:
                planned = msgspec.structs.replace(planned, spec=self.spec, table_id=self._ids.uuid())
            planned.check(state, self.spec.name)
            number = state.version + 1
            data = encode(planned, attempt_id=attempt, now_ms=now_ms(self._clock), version=number, note=state.note)
            try:
                await self._store.create(log_key(self.spec.root, number), data)
            except AlreadyExists:
                continue
            self._known = await history.committed(self._store, self.spec.root, state, data)
            return self._known
        raise Overloaded(f"table {self.spec.name} was committed to by others {RACES_MAX} times")


def schema_json(columns: Sequence[tuple[str, str]]) -> str:
    """The schema string of nullable columns, each a name and a type of Delta's."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns]
    return msgspec.json.encode({"type": "struct", "fields": fields}).decode()


def _parquet(rows: pa.Table) -> tuple[bytes, Any]:
    """The file, and what its writer says of its columns."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    metadata: list[Any] = []
    pq.write_table(rows, sink, compression="zstd", coerce_timestamps="us", metadata_collector=metadata)
    return sink.getvalue(), metadata[0]


def _rows(data: bytes, where: Any) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(io.BytesIO(data), filters=where)
