"""Accepted batches for bulk readers: found through the index, read from their blobs, verified.

Offsets are acceptance times: `through_ns`, up to which everything indexed was returned, and `late_ms`, up to which the
reconciler's notes of late index entries were processed. A step ends `settle_s` before now, so that the index has caught
up with acceptance; a batch that is indexed later has such a note, and is returned then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from lakebed.batches import paths
from lakebed.batches.codec import arrow
from lakebed.batches.index import AcceptedIndex
from lakebed.batches.model import AcceptedByTime, Batch
from lakebed.batches.reader import read_frame, verified
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset, ahead, within
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.model import ObjectInfo, read_record
from lakebed.store.protocol import Store

SETTLE_S = 10.0  # twice the patience of a collector's derived writes
FOREVER_NS = 2**63 - 1
CHUNK = 256  # entries whose contents are read at once to see how many fit a limit


def open_feed(context: Context, options: Mapping[str, str]) -> BatchesFeed:
    """`start` and `end` (acceptance; ISO 8601 or nanoseconds; end exclusive) and `settle_s`.

    A negative `settle_s` is for a single read: everything that is indexed, whatever the clocks say.
    """
    start, end = options.get("start", ""), options.get("end", "")
    return BatchesFeed(
        context.store,
        now_ns=context.clock.now_ns,
        start_ns=moment_ns(start) if start else 0,
        end_ns=moment_ns(end) if end else FOREVER_NS,
        settle_s=float(options.get("settle_s", SETTLE_S)),
    )


class BatchesFeed:
    def __init__(
        self, store: Store, *, now_ns: Any, start_ns: int = 0, end_ns: int = FOREVER_NS, settle_s: float = SETTLE_S
    ) -> None:
        if start_ns >= end_ns:
            raise Invalid(f"the range from {start_ns} to {end_ns} is empty", hint="start must be before end")
        self._store, self._now_ns = store, now_ns
        self._index = AcceptedIndex(store)
        self._start_ns, self._end_ns, self._settle_ns = start_ns, end_ns, round(settle_s * 1e9)

    def schema(self) -> Any:
        import pyarrow as pa

        return pa.schema(
            [
                pa.field("agent_id", pa.string()),
                pa.field("boot_id", pa.string()),
                pa.field("seq", pa.int64()),
                pa.field("batch_id", pa.string()),
                pa.field("accepted_at", pa.timestamp("us", "UTC")),
                pa.field("metric", pa.string()),
                pa.field("labels", pa.map_(pa.string(), pa.string())),
                pa.field("time", pa.timestamp("us", "UTC")),
                pa.field("time_ns", pa.int64()),
                pa.field("value", pa.float64()),
                pa.field("kind", pa.string()),
            ]
        )

    async def begin(self) -> Offset:
        return {"through_ns": self._start_ns - 1, "late_ms": 0}

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        """With a limit, up to the last batch that fits it: batches of one instant stay together."""
        now_ns = self._now_ns()
        # A collector's clock may be ahead: an offset beyond now would pass over what others accept meanwhile.
        until_ns = min(now_ns - self._settle_ns if self._settle_ns >= 0 else FOREVER_NS, self._end_ns - 1)
        last_ns = start["through_ns"]
        # Notes first: a batch whose note exists now is in the index that is listed next. The youngest settle too: one
        # that is stored later may have the same time, which has the store's resolution, and would be passed over.
        settled_ms = (now_ns - self._settle_ns) // 1_000_000 if self._settle_ns >= 0 else FOREVER_NS
        notes = [
            (paths.parse_by_time(note.key)[1], note.modified_ms)
            async for note in self._notes(FOREVER_NS)
            if note.modified_ms <= settled_ms
        ]
        if self._settle_ns < 0 and not limit:
            last_ns = max(last_ns, until_ns)  # a single read lists once
        elif until_ns > last_ns:
            async for piece in self._fitting(self._indexed(last_ns + 1, until_ns), limit):
                last_ns = max(last_ns, paths.parse_by_time(piece.key)[1])
        late_ms = max((modified_ms for at_ns, modified_ms in notes if at_ns <= last_ns), default=0)
        return {"through_ns": last_ns, "late_ms": max(start["late_ms"], late_ms)}

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        from_ns = max(start["through_ns"] + 1, _ns(wanted.low.get("accepted_at"), 0))
        to_ns = min(end["through_ns"], _ns(wanted.high.get("accepted_at"), FOREVER_NS - 1000) + 999)
        found = [piece async for piece in self._indexed(from_ns, to_ns)]
        late = [
            paths.parse_by_time(note.key)[0]  # a note's name holds everything: its content is not read
            async for note in self._notes(start["through_ns"])
            if start["late_ms"] < note.modified_ms <= end["late_ms"]
        ]
        entries = await self._index.find(late)
        return [*found, *(_piece(name, entries.get(name)) for name in late)]

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        entry = await self.entry(piece)
        if not _wanted(entry, wanted):
            return None
        batch = verified(await read_frame(self._store, entry.place), entry.frame_sha256)
        if paths.accepted_key(batch.identity) != entry.accepted_manifest_key:
            raise Corrupt(f"blob {entry.frame_sha256} carries another identity than its manifest")
        return self._rows(batch, paths.parse_by_time(piece.key), columns)

    async def entry(self, piece: FeedSlice) -> AcceptedByTime:
        """The index entry of the piece's batch. Raises NotFound or Corrupt."""
        if piece.locator:
            return msgspec.json.decode(piece.locator, type=AcceptedByTime)
        return read_record(await self._store.get(piece.key), AcceptedByTime)  # a single object

    async def described(self, piece: FeedSlice) -> FeedSlice:
        if piece.locator:
            return piece
        try:
            return _piece(piece.id, await self.entry(piece))
        except (Corrupt, NotFound, Invalid):
            return piece

    def _rows(self, batch: Batch, named: tuple[str, int], columns: Sequence[str]) -> Any:
        import pyarrow as pa

        schema = self.schema()
        batch_id, accepted_ns = named
        made = {"kind": "kind_name"}
        arrays = []
        for name in columns:
            if name == "batch_id":
                arrays.append(pa.repeat(batch_id, batch.columns.samples))
            elif name == "accepted_at":
                moment = pa.scalar(accepted_ns // 1000, pa.timestamp("us", "UTC"))
                arrays.append(pa.repeat(moment, batch.columns.samples))
            else:
                arrays.append(arrow.column(batch, made.get(name, name)))
        return pa.record_batch(arrays, schema=pa.schema([schema.field(name) for name in columns]))

    async def _indexed(self, from_ns: int, to_ns: int) -> AsyncIterator[FeedSlice]:
        """Entries of the index with acceptance in [from_ns, to_ns], in order."""
        async for manifest_id, entry in self._index.entries(from_ns, to_ns):
            yield _piece(manifest_id, entry)

    async def _notes(self, through_ns: int) -> AsyncIterator[ObjectInfo]:
        """The reconciler's notes of batches accepted up to then."""
        async for info in self._store.list(ROLLUP_WORK):
            try:
                _, at_ns = paths.parse_by_time(info.key)
            except Invalid:
                continue
            if self._start_ns <= at_ns <= through_ns and at_ns < self._end_ns:
                yield info

    async def _fitting(self, listed: AsyncIterator[FeedSlice], limit: Limit) -> AsyncIterator[FeedSlice]:
        held: list[FeedSlice] = []
        async for piece in listed:
            if not limit:
                yield piece
                continue
            held.append(piece)
            if len(held) % CHUNK == 0 and len(await self._first(held, limit)) < len(held):
                break
        for piece in await self._first(held, limit):
            yield piece

    async def _first(self, held: list[FeedSlice], limit: Limit) -> list[FeedSlice]:
        if limit.by_content:
            held[:] = [piece async for piece in ahead(held, self.described)]
        return within(held, limit)


def _piece(manifest_id: str, entry: AcceptedByTime | None) -> FeedSlice:
    """A batch, with what the index says of it if that is read already. Raises Invalid when that names no batch."""
    key = paths.by_time_of(manifest_id)
    if entry is None:
        return FeedSlice(key, id=manifest_id)
    identity = paths.identity_of(entry.accepted_manifest_key)
    return FeedSlice(
        key,
        entry.samples,
        entry.frame_bytes,
        msgspec.json.encode(entry),
        manifest_id,
        f"{identity.agent_id}\0{identity.boot_id}",
        identity.seq_start,
        identity.seq_end,
    )


def moment_ns(text: str) -> int:
    """A moment as nanoseconds: a number of them, or ISO 8601 (UTC unless it says otherwise). Raises Invalid."""
    if text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{text!r} is not a time", hint="2026-11-15T12:00:00Z, or nanoseconds since 1970") from error
    return _ns(moment if moment.tzinfo else moment.replace(tzinfo=UTC), 0)


def _wanted(entry: AcceptedByTime, wanted: FeedFilter) -> bool:
    """Whether a batch may match, by its index entry: its agent and the times of its samples."""
    identity = paths.identity_of(entry.accepted_manifest_key)
    first_ns, last_ns = entry.first_time_unix_ns, entry.last_time_unix_ns
    return (
        wanted.takes("agent_id", identity.agent_id)
        and wanted.takes("boot_id", identity.boot_id)
        and wanted.may_hold("seq", identity.seq_start, identity.seq_end)
        and wanted.may_hold("time_ns", first_ns, last_ns)
        and wanted.may_hold("time", _moment(first_ns), _moment(last_ns))
    )


def _ns(moment: datetime | None, otherwise: int) -> int:
    """Exactly, to the microsecond: a float would lose the difference between neighbours."""
    if moment is None:
        return otherwise
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


def _moment(at_ns: int) -> datetime:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).replace(microsecond=at_ns // 1000 % 1_000_000)
