"""What rollups store (state, plans, manifests, notes), and what the roller and its engines exchange."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from lakebed.rollups import paths


class RollupWork(msgspec.Struct, frozen=True):
    """Derived: a batch that entered the by-time index late, after readers may have passed its hour."""

    schema: Literal["lightmetrics.rollup_work.v1"]
    accepted_manifest_key: str
    accepted_by_time_key: str


class RollupInput(msgspec.Struct, frozen=True):
    """A batch to roll up, by its number in the generation and its name in the index. `frame_sha256` is what the index
    says; empty: it has no entry that can be read."""

    number: int
    manifest_id: str
    frame_sha256: str = ""
    raw_blob_key: str = ""  # of a pack; empty: the frame is a blob of its own
    raw_blob_offset: int = 0
    frame_bytes: int = 0


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
    raw_blob_offset: int = 0  # in the pack `key`; 0: the frame is a blob of its own


class StoredChunk(msgspec.Struct, frozen=True):
    """A chunk in the bucket. `window_s` is 0 for an index chunk, whose rows are series."""

    key: str
    window_s: int
    rows: int
    samples: int
    size: int


class Generation(msgspec.Struct, frozen=True):
    """`first_at_ns` and `last_at_ns` bound when its batches were accepted."""

    sequence: int
    digest: str
    first_at_ns: int
    last_at_ns: int

    @property
    def id(self) -> str:
        return f"{self.sequence:0{paths.GENERATION_DIGITS}d}-{self.digest}"

    @property
    def manifest_key(self) -> str:
        return paths.rollup_manifest_key(self.id, self.last_at_ns)


class RollupState(msgspec.Struct, frozen=True):
    """What is rolled up. Every batch that the index by time showed with acceptance before `settled_ns` is in a
    committed generation, is recorded as unreadable or has a note of being late; later ones are in one if a recent one
    lists them."""

    committed: int = 0
    settled_ns: int = 0
    through_ns: int = 0  # acceptances up to here were looked at
    notes_ms: int = 0  # notes of late batches that were stored before were looked at
    windows_s: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    recent: tuple[Generation, ...] = ()  # committed ones that may cover batches accepted since settled_ns
    pending: Generation | None = None
    swept: int = 0  # of abandoned numbers up to here nothing is left
    sweep_at_ns: int = 0  # all chunks are looked at again, while some of an abandoned number may be left

    def counts(self, sequence: int) -> bool:
        """Whether chunks of this generation count."""
        return sequence <= self.committed and sequence not in self.abandoned


class MergedSpans(msgspec.Struct, frozen=True):
    """Days and months whose chunks are merged, and through which generation.

    Those in `listed` have a list of their chunks, and are used. One that an earlier version merged is merged again.
    """

    through: dict[str, int] = {}
    listed: tuple[str, ...] = ()

    @property
    def usable(self) -> dict[str, int]:
        return {span: self.through[span] for span in self.listed if span in self.through}

    def with_span(self, span: str, sequence: int) -> MergedSpans:
        rest = self.without({span})
        return MergedSpans(rest.through | {span: sequence}, (*rest.listed, span))

    def without(self, spans: set[str]) -> MergedSpans:
        return MergedSpans(
            {span: number for span, number in self.through.items() if span not in spans},
            tuple(span for span in self.listed if span not in spans),
        )


class MergedChunks(msgspec.Struct, frozen=True):
    """Every merged chunk of a window and span: the metric's folder → the digest and the number of its chunks."""

    schema: Literal["lightmetrics.rollup_merged.v1"]
    chunks: dict[str, tuple[str, int]]

    def keys(self, folder: str, through: int, metric: str) -> list[str]:
        """The chunks of one metric; `folder` is that of the window and span."""
        digest, parts = self.chunks.get(metric, ("", 0))
        return [paths.merged_key(folder, metric, through, digest, part) for part in range(parts)]


class RollupPlan(msgspec.Struct, frozen=True):
    """The batches of a generation that was begun, so that the next lease holder can complete it."""

    schema: Literal["lightmetrics.rollup_plan.v1"]
    generation: Generation
    windows_s: tuple[int, ...]
    covers: tuple[str, ...]  # manifest ids, sorted; their places are the numbers of the batches


class UnreadableBatch(msgspec.Struct, frozen=True):
    """A batch that could not be read when its generation was made. It is tried again by every run."""

    schema: Literal["lightmetrics.rollup_aside.v1"]
    manifest_id: str
    key: str
    problem: str


class RollupManifest(msgspec.Struct, frozen=True):
    """What a generation is made of and from. It counts once its number is committed in the state."""

    schema: Literal["lightmetrics.rollup_manifest.v1"]
    generation: Generation
    windows_s: tuple[int, ...]
    samples: int
    covers: tuple[str, ...]
    chunks: tuple[StoredChunk, ...]
    index: tuple[StoredChunk, ...]


class RollupJob(Protocol):
    """An engine for one generation at a time: `read`, then `write` or nothing, then `close`."""

    async def read(self, inputs: list[RollupInput], windows_s: tuple[int, ...]) -> list[RollupInputReport]:
        """Reads and aggregates every batch, and keeps the result. Raises Unavailable while the bucket is down."""

    async def write(self, generation_id: str) -> list[StoredChunk]:
        """Stores the chunks of what was read, if absent. Raises Conflict if one exists with other bytes."""

    async def close(self) -> None:
        """Releases what was kept."""


Table = Any  # an Arrow table
