"""The records of the part, as they are stored. Field names and schemas are fixed; `attempt_id` is there so that a
collector whose answer was lost recognises its own manifest."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from lakebed.batches.seq_ranges import SeqRanges
from lakebed.core.errors import Conflict, Invalid

WIRE_VERSION = 1  # how a frame is sent
FRAME_VERSION = 1  # how its header and body are laid out
SEQ_MAX = 2**63 - 1  # fits a signed 64-bit column in every reader
ID_BYTES_MAX = 120  # as hex behind "agent=" it fits one path segment: SeaweedFS takes 255 bytes

LATE_NS = 60_000_000_000  # an entry written later than this asks for rollup work: far inside the roller's overlap


class Kind(IntEnum):
    """What a value means. A counter only grows within a boot; a delta is what was added since the sample before."""

    UNTYPED = 0
    GAUGE = 1
    COUNTER = 2
    DELTA = 3


class Compression(IntEnum):
    NONE = 0
    ZSTD = 1


class BatchIdentity(msgspec.Struct, frozen=True, order=True):
    """Which batch this is: the dedupe key of the whole system. `seq_end` is inclusive."""

    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int

    @property
    def samples(self) -> int:
        return self.seq_end - self.seq_start + 1


class Sample(msgspec.Struct, frozen=True):
    """One measurement. `labels` must not name a label twice."""

    metric: str
    time_ns: int
    value: float
    kind: Kind = Kind.GAUGE
    labels: Mapping[str, str] = {}


class FrameLimits(msgspec.Struct, frozen=True):
    """What a reader accepts. A frame outside them is Invalid before it costs memory."""

    frame_bytes: int = 4 * 1024 * 1024
    body_bytes: int = 16 * 1024 * 1024  # after decompression
    samples: int = 250_000
    series: int = 50_000
    labels_per_series: int = 64
    strings: int = 100_000
    name_bytes: int = 255  # a metric's or a label's name
    label_value_bytes: int = 1024


LIMITS = FrameLimits()


class SampleColumns(msgspec.Struct, frozen=True, eq=False):
    """Samples as columns. One row a sample; series, labels and strings are dictionaries.

    times_ns int64, values float64, kinds uint8, series uint32 (an index of the series table): one entry a sample.
    series_metric uint32 (an index of `strings`), label_offsets uint32 (one more than there are series): the table.
    label_names, label_values uint32 (indexes of `strings`): labels of all series, end to end.
    strings: every name and value once, in ascending order of their UTF-8 bytes.
    """

    times_ns: Any
    values: Any
    kinds: Any
    series: Any
    series_metric: Any
    label_offsets: Any
    label_names: Any
    label_values: Any
    strings: tuple[str, ...]

    @property
    def samples(self) -> int:
        return len(self.times_ns)

    def metric(self, series: int) -> str:
        return self.strings[int(self.series_metric[series])]

    def labels(self, series: int) -> dict[str, str]:
        start, end = int(self.label_offsets[series]), int(self.label_offsets[series + 1])
        return {
            self.strings[name]: self.strings[value]
            for name, value in zip(
                self.label_names[start:end].tolist(), self.label_values[start:end].tolist(), strict=True
            )
        }

    def rows(self) -> list[Sample]:
        """Every sample as a value: for people and tests, not for the hot path."""
        table = [(self.metric(i), self.labels(i)) for i in range(len(self.series_metric))]
        return [
            Sample(metric=table[s][0], time_ns=t, value=v, kind=Kind(k), labels=table[s][1])
            for s, t, v, k in zip(
                self.series.tolist(), self.times_ns.tolist(), self.values.tolist(), self.kinds.tolist(), strict=True
            )
        ]


class Batch(msgspec.Struct, frozen=True, eq=False):
    """A decoded, validated frame."""

    identity: BatchIdentity
    columns: SampleColumns
    compression: Compression
    wire_version: int = WIRE_VERSION
    frame_version: int = FRAME_VERSION


def check_identity(identity: BatchIdentity) -> BatchIdentity:
    """Returns the identity, or raises Invalid for one that cannot be a key."""
    check_id("agent_id", identity.agent_id)
    check_id("boot_id", identity.boot_id)
    if not 0 <= identity.seq_start <= identity.seq_end <= SEQ_MAX:
        raise Invalid(f"sequence range {identity.seq_start}-{identity.seq_end} is not a range of 0 to {SEQ_MAX}")
    return identity


def check_id(name: str, value: str) -> str:
    if not value or len(value.encode()) > ID_BYTES_MAX or not value.isprintable():
        raise Invalid(f"{name} {value[:80]!r} must be 1 to {ID_BYTES_MAX} printable bytes")
    return value


ACCEPTED_SCHEMA: Literal["lightmetrics.accepted_batch.v1"] = "lightmetrics.accepted_batch.v1"
CONFLICT_SCHEMA: Literal["lightmetrics.identity_conflict.v1"] = "lightmetrics.identity_conflict.v1"


class FramePlace(NamedTuple):
    """Where a frame is stored: from `offset` of a pack, or the whole object when `offset` is 0."""

    key: str
    offset: int
    length: int


class AcceptedBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The identity manifest: the collector that created it accepted the batch, and it never changes."""

    schema: Literal["lightmetrics.accepted_batch.v1"]
    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int
    frame_sha256: str
    frame_bytes: int
    raw_blob_key: str
    accepted_at_unix_ns: int
    collector_id: str
    wire_version: int
    frame_version: int
    attempt_id: str = ""
    raw_blob_offset: int = 0  # of the frame in a pack; a pack has its table first, so 0 is a blob of this frame alone

    @property
    def identity(self) -> BatchIdentity:
        return BatchIdentity(self.agent_id, self.boot_id, self.seq_start, self.seq_end)

    @property
    def place(self) -> FramePlace:
        return FramePlace(self.raw_blob_key, self.raw_blob_offset, self.frame_bytes)


