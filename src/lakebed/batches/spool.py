"""Acceptance on this disk, for a single collector: a batch is accepted once its record is fsynced in the spool.

Concurrent uploads share one fsync. Duplicates and conflicts are detected from what this spool has accepted; the bucket
decides when a batch is landed. Until then queries read the batch from the spool.

Landing writes the blob, then the manifest with the spool's own time and attempt, so landing again after a lost response
finds its own bytes. It is idempotent and resumable.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import OnAccepted, store_conflict
from lakebed.batches.codec.frame import decode, peek
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.landed import LandedBatches, SpoolAuthority
from lakebed.batches.model import AcceptedBatch, Batch, BatchIdentity, SettledBoot, UploadResponse, write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import ANY_FRAME, verified
from lakebed.batches.segments import HEAD, SpoolRecord, SpoolSegments, pack
from lakebed.batches.settled import SettledBoots
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, LakebedError, NotFound, Overloaded, Unavailable
from lakebed.core.logs import logger
from lakebed.store.model import read_record
from lakebed.store.runtime import StoreRuntime

SEGMENT_BYTES_MAX = 64 * 1024 * 1024
GROUP_MAX = 1_000  # uploads that share one fsync
QUARANTINE_TIMEOUT_S = 5.0
OUTCOMES = ("accepted", "duplicate", "conflict", "failed")
LOOK_TIMEOUT_S = 2.0  # for the manifest of a batch that may have landed long ago

log = logger("batches")


class SpooledBatch(msgspec.Struct, frozen=True):
    accepted: AcceptedBatch
    record: SpoolRecord


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    data: bytes
    done: asyncio.Future[tuple[int, int]]


class Spool:
    """The local spool: `accept` as the bucket's acceptor does, `unlanded` for queries, `take`/`landed` for landing."""

    def __init__(
        self,
        runtime: StoreRuntime,
        folder: Path,
        *,
        collector_id: str,
        on_accepted: OnAccepted,
        settled: SettledBoots,
        bytes_max: int,
        known_max: int,
        retry_after_s: float,
    ) -> None:
        self._settled = settled
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._segments = SpoolSegments(folder)
        self._store, self._collector_id, self._on_accepted = store, collector_id, on_accepted
        self._bytes_max, self._retry_after_s = bytes_max, retry_after_s
        self._clock, self._ids = clock, ids
        self._held: dict[BatchIdentity, SpooledBatch] = {}  # fsynced, not landed
        self._arriving: dict[BatchIdentity, asyncio.Future[tuple[int, int]]] = {}
        self._landed = LandedBatches(folder, known_max=known_max)
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._bytes = 0
        self._coming_bytes = 0  # being written, also for clients that have given up
        metrics.gauge("lakebed_batches_spool_disk_bytes").set_function(lambda: disk_bytes(folder))
        self._gauges = (metrics.gauge("lakebed_batches_spool_bytes"), metrics.gauge("lakebed_batches_spool_batches"))
        outcomes = metrics.counter("lakebed_batches_uploads_total")
        self._outcomes = {name: outcomes.labels(outcome=name) for name in OUTCOMES}
        self._samples = metrics.counter("lakebed_batches_samples_total")
        self._seconds = metrics.histogram("lakebed_batches_accept_seconds")

    async def open(self) -> int:
        """Takes up what an earlier run left; returns how many batches it held that are not known to be landed."""
        await asyncio.to_thread(self._landed.load)
        for number in self._segments.numbers():
            for spooled in await asyncio.to_thread(self._recover, number):
                self._hold(spooled)
        return len(self._held)

    async def accept(self, submitted: Submission) -> UploadResponse:
        """Accepts the batch on this disk. Raises IdentityConflict, Overloaded when the spool is full, Unavailable."""
        started_s = self._clock.monotonic_s()
        answer = await self._accept(submitted)
        self._seconds.observe(self._clock.monotonic_s() - started_s)
        return answer

    async def _accept(self, submitted: Submission) -> UploadResponse:
        identity = submitted.batch.identity
        existing = await self._existing(identity)
        if isinstance(existing, SettledBoot):
            self._outcomes["duplicate"].inc()
            return acceptance.settled_response(identity, submitted.sha256, existing.through_ns)
        if existing is not None:
            if existing.frame_sha256 == submitted.sha256:
                self._outcomes["duplicate"].inc()
                return acceptance.response(existing, duplicate=True)
            self._outcomes["conflict"].inc()
            raise await self._quarantine(existing, submitted)
        taken = self._bytes + self._coming_bytes
        if taken + len(submitted.frame) > self._bytes_max:
            raise Overloaded(
                f"the spool holds {taken} bytes that are not in the bucket yet",
                retry_after_s=self._retry_after_s,
                hint="check that the bucket can be reached, or raise batches.spool_bytes_max",
            )
        return await self._append(submitted)

    async def _existing(self, identity: BatchIdentity) -> AcceptedBatch | SettledBoot | None:
        """What was accepted under this identity before; also by another upload while the bucket was asked."""
        while True:
            while (arriving := self._arriving.get(identity)) is not None:
                await asyncio.wait([arriving])
            if (held := self._held.get(identity)) is not None:
                return held.accepted
            if (found := await self._landed_before(identity)) is not None:
                return found
            if identity not in self._arriving and identity not in self._held:
                return self._landed.get(identity)

    async def _landed_before(self, identity: BatchIdentity) -> AcceptedBatch | SettledBoot | None:
        """The manifest of a batch that has landed: known here, or, for a number that is not new, in the bucket; or the
        record that retention left of it.

        While the bucket is away, an old batch that is not known here is taken: landing finds its manifest.
        """
        known = self._landed.get(identity)
        if known is not None or self._landed.is_new(identity):
            return known
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                try:
                    return read_record(await self._store.get(paths.accepted_key(identity)), AcceptedBatch)
                except NotFound:
                    return await self._settled.find(identity)
        except (TimeoutError, LakebedError):
            return None

    async def _append(self, submitted: Submission) -> UploadResponse:
        accepted = acceptance.manifest(
            submitted, at_ns=self._clock.now_ns(), collector_id=self._collector_id, attempt_id=self._ids.token()
        )
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._arriving[accepted.identity] = done
        data = pack(submitted.frame, accepted.accepted_at_unix_ns, accepted.attempt_id)
        self._waiting.append(_Waiting(data, done))
        self._coming_bytes += len(data)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        try:
            segment, offset = await asyncio.shield(done)
        except OSError as error:
            self._outcomes["failed"].inc()
            raise Unavailable(f"the spool cannot be written: {error}", retry_after_s=self._retry_after_s) from error
        finally:
            self._arriving.pop(accepted.identity, None)
            del done  # an error refers to this frame: a cycle would keep the upload until the garbage collector runs
        record = SpoolRecord(segment, offset, len(submitted.frame), accepted.accepted_at_unix_ns, accepted.attempt_id)
        self._hold(SpooledBatch(accepted, record))
        self._on_accepted(accepted, submitted)
        self._outcomes["accepted"].inc()
        self._samples.inc(submitted.batch.columns.samples)
        return acceptance.response(accepted, duplicate=False)

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
            try:
                if self._segments.active_bytes > SEGMENT_BYTES_MAX:
                    self._segments.seal()
                segment, offset = await asyncio.to_thread(self._segments.append, [one.data for one in group])
            except OSError as error:
                for one in group:
                    one.done.set_exception(error.with_traceback(None))  # its frames hold the group
                continue
            finally:
                self._coming_bytes -= sum(len(one.data) for one in group)
            for one in group:
                one.done.set_result((segment, offset))
                offset += len(one.data)

    async def unlanded(self) -> AsyncIterator[tuple[AcceptedBatch, Batch | None]]:
        """Every batch not known to be landed, read from disk; None for one that cannot be read. One that lands
        meanwhile, or landed before a restart, may still be given."""
        for identity, spooled in list(self._held.items()):
            batch: Batch | None
            try:
                frame = await asyncio.to_thread(self._segments.read, spooled.record)
                batch = decode(frame, ANY_FRAME)
            except (OSError, Corrupt, Invalid):
                if identity not in self._held:
                    continue  # landed and removed since
                batch = None
            yield spooled.accepted, batch

    def damaged_files(self) -> int:
        """Files that are kept because an accepted batch in them cannot be read."""
        return self._segments.damaged_files()

    def waiting(self) -> list[SpooledBatch]:
        """What is to be landed, oldest first; uploads from now on go to a new segment."""
        if not self._writing():
            self._segments.seal()
        return list(self._held.values())

    async def frame(self, spooled: SpooledBatch) -> bytes:
        return await asyncio.to_thread(self._segments.read, spooled.record)

    def landed(self, identity: BatchIdentity) -> None:
        """The batch is in the bucket now: its record goes with the next sweep of its segment."""
        if (spooled := self._release(identity)) is not None:
            self._landed.add(spooled.accepted)

    async def sweep(self) -> None:
        """Removes segments of which everything has landed. Uploads in progress may still point at one: then not now."""
        if self._writing():
            return
        await asyncio.to_thread(self._landed.sync)  # before the only other record of them goes
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

    def _recover(self, number: int) -> list[SpooledBatch]:
        found = []
        for record, frame in self._segments.recover(number):
            try:
                identity = peek(frame, ANY_FRAME)
            except Invalid as error:  # a whole record that is no frame: never written by us
                log.error("unreadable spool record is skipped", segment=number, error=error.message)
                self._segments.damaged.add(number)
                continue
            accepted = acceptance.manifest_of(
                identity,
                sha256 := hashlib.sha256(frame).hexdigest(),
                acceptance.whole_place(sha256, len(frame)),
                at_ns=record.at_ns,
                collector_id=self._collector_id,
                attempt_id=record.attempt_id,
            )
            found.append(SpooledBatch(accepted, record))
        if not found:
            self._segments.remove(number)
        return found

    def _hold(self, spooled: SpooledBatch) -> None:
        self._release(spooled.accepted.identity)  # an upload that was given up and sent again left two records
        self._held[spooled.accepted.identity] = spooled
        self._count(spooled.record.frame_bytes + HEAD.size)

    def _release(self, identity: BatchIdentity) -> SpooledBatch | None:
        spooled = self._held.pop(identity, None)
        if spooled is not None:
            self._count(-spooled.record.frame_bytes - HEAD.size)
        return spooled

    def _count(self, size: int) -> None:
        self._bytes += size
        self._gauges[0].set(self._bytes)
        self._gauges[1].set(len(self._held))

    async def _quarantine(self, existing: AcceptedBatch, submitted: Submission) -> LakebedError:
        at_ns = self._clock.now_ns()
        record = acceptance.conflict(existing, submitted.sha256, at_ns=at_ns, collector_id=self._collector_id)
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await write_blob(self._store, submitted)
                return acceptance.refusal(await store_conflict(self._store, record), quarantined=True)
        except (TimeoutError, LakebedError) as error:
            log.warning("conflict returned, but its record could not be stored", error=str(error))
            return acceptance.refusal(record, quarantined=False)


