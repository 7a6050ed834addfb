"""What the queue speaks in: entries, the two manifests as they are stored, and what callers are given.

The manifests keep the seed's fields (`pending`; `claimed`, `done`) exactly as it gives them. What Lakebed needs beyond
them stands beside, keyed by location, so that a manifest in the seed's plain form reads as it is.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

VERSION = 1


class KeyValueEntry(msgspec.Struct, frozen=True):
    """One entry. Both sides are opaque bytes; in JSON they are base64."""

    key: bytes
    value: bytes


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a pending location: its sequence in the queue, and for people its size, count and time."""

    sequence: int
    size_bytes: int = 0
    count: int = 0
    enqueued_ms: int = 0


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The last append of one ingestor: which of its batches, in which generation, and the sequence it was given."""

    counter: int
    generation: int
    sequence: int


class ProducerManifest(msgspec.Struct, frozen=True):
    pending: tuple[str, ...] = ()
    version: int = VERSION
    entries: dict[str, Pending] = {}
    next_sequence: int = 1
    generation: int = 0
    generation_at_ms: int = 0
    cleanups: int = 0
    sessions: dict[str, Session] = {}

    def __post_init__(self) -> None:
        _check_version("producer", self.version)


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a location, under which epoch. Every claim has its own epoch; an ack must name it."""

    collector: str = ""
    epoch: int = 0
    sequence: int = 0
    since_ms: int = 0


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A finished location. `dead` means that its data now belongs to a dead letter and is not removed."""

    epoch: int = 0
    at_ms: int = 0
    dead: bool = False


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """How often a batch was rejected and why. With `bury` it is on its way to the dead letters, whoever holds it.

    `silences` counts the collectors that went silent with this batch first in their hands: it may be killing them.
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
    claims: dict[str, Claim] = {}
    finished: dict[str, Done] = {}
    troubles: dict[str, Trouble] = {}
    next_epoch: int = 1
    cleanups: int = 0
    settled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_version("consumer", self.version)


def _check_version(which: str, version: int) -> None:
    if version != VERSION:
        raise ValueError(f"{which} manifest version {version} is not known; this Lakebed reads and writes {VERSION}")


class Append(msgspec.Struct, frozen=True):
    """A stored batch on its way into the producer manifest. `counter` numbers the batches of one ingestor."""

    ingestor: str
    counter: int
    generation: int
    location: str
    size_bytes: int
    count: int


class Durable(msgspec.Struct, frozen=True):
    """Where entries came to rest: the batch object is stored and its location is in the producer manifest."""

    location: str
    sequence: int


class Claimed(msgspec.Struct, frozen=True):
    """A location that a collector holds. `takeover` means that somebody held it before."""

    location: str
    sequence: int
    epoch: int
    size_bytes: int
    enqueued_ms: int
    takeover: bool = False
    trouble: Trouble | None = None


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
    """A batch that could not be processed, set aside with the reason. `replay_as` is where a replay puts it."""

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
            raise ValueError(f"dead letter version {self.version} is not known; this Lakebed reads {VERSION}")


class ClosedLetter(msgspec.Struct, frozen=True):
    """What became of a dead letter, by whose word. Kept for good: nothing is dropped silently."""

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
