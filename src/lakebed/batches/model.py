"""The records of the part, as they are stored. Field names and schemas are fixed; `attempt_id` is there so that a
collector whose answer was lost recognises its own manifest."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from lakebed.errors import Conflict, Corrupt, Invalid
from lakebed.frame.model import Identity
from lakebed.store.model import StoredObject

ACCEPTED_SCHEMA: Literal["lightmetrics.accepted_batch.v1"] = "lightmetrics.accepted_batch.v1"
CONFLICT_SCHEMA: Literal["lightmetrics.identity_conflict.v1"] = "lightmetrics.identity_conflict.v1"


class Accepted(msgspec.Struct, frozen=True):
    """The identity manifest: whoever created it accepted the batch, and it never changes."""

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

    @property
    def identity(self) -> Identity:
        return Identity(self.agent_id, self.boot_id, self.seq_start, self.seq_end)


class ConflictRecord(msgspec.Struct, frozen=True):
    """The quarantine manifest: the same identity came with other bytes. First seen is what stands; it never changes."""

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
    def identity(self) -> Identity:
        return Identity(self.agent_id, self.boot_id, self.seq_start, self.seq_end)


class AcceptedByTime(msgspec.Struct, frozen=True):
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


class BlobReference(msgspec.Struct, frozen=True):
    """Derived: somebody refers to this blob. Kept while the record it names stands."""

    schema: Literal["lightmetrics.blob_reference.v1"]
    sha256: str
    referrer_key: str


class BlobSeen(msgspec.Struct, frozen=True):
    """Derived: a blob under an hour at which a collector had it in hand."""

    schema: Literal["lightmetrics.blob_seen.v1"]
    sha256: str
    raw_blob_key: str


class RollupWork(msgspec.Struct, frozen=True):
    """Derived: a batch that entered the by-time index late, after readers may have passed its hour."""

    schema: Literal["lightmetrics.rollup_work.v1"]
    accepted_manifest_key: str
    accepted_by_time_key: str


class Repair(msgspec.Struct, frozen=True):
    """An accepted batch whose blob is missing or damaged: for a person to see."""

    schema: Literal["lightmetrics.raw_blob_repair.v1"]
    accepted_manifest_key: str
    raw_blob_key: str
    problem: str
    observed_at_unix_ns: int


Action = Literal["accept_existing", "quarantine_boot"]


class Resolution(msgspec.Struct, frozen=True):
    """What an operator decided about one conflict, and why. Immutable."""

    schema: Literal["lightmetrics.conflict_resolution.v1"]
    conflict_id: str
    action: Action
    reason: str
    resolved_by: str
    resolved_at_unix_ns: int


class HeldBoot(msgspec.Struct, frozen=True):
    """A boot of an agent that is set aside for investigation: nothing of it is accepted."""

    schema: Literal["lightmetrics.held_boot.v1"]
    agent_id: str
    boot_id: str
    reason: str
    held_by: str
    held_at_unix_ns: int


class Answer(msgspec.Struct, frozen=True):
    """What an agent is told: its batch is durable, and whether this upload made it so."""

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
    """An operator set this agent's boot aside: the agent keeps its copy."""

    code = "boot_quarantined"


class BadFrame(Invalid):
    """The bytes are no frame, or one that nobody may send."""

    code = "bad_frame"


R = TypeVar("R")


def read_record(stored: StoredObject, kind: type[R]) -> R:
    """The record in a stored object. Raises Corrupt naming the key."""
    try:
        return msgspec.json.decode(stored.data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{stored.key!r} does not decode as {kind.__name__}: {error}",
            hint="nothing was changed; look at the object",
            key=stored.key,
        ) from error


def write_record(record: Any) -> bytes:
    return msgspec.json.encode(record)
