"""Accepts batches: first the blob, then the identity manifest, created if absent. Only that create is acceptance.

Steps 5 to 10 of the ingest flow; `routes.py` does 1 to 4. A lost response is resolved by creating again, with the same
bytes, or by reading what exists: a batch is reported as a duplicate only when its manifest was read with the same hash.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.model import AcceptedBatch, ConflictRecord, FramePlace, UploadResponse, write_record
from lakebed.batches.packer import Packer, write_blob
from lakebed.core.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    LakebedError,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
)
from lakebed.core.logs import logger
from lakebed.store.model import read_record
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

if TYPE_CHECKING:
    from lakebed.batches.model import BatchIdentity

RESOLVE_TRIES_MAX = 3  # creates of a manifest whose outcome is unknown, on top of the store's own retries
RESOLVE_BASE_S = 0.1
RESOLVE_CAP_S = 1.0
QUARANTINE_TIMEOUT_S = 5.0  # a conflict is returned even when its record cannot be stored

log = logger("batches")

OnAccepted = Callable[[AcceptedBatch, Submission], None]


class Acceptor:
    """One collector's accept path. `on_accepted` is called once for each batch that this collector accepted."""

    def __init__(
        self,
        runtime: StoreRuntime,
        derived_writes: DerivedWrites,
        *,
        collector_id: str,
        on_accepted: OnAccepted,
        accepting_max: int,
        known_max: int,
        timeout_s: float,
        retry_after_s: float,
        pack_s: float = 0.0,
    ) -> None:
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._store, self._derived_writes, self._on_accepted = store, derived_writes, on_accepted
        self._collector_id = collector_id
        self._accepting_max, self._known_max = accepting_max, known_max
        self._timeout_s, self._retry_after_s = timeout_s, retry_after_s
        self._clock, self._ids = clock, ids
        self._packer = Packer(runtime, wait_s=pack_s) if pack_s else None
        self._known: OrderedDict[BatchIdentity, AcceptedBatch] = OrderedDict()
        self._under_way: dict[BatchIdentity, asyncio.Future[None]] = {}
        self._accepting = 0
        outcomes = metrics.counter("lakebed_batches_uploads_total")
        self._outcomes = {
            name: outcomes.labels(outcome=name) for name in ("accepted", "duplicate", "conflict", "failed")
        }
        self._samples = metrics.counter("lakebed_batches_samples_total")
        self._seconds = metrics.histogram("lakebed_batches_accept_seconds")

    async def accept(self, submitted: Submission) -> UploadResponse:
        """Accepts the batch, or returns that it was accepted before. Safe to repeat, on any collector.

        Raises IdentityConflict when other bytes hold the identity, Overloaded or Unavailable when the agent must retry.
        """
        if self._accepting >= self._accepting_max:
            raise Overloaded(
                f"{self._accepting_max} uploads are already in progress", retry_after_s=self._retry_after_s
            )
        started_s = self._clock.monotonic_s()
        self._accepting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._once(submitted)
        except TimeoutError:
            self._outcomes["failed"].inc()
            raise self._retry(f"the store did not respond within {self._timeout_s:g} s") from None
        except (Unavailable, Denied, Corrupt, NotFound) as error:  # NotFound: the bucket is missing
            self._outcomes["failed"].inc()
            raise self._retry(error.message) from error
        finally:
            self._accepting -= 1
        self._seconds.observe(self._clock.monotonic_s() - started_s)
        return answer

    async def _once(self, submitted: Submission) -> UploadResponse:
        """One upload of an identity at a time in this process: racing ourselves would only slow the store down."""
        identity = submitted.batch.identity
        while identity in self._under_way:
            await asyncio.shield(self._under_way[identity])
        known = self._known.get(identity)
        if known is not None and known.frame_sha256 == submitted.sha256:
            self._outcomes["duplicate"].inc()
            return acceptance.response(known, duplicate=True)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[identity] = done
        try:
            return await self._accept(submitted)
        finally:
            del self._under_way[identity]
            done.set_result(None)

    async def _accept(self, submitted: Submission) -> UploadResponse:
        at_ns = self._clock.now_ns()
        place = await self._store_frame(submitted)
        mine = acceptance.manifest(
            submitted, place, at_ns=at_ns, collector_id=self._collector_id, attempt_id=self._ids.token()
        )
        try:
            existing = await self._create_manifest(mine)
        except BaseException:
            # The blob may stay an orphan: let the garbage collector find it without a full scan.
            self._derived_writes.put_orphan(submitted.sha256, at_ns, place)
            raise
        verdict = acceptance.judge(mine, existing)
        self._outcomes[verdict].inc()
        if existing.raw_blob_key != place.key and (place.offset or verdict == "duplicate"):
            self._derived_writes.put_orphan(submitted.sha256, at_ns, place)  # the batch does not need these bytes
        if verdict == "conflict":
            raise await self._quarantine(existing, submitted, place)
        self._remember(existing)
        if verdict == "accepted":
            self._samples.inc(submitted.batch.columns.samples)
            self._on_accepted(existing, submitted)
            self._derived_writes.put(existing, acceptance.span_of(submitted.batch))
        return acceptance.response(existing, duplicate=verdict == "duplicate")

    async def _store_frame(self, submitted: Submission) -> FramePlace:
        if self._packer is not None:
            return await self._packer.store(submitted)
        await write_blob(self._store, submitted)
        return acceptance.whole_place(submitted.sha256, len(submitted.frame))

    async def _create_manifest(self, mine: AcceptedBatch) -> AcceptedBatch:
        """Creates the manifest and returns the one that exists. The same bytes each time, so repeating is harmless."""
        key, data = paths.accepted_key(mine.identity), write_record(mine)
        for attempt in range(RESOLVE_TRIES_MAX):
            try:
                await self._store.create(key, data)
                return mine
            except AlreadyExists as error:
                return read_record(error.current, AcceptedBatch)
            except OutcomeUnknown:
                if attempt + 1 == RESOLVE_TRIES_MAX:
                    raise
                await self._clock.sleep(self._ids.jitter_s(attempt, base_s=RESOLVE_BASE_S, cap_s=RESOLVE_CAP_S))
        raise AssertionError("unreachable")

    async def _quarantine(self, existing: AcceptedBatch, submitted: Submission, place: FramePlace) -> LakebedError:
        record = acceptance.conflict(
            existing, submitted.sha256, at_ns=self._clock.now_ns(), collector_id=self._collector_id
        )
        stored = False
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                if place.offset:  # a quarantined frame is a blob of its own: its pack may be deleted
                    await write_blob(self._store, submitted)
                record = await store_conflict(self._store, record)
                stored = True
        except (TimeoutError, LakebedError) as error:
            log.warning(
                "conflict returned, but its record could not be stored",
                error=str(error),
                accepted=record.accepted_manifest_key,
            )
        return acceptance.refusal(record, quarantined=stored)

    def _remember(self, existing: AcceptedBatch) -> None:
        self._known[existing.identity] = existing
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)

    def _retry(self, message: str) -> Unavailable:
        return Unavailable(
            f"not accepted: {message}",
            retry_after_s=self._retry_after_s,
            hint="send the same bytes again, here or to another collector",
        )


async def store_conflict(store: Store, record: ConflictRecord) -> ConflictRecord:
    """Stores the quarantine manifest behind its reverse reference; returns the one that exists, the first."""
    reference = acceptance.quarantine_by_blob(record.identity, record.submitted_frame_sha256)
    await store.create(reference.key, reference.data)
    try:
        await store.create(paths.quarantine_key(record.identity, record.submitted_frame_sha256), write_record(record))
    except AlreadyExists as error:
        return read_record(error.current, ConflictRecord)
    return record