class ConflictRecord(msgspec.Struct, frozen=True):
    """The quarantine manifest: the same identity came with other bytes. The first one is kept; it never changes."""

    schema: Literal["lightmetrics.identity_conflict.v1"]
    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int
    accepted_manifest_key: str
    accepted_raw_blob_key: str
    accepted_frame_sha256: str
    submitted_raw_blob_key: str
    submitted_frame_sha256: str
    observed_at_unix_ns: int
    collector_id: str

    @property
    def identity(self) -> BatchIdentity:
        return BatchIdentity(self.agent_id, self.boot_id, self.seq_start, self.seq_end)


class AcceptedByTime(msgspec.Struct, frozen=True, omit_defaults=True):
    """Derived: an accepted batch under its hour of acceptance, with the span of its samples."""

    schema: Literal["lightmetrics.accepted_by_time.v1"]
    accepted_manifest_key: str
    frame_sha256: str
    raw_blob_key: str
    frame_bytes: int
    samples: int
    accepted_at_unix_ns: int
    first_time_unix_ns: int
    last_time_unix_ns: int
    raw_blob_offset: int = 0

    @property
    def place(self) -> FramePlace:
        return FramePlace(self.raw_blob_key, self.raw_blob_offset, self.frame_bytes)


class BlobReference(msgspec.Struct, frozen=True):
    """Derived: a record refers to this blob. Kept while that record exists."""

    schema: Literal["lightmetrics.blob_reference.v1"]
    sha256: str
    referrer_key: str


class BlobSeen(msgspec.Struct, frozen=True):
    """Derived: a blob under an hour in which a collector received it."""

    schema: Literal["lightmetrics.blob_seen.v1"]
    sha256: str
    raw_blob_key: str


class Repair(msgspec.Struct, frozen=True):
    """An accepted batch whose blob is missing or damaged: for a person to see."""

    schema: Literal["lightmetrics.raw_blob_repair.v1"]
    accepted_manifest_key: str
    raw_blob_key: str
    problem: str
    observed_at_unix_ns: int


ResolutionAction = Literal["accept_existing", "quarantine_boot"]


class ConflictResolution(msgspec.Struct, frozen=True):
    """What an operator decided about one conflict, and why. Immutable."""

    schema: Literal["lightmetrics.conflict_resolution.v1"]
    conflict_id: str
    action: ResolutionAction
    reason: str
    resolved_by: str
    resolved_at_unix_ns: int


class HeldBoot(msgspec.Struct, frozen=True):
    """A quarantined boot of an agent: none of its batches is accepted."""

    schema: Literal["lightmetrics.held_boot.v1"]
    agent_id: str
    boot_id: str
    reason: str
    held_by: str
    held_at_unix_ns: int


class UploadResponse(msgspec.Struct, frozen=True):
    """The response to an upload: the batch is durable, and whether this upload accepted it."""

    duplicate: bool
    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int
    frame_sha256: str
    accepted_at_unix_ns: int


class IdentityConflict(Conflict):
    """Same identity, other bytes: the agent keeps its copy, outside its retry order."""

    code = "identity_conflict"


class BootHeld(Conflict):
    """An operator quarantined this agent's boot: the agent keeps its copy."""

    code = "boot_quarantined"


class BadFrame(Invalid):
    """The bytes are not a valid frame."""

    code = "bad_frame"


R = TypeVar("R")


class AuditWorkFile(msgspec.Struct, frozen=True):
    """A file of an audit's work for the reconciler, one JSON line each: `do`, `key`, `finding`."""

    key: str
    do: str
    lines: int


class GarbageProof(msgspec.Struct, frozen=True):
    """What garbage collection requires: this audit has read everything accepted and quarantined up to `through_ns`.

    It holds when the work of this audit is done. `through_ns` is before the listing began, by the grace of its source.
    """

    through_ns: int
    source: str
    accepted: int
    quarantined: int
    whole: bool  # nothing had to be left out


class LatestAudit(msgspec.Struct, frozen=True):
    """The register that names the last completed audit; empty: there was none yet."""

    audit_id: str = ""
    completed_at_unix_ns: int = 0
    ok: bool = True


class SettledBoot(msgspec.Struct, frozen=True):
    """The removed sequence numbers of one boot. All were accepted up to `through_ns`."""

    ranges: SeqRanges = ()
    through_ns: int = 0


class RetentionState(msgspec.Struct, frozen=True):
    """What retention has removed: batches accepted before `removed_ns`. `pending`: hours whose records are written,
    and when."""

    removed_ns: int = 0
    pending: dict[str, int] = {}


def write_record(record: Any) -> bytes:
    return msgspec.json.encode(record)
