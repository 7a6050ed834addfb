"""The ledger as a table: segments are moved into `tables/lifecycle/ledger`, which every engine can query.

A move is planned durably, committed once under its number, and only then are its segments deleted: whatever dies in
between, every row is in the segments or in the table, and in the table at most once. Rows of a file are sorted by
bucket and key, so that asking about one key opens few files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.clock import Clock
from lakebed.delta import vacuum
from lakebed.delta.log import Commit, overlapping
from lakebed.delta.model import Batch, DataFile, Snapshot, TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.errors import Corrupt, NotFound
from lakebed.ids import Ids
from lakebed.lifecycle import paths
from lakebed.lifecycle.model import ActionKind, Identity
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import Fold, LedgerRow
from lakebed.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION = "lifecycle-ledger"
SEGMENTS_MAX = 1000  # moved at once: some 100,000 rows, a few megabytes
FILES_MAX = 16  # files of less than SMALL_ROWS before a move takes them along
SMALL_ROWS = 100_000
FILES_READ_MAX = 8  # of one look at the newest rows
SWEEP_EVERY = 64  # moves between two sweeps of the table's folder
PLANNED = "PLANNED"  # the outcome of an intent
COLUMNS = (
    ("at", "timestamp"),
    ("bucket", "string"),
    ("key", "string"),
    ("version_id", "string"),
    ("upload_id", "string"),
    ("rule_id", "string"),
    ("rule_hash", "string"),
    ("kind", "string"),
    ("verb", "string"),
    ("outcome", "string"),
    ("reason", "string"),
    ("stream", "string"),
    ("run", "string"),
    ("at_ns", "long"),
    ("due_at_ns", "long"),
    ("mtime_ns", "long"),
    ("size", "long"),
    ("head_fid", "string"),
    ("extended_hash", "string"),
    ("segment", "string"),
)
_DECODER = msgspec.json.Decoder(LedgerRow)
SPEC = TableSpec("lifecycle/ledger", schema_json(COLUMNS), stats=("bucket", "key", "at_ns"))


class LedgerTable:
    def __init__(self, store: Store, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._table = PlainTable(store, SPEC, clock=clock, ids=ids)

    async def rows(
        self, bucket: str, *, key: str | None = None, after_ns: int = 0
    ) -> AsyncIterator[tuple[str, LedgerRow]]:
        """The bucket's rows, file by file, each with the segment it came from; only those of `key` when given."""
        import pyarrow.compute as pc

        state = await self._table.snapshot()
        files = overlapping(state.files, "bucket", bucket, bucket)
        where = pc.field("bucket") == bucket
        if key is not None:
            files = overlapping(files, "key", key, key)
            where = where & (pc.field("key") == key)
        if after_ns:
            where = where & (pc.field("at_ns") >= after_ns)
        for file in files:
            found = await self._table.read(file, where=where)
            for row in sorted(found.to_pylist(), key=lambda row: (row["at_ns"], row["segment"])):
                yield row["segment"], row_of(row)

    async def latest(self, bucket: str, limit: int) -> list[tuple[str, LedgerRow]]:
        """The bucket's newest rows, each with its segment, of at most FILES_READ_MAX files; in no order."""
        import pyarrow.compute as pc

        files = overlapping((await self._table.snapshot()).files, "bucket", bucket, bucket)
        found: list[tuple[str, LedgerRow]] = []
        for file in sorted(files, key=_newest_ns, reverse=True)[:FILES_READ_MAX]:
            if len(found) >= limit and _newest_ns(file) <= sorted(row.at_ns for _, row in found)[-limit]:
                break
            rows = (await self._table.read(file, where=pc.field("bucket") == bucket)).sort_by("at_ns")
            found += [(row["segment"], row_of(row)) for row in rows.slice(max(0, len(rows) - limit)).to_pylist()]
        return found

    async def holds(self, number: int) -> bool:
        """Whether this move was committed."""
        return (await self._table.snapshot()).applied.get(APPLICATION, -1) >= number

    async def take(self, number: int, segments: Sequence[str]) -> None:
        """Commits the rows of these segments as one move, once. Raises Corrupt for a segment that does not decode."""
        rows: list[tuple[str, LedgerRow]] = []
        for segment in segments:
            try:
                stored = await self._store.get(segment)
            except NotFound:  # another has finished the same move: the commit below will see it
                continue
            rows += [(segment, row) for row in decode(stored.data, segment)]
        state = await self._table.snapshot()
        small = [file for file in state.files if file.rows < SMALL_ROWS]
        along = small if len(small) >= FILES_MAX else []
        made = await self._table.write(await self._together(rows, along))

        def commit(state: Snapshot) -> Commit | None:
            if state.applied.get(APPLICATION, -1) >= number:
                return None
            return Commit("WRITE", (made,), tuple(along), Batch(APPLICATION, number), rows_inserted=len(rows))

        await self._table.commit(commit)

    async def _together(self, rows: Sequence[tuple[str, LedgerRow]], along: Sequence[DataFile]) -> pa.Table:
        import pyarrow as pa

        old = [await self._table.read(file) for file in along]
        return pa.concat_tables([*old, arrow(rows)]).sort_by([(name, "ascending") for name in ("bucket", "key", "at")])


