"""Acceptance on this disk, for a single collector: a batch is accepted once its record is fsynced in the spool.

Concurrent uploads share one fsync. Duplicates and conflicts are told from what this spool has seen; the bucket says the
last word when a batch is landed. Until then a batch is served to private queries from the spool.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from lakebed.batches import acceptance
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Won, store_conflict, write_blob
from lakebed.batches.model import Accepted, Answer
from lakebed.batches.raw import ANY_FRAME
from lakebed.batches.segments import HEAD, Record, Segments, pack
from lakebed.clock import Clock
from lakebed.errors import Corrupt, Invalid, LakebedError, Overloaded, Unavailable
from lakebed.frame.codec import decode, peek
from lakebed.frame.model import Batch, Identity
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store

SEGMENT_BYTES_MAX = 64 * 1024 * 1024
GROUP_MAX = 1_000  # uploads that share one fsync
QUARANTINE_TIMEOUT_S = 5.0

log = logger("batches")


class Spooled(msgspec.Struct, frozen=True):
    accepted: Accepted
    record: Record


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    data: bytes
    done: asyncio.Future[tuple[int, int]]


class Spool:
    """The local spool: `accept` as the bucket's acceptor does, `unlanded` for queries, `take`/`landed` for landing."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        collector_id: str,
        won: Won,
        bytes_max: int,
        known_max: int,
        retry_after_s: float,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
    ) -> None:
        self._segments = Segments(folder)
        self._store, self._collector_id, self._won = store, collector_id, won
        self._bytes_max, self._known_max, self._retry_after_s = bytes_max, known_max, retry_after_s
        self._clock, self._ids = clock, ids
        self._held: dict[Identity, Spooled] = {}  # fsynced, not landed
        self._arriving: dict[Identity, asyncio.Future[tuple[int, int]]] = {}
        self._known: OrderedDict[Identity, Accepted] = OrderedDict()  # landed
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._bytes = 0
        self._gauges = (metrics.gauge("lakebed_batches_spool_bytes"), metrics.gauge("lakebed_batches_spool_batches"))
        outcomes = metrics.counter("lakebed_batches_uploads_total")
        self._outcomes = {name: outcomes.labels(outcome=name) for name in ("accepted", "duplicate", "conflict")}

    async def open(self) -> int:
        """Takes up what an earlier run left; returns how many batches it held that are not known to be landed."""
        for number in self._segments.numbers():
            for spooled in await asyncio.to_thread(self._recover, number):
                self._hold(spooled)
        return len(self._held)

    async def accept(self, submitted: Submission) -> Answer:
        """Accepts the batch on this disk. Raises IdentityConflict, Overloaded when the spool is full, Unavailable."""
        identity = submitted.batch.identity
        while (arriving := self._arriving.get(identity)) is not None:
            await asyncio.wait([arriving])
        held = self._held.get(identity)
        standing = held.accepted if held is not None else self._known.get(identity)
        if standing is not None:
            if standing.frame_sha256 == submitted.sha256:
                self._outcomes["duplicate"].inc()
                return acceptance.answer(standing, duplicate=True)
            self._outcomes["conflict"].inc()
            raise await self._quarantine(standing, submitted)
        if self._bytes + len(submitted.frame) > self._bytes_max:
            raise Overloaded(
                f"the spool holds {self._bytes} bytes that are not landed yet",
                retry_after_s=self._retry_after_s,
                hint="check that the bucket can be reached, or raise ingest.spool_bytes_max",
            )
        return await self._append(submitted)

    async def _append(self, submitted: Submission) -> Answer:
        accepted = acceptance.manifest(
            submitted, at_ns=self._clock.now_ns(), collector_id=self._collector_id, attempt_id=self._ids.token()
        )
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._arriving[accepted.identity] = done
        data = pack(submitted.frame, accepted.accepted_at_unix_ns, accepted.attempt_id)
        self._waiting.append(_Waiting(data, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        try:
            segment, offset = await asyncio.shield(done)
        except OSError as error:
            raise Unavailable(f"the spool cannot be written: {error}", retry_after_s=self._retry_after_s) from error
        finally:
            self._arriving.pop(accepted.identity, None)
        record = Record(segment, offset, len(submitted.frame), accepted.accepted_at_unix_ns, accepted.attempt_id)
        self._hold(Spooled(accepted, record))
        self._won(accepted, submitted)
        self._outcomes["accepted"].inc()
        return acceptance.answer(accepted, duplicate=False)

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
            try:
                if self._segments.active_bytes > SEGMENT_BYTES_MAX:
                    self._segments.seal()
                segment, offset = await asyncio.to_thread(self._segments.append, [one.data for one in group])
            except OSError as error:
                for one in group:
                    one.done.set_exception(error)
                continue
            for one in group:
                one.done.set_result((segment, offset))
                offset += len(one.data)

    async def unlanded(self) -> AsyncIterator[tuple[Identity, Batch | None]]:
        """Every batch not landed yet, read from disk; None for one that cannot be read. One that lands meanwhile may
        still be given."""
        for identity, spooled in list(self._held.items()):
            batch: Batch | None
            try:
                frame = await asyncio.to_thread(self._segments.read, spooled.record)
                batch = decode(frame, ANY_FRAME)
            except (OSError, Corrupt, Invalid):
                if identity not in self._held:
                    continue  # landed and removed since
                batch = None
            yield identity, batch

    def waiting(self) -> list[Spooled]:
        """What is to be landed, oldest first; uploads from now on go to a new segment."""
        if not self._writing():
            self._segments.seal()
        return list(self._held.values())

    async def frame(self, spooled: Spooled) -> bytes:
        return await asyncio.to_thread(self._segments.read, spooled.record)

    def landed(self, identity: Identity) -> None:
        """The batch is in the bucket now: its record goes with the next sweep of its segment."""
        spooled = self._release(identity)
        if spooled is None:
            return
        self._known[identity] = spooled.accepted
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)

    async def sweep(self) -> None:
        """Removes segments of which everything has landed. Uploads under way may still point at one: then not now."""
        if self._writing():
            return
        needed = {spooled.record.segment for spooled in self._held.values()} | {self._segments.active_number}
        for number in self._segments.numbers():
            if number not in needed:
                await asyncio.to_thread(self._segments.remove, number)

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._segments.close()

    def _writing(self) -> bool:
        """Whether a segment may be in use: also by a write whose uploads were all given up by their clients."""
        return bool(self._waiting or self._arriving) or (self._writer is not None and not self._writer.done())

    def _recover(self, number: int) -> list[Spooled]:
        found = []
        for record, frame in self._segments.recover(number):
            try:
                identity = peek(frame, ANY_FRAME)
            except Invalid as error:  # a whole record that is no frame: never written by us
                log.error("a spooled record is set aside", segment=number, cause=error.message)
                self._segments.damaged.add(number)
                continue
            accepted = acceptance.manifest_of(
                identity,
                hashlib.sha256(frame).hexdigest(),
                len(frame),
                at_ns=record.at_ns,
                collector_id=self._collector_id,
                attempt_id=record.attempt_id,
            )
            found.append(Spooled(accepted, record))
        if not found:
            self._segments.remove(number)
        return found

    def _hold(self, spooled: Spooled) -> None:
        self._release(spooled.accepted.identity)  # an upload that was given up and sent again left two records
        self._held[spooled.accepted.identity] = spooled
        self._count(spooled.record.frame_bytes + HEAD.size)

    def _release(self, identity: Identity) -> Spooled | None:
        spooled = self._held.pop(identity, None)
        if spooled is not None:
            self._count(-spooled.record.frame_bytes - HEAD.size)
        return spooled

    def _count(self, size: int) -> None:
        self._bytes += size
        self._gauges[0].set(self._bytes)
        self._gauges[1].set(len(self._held))

    async def _quarantine(self, standing: Accepted, submitted: Submission) -> LakebedError:
        at_ns = self._clock.now_ns()
        record = acceptance.conflict(standing, submitted.sha256, at_ns=at_ns, collector_id=self._collector_id)
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await write_blob(self._store, submitted)
                return acceptance.refusal(await store_conflict(self._store, record), quarantined=True)
        except (TimeoutError, LakebedError) as error:
            log.warning("conflict answered without its record", cause=str(error))
            return acceptance.refusal(record, quarantined=False)