def disk_bytes(folder: Path) -> int:
    """What the spool uses on its disk: waiting and landed batches, damaged segments, and the landed identities."""
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())


LANDINGS_MAX = 8  # batches being landed at once


class DamagedRecord(Unavailable):
    """A spooled batch cannot be read back: its segment is kept."""


class Lander:
    def __init__(
        self,
        runtime: StoreRuntime,
        spool: Spool,
        derived_writes: DerivedWrites,
        *,
        settled: SettledBoots,
        authority: SpoolAuthority,
        interval_s: float,
        collector_id: str,
    ) -> None:
        store, clock, metrics = runtime.store, runtime.clock, runtime.metrics
        self._runtime, self._authority, self._confirmed = runtime, authority, False
        self._spool, self._store, self._derived_writes, self._settled = spool, store, derived_writes, settled
        self._interval_s, self._collector_id, self._clock = interval_s, collector_id, clock
        self._outcomes = metrics.counter("lakebed_batches_landed_total")

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            try:
                await self.land()
            except LakebedError as error:
                log.warning("spooled batches could not be uploaded and are retried", error=error.message)

    async def land(self) -> int:
        """Lands everything the spool holds; returns how many. Raises Unavailable, keeping what is not landed.

        A batch that cannot be read back from the disk is reported after the others have landed; an error of the bucket
        ends the run at once, because it would meet them all.
        """
        try:
            return await self._land()
        except OSError as error:  # a full disk, a file that cannot be removed: the next run may succeed
            raise Unavailable(f"the spool cannot be written: {error}") from error

    async def _land(self) -> int:
        if not self._confirmed:  # the process may have started while the bucket was away
            await self._authority.confirm(self._runtime)
            self._confirmed = True
        waiting = self._spool.waiting()
        damaged: DamagedRecord | None = None
        for at in range(0, len(waiting), LANDINGS_MAX):
            group = waiting[at : at + LANDINGS_MAX]
            results = await asyncio.gather(*(self._one(spooled) for spooled in group), return_exceptions=True)
            for result in results:
                if isinstance(result, DamagedRecord):
                    damaged = result
                elif isinstance(result, BaseException):
                    raise result
        await self._spool.sweep()
        if damaged is not None:
            raise damaged
        return len(waiting)

    async def _one(self, spooled: SpooledBatch) -> None:
        try:
            frame = await self._spool.frame(spooled)
            submitted = acceptance.submission(frame, verified(frame, spooled.accepted.frame_sha256))
        except (OSError, Corrupt) as error:
            self._outcomes.labels(outcome="damaged").inc()
            raise DamagedRecord(f"a spooled batch cannot be read back: {error}") from error
        if await self._settled.find(spooled.accepted.identity) is not None:  # accepted once, and removed by retention
            self._outcomes.labels(outcome="duplicate").inc()
            self._spool.landed(spooled.accepted.identity)
            return
        await write_blob(self._store, submitted)
        existing = await self._create(spooled.accepted)
        verdict = acceptance.judge(spooled.accepted, existing)
        if verdict == "conflict":
            record = acceptance.conflict(
                existing, submitted.sha256, at_ns=self._clock.now_ns(), collector_id=self._collector_id
            )
            await store_conflict(self._store, record)
            log.error(
                "conflict: the bucket has another batch under the identity of a spooled one",
                quarantined=record.submitted_raw_blob_key,
            )
        else:
            self._derived_writes.put(existing, acceptance.span_of(submitted.batch))
        self._outcomes.labels(outcome=verdict).inc()
        self._spool.landed(spooled.accepted.identity)

    async def _create(self, accepted: AcceptedBatch) -> AcceptedBatch:
        try:
            await self._store.create(paths.accepted_key(accepted.identity), write_record(accepted))
        except AlreadyExists as error:
            return read_record(error.current, AcceptedBatch)
        return accepted
