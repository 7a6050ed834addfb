"""The queue's values: entries, the two manifests as they are stored, and what callers get.

The manifests keep the seed's fields (`pending`; `claimed`, `done`) unchanged. What Lakebed adds is in further
fields, keyed by location, so that a manifest in the seed's plain form can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from lakebed.core.errors import Invalid, Stale, Unavailable

VERSION = 1


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


class ProducerManifest(msgspec.Struct, frozen=True):
    pending: tuple[str, ...] = ()
    version: int = VERSION
    entries: dict[str, PendingBatch] = {}
    next_sequence: int = 1
    generation: int = 0
    generation_at_ms: int = 0
    cleanups: int = 0
    sessions: dict[str, IngestorSession] = {}

    def __post_init__(self) -> None:
        _check_version("producer", self.version)


class BatchClaim(msgspec.Struct, frozen=True, array_like=True):
    """Which collector has claimed a location, under which epoch. Every claim has its own epoch; an ack must name it."""

    collector: str = ""
    epoch: int = 0
    sequence: int = 0
    since_ms: int = 0


class DoneBatch(msgspec.Struct, frozen=True, array_like=True):
    """A finished location. `dead` means that its data now belongs to a dead letter and is not removed."""

    epoch: int = 0
    at_ms: int = 0
    dead: bool = False


class BatchTrouble(msgspec.Struct, frozen=True, array_like=True):
    """How often a batch was rejected and why. With `bury` it becomes a dead letter, whichever collector has claimed it.

    `silences` counts the collectors that stopped while this batch was their first: it may be crashing them.
    """

    count: int
    reason: str
    at_ms: int
    bury: bool = False
    silences: int = 0


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


class Durable(msgspec.Struct, frozen=True):
    """Where entries are durable: the batch object is stored and its location is in the producer manifest."""

    location: str
    sequence: int


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
    """A claimed batch with its entries. Store `sequence` with the data, and redelivery becomes exactly-once."""

    entries: list[KeyValueEntry]
    claimed: Claimed

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


class ShortRead(Unavailable):
    """Fewer bytes of a batch arrived than were stored: read it again."""

    code = "short"


def status_of(
    queue: str, producer: ProducerManifest, consumer: ConsumerManifest, *, dead: int, timeout_ms: int, now_ms: int
) -> QueueStatus:
    done = set(consumer.done)
    waiting = [producer.entries[location] for location in producer.pending if location not in done]
    return QueueStatus(
        queue=queue,
        pending=len(waiting),
        bytes_waiting=sum(entry.size_bytes for entry in waiting),
        claimed=len(consumer.claimed),
        done=len(done),
        dead=dead,
        pending_age_s=_age_s((entry.enqueued_ms for entry in waiting), now_ms),
        claimed_age_s=_age_s((claim.since_ms for claim in consumer.claims.values()), now_ms),
        done_age_s=_age_s((one.at_ms for one in consumer.finished.values()), now_ms),
        stale_claims=sum(now_ms - at_ms > timeout_ms for at_ms in consumer.claimed.values()),
        next_sequence=producer.next_sequence,
        generation=producer.generation,
        collectors=sorted({claim.collector for claim in consumer.claims.values() if claim.collector}),
    )


def _age_s(times_ms: Iterable[int], now_ms: int) -> float | None:
    oldest = min((at for at in times_ms if at), default=None)
    return None if oldest is None else max(0.0, (now_ms - oldest) / 1000)
