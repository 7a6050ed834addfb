"""Bins: many groups of keys in one head, so that changes of many groups are one write. Pure decisions.

In a bin a key follows its partition key, so that a group's keys are neighbours and a group never sees another's.

A bin that is too large, or that several processes change at the same time, is split between two partition keys. The one
conditional write puts `split` into its head, which names two new bins and never changes again. Each of the two begins
with its half of that head, which everybody derives in the same way: so nothing else has to be written, and a process
that dies after the split leaves nothing to repair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from lakebed.core.errors import LakebedError
from lakebed.meta.bucket.decisions import HeadFull, LoadedState, NotLoaded, cut, demand, find, overlapping, scan
from lakebed.meta.bucket.model import (
    BIN_SCHEMA,
    HOT_BYTES_HARD_MAX,
    SEPARATOR,
    BinSplit,
    Head,
    HotEntry,
    entry_bytes,
    entry_of,
    hot_bytes,
    plain,
)
from lakebed.meta.model import MetaEntry

MEMBERS_MAX = 128  # groups in a bin: their control records are about 64 KiB
MEMBERS_CONTENDED_MAX = 100  # in one that several processes change at the same time
SPILLED_BYTES_MAX = 16 * 1024 * 1024  # in a bin's leaves: a spill writes all of them again
BEHIND_ALL = "\U0010ffff"  # no partition key starts with it


class BinPut(NamedTuple):
    """A put, with keys as the bin has them."""

    key: str
    value: bytes
    expected: str | None = None
    session: str = ""
    first: tuple[str, bytes] | None = None


def stored_key(partition_key: str, key: str) -> str:
    return f"{partition_key}{SEPARATOR}{key}"


def member_of(key: str) -> str:
    return key.partition(SEPARATOR)[0]


def put_all(head: Head, puts: Sequence[BinPut], known: LoadedState) -> tuple[Head, list[MetaEntry | LakebedError]]:
    """Makes each put on its own, all in one head: of a bin, or of one group."""
    now = msgspec.structs.replace(head, hot=dict(head.hot))
    size_bytes = hot_bytes(now.hot)
    made: list[MetaEntry | LakebedError] = []
    for put in puts:
        try:
            if put.expected is not None:
                demand(find(now, put.key, known), put.key, put.expected)
        except LakebedError as error:
            made.append(error)
            continue
        if put.first is not None and find(now, put.first[0], known) is None:
            size_bytes += entry_bytes(*put.first)
            now = _stored(now, *put.first, "", known)
        size_bytes += entry_bytes(put.key, put.value)
        if size_bytes > HOT_BYTES_HARD_MAX:
            raise HeadFull
        now = _stored(now, put.key, put.value, put.session, known)
        made.append(entry_of(put.key, now.hot[put.key]))
    if now.version == head.version or head.schema != BIN_SCHEMA:
        return (head if now.version == head.version else now), made
    members = {member_of(put.key) for put in puts}.difference(head.members)
    return msgspec.structs.replace(now, members=tuple(sorted(members.union(head.members)))), made


def _stored(now: Head, key: str, value: bytes, session: str, known: LoadedState) -> Head:
    """Changes the draft's entries in place."""
    refs = now.refs if key in now.hot else cut(now.refs, key, key + SEPARATOR, known)
    now.hot[key] = HotEntry(value, now.version + 1, session)
    return msgspec.structs.replace(now, version=now.version + 1, refs=refs)


def without_empty(head: Head, member: str, known: LoadedState) -> Head:
    """The bin without this group of it, when the group has no entry left."""
    start = stored_key(member, "")
    if member not in head.members or any(key.startswith(start) for key in head.hot):
        return head
    if scan(head, known, start=start, end=stored_key(member, BEHIND_ALL), limit=1):
        return head
    return msgspec.structs.replace(head, members=tuple(other for other in head.members if other != member))


def scan_all(head: Head, known: LoadedState, *, start: str, end: str, limit: int) -> list[MetaEntry]:
    """The first `limit` entries of all groups with start <= key < end."""
    hot = {key: entry for key, entry in head.hot.items() if start <= plain(key) < end}
    sessions = {entry.session for entry in hot.values() if entry.session} - known.sessions.keys()
    wanted = [(stored_key(member, start), stored_key(member, end)) for member in head.members]
    refs = {ref for low, high in wanted for ref in overlapping(head.refs, low, high)}
    missing = {ref.id for ref in refs if ref.id not in known.leaves}
    if sessions or missing:
        raise NotLoaded(leaves=missing, sessions=sessions)
    rows = [row for ref in refs for row in known.leaves[ref.id].visible(ref) if start <= plain(row.key) < end]
    found = [entry_of(key, entry) for key, entry in hot.items() if known.lives(entry)]
    found += [entry_of(row.key, row) for row in rows]
    return sorted(found, key=lambda entry: entry.key)[:limit]


def split_due(head: Head, *, contended: bool) -> bool:
    if head.schema != BIN_SCHEMA or head.split is not None or len(head.members) < 2:
        return False
    large = len(head.members) > MEMBERS_MAX or sum(ref.size_bytes for ref in head.refs) > SPILLED_BYTES_MAX
    return large or (contended and len(head.members) > MEMBERS_CONTENDED_MAX)


def split(head: Head, left: str, right: str, contended: bool) -> Head:
    """The head with its split into the bins of these new names; as it is when no split is due any more.

    Between the halves are as many hot entries, which are those that changed last, as can be.
    """
    if not split_due(head, contended=contended):
        return head
    weights = Counter(member_of(key) for key in head.hot)
    sums = list(accumulate(1 + weights[member] for member in head.members))
    at = next(number for number, weight in enumerate(sums, 1) if 2 * weight >= sums[-1])
    at = min(max(at, 1), len(head.members) - 1)
    return msgspec.structs.replace(head, split=BinSplit(head.members[at], left, right))


def half(head: Head, known: LoadedState, *, left: bool) -> Head:
    """What a bin begins with that this one was split into."""
    assert head.split is not None
    at = head.split.at
    return Head(
        schema=BIN_SCHEMA,
        version=head.version,
        fence=head.fence,
        hot={key: entry for key, entry in head.hot.items() if (key < at) == left},
        refs=cut(head.refs, at, BEHIND_ALL, known) if left else cut(head.refs, "", at, known),
        members=tuple(member for member in head.members if (member < at) == left),
    )
