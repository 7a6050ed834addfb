"""The deletion ledger: every verdict and the intent before it, so that a missing object can always be explained.

Intents are written before the first delete of a batch, verdicts after the last: an object that is gone has at least an
intent. Rows are immutable JSON lines under the bucket's name, in order of time. Every `fold_s` their segments are moved
into the table `tables/lifecycle/ledger`, which every engine can query; `DeletionLedger` reads both.

A move is planned durably, committed once under its number, and only then are its segments deleted: after a crash at any
point every row is in the segments or in the table, and in the table at most once. Rows of a file are sorted by bucket
and key, so that a query for one key opens few files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.errors import Corrupt, NotFound
from lakebed.delta import cleanup, vacuum
from lakebed.delta.log import Commit, overlapping
from lakebed.delta.model import DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.lifecycle import paths
from lakebed.lifecycle.events import expiration_events
from lakebed.lifecycle.model import ActionKind, ObjectIdentity
from lakebed.lifecycle.paths import LEDGER, ledger_folder, ledger_segment
from lakebed.lifecycle.state import Fold, LedgerRow, LifecycleState, changed
from lakebed.store.runtime import StoreRuntime

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION = "lifecycle-ledger"
SEGMENTS_MAX = 1000  # moved at once: some 100,000 rows, a few megabytes
FILES_MAX = 16  # files of less than SMALL_ROWS before a move takes them along
SMALL_ROWS = 100_000
FILES_READ_MAX = 8  # of one look at the newest rows
SWEEP_EVERY = 64  # moves between two sweeps of the table's folder
EXPIRE_NS = 24 * 3600 * 1_000_000_000  # longest time between two looks for rows past their retention
EXPIRE_PARTS = 20  # of the retention: how long a row may stay beyond it
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
SEGMENTS_READ_MAX = 200  # for the newest rows


class LedgerTable:
    def __init__(self, runtime: StoreRuntime) -> None:
        self._store = runtime.store
        self._table = PlainTable(runtime, SPEC)

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
        small = [file for file in (await self._table.snapshot()).files if file.rows < SMALL_ROWS]
        if len(small) < FILES_MAX or not await self._commit(number, rows, small):
            await self._commit(number, rows, ())

    async def _commit(self, number: int, rows: Sequence[tuple[str, LedgerRow]], along: Sequence[DataFile]) -> bool:
        """Commits the move with the rows of these files, unless it was committed. False when one of them is gone from
        the table since: retention removed its rows, and they must not come back.
        """
        made = await self._table.write(await self._together(rows, along))
        names, complete = {file.path for file in along}, True

        def commit(state: Snapshot) -> Commit | None:
            nonlocal complete
            if state.applied.get(APPLICATION, -1) >= number:
                return None
            complete = names <= {file.path for file in state.files}
            batch = WriteBatch(APPLICATION, number)
            return Commit("WRITE", (made,), tuple(along), batch, rows_inserted=len(rows)) if complete else None

        await self._table.commit(commit)
        return complete

    async def expire(self, before_ns: int, *, slack_ns: int = 0) -> int:
        """Removes rows older than this. Files of old rows only go whole; one with rows that are older by more than
        `slack_ns` is written again without them. Returns how many rows went.
        """
        import pyarrow.compute as pc

        state = await self._table.snapshot()
        old = [file for file in state.files if _oldest_ns(file) < before_ns - slack_ns]
        made: list[DataFile] = []
        for file in old:
            if _newest_ns(file) >= before_ns:
                kept = await self._table.read(file, where=pc.field("at_ns") >= before_ns)
                made += [await self._table.write(kept)] if len(kept) else []
        gone = 0
        if old:
            names = {file.path for file in old}

            def commit(state: Snapshot) -> Commit | None:
                """A move that took one of these files along meanwhile has its rows; the next pass removes them."""
                nonlocal gone
                there = names <= {file.path for file in state.files}
                gone = sum(file.rows for file in old) - sum(file.rows for file in made) if there else 0
                return Commit("DELETE", tuple(made), tuple(old)) if there else None

            await self._table.commit(commit)
        return gone

    async def _together(self, rows: Sequence[tuple[str, LedgerRow]], along: Sequence[DataFile]) -> pa.Table:
        import pyarrow as pa

        old = [await self._table.read(file) for file in along]
        return pa.concat_tables([*old, arrow(rows)]).sort_by([(name, "ascending") for name in ("bucket", "key", "at")])


Publish = Callable[[Sequence[bytes]], Awaitable[None]]


class LedgerMover:
    """Moves segments into the table. Several may run; a lease only saves duplicate work.

    With `publish`, the events of their deletions are published before the move: at least once. While that raises,
    nothing is moved, so no event is lost. Rows older than `keep_ns` leave the table; 0 keeps them forever.
    """

    def __init__(self, state: LifecycleState, *, publish: Publish | None = None, keep_ns: int = 0) -> None:
        self._publish, self._keep_ns, self._expired_ns = publish, keep_ns, 0
        self._store, self._clock, self._plan = state.store, state.clock, state.fold
        self._table = LedgerTable(state.runtime)

    async def run(self) -> int:
        """Moves the present segments, up to a limit; returns how many. Safe to interrupt and to run twice."""
        plan = await self._planned()
        if plan.segments and not await self._table.holds(plan.number):
            await self._announce(plan.segments)
            await self._table.take(plan.number, plan.segments)
        for segment in plan.segments:
            await self._store.delete(segment)

        def done(known: Fold) -> Fold:
            return msgspec.structs.replace(known, segments=()) if known.number == plan.number else known

        if plan.segments:
            await self._plan.change(changed(done))
            if plan.number % SWEEP_EVERY == 0:  # files that were merged, and what an interrupted move left
                await vacuum.sweep(self._store, SPEC.root, clock=self._clock)
                await cleanup.clean(self._store, SPEC.root, clock=self._clock)
        await self._expire()
        return len(plan.segments)

    async def _announce(self, segments: Sequence[str]) -> None:
        if self._publish is None:
            return
        for segment in segments:
            try:
                stored = await self._store.get(segment)
            except NotFound:  # another has finished the same move
                continue
            if events := expiration_events(segment.removeprefix(LEDGER), decode(stored.data, segment)):
                await self._publish(events)

    async def _expire(self) -> None:
        now_ns = self._clock.now_ns()
        if self._keep_ns and now_ns - self._expired_ns >= min(EXPIRE_NS, self._keep_ns // EXPIRE_PARTS):
            self._expired_ns = now_ns
            await self._table.expire(now_ns - self._keep_ns, slack_ns=self._keep_ns // EXPIRE_PARTS)

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


def _oldest_ns(file: DataFile) -> float:
    return float(file.low.get("at_ns", "-inf"))


def _newest_ns(file: DataFile) -> float:
    """Of its rows; a file without bounds may hold the newest."""
    return float(file.high.get("at_ns", "inf"))


def _at_ns(row: LedgerRow) -> int:
    return row.at_ns


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
    flat = {name: getattr(row, name) for name, _ in COLUMNS if hasattr(row, name)}
    flat |= msgspec.structs.asdict(row.identity)
    flat |= {"at": row.at_ns // 1000, "kind": row.kind.value, "outcome": row.outcome or PLANNED}
    return flat | {"segment": segment.removeprefix(paths.LEDGER)}


def row_of(flat: dict[str, Any]) -> LedgerRow:
    """A row as it was in its segment."""
    mine = {name: flat[name] for name in LedgerRow.__struct_fields__ if name in flat}
    identity = ObjectIdentity(flat["mtime_ns"], flat["size"], flat["head_fid"], flat["extended_hash"])
    outcome = "" if flat["outcome"] == PLANNED else flat["outcome"]
    return LedgerRow(**mine | {"identity": identity, "kind": ActionKind(flat["kind"]), "outcome": outcome})


class DeletionLedger:
    def __init__(self, runtime: StoreRuntime) -> None:
        self._store, self._clock, self._ids = runtime.store, runtime.clock, runtime.ids
        self._table = LedgerTable(runtime)
        self._count = 0  # keeps segments of one instant in order

    async def append(self, rows: Sequence[LedgerRow]) -> None:
        """Stores the rows, one object per bucket. Raises what the store raises: without intents nothing is deleted."""
        for bucket, some in groupby(sorted(rows, key=lambda row: row.bucket), key=lambda row: row.bucket):
            data = b"".join(msgspec.json.encode(row) + b"\n" for row in some)
            self._count += 1
            name = f"{self._count:08d}-{self._ids.token()}"
            await self._store.create(ledger_segment(bucket, self._clock.now_ns(), name), data)

    async def rows(self, bucket: str, *, key: str | None = None, after_ns: int = 0) -> AsyncIterator[LedgerRow]:
        """The bucket's rows, those of the table first; each file and each segment in order of time. Raises Corrupt.

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

    async def of_key(self, bucket: str, key: str, limit: int = 0) -> list[LedgerRow]:
        """The newest rows of one key, in order of time; all of them without a limit. Raises Corrupt.

        Files overlap in time, and one that retention has written again stands behind younger ones.
        """
        found: list[LedgerRow] = []
        async for row in self.rows(bucket, key=key):
            found.append(row)
            if limit and len(found) >= 2 * limit:
                found = sorted(found, key=_at_ns)[-limit:]
        return sorted(found, key=_at_ns)[-limit:]

    async def latest(self, bucket: str, limit: int) -> list[LedgerRow]:
        """The bucket's newest rows, in order of time. However long the ledger is, at most SEGMENTS_READ_MAX of its
        segments and a few files of its table are read. Raises Corrupt.

        Segments come first: one that is moved meanwhile is in the table when that is read, and is returned once.
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