class Mover:
    """Moves segments into the table; several may run, a lease only saves them from doing the same."""

    def __init__(self, shelf: Shelf) -> None:
        self._store, self._clock, self._plan = shelf.store, shelf.clock, shelf.fold
        self._table = LedgerTable(shelf.store, clock=shelf.clock, ids=shelf.ids)

    async def run(self) -> int:
        """Moves the segments there are, up to a limit; gives how many. Safe to cut off and to run twice."""
        plan = await self._planned()
        if plan.segments and not await self._table.holds(plan.number):
            await self._table.take(plan.number, plan.segments)
        for segment in plan.segments:
            await self._store.delete(segment)

        def done(known: Fold) -> Fold:
            return msgspec.structs.replace(known, segments=()) if known.number == plan.number else known

        if plan.segments:
            await self._plan.change(changed(done))
            if plan.number % SWEEP_EVERY == 0:  # files that were put together, and what a move left that died
                await vacuum.sweep(self._store, SPEC.root, clock=self._clock)
        return len(plan.segments)

    async def _planned(self) -> Fold:
        known = (await self._plan.read()).value
        if known.segments:
            return known
        found: list[str] = []
        for bucket in await self._store.children(paths.LEDGER):
            async for info in self._store.list(paths.ledger_folder(bucket)):
                if len(found) >= SEGMENTS_MAX:
                    break
                found.append(info.key)
        if not found:
            return known

        def begin(known: Fold) -> Fold:
            return known if known.segments else Fold(number=known.number + 1, segments=tuple(found))

        return await self._plan.change(changed(begin))


def _newest_ns(file: DataFile) -> float:
    """Of its rows; a file without bounds may hold the newest."""
    return float(file.high.get("at_ns", "inf"))


def decode(data: bytes, name: str) -> list[LedgerRow]:
    """The rows of a segment. Raises Corrupt, naming it."""
    try:
        return [_DECODER.decode(line) for line in data.splitlines() if line]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{name!r} does not decode: {error}") from error


def arrow(rows: Sequence[tuple[str, LedgerRow]]) -> pa.Table:
    """Rows with their segments, in the table's columns."""
    import pyarrow as pa

    kinds = {"timestamp": pa.timestamp("us", tz="UTC"), "string": pa.string(), "long": pa.int64()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS])
    return pa.Table.from_pylist([_flat(segment, row) for segment, row in rows], schema=schema)


def _flat(segment: str, row: LedgerRow) -> dict[str, Any]:
    told = {name: getattr(row, name) for name, _ in COLUMNS if hasattr(row, name)}
    told |= msgspec.structs.asdict(row.identity)
    told |= {"at": row.at_ns // 1000, "kind": row.kind.value, "outcome": row.outcome or PLANNED}
    return told | {"segment": segment.removeprefix(paths.LEDGER)}


def row_of(told: dict[str, Any]) -> LedgerRow:
    """A row as it was in its segment."""
    mine = {name: told[name] for name in LedgerRow.__struct_fields__ if name in told}
    identity = Identity(told["mtime_ns"], told["size"], told["head_fid"], told["extended_hash"])
    outcome = "" if told["outcome"] == PLANNED else told["outcome"]
    return LedgerRow(**mine | {"identity": identity, "kind": ActionKind(told["kind"]), "outcome": outcome})
