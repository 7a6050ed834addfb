"""Which batches are in the rollups: the roller's state, and every change to it, as pure functions.

A *generation* is a set of batches that are rolled up together. Its chunks carry its number, so a reader of the state
knows at once which chunks count: those of committed numbers. Committing is one conditional write, and it makes all
chunks of a generation true together, in every window, hour and metric.

A generation is begun in the state before its first chunk is stored. The next lease holder completes exactly it, or
abandons its number; a fenced holder can only store chunks that are the same, or that never count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from lakebed.batches.paths import parse_by_time
from lakebed.core.errors import Conflict, Overloaded
from lakebed.rollups.model import Generation, RollupState

MAKER = 2  # counts up when chunks of the same batches come out with other keys or bytes
ABANDONED_MAX = 1_000  # numbers kept in the state; each took a crash and a changed input
RECENT_MAX = 2_000  # generations whose batches lie in the overlap


def generation(state: RollupState, covers: Iterable[str], windows_s: tuple[int, ...]) -> Generation:
    """The next generation, of these manifest ids. The same batches have the same digest, in any order."""
    listed = sorted(covers)
    at = [parse_by_time(name)[1] for name in listed]
    digest = hashlib.sha256("\n".join([repr((MAKER, windows_s)), *listed]).encode()).hexdigest()[:32]
    return Generation(max(state.committed, *state.abandoned, 0) + 1, digest, min(at), max(at))


def begin(state: RollupState, new: Generation, windows_s: tuple[int, ...]) -> RollupState:
    """Raises Conflict when another generation is in progress: finish or abandon it first."""
    if state.pending not in (None, new):
        raise Conflict(f"rollup generation {state.pending} is in progress")
    return msgspec.structs.replace(state, pending=new, windows_s=windows_s)


def commit(state: RollupState, done: Generation) -> RollupState:
    """Raises Conflict unless exactly this generation is in progress."""
    if state.pending != done:
        raise Conflict(f"rollup generation {done.id} is not in progress")
    if len(state.recent) >= RECENT_MAX:
        raise Overloaded(
            f"{RECENT_MAX} generations in the overlap", hint="increase rollups.interval_s or reduce rollups.overlap_s"
        )
    return msgspec.structs.replace(state, committed=done.sequence, pending=None, recent=(*state.recent, done))


def abandon(state: RollupState) -> RollupState:
    """Gives up the generation in progress: its number is never committed, and its chunks never count."""
    if state.pending is None:
        return state
    if len(state.abandoned) >= ABANDONED_MAX:
        raise Overloaded(f"{ABANDONED_MAX} generations were abandoned", hint="find out why they cannot be completed")
    gone = (*state.abandoned, state.pending.sequence)
    return msgspec.structs.replace(state, abandoned=gone, pending=None)


def advance(state: RollupState, through_ns: int, notes_ms: int, overlap_ns: int) -> RollupState:
    """Everything indexed up to `through_ns` was taken, and every note stored up to `notes_ms`: what lies further back
    than the overlap is settled."""
    settled_ns = max(state.settled_ns, through_ns - overlap_ns)
    return msgspec.structs.replace(
        state,
        through_ns=max(state.through_ns, through_ns),
        settled_ns=settled_ns,
        notes_ms=max(state.notes_ms, notes_ms - overlap_ns // 1_000_000),
        recent=tuple(each for each in state.recent if each.last_at_ns >= settled_ns),
    )
