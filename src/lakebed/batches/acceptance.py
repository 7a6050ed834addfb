"""The decisions of acceptance, without I/O: what to write, and what an existing manifest means for an upload.

A batch is accepted when its manifest is created. All else here is a function of that manifest and the frame, so two
collectors derive the same bytes and repeating is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import (
    ACCEPTED_SCHEMA,
    CONFLICT_SCHEMA,
    FRAME_VERSION,
    LATE_NS,
    WIRE_VERSION,
    AcceptedBatch,
    AcceptedByTime,
    Batch,
    BatchIdentity,
    BlobReference,
    BlobSeen,
    ConflictRecord,
    FramePlace,
    IdentityConflict,
    UploadResponse,
    write_record,
)
from lakebed.rollups.model import RollupWork
from lakebed.rollups.paths import work_key
from lakebed.store.model import HashedBytes

Verdict = Literal["accepted", "duplicate", "conflict"]


class Submission(msgspec.Struct, frozen=True, eq=False):
    """A validated frame on its way in."""

    frame: bytes
    batch: Batch
    sha256: str

    @property
    def blob_key(self) -> str:
        return paths.blob_key(self.sha256)


class Write(msgspec.Struct, frozen=True):
    """A create that is still to be made; the same key always carries the same bytes."""

    key: str
    data: bytes


def submission(frame: bytes, batch: Batch) -> Submission:
    hashed = HashedBytes.of(frame)
    return Submission(hashed, batch, hashed.sha256)


def manifest(
    submitted: Submission, place: FramePlace | None = None, *, at_ns: int, collector_id: str, attempt_id: str
) -> AcceptedBatch:
    """The manifest of this upload. Without a place, the frame is a blob of its own."""
    return manifest_of(
        submitted.batch.identity,
        submitted.sha256,
        place or whole_place(submitted.sha256, len(submitted.frame)),
        at_ns=at_ns,
        collector_id=collector_id,
        attempt_id=attempt_id,
    )


def whole_place(sha256: str, frame_bytes: int) -> FramePlace:
    return FramePlace(paths.blob_key(sha256), 0, frame_bytes)


def manifest_of(
    identity: BatchIdentity, sha256: str, place: FramePlace, *, at_ns: int, collector_id: str, attempt_id: str
) -> AcceptedBatch:
    return AcceptedBatch(
        schema=ACCEPTED_SCHEMA,
        agent_id=identity.agent_id,
        boot_id=identity.boot_id,
        seq_start=identity.seq_start,
        seq_end=identity.seq_end,
        frame_sha256=sha256,
        frame_bytes=place.length,
        raw_blob_key=place.key,
        accepted_at_unix_ns=at_ns,
        collector_id=collector_id,
        wire_version=WIRE_VERSION,
        frame_version=FRAME_VERSION,
        attempt_id=attempt_id,
        raw_blob_offset=place.offset,
    )


def judge(mine: AcceptedBatch, existing: AcceptedBatch) -> Verdict:
    """What an existing manifest means for this upload. One with our attempt id is ours, even after a retry."""
    if existing.frame_sha256 != mine.frame_sha256:
        return "conflict"
    return "accepted" if existing.attempt_id == mine.attempt_id and mine.attempt_id else "duplicate"


def response(existing: AcceptedBatch, *, duplicate: bool) -> UploadResponse:
    return UploadResponse(
        duplicate=duplicate,
        agent_id=existing.agent_id,
        boot_id=existing.boot_id,
        seq_start=existing.seq_start,
        seq_end=existing.seq_end,
        frame_sha256=existing.frame_sha256,
        accepted_at_unix_ns=existing.accepted_at_unix_ns,
    )


def settled_response(identity: BatchIdentity, sha256: str, through_ns: int) -> UploadResponse:
    """The response to a batch that was accepted once and removed since: a duplicate. Its exact time is not known."""
    place = (identity.agent_id, identity.boot_id, identity.seq_start, identity.seq_end)
    return UploadResponse(True, *place, sha256, through_ns)


def conflict(existing: AcceptedBatch, submitted_sha256: str, *, at_ns: int, collector_id: str) -> ConflictRecord:
    return ConflictRecord(
        schema=CONFLICT_SCHEMA,
        agent_id=existing.agent_id,
        boot_id=existing.boot_id,
        seq_start=existing.seq_start,
        seq_end=existing.seq_end,
        accepted_manifest_key=paths.accepted_key(existing.identity),
        accepted_raw_blob_key=existing.raw_blob_key,
        accepted_frame_sha256=existing.frame_sha256,
        submitted_raw_blob_key=paths.blob_key(submitted_sha256),
        submitted_frame_sha256=submitted_sha256,
        observed_at_unix_ns=at_ns,
        collector_id=collector_id,
    )


def refusal(record: ConflictRecord, *, quarantined: bool) -> IdentityConflict:
    """The error of a conflict: both hashes and keys, and whether its record is stored."""
    detail: dict[str, Any] = msgspec.to_builtins(record)
    del detail["schema"]
    return IdentityConflict(
        f"batch {record.seq_start}-{record.seq_end} of this boot was accepted with other bytes",
        hint="keep the batch, park it outside the retry order, and an operator decides: lakebed batches conflicts",
        quarantined=quarantined,
        quarantine_key=paths.quarantine_key(record.identity, record.submitted_frame_sha256),
        **detail,
    )


class SampleSpan(msgspec.Struct, frozen=True):
    """What the by-time index stores of a batch's samples."""

    samples: int
    first_ns: int
    last_ns: int


