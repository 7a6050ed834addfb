"""Cursors of the event stream: where they may stand, and the pure changes of one shard's.

`advanced` is refused when anything is not as the sweep read it; `rewound` raises the generation, so that every sweep
under way is refused from then on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lakebed.lifecycle.model import BEFORE_FIRST, Calendar, Position
from lakebed.lifecycle.state import ReaderState


class Move(msgspec.Struct, frozen=True):
    """One cursor's way forward, and what it was read as: its position and the set of rules it was last moved for."""

    delay_ns: int | None
    seen: Position
    to: Position
    seen_rules: str
    rules: str


def stream_cutoff(calendar: Calendar, now_ns: int, delay_ns: int | None, flush_lag_ns: int) -> int:
    """How far a stream may be read: what is due, and can no longer be preceded by a late event."""
    wanted_ns = now_ns - calendar.small_delay_ns if delay_ns is None else calendar.cutoff(now_ns, delay_ns)
    return min(wanted_ns, now_ns - flush_lag_ns)


def advanced(state: ReaderState, generation: int, moves: Iterable[Move]) -> ReaderState | None:
    """The cursors moved forward, all or none; None when one was changed since it was read."""
    if state.generation != generation:
        return None
    for move in moves:
        if (state.cursor(move.delay_ns), state.rules_of(move.delay_ns)) != (move.seen, move.seen_rules):
            return None
        state = state.at(move.delay_ns, move.to).for_rules(move.delay_ns, move.rules)
    return state


def rewound(
    state: ReaderState, floors: Iterable[tuple[int | None, int]], *, generation: int, reach: str, begins_ns: int
) -> ReaderState:
    """Each cursor at its floor or before, under a new generation.

    Cursors of a log that was lost since, and those that the log no longer reaches back to, mean nothing any more: they
    are dropped, and set to the floor where one is given.
    """
    if state.reach != reach:
        state = msgspec.structs.replace(state, originals={}, predicate=None, rules={}, reach=reach)
    for delay_ns, floor_ns in floors:
        floor, known = Position(max(floor_ns, begins_ns), BEFORE_FIRST), state.cursor(delay_ns)
        if known is None or known > floor or known.ts_ns < begins_ns:
            state = state.at(delay_ns, floor)
    return msgspec.structs.replace(state, generation=max(state.generation + 1, generation))


def without_unused(state: ReaderState, used: set[int | None]) -> ReaderState:
    """The same object when every cursor is in use."""
    originals = {delay: at for delay, at in state.originals.items() if int(delay) in used}
    predicate = state.predicate if None in used else None
    if len(originals) == len(state.originals) and predicate is state.predicate:
        return state
    rules = {name: one for name, one in state.rules.items() if name in originals or (name == "predicate" and predicate)}
    return msgspec.structs.replace(state, originals=originals, predicate=predicate, rules=rules)
