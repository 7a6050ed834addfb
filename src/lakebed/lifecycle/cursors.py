"""Where sweeps begin: cursors seeded or pulled back when a walk completes. Pure.

Only actions that complete their first bootstrap, and groups an operator reseeds, move a cursor, and only backwards:
a routine safety scan must not make every sibling replay. The floor is anchored to the walk's start, so that what the
walk missed while it went along is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakebed.lifecycle.engine import ActionRef, Snapshot
from lakebed.lifecycle.model import BEFORE_FIRST, Mode, Position
from lakebed.lifecycle.state import ReaderState


def seed(
    state: ReaderState,
    snapshot: Snapshot,
    newly_completed: Iterable[ActionRef],
    target_modes: Mapping[ActionRef, Mode],
    started_ns: int,
    *,
    lookback_ns: int,
    force_delays_ns: Iterable[int] = (),
    force_predicate: bool = False,
) -> ReaderState:
    """The cursors after a walk that began at `started_ns`.

    `target_modes` was decided before, since an action completing now has no durable mode yet; scans need no cursor.
    """
    delays, predicate = set(force_delays_ns), force_predicate
    for ref in newly_completed:
        if target_modes.get(ref) is not Mode.EVENT_DRIVEN:
            continue
        delays |= set(snapshot.actions[ref].delays_ns)
        predicate = predicate or snapshot.actions[ref].predicate_sensitive
    for delay_ns in sorted(delays):
        floor = Position(started_ns - max(delay_ns, lookback_ns), BEFORE_FIRST)
        state = _pulled_back(state, delay_ns, floor)
    if predicate:
        state = _pulled_back(state, None, Position(started_ns - lookback_ns, BEFORE_FIRST))
    return state


def _pulled_back(state: ReaderState, delay_ns: int | None, floor: Position) -> ReaderState:
    known = state.cursor(delay_ns)
    return state if known is not None and known <= floor else state.at(delay_ns, floor)


def advanced(state: ReaderState, delay_ns: int | None, seen: Position, to: Position) -> ReaderState:
    """The cursor moved from where the reader knew it to be; a cursor that a walk pulled back meanwhile stays."""
    return state.at(delay_ns, to) if state.cursor(delay_ns) == seen and to > seen else state
