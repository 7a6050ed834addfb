"""Reads and changes of a group of keys: pure decisions over a head and the leaves and sessions that are loaded.

A decision that needs a leaf or a session that is not loaded raises `NotLoaded`; the role loads it and decides again.
Functions that change a head return the same head when there is nothing to change.

A spill moves old entries of a head into leaves. `plan_spill` picks them; the leaves are stored; `apply_spill` changes
the head as it is by then. An entry that changed meanwhile stays in the head; a changed reference or a raised fence
refuses the plan.

A write may succeed, be overwritten by another process, and then be reported as a conflict. So every change gets a
number of its writer, stored in the head. A head with that number contains the change, which is not repeated; a head
that no longer remembers the writer makes the outcome unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice, pairwise
from typing import Any, TypeVar

import msgspec

from lakebed.core.errors import AlreadyExists, OutcomeUnknown, Overloaded, Stale
from lakebed.meta.bucket.model import (
    HOT_BYTES_KEPT,
    HOT_BYTES_MAX,
    LEAF_BYTES,
    LEAF_MERGED_BYTES_MAX,
    REFS_HARD_MAX,
    REFS_MAX,
    WRITERS_MAX,
    Head,
    HotEntry,
    Leaf,
    LeafRef,
    LeafRow,
    entry_bytes,
    entry_of,
    hot_bytes,
    plain,
)
from lakebed.meta.model import ABSENT, MetaEntry

R = TypeVar("R")
TOUCHED_MAX = 16  # leaves one spill reads and writes again


class NotLoaded(Exception):
    """These leaves or sessions must be loaded first."""

    def __init__(self, *, leaves: Iterable[str] = (), sessions: Iterable[str] = ()) -> None:
        super().__init__("not decidable yet")
        self.leaves, self.sessions = tuple(leaves), tuple(sessions)


class HeadFull(Exception):
    """The head must be spilled before it takes more."""


class LoadedState(msgspec.Struct, frozen=True):
    """What has been loaded for one call: leaves, which never change, and which sessions are alive."""

    leaves: Mapping[str, Leaf]
    sessions: Mapping[str, bool]

    def leaf(self, ref: LeafRef) -> Leaf:
        if ref.id not in self.leaves:
            raise NotLoaded(leaves=[ref.id])
        return self.leaves[ref.id]

    def lives(self, entry: HotEntry) -> bool:
        if not entry.session:
            return True
        if entry.session not in self.sessions:
            raise NotLoaded(sessions=[entry.session])
        return self.sessions[entry.session]


def find(head: Head, key: str, known: LoadedState) -> MetaEntry | None:
    hot = head.hot.get(key)
    if hot is not None:
        return entry_of(key, hot) if known.lives(hot) else None
    for ref in overlapping(head.refs, key, _after(key)):
        row = known.leaf(ref).find(key)
        if row is not None:
            return entry_of(key, row)
    return None


def scan(head: Head, known: LoadedState, *, start: str, end: str, limit: int) -> list[MetaEntry]:
    """The first `limit` entries with start <= key < end."""
    hot = {key: entry for key, entry in head.hot.items() if start <= key < end}
    unknown = {entry.session for entry in hot.values() if entry.session} - known.sessions.keys()
    refs = _enough(overlapping(head.refs, start, end), start, limit)
    missing = [ref.id for ref in refs if ref.id not in known.leaves]
    if unknown or missing:
        raise NotLoaded(leaves=missing, sessions=unknown)
    found = [entry_of(key, entry) for key, entry in hot.items() if known.lives(entry)]
    spilled = (
        entry_of(row.key, row) for ref in refs for row in known.leaves[ref.id].visible(ref) if start <= row.key < end
    )
    found.extend(islice(spilled, limit))
    found.sort(key=lambda entry: entry.key)
    return found[:limit]


def delete(head: Head, key: str, expected: str | None, known: LoadedState) -> tuple[Head, None]:
    if expected is not None:
        demand(find(head, key, known), key, expected)
    return delete_range(head, key, _after(key), known)


def delete_range(head: Head, start: str, end: str, known: LoadedState) -> tuple[Head, None]:
    hot = {key: entry for key, entry in head.hot.items() if not start <= key < end}
    refs = cut(head.refs, start, end, known)
    if len(hot) == len(head.hot) and refs == head.refs:
        return head, None
    return msgspec.structs.replace(head, hot=hot, refs=refs), None


def demand(current: MetaEntry | None, key: str, expected: str) -> None:
    """Raises unless the entry at the key is what the caller expects."""
    if expected == ABSENT and current is not None:
        raise AlreadyExists(f"meta entry {plain(key)!r} already exists", current=current)
    if expected != ABSENT and (current is None or current.version != expected):
        raise Stale(f"meta entry {plain(key)!r} has changed or is gone", current=current)


def overlapping(refs: Collection[LeafRef], start: str, end: str) -> list[LeafRef]:
    return [ref for ref in refs if ref.first < end and ref.last >= start]


def cut(refs: tuple[LeafRef, ...], start: str, end: str, known: LoadedState) -> tuple[LeafRef, ...]:
    """The references without start <= key < end. Leaves that go whole need not be known."""
    touched = overlapping(refs, start, end)
    if not touched:
        return refs
    partly = [ref for ref in touched if ref.first < start or ref.last >= end]
    missing = [ref.id for ref in partly if ref.id not in known.leaves]
    if missing:
        raise NotLoaded(leaves=missing)
    left = {ref: known.leaves[ref.id].without(ref, start, end) for ref in partly}
    gone = set(touched) - left.keys()
    after = tuple(piece for ref in refs if ref not in gone for piece in left.get(ref, (ref,)))
    if len(after) > max(len(refs), REFS_HARD_MAX):
        raise Overloaded(
            "this group of keys is full",
            hint="compaction is not running or is far behind: check lakebed work --parts log",
        )
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


class HeadWriter:
    """A process as the heads name it, with the number of its last decision.

    Changes that share a write are decided one on the head of the other. Such a draft has numbers that nothing has
    stored yet, so what is done is seen by the head that was stored before all of them.
    """

    def __init__(self, id: str) -> None:
        self.id, self.last = id, 0
        self._stored: dict[str, int] = {}
        self._draft: Head | None = None

    def stored_in(self, head: Head) -> dict[str, int]:
        """The writers of the stored head that this one, perhaps a draft, was made of."""
        if head is not self._draft:
            self._stored = head.writers
        return self._stored

    def drafted(self, head: Head) -> Head:
        self._draft = head
        return head


class HeadChange:
    """One change through all its attempts. `follows_other` when another process made the change before it."""

    def __init__(self, writer: HeadWriter) -> None:
        self._writer = writer
        self.follows_other = False
        self._number = 0
        self._answer: Any = None

    def deciding(
        self, decide: Callable[[Head], tuple[Head, R]]
    ) -> Callable[[Head], tuple[Head, tuple[Head | None, R]]]:
        """`decide` for the register. Its result comes with the new head, if there is one."""

        def once(head: Head) -> tuple[Head, tuple[Head | None, R]]:
            stored = self._writer.stored_in(head)
            if self._number and self._done(stored):
                return head, self._answer
            self._number = 0  # the last attempt is not in this head, so it never will be
            after, result = decide(head)
            if after is head:
                return head, (None, result)
            self.follows_other = next(reversed(head.writers), self._writer.id) != self._writer.id
            self._writer.last += 1
            self._number, self._answer = self._writer.last, (after, result)
            signed = msgspec.structs.replace(after, writers=self._signed(head.writers))
            return self._writer.drafted(signed), self._answer

        return once

    def _done(self, writers: dict[str, int]) -> bool:
        last = writers.get(self._writer.id)
        if last is None and len(writers) >= WRITERS_MAX:
            raise OutcomeUnknown("the outcome of a change is unknown: the group no longer remembers this writer")
        return last is not None and last >= self._number

    def _signed(self, writers: dict[str, int]) -> dict[str, int]:
        """The writers with this one as the latest."""
        others = [(id, last) for id, last in writers.items() if id != self._writer.id]
        return dict([*others[-(WRITERS_MAX - 1) :], (self._writer.id, self._number)])


class Replan(Exception):
    """The head has moved in a way that this plan cannot follow."""


class SpillPlan(msgspec.Struct, frozen=True):
    """`moved` are the hot entries that go (key to version), `dropped` those of ended sessions, `replaced` the
    references that the new `leaves` take over."""

    fence: int
    moved: dict[str, int]
    dropped: dict[str, int]
    replaced: tuple[LeafRef, ...]
    leaves: dict[str, Leaf]


def spill_due(head: Head) -> bool:
    return head.split is None and (overflowing(head) or len(head.refs) > REFS_MAX)


def overflowing(head: Head) -> bool:
    return hot_bytes(head.hot) > HOT_BYTES_MAX * head.scale


def plan_spill(head: Head, known: LoadedState, ended: Collection[str], new_id: Callable[[], str]) -> SpillPlan | None:
    """The next spill of this head, or None when nothing is to be gained. Raises Need for leaves to be merged."""
    dropped = {key: entry.version for key, entry in head.hot.items() if entry.session in ended}
    rows, touched = _victims(head)
    merging = len(head.refs) > REFS_MAX
    if merging:
        touched |= set(_window(head.refs))
    if not rows and not touched and not dropped:
        return None
    missing = [ref.id for ref in touched if ref.id not in known.leaves]
    if missing:
        raise NotLoaded(leaves=missing)
    merged = sorted(
        [*rows, *(row for ref in touched for row in known.leaves[ref.id].visible(ref))], key=lambda row: row.key
    )
    borders = [ref.first for ref in head.refs if ref not in touched]
    # A merged leaf keeps its size limit when it grows: a split would only be merged again.
    least, most = LEAF_BYTES * head.scale, LEAF_MERGED_BYTES_MAX * head.scale
    size_bytes_max = most if merging else max([least, *(ref.size_bytes for ref in touched)])
    chunks = _chunks(merged, borders, size_bytes_max)
    return SpillPlan(
        fence=head.fence,
        moved={row.key: row.version for row in rows},
        dropped=dropped,
        replaced=tuple(ref for ref in head.refs if ref in touched),
        leaves={new_id(): Leaf(chunk) for chunk in chunks},
    )


def apply_spill(head: Head, plan: SpillPlan) -> Head:
    """The head with the plan carried out. Raises Replan when it no longer fits."""
    referred = set(head.refs)
    if head.split is not None or head.fence != plan.fence or not referred.issuperset(plan.replaced):
        raise Replan
    gone = plan.moved | plan.dropped
    hot = {key: entry for key, entry in head.hot.items() if gone.get(key) != entry.version}
    changed = [key for key, version in plan.moved.items() if key not in head.hot or head.hot[key].version != version]
    fresh = [piece for id, leaf in plan.leaves.items() for piece in _without(id, leaf, changed)]
    replaced = set(plan.replaced)
    refs = sorted([ref for ref in head.refs if ref not in replaced] + fresh, key=lambda ref: ref.first)
    if any(left.last >= right.first for left, right in pairwise(refs)):
        raise Replan
    return msgspec.structs.replace(head, hot=hot, refs=tuple(refs))


def _victims(head: Head) -> tuple[list[LeafRow], set[LeafRef]]:
    """The permanent entries that have not changed for longest, and the leaves that must take them."""
    size_bytes = hot_bytes(head.hot)
    rows: list[LeafRow] = []
    touched: set[LeafRef] = set()
    if not overflowing(head):
        return rows, touched
    lasting = [(entry.version, key) for key, entry in head.hot.items() if not entry.session]
    firsts = [ref.first for ref in head.refs]
    for version, key in sorted(lasting):
        if size_bytes <= HOT_BYTES_KEPT * head.scale:
            break
        near = _near(head.refs, firsts, key, LEAF_BYTES * head.scale // 2)
        if near is not None and near not in touched:
            if len(touched) == TOUCHED_MAX:
                continue  # the next spill takes it
            touched.add(near)
        entry = head.hot[key]
        rows.append(LeafRow(key, entry.value, version))
        size_bytes -= entry_bytes(key, entry.value)
    return rows, touched


def _near(refs: tuple[LeafRef, ...], firsts: list[str], key: str, small_bytes: int) -> LeafRef | None:
    """The leaf whose range contains the key, or the small one to its left, which may grow."""
    at = bisect_left(firsts, key) - 1
    if at < 0:
        return None
    ref = refs[at]
    return ref if key <= ref.last or ref.size_bytes < small_bytes else None


def _window(refs: tuple[LeafRef, ...]) -> tuple[LeafRef, ...]:
    """The neighbours that are cheapest to merge; none when a merge would not reduce their number."""
    windows = [refs[at : at + TOUCHED_MAX] for at in range(len(refs) - TOUCHED_MAX + 1)]
    best = min(windows, key=lambda window: sum(ref.size_bytes for ref in window))
    size_bytes = sum(ref.size_bytes for ref in best)
    return best if size_bytes // LEAF_MERGED_BYTES_MAX + 1 < len(best) // 2 else ()


def _chunks(rows: list[LeafRow], borders: list[str], size_bytes_max: int) -> list[list[LeafRow]]:
    """Rows in leaves of about the size, none of which spans a leaf that stays."""
    chunks: list[list[LeafRow]] = []
    size_bytes = 0
    for row in rows:
        last = chunks[-1][-1].key if chunks else ""
        spans = bisect_left(borders, row.key) != bisect_left(borders, last)
        more = entry_bytes(row.key, row.value)
        if not chunks or spans or size_bytes + more > size_bytes_max:
            chunks.append([])
            size_bytes = 0
        chunks[-1].append(row)
        size_bytes += more
    return chunks


def _without(id: str, leaf: Leaf, keys: list[str]) -> list[LeafRef]:
    pieces = [leaf.whole(id)]
    for key in keys:
        pieces = [part for piece in pieces for part in leaf.without(piece, key, key + "\0")]
    return pieces
