"""What passes between whoever decides what is rolled up and the engine that does it: plain values."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Input(msgspec.Struct, frozen=True):
    """A batch to roll up, by its number in the generation and its name in the index by time."""

    number: int
    manifest_id: str


class Told(msgspec.Struct, frozen=True):
    """What reading a batch came to. One with a `problem` is set aside under `key`; the rest goes on without it."""

    number: int
    manifest_id: str
    key: str
    frame_sha256: str = ""
    frame_bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0
    samples: int = 0
    problem: str = ""


class StoredChunk(msgspec.Struct, frozen=True):
    """A chunk that stands in the bucket. `window_s` is 0 for an index chunk, whose rows are series."""

    key: str
    window_s: int
    rows: int
    samples: int
    size: int


class Job(Protocol):
    """An engine for one generation at a time: `read`, then `write` or nothing, then `close`."""

    async def read(self, inputs: list[Input], windows_s: tuple[int, ...]) -> list[Told]:
        """Reads every batch, keeping what they come to. Raises Unavailable when the bucket does not answer."""

    async def write(self, generation_id: str) -> list[StoredChunk]:
        """Stores the chunks of what was read, each only if absent. Raises Conflict when one stands with other bytes."""

    async def close(self) -> None:
        """Lets go of what was kept."""


Table = Any  # an Arrow table
