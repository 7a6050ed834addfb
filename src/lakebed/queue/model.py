"""The queue's values: entries, the two manifests as they are stored, and what callers get.

The manifests keep the seed's fields (`pending`; `claimed`, `done`) unchanged. What Lakebed adds is in further
fields, keyed by location, so that a manifest in the seed's plain form can be read. The producer manifest is the short
head of a queue of any length: `pending` lists its newest batches, and immutable segments list the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from lakebed.core.errors import Invalid, Stale, Unavailable

VERSION = 1
SEALED_VERSION = 2  # of a producer manifest with segments: a reader of version 1 would take `pending` for the whole


class KeyValueEntry(msgspec.Struct, frozen=True):
    """One entry. Both sides are opaque bytes; in JSON they are base64."""

    key: bytes
    value: bytes


class PendingBatch(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a pending location: its sequence in the queue, and its size, count and time."""

    sequence: int
    size_bytes: int = 0
    count: int = 0
    enqueued_ms: int = 0


class IngestorSession(msgspec.Struct, frozen=True, array_like=True):
    """The last append of one ingestor: which of its batches, in which generation, and the sequence it was given."""

    counter: int
    generation: int
    sequence: int


class EnqueuedKey(msgspec.Struct, frozen=True, array_like=True):
    """An idempotency key (hashed) that was enqueued, with the sequence of its batch and the time."""

    key: str
    sequence: int
    at_ms: int


class ProducerManifest(msgspec.Struct, frozen=True):
    """The head of a queue: the newest batches, and numbers that say which segments hold the others.

    Every sequence from `floor` up to `next_sequence` is in a segment (below `sealed`) or in `pending`, unless it is in
    `removed`. A floor of 0 means that the manifest was written without these numbers (`appending.complete`).
    """

    pending: tuple[str, ...] = ()
    version: int = VERSION
    entries: dict[str, PendingBatch] = {}
    next_sequence: int = 1
    generation: int = 0
    generation_at_ms: int = 0
    cleanups: int = 0
    sessions: dict[str, IngestorSession] = {}
    floor: int = 0
    removed: tuple[tuple[int, int], ...] = ()  # ranges above the floor, first and last, in order
    sealed: int = 0
    segments: str = ""  # the folder of the segments
    block: int = 0  # sequences of one segment; 0 until the first one is sealed
    sealed_bytes: int = 0  # of the sealed batches that were not removed
    replays: dict[str, int] = {}  # dead letters whose replay is enqueued and that are not closed yet → sequence
    keys: tuple[EnqueuedKey, ...] = ()
    keys_first: int = 0  # the key segments from this one ...
    keys_next: int = 0  # ... up to here, exclusive
    shards: int = 1  # of the whole queue, in the manifest of its first shard

    def __post_init__(self) -> None:
        if self.version not in (VERSION, SEALED_VERSION):
            _check_version("producer", self.version)

    @property
    def waiting(self) -> int:
        """How many batches were appended and not removed."""
        return self.next_sequence - self.floor - sum(last - first + 1 for first, last in self.removed)

    @property
    def waiting_bytes(self) -> int:
        return self.sealed_bytes + sum(entry.size_bytes for entry in self.entries.values())

    def is_removed(self, sequence: int) -> bool:
        return self.are_removed(sequence, sequence)

    def are_removed(self, first: int, last: int) -> bool:
        """Whether all of these sequences are removed."""
        first = max(first, self.floor)
        return last < first or any(start <= first and last <= end for start, end in self.removed)


class PendingView(msgspec.Struct, frozen=True):
    """The first batches of a queue, from segments and head; `whole` when no others follow."""

    pending: tuple[str, ...]
    entries: dict[str, PendingBatch]
    cleanups: int
    head: ProducerManifest
    whole: bool = True


class BatchClaim(msgspec.Struct, frozen=True, array_like=True):
    """Which collector has claimed a location, under which epoch. Every claim has its own epoch; an ack must name it."""

    collector: str = ""
    epoch: int = 0
    sequence: int = 0
    since_ms: int = 0
    size_bytes: int = 0
    enqueued_ms: int = 0


class DoneBatch(msgspec.Struct, frozen=True, array_like=True):
    """A finished location. `dead` means that its data now belongs to a dead letter and is not removed."""

    epoch: int = 0
    at_ms: int = 0
    dead: bool = False
    sequence: int = 0
    size_bytes: int = 0


class BatchTrouble(msgspec.Struct, frozen=True, array_like=True):
    """How often a batch was rejected and why. With `bury` it becomes a dead letter, whichever collector has claimed it.

    `silences` counts the collectors that stopped while this batch was their first: it may be crashing them.
    """

    count: int
    reason: str
    at_ms: int
    bury: bool = False
    silences: int = 0
    until_ms: int = 0  # it is not delivered again before this


class ConsumerManifest(msgspec.Struct, frozen=True):
    claimed: dict[str, int] = {}
    done: tuple[str, ...] = ()
    version: int = VERSION
    claims: dict[str, BatchClaim] = {}
    finished: dict[str, DoneBatch] = {}
    troubles: dict[str, BatchTrouble] = {}
    next_epoch: int = 1
    cleanups: int = 0
    settled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_version("consumer", self.version)


def _check_version(which: str, version: int) -> None:
    if version != VERSION:
        raise ValueError(f"{which} manifest version {version} is unknown; this Lakebed reads and writes {VERSION}")


class Append(msgspec.Struct, frozen=True):
    """A stored batch on its way into the producer manifest. `counter` numbers the batches of one ingestor."""

    ingestor: str
    counter: int
    generation: int
    location: str
    size_bytes: int
    count: int
    keys: tuple[str, ...] = ()