def span_of(batch: Batch) -> SampleSpan:
    times = batch.columns.times_ns
    return SampleSpan(len(times), int(times[times.argmin()]), int(times[times.argmax()]))


def entry_of(accepted: AcceptedBatch, span: SampleSpan) -> AcceptedByTime:
    """What the index says of an accepted batch."""
    return AcceptedByTime(
        schema="lightmetrics.accepted_by_time.v1",
        accepted_manifest_key=paths.accepted_key(accepted.identity),
        frame_sha256=accepted.frame_sha256,
        raw_blob_key=accepted.raw_blob_key,
        frame_bytes=accepted.frame_bytes,
        samples=span.samples,
        accepted_at_unix_ns=accepted.accepted_at_unix_ns,
        first_time_unix_ns=span.first_ns,
        last_time_unix_ns=span.last_ns,
        raw_blob_offset=accepted.raw_blob_offset,
    )


def by_time(accepted: AcceptedBatch, span: SampleSpan) -> Write:
    key = paths.accepted_by_time_key(accepted.identity, accepted.accepted_at_unix_ns)
    return Write(key, write_record(entry_of(accepted, span)))


def by_blob(accepted: AcceptedBatch) -> Write:
    entry = BlobReference(
        "lightmetrics.blob_reference.v1", accepted.frame_sha256, paths.accepted_key(accepted.identity)
    )
    return Write(paths.accepted_by_blob_key(accepted.frame_sha256, accepted.identity), write_record(entry))


def blob_seen(sha256: str, at_ns: int) -> Write:
    entry = BlobSeen("lightmetrics.blob_seen.v1", sha256, paths.blob_key(sha256))
    return Write(paths.blob_by_time_key(sha256, at_ns), write_record(entry))


def quarantine_by_blob(identity: BatchIdentity, sha256: str) -> Write:
    """The reverse reference from a submitted blob to its quarantine manifest. The manifest's key holds all of it."""
    entry = BlobReference("lightmetrics.blob_reference.v1", sha256, paths.quarantine_key(identity, sha256))
    return Write(paths.quarantine_by_blob_key(sha256, identity), write_record(entry))


def rollup_work(accepted: AcceptedBatch) -> Write:
    entry = RollupWork(
        "lightmetrics.rollup_work.v1",
        paths.accepted_key(accepted.identity),
        paths.accepted_by_time_key(accepted.identity, accepted.accepted_at_unix_ns),
    )
    return Write(work_key(accepted.identity, accepted.accepted_at_unix_ns), write_record(entry))


def derived(accepted: AcceptedBatch, span: SampleSpan, now_ns: Callable[[], int] | None = None) -> tuple[Write, ...]:
    """Everything that follows from one acceptance, as single objects: what earlier versions wrote, in the order in
    which a crash in between costs least. Now a row of the index holds all of it.

    `now_ns` returns when it is written. Long after the acceptance, a reader of the index by time may have passed its
    hour: then rollup work is requested first.
    """
    late = now_ns is not None and now_ns() - accepted.accepted_at_unix_ns > LATE_NS
    return (
        *([rollup_work(accepted)] if late else []),
        by_time(accepted, span),
        by_blob(accepted),
        blob_seen(accepted.frame_sha256, accepted.accepted_at_unix_ns),
    )
