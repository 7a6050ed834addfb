"""Values that the roller and its engines exchange, and the record that requests rollup work."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec


class RollupWork(msgspec.Struct, frozen=True):
    """Derived: a batch that entered the by-time index late, after readers may have passed its hour."""

    schema: Literal["lightmetrics.rollup_work.v1"]
    accepted_manifest_key: str
    accepted_by_time_key: str


class RollupInput(msgspec.Struct, frozen=True):
    """A batch to roll up, by its number in the generation and its name in the index by time."""

    number: int
    manifest_id: str


class RollupInputReport(msgspec.Struct, frozen=True):
    """The result of reading a batch. One with a `problem` is skipped under `key`; the rest continues without it."""

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
    """A chunk in the bucket. `window_s` is 0 for an index chunk, whose rows are series."""

    key: str
    window_s: int
    rows: int
    samples: int
    size: int


class RollupJob(Protocol):
    """An engine for one generation at a time: `read`, then `write` or nothing, then `close`."""

    async def read(self, inputs: list[RollupInput], windows_s: tuple[int, ...]) -> list[RollupInputReport]:
        """Reads and aggregates every batch, and keeps the result. Raises Unavailable while the bucket is down."""

    async def write(self, generation_id: str) -> list[StoredChunk]:
        """Stores the chunks of what was read, if absent. Raises Conflict if one exists with other bytes."""

    async def close(self) -> None:
        """Releases what was kept."""


Table = Any  # an Arrow table