class Durable(msgspec.Struct, frozen=True):
    """Where entries are durable: the batch object is stored and its location is in the producer manifest.

    `repeated` means that an earlier call with the same idempotency key enqueued them; the location is not known then.
    """

    location: str
    sequence: int
    repeated: bool = False
    shard: int = 0


class Claimed(msgspec.Struct, frozen=True):
    """A location that a collector has claimed. `takeover` means that another collector had claimed it before."""

    location: str
    sequence: int
    epoch: int
    size_bytes: int
    enqueued_ms: int
    takeover: bool = False
    trouble: BatchTrouble | None = None


class CollectedBatch(msgspec.Struct, frozen=True):
    """A claimed batch with its entries. Store `sequence` with the data, and redelivery becomes exactly-once.

    `confirmed_ms`: when its claim was made, or last confirmed, before it was delivered.
    """

    entries: list[KeyValueEntry]
    claimed: Claimed
    shard: int = 0
    confirmed_ms: int = 0

    @property
    def location(self) -> str:
        return self.claimed.location

    @property
    def sequence(self) -> int:
        return self.claimed.sequence


class DeadLetter(msgspec.Struct, frozen=True):
    """A batch that could not be processed, kept with the reason. `replay_as` is where a replay stores it."""

    id: str
    location: str
    sequence: int
    reason: str
    rejections: int
    buried_ms: int
    enqueued_ms: int = 0
    version: int = VERSION
    replay_as: str = ""
    replay_generation: int = 0

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"dead letter version {self.version} is unknown; this Lakebed reads {VERSION}")


class ClosedLetter(msgspec.Struct, frozen=True):
    """What became of a dead letter, and why. Kept forever: nothing is dropped silently."""

    letter: DeadLetter
    action: Literal["replayed", "discarded"]
    reason: str
    at_ms: int
    version: int = VERSION
    sequence: int = 0  # of the replayed batch


class QueueStatus(msgspec.Struct, frozen=True):
    """A queue at one instant. Ages are of the oldest of their kind, None when there is none or it is unknown."""

    queue: str
    pending: int
    bytes_waiting: int
    claimed: int
    done: int
    dead: int
    pending_age_s: float | None
    claimed_age_s: float | None
    done_age_s: float | None
    stale_claims: int
    next_sequence: int
    generation: int
    collectors: list[str]
    shards: int = 1

    def row(self) -> dict[str, Any]:
        row = msgspec.to_builtins(self)
        assert isinstance(row, dict)
        return row


class Closed(Invalid):
    """The ingestor or collector was closed; it accepts no more calls."""

    code = "closed"


class GenerationExpired(Stale):
    """A batch was stored so long ago that the sweeper may have deleted it: store it again under a fresh name."""

    code = "outlived"


class KeysEnqueued(Stale):
    """Entries under these idempotency keys are in the queue already: leave them out of the batch."""

    code = "keys_enqueued"

    def __init__(self, sequences: dict[str, int]) -> None:
        super().__init__(f"{len(sequences)} idempotency keys were enqueued before")
        self.sequences = sequences


class KeysUnread(Stale):
    """Segments of idempotency keys were written since they were read: read them, then append."""

    code = "keys_unread"


class ShortRead(Unavailable):
    """Fewer bytes of a batch arrived than were stored: read it again."""

    code = "short"


def status_of(
    queue: str, view: PendingView, consumer: ConsumerManifest, *, dead: int, timeout_ms: int, now_ms: int
) -> QueueStatus:
    """The status from the first batches; the numbers of the others are in the head."""
    head = view.head
    done = {
        location: view.entries[location].size_bytes if location in view.entries else one.size_bytes
        for location, one in consumer.finished.items()
        if location in view.entries or (one.sequence and not head.is_removed(one.sequence))
    }
    waiting = [view.entries[location] for location in view.pending if location not in done]
    return QueueStatus(
        queue=queue,
        pending=max(0, head.waiting - len(done)),
        bytes_waiting=max(0, head.waiting_bytes - sum(done.values())),
        claimed=len(consumer.claimed),
        done=len(consumer.done),
        dead=dead,
        pending_age_s=_age_s((entry.enqueued_ms for entry in waiting), now_ms),
        claimed_age_s=_age_s((claim.since_ms for claim in consumer.claims.values()), now_ms),
        done_age_s=_age_s((one.at_ms for one in consumer.finished.values()), now_ms),
        stale_claims=sum(now_ms - at_ms > timeout_ms for at_ms in consumer.claimed.values()),
        next_sequence=head.next_sequence,
        generation=head.generation,
        collectors=sorted({claim.collector for claim in consumer.claims.values() if claim.collector}),
    )


def merged(statuses: Sequence[QueueStatus]) -> QueueStatus:
    """The status of a queue from those of its shards."""
    if len(statuses) == 1:
        return statuses[0]
    sums = {
        field: sum(getattr(one, field) for one in statuses)
        for field in ("pending", "bytes_waiting", "claimed", "done", "dead", "stale_claims")
    }
    ages: dict[str, Any] = {
        field: max((age for one in statuses if (age := getattr(one, field)) is not None), default=None)
        for field in ("pending_age_s", "claimed_age_s", "done_age_s")
    }
    newest = {field: max(getattr(one, field) for one in statuses) for field in ("next_sequence", "generation")}
    collectors = sorted({name for one in statuses for name in one.collectors})
    return QueueStatus(queue=statuses[0].queue, **sums, **ages, **newest, collectors=collectors, shards=len(statuses))


def _age_s(times_ms: Iterable[int], now_ms: int) -> float | None:
    oldest = min((at for at in times_ms if at), default=None)
    return None if oldest is None else max(0.0, (now_ms - oldest) / 1000)
