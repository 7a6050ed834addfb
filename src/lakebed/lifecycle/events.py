"""What an event means for lifecycle: a new age, a change of predicates, or nothing.

An overwrite resets the clock, so it is a new age even when metadata changed with it. A version that was removed gives
no new age, but can leave a delete marker alone: it counts as a change of predicates, and is swept at once too. Where
versions are kept, what has no version id is the null version; elsewhere its removal is the end of its key.
"""

from __future__ import annotations

from enum import StrEnum

from lakebed.lifecycle.seams import Event


class Meaning(StrEnum):
    AGE_ORIGIN = "age_origin"
    PREDICATE_CHANGE = "predicate_change"
    REMOVAL = "removal"
    NOTHING = "nothing"


def meaning(event: Event, *, versioned: bool = False) -> Meaning:
    old, new = event.old, event.new
    if new is None:
        version = event.version_id or (versioned and not event.upload_id)
        return Meaning.REMOVAL if old is not None and version else Meaning.NOTHING
    if old is None or (old.mtime_ns, old.size, old.fids) != (new.mtime_ns, new.size, new.fids):
        return Meaning.AGE_ORIGIN
    return Meaning.PREDICATE_CHANGE if old.extended_hash != new.extended_hash else Meaning.NOTHING


def sweeps_original(event: Event, *, versioned: bool) -> bool:
    return meaning(event, versioned=versioned) in (Meaning.AGE_ORIGIN, Meaning.REMOVAL)


def sweeps_predicate(event: Event, *, versioned: bool) -> bool:
    return meaning(event, versioned=versioned) in (Meaning.PREDICATE_CHANGE, Meaning.REMOVAL)
