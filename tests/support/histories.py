"""Judges what clients were promised against what is stored. Pure: a history in, a list of violations out.

A history is what clients recorded (`Write`, `Handled`) and what was read (`Seen`). A place is a partition, a queue, a
boot of an agent, a project or a table; a position is an offset, a sequence or a version in it.

- lost: a write was acknowledged, and the final read does not have it;
- acknowledged twice: one value is at two positions although its client was promised once, or one batch was
  acknowledged by two collectors;
- two values at one position: by what writers were answered, by what readers saw, or by both together;
- out of order: writes of a client that was promised order were sent one after another and acknowledged, and their
  positions do not grow, or the final read has them in another order;
- refused and there: a client was answered that nothing was done, and the value is there.

A write with outcome `unknown` may be there or not. An empty list means that the history is one that a correct system
can produce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

LOST, TWICE, TWO_VALUES = "lost", "acknowledged twice", "two values at one position"
OUT_OF_ORDER, REFUSED = "out of order", "refused and there"


class Promise(msgspec.Struct, frozen=True):
    """What a client may rely on. One that repeats a plain write after a lost answer is not promised `once`."""

    once: bool = True
    ordered: bool = True


EXACTLY_ONCE = Promise()
UNORDERED = Promise(ordered=False)
AT_LEAST_ONCE = Promise(once=False)


class Write(msgspec.Struct, frozen=True):
    """One value that a client wrote, in the order in which the client sent them. `position` where it was told one."""

    client: str
    place: str
    value: str
    outcome: Literal["ok", "fail", "unknown"]
    position: int | None = None
    promise: Promise = EXACTLY_ONCE


class Seen(msgspec.Struct, frozen=True):
    """One value that a reader got. The final read is complete and in order of position; other readers need not be."""

    place: str
    value: str
    position: int | None = None
    final: bool = True


class Handled(msgspec.Struct, frozen=True):
    """A collector acknowledged the batch at this position, and was answered that this is so."""

    collector: str
    place: str
    position: int


class Violation(msgspec.Struct, frozen=True):
    kind: str
    place: str
    detail: str


Event = Write | Seen | Handled


def check(history: Iterable[Event], *, shared: bool = False) -> list[Violation]:
    """Every violation, place by place. `shared`: many values may be at one position, as entries do in a batch."""
    places: dict[str, list[Event]] = defaultdict(list)
    for event in history:
        places[event.place].append(event)
    return [found for place, events in sorted(places.items()) for found in _place(place, events, shared)]


def _place(place: str, events: Sequence[Event], shared: bool) -> Iterable[Violation]:
    writes = [event for event in events if isinstance(event, Write)]
    seen = [event for event in events if isinstance(event, Seen)]
    handled = [event for event in events if isinstance(event, Handled)]
    yield from _presence(place, writes, seen)
    yield from _twice(place, writes, seen, handled)
    if not shared:
        yield from _two_values(place, writes, seen)
    yield from _order(place, writes, [one for one in seen if one.final])


def _presence(place: str, writes: Sequence[Write], seen: Sequence[Seen]) -> Iterable[Violation]:
    anywhere, final = {one.value for one in seen}, {one.value for one in seen if one.final}
    acknowledged = {write.value for write in writes if write.outcome == "ok"}
    for write in writes:
        if write.outcome == "ok" and write.value not in final:
            yield Violation(LOST, place, f"{write.value} was acknowledged to {write.client} at {write.position}")
        if write.outcome == "fail" and write.value in anywhere and write.value not in acknowledged:
            yield Violation(REFUSED, place, f"{write.value} was refused to {write.client}")


def _twice(
    place: str, writes: Sequence[Write], seen: Sequence[Seen], handled: Sequence[Handled]
) -> Iterable[Violation]:
    exempt = {write.value for write in writes if not write.promise.once}
    final: dict[str, list[int | None]] = defaultdict(list)
    for one in seen:
        if one.final:
            final[one.value].append(one.position)
    positions: dict[str, set[int]] = defaultdict(set)
    for reported in (*[write for write in writes if write.outcome == "ok"], *seen):
        if reported.position is not None:
            positions[reported.value].add(reported.position)
    for value in sorted({*final, *positions} - exempt):
        if len(final[value]) > 1 or len(positions[value]) > 1:
            yield Violation(TWICE, place, f"{value} stands at {final[value]}, and was told at {positions[value]}")
    collectors: dict[int, set[str]] = defaultdict(set)
    for one in handled:
        collectors[one.position].add(one.collector)
    for position, names in sorted(collectors.items()):
        if len(names) > 1:
            yield Violation(TWICE, place, f"{position} was acknowledged by {sorted(names)}")


def _two_values(place: str, writes: Sequence[Write], seen: Sequence[Seen]) -> Iterable[Violation]:
    at: dict[int, set[str]] = defaultdict(set)
    for reported in (*[write for write in writes if write.outcome == "ok"], *seen):
        if reported.position is not None:
            at[reported.position].add(reported.value)
    for position, values in sorted(at.items()):
        if len(values) > 1:
            yield Violation(TWO_VALUES, place, f"{position} is {sorted(values)}")


def _order(place: str, writes: Sequence[Write], final: Sequence[Seen]) -> Iterable[Violation]:
    first = {one.value: number for number, one in reversed(list(enumerate(final)))}
    before: dict[str, Write] = {}
    for write in writes:
        if write.outcome != "ok" or not write.promise.ordered:
            continue
        earlier = before.get(write.client)
        if earlier is not None and _turned(earlier, write, first):
            detail = f"{write.client} wrote {earlier.value} at {earlier.position}, then {write.value}"
            yield Violation(OUT_OF_ORDER, place, f"{detail} at {write.position}")
        before[write.client] = write


def _turned(earlier: Write, later: Write, first: dict[str, int]) -> bool:
    if earlier.position is not None and later.position is not None and earlier.position > later.position:
        return True
    return earlier.value in first and later.value in first and first[earlier.value] > first[later.value]
