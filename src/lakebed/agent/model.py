"""What the agent keeps: queued batches, parked batches, alerts and the lines of its ledger, as frozen values."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lakebed.batches.model import BatchIdentity
from lakebed.core.errors import Conflict, Overloaded, Unavailable

QUEUE_FORMAT = "lakebed.agent_queue.v1"
PARKED_FORMAT = "lakebed.agent_parked.v1"

WhenFull = Literal["block", "drop_oldest"]
ParkedFor = Literal["identity_conflict", "boot_quarantined", "rejected", "corrupt"]
BatchKey = tuple[int, str, int]
LedgerVerb = Literal["dropped_when_full", "dropped_by_owner", "parked", "returned", "torn"]


class QueueInUse(Conflict):
    """Another agent holds the queue folder's lock."""

    code = "queue_in_use"


class QueueFull(Overloaded):
    """The queue has no room and its policy is to wait. Nothing was stored; offer the same frames again."""

    code = "queue_full"


class DiskTrouble(Unavailable):
    """The disk refused. Nothing is promised about these frames; offer the same bytes again."""

    code = "disk_trouble"


class Frame(msgspec.Struct, frozen=True):
    """A batch whose number and bytes never change: every retry sends exactly this."""

    identity: BatchIdentity
    data: bytes
    sha256: str


class QueuedBatch(msgspec.Struct, frozen=True):
    """A batch on disk. Everything here is in the file's name, so opening a queue reads no batch."""

    boot: int  # ordinal of the boot among those in this queue: older boots are sent first
    boot_id: str
    seq_start: int
    seq_end: int
    sha256: str
    size_bytes: int

    @property
    def key(self) -> BatchKey:
        return self.boot, self.boot_id, self.seq_start

    @property
    def samples(self) -> int:
        return self.seq_end - self.seq_start + 1


class ParkedBatch(msgspec.Struct, frozen=True):
    """Why a batch left the retry order. Kept beside its bytes until the owner decides."""

    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int
    reason: ParkedFor
    submitted_frame_sha256: str
    parked_at_ms: int
    size_bytes: int
    accepted_frame_sha256: str = ""
    collector: str = ""
    status: int = 0
    message: str = ""
    format: str = PARKED_FORMAT


class AgentAlert(msgspec.Struct, frozen=True):
    """Something the agent's owner has to know, for as long as it lasts."""

    kind: str
    message: str
    first_at_ms: int
    last_at_ms: int
    count: int
    detail: dict[str, Any] = {}


class AppendResult(msgspec.Struct, frozen=True):
    """What an append did: batches stored, and older ones (or these) given up because the queue was full."""

    stored: tuple[QueuedBatch, ...]
    dropped_batches: int = 0
    dropped_samples: int = 0
