"""What one step of bronze loads: new batches, without numbers that were loaded before. Pure.

A step's commit remembers the batches it took. The next ones look back over an overlap, because the index of accepted
batches is written after acceptance, by clocks that differ: batches that are remembered are not taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lakebed.core.feed import FeedSlice, Limit, Offset, within

Range = tuple[int, int]  # inclusive


class TakenBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch in a step's commit: its id, whose numbers (an index of the commit's series), from and to."""

    id: str
    series: int = -1
    first: int = 0
    last: int = -1


class StepNote(msgspec.Struct, frozen=True):
    """The note of a commit: how far the table has come, and which batches it took, good or quarantined.

    Whatever the index showed at `looked_ns` with an acceptance up to the offset is in the table, or quarantined.
    0: not known, in a commit of an earlier version.
    """

    offset: Offset
    series: tuple[str, ...] = ()
    batches: tuple[TakenBatch, ...] = ()
    version: int = 1
    looked_ns: int = 0


class SampleWork(msgspec.Struct, frozen=True):
    """A piece for a task, and the numbers in it that are in the table already."""

    piece: FeedSlice
    doubled: tuple[Range, ...] = ()


class SampleStep(msgspec.Struct, frozen=True):
    works: tuple[SampleWork, ...]
    cut: bool = False  # more was waiting than the limit lets through


def note_of(offset: Offset, pieces: Sequence[FeedSlice], looked_ns: int = 0) -> StepNote:
    series = {name: n for n, name in enumerate(dict.fromkeys(piece.series for piece in pieces if piece.series))}
    batches = [TakenBatch(piece.id, series.get(piece.series, -1), piece.first, piece.last) for piece in pieces]
    return StepNote(offset, tuple(series), tuple(batches), looked_ns=looked_ns)


def plan(pieces: Iterable[FeedSlice], known: Sequence[StepNote], limit: Limit) -> SampleStep:
    """The batches of this step, in order. `pieces` are described; those that a note knows are left out."""
    seen = {taken.id for note in known for taken in note.batches}
    fresh: dict[str, FeedSlice] = {}
    for piece in pieces:
        if piece.id not in seen:
            fresh.setdefault(piece.id, piece)
    chosen = within(list(fresh.values()), limit)
    held = TakenNumbers(known)
    return SampleStep(tuple(SampleWork(piece, held.take(piece)) for piece in chosen), cut=len(chosen) < len(fresh))


def unnumbered(pieces: Sequence[FeedSlice], bad: set[str]) -> list[FeedSlice]:
    """The pieces, those that could not be read without their numbers: they take none."""
    return [
        msgspec.structs.replace(piece, series="", first=0, last=-1) if piece.id in bad else piece for piece in pieces
    ]


def without(note: StepNote, ids: set[str]) -> StepNote:
    """The note as if it had not taken these batches."""
    return msgspec.structs.replace(note, batches=tuple(taken for taken in note.batches if taken.id not in ids))


class TakenNumbers:
    """Which numbers of each series are taken. Batches of one agent follow each other, so ranges are few."""

    def __init__(self, known: Sequence[StepNote] = ()) -> None:
        self._ranges: dict[str, list[Range]] = {}
        for note in known:
            for taken in note.batches:
                if taken.series >= 0:
                    self._add(note.series[taken.series], (taken.first, taken.last))

    def take(self, piece: FeedSlice) -> tuple[Range, ...]:
        """Takes the piece's numbers; gives those that were taken before."""
        if not piece.series:
            return ()
        mine = (piece.first, piece.last)
        doubled = tuple(
            (max(first, piece.first), min(last, piece.last))
            for first, last in self._ranges.get(piece.series, ())
            if first <= piece.last and last >= piece.first
        )
        self._add(piece.series, mine)
        return doubled

    def _add(self, series: str, new: Range) -> None:
        """Joins the range with those that touch it, so that what is held stays disjoint and sorted."""
        first, last = new
        kept = []
        for held in self._ranges.get(series, ()):
            if held[1] < first - 1 or held[0] > last + 1:
                kept.append(held)
            else:
                first, last = min(first, held[0]), max(last, held[1])
        self._ranges[series] = sorted([*kept, (first, last)])


def looked_back(offset: Mapping[str, int], overlap_s: float) -> Offset:
    """Where listing begins: an overlap before the offset."""
    return {
        "through_ns": max(-1, offset["through_ns"] - round(overlap_s * 1e9)),
        "late_ms": max(0, offset["late_ms"] - round(overlap_s * 1e3)),
    }
