"""What a group of keys answers: pure decisions over a head and the leaves and sessions that are known.

A decision that needs a leaf or a session's state that is not known raises `Need`; the role fetches it and decides
again. Functions that change a head return the very head they were given when there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

import msgspec

from lakebed.errors import AlreadyExists, Overloaded, Stale
from lakebed.meta.bucket_model import (
    HOT_BYTES_HARD_MAX,
    REFS_HARD_MAX,
    Head,
    Hot,
    Leaf,
    LeafRef,
    entry_bytes,
    entry_of,
    hot_bytes,
)
from lakebed.meta.model import ABSENT, Entry


class Need(Exception):
    """These leaves or sessions must be known first."""

    def __init__(self, *, leaves: Iterable[str] = (), sessions: Iterable[str] = ()) -> None:
        super().__init__("not decidable yet")
        self.leaves, self.sessions = tuple(leaves), tuple(sessions)


class Crowded(Exception):
    """The head must be spilled before it takes more."""


class Known(msgspec.Struct, frozen=True):
    """What has been fetched for one call: leaves, which never change, and which sessions live right now."""

    leaves: Mapping[str, Leaf]
    sessions: Mapping[str, bool]

    def leaf(self, ref: LeafRef) -> Leaf:
        if ref.id not in self.leaves:
            raise Need(leaves=[ref.id])
        return self.leaves[ref.id]

    def lives(self, entry: Hot) -> bool:
        if not entry.session:
            return True
        if entry.session not in self.sessions:
            raise Need(sessions=[entry.session])
        return self.sessions[entry.session]


def find(head: Head, key: str, known: Known) -> Entry | None:
    hot = head.hot.get(key)
    if hot is not None:
        return entry_of(key, hot) if known.lives(hot) else None
    for ref in overlapping(head.refs, key, _after(key)):
        row = known.leaf(ref).find(key)
        if row is not None:
            return entry_of(key, row)
    return None


def scan(head: Head, known: Known, *, start: str, end: str, limit: int) -> list[Entry]:
    """The first `limit` entries with start <= key < end."""
    hot = {key: entry for key, entry in head.hot.items() if start <= key < end}
    unknown = {entry.session for entry in hot.values() if entry.session} - known.sessions.keys()
    refs = _enough(overlapping(head.refs, start, end), start, limit)
    missing = [ref.id for ref in refs if ref.id not in known.leaves]
    if unknown or missing:
        raise Need(leaves=missing, sessions=unknown)
    found = [entry_of(key, entry) for key, entry in hot.items() if known.lives(entry)]
    spilled = (
        entry_of(row.key, row) for ref in refs for row in known.leaves[ref.id].visible(ref) if start <= row.key < end
    )
    found.extend(islice(spilled, limit))
    found.sort(key=lambda entry: entry.key)
    return found[:limit]


def put(head: Head, key: str, value: bytes, expected: str | None, session: str, known: Known) -> tuple[Head, Entry]:
    if expected is not None:
        demand(find(head, key, known), key, expected)
    if hot_bytes(head.hot) + entry_bytes(key, value) > HOT_BYTES_HARD_MAX:
        raise Crowded
    made = Hot(value, head.version + 1, session)
    refs = head.refs if key in head.hot else cut(head.refs, key, _after(key), known)
    after = msgspec.structs.replace(head, version=made.version, hot={**head.hot, key: made}, refs=refs)
    return after, entry_of(key, made)


def delete(head: Head, key: str, expected: str | None, known: Known) -> tuple[Head, None]:
    if expected is not None:
        demand(find(head, key, known), key, expected)
    return delete_range(head, key, _after(key), known)


def delete_range(head: Head, start: str, end: str, known: Known) -> tuple[Head, None]:
    hot = {key: entry for key, entry in head.hot.items() if not start <= key < end}
    refs = cut(head.refs, start, end, known)
    if len(hot) == len(head.hot) and refs == head.refs:
        return head, None
    return msgspec.structs.replace(head, hot=hot, refs=refs), None


def demand(current: Entry | None, key: str, expected: str) -> None:
    """Raises unless what stands at the key is what the caller expects."""
    if expected == ABSENT and current is not None:
        raise AlreadyExists(f"meta entry {key!r} already exists", current=current)
    if expected != ABSENT and (current is None or current.version != expected):
        raise Stale(f"meta entry {key!r} has changed or is gone", current=current)


def overlapping(refs: Collection[LeafRef], start: str, end: str) -> list[LeafRef]:
    return [ref for ref in refs if ref.first < end and ref.last >= start]


def cut(refs: tuple[LeafRef, ...], start: str, end: str, known: Known) -> tuple[LeafRef, ...]:
    """The references without start <= key < end. Leaves that go whole need not be known."""
    touched = overlapping(refs, start, end)
    if not touched:
        return refs
    partly = [ref for ref in touched if ref.first < start or ref.last >= end]
    missing = [ref.id for ref in partly if ref.id not in known.leaves]
    if missing:
        raise Need(leaves=missing)
    left = {ref: known.leaves[ref.id].without(ref, start, end) for ref in partly}
    gone = set(touched) - left.keys()
    after = tuple(piece for ref in refs if ref not in gone for piece in left.get(ref, (ref,)))
    if len(after) > max(len(refs), REFS_HARD_MAX):
        raise Overloaded("this group of keys is full", hint="its compaction is not running, or far behind")
    return after


def _enough(refs: list[LeafRef], start: str, limit: int) -> list[LeafRef]:
    """As many of these references, in key order, as surely hold `limit` entries from `start` on."""
    found = 0
    for at, ref in enumerate(refs):
        found += ref.count if start <= ref.first else 1  # its last entry, at least
        if found >= limit:
            return refs[: at + 1]
    return refs


def _after(key: str) -> str:
    return key + "\0"
