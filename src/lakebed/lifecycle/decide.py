"""From a live family and its candidate actions to what is to be done: pure, the same for every stream.

One verb per entry. An entry that is not due is left to its own event, except where no event is to come: a late change
of predicates, or an entry whose time is later than the event that brought it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lakebed.lifecycle.engine import ActionRef, CompiledAction
from lakebed.lifecycle.evaluate import due_at, verb_of
from lakebed.lifecycle.model import Calendar, Entry, StreamKind, Verb
from lakebed.lifecycle.seams import Event, Family
from lakebed.lifecycle.state import PendingItem


class Deletion(msgspec.Struct, frozen=True):
    entry: Entry
    verb: Verb
    action: CompiledAction
    due_ns: int


class Decision(msgspec.Struct, frozen=True):
    deletions: tuple[Deletion, ...] = ()
    waits: tuple[tuple[ActionRef, PendingItem], ...] = ()


def decide(
    kind: StreamKind,
    actions: Iterable[CompiledAction],
    family: Family,
    now_ns: int,
    calendar: Calendar,
    event: Event | None = None,
) -> Decision:
    ordered = sorted(actions, key=lambda action: action.ref)
    deletions: list[Deletion] = []
    waits: list[tuple[ActionRef, PendingItem]] = []
    for entry in sorted(family.entries, key=lambda entry: entry.latest):  # noncurrent ones first
        later: list[tuple[ActionRef, PendingItem]] = []
        for action in ordered:
            due_ns = due_at(action.rule, action.kind, entry, calendar)
            if due_ns is None:
                continue
            if due_ns <= now_ns:
                deletions.append(Deletion(entry, verb_of(action.kind, entry), action, due_ns))
                later = []
                break
            if _no_event_to_come(kind, event, entry):
                item = PendingItem(entry.key, entry.version_id, due_ns, entry.identity, entry.upload_id)
                later.append((action.ref, item))
        waits += later
    return Decision(tuple(deletions), tuple(waits))


def _no_event_to_come(kind: StreamKind, event: Event | None, entry: Entry) -> bool:
    if kind is StreamKind.PREDICATE:
        return True
    if kind is not StreamKind.ORIGINAL or event is None or event.new is None:
        return False
    brought = (event.new.mtime_ns, event.new.size) == (entry.mtime_ns, entry.size)
    return brought and entry.mtime_ns > event.position.ts_ns
