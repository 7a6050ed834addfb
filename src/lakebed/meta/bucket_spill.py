"""What a spill moves: pure. `plan` picks old entries of a head and neighbouring leaves, `apply` swaps them in.

The leaves of a plan are stored between the two. `apply` runs on whatever head stands by then: an entry that changed
meanwhile stays as it is and is cut from the new leaf; a changed reference or a raised fence refuses the plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from itertools import pairwise

import msgspec

from lakebed.meta.bucket_model import (
    HOT_BYTES_KEPT,
    HOT_BYTES_MAX,
    LEAF_BYTES,
    LEAF_MERGED_BYTES_MAX,
    REFS_MAX,
    Head,
    Leaf,
    LeafRef,
    Row,
    entry_bytes,
    hot_bytes,
)
from lakebed.meta.bucket_shard import Known, Need

TOUCHED_MAX = 16  # leaves one spill reads and writes again


class Replan(Exception):
    """The head has moved in a way that this plan cannot follow."""


class Plan(msgspec.Struct, frozen=True):
    """`moved` are the hot entries that go (key to version), `dropped` those of ended sessions, `replaced` the
    references that the new `leaves` take over."""

    fence: int
    moved: dict[str, int]
    dropped: dict[str, int]
    replaced: tuple[LeafRef, ...]
    leaves: dict[str, Leaf]


def due(head: Head) -> bool:
    return overflowing(head) or len(head.refs) > REFS_MAX


def overflowing(head: Head) -> bool:
    return hot_bytes(head.hot) > HOT_BYTES_MAX


def plan(head: Head, known: Known, ended: Collection[str], new_id: Callable[[], str]) -> Plan | None:
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
        raise Need(leaves=missing)
    merged = sorted(
        [*rows, *(row for ref in touched for row in known.leaves[ref.id].visible(ref))], key=lambda row: row.key
    )
    borders = [ref.first for ref in head.refs if ref not in touched]
    # A merged leaf stays as large as it is when more comes into it: splitting it would only call for merging again.
    size_bytes_max = LEAF_MERGED_BYTES_MAX if merging else max([LEAF_BYTES, *(ref.size_bytes for ref in touched)])
    chunks = _chunks(merged, borders, size_bytes_max)
    return Plan(
        fence=head.fence,
        moved={row.key: row.version for row in rows},
        dropped=dropped,
        replaced=tuple(ref for ref in head.refs if ref in touched),
        leaves={new_id(): Leaf(chunk) for chunk in chunks},
    )


def apply(head: Head, plan: Plan) -> Head:
    """The head with the plan carried out. Raises Replan when it no longer fits."""
    standing = set(head.refs)
    if head.fence != plan.fence or not standing.issuperset(plan.replaced):
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


def _victims(head: Head) -> tuple[list[Row], set[LeafRef]]:
    """The lasting entries that have not changed for longest, and the leaves whose span they fall into or follow."""
    size_bytes = hot_bytes(head.hot)
    rows: list[Row] = []
    touched: set[LeafRef] = set()
    if size_bytes <= HOT_BYTES_MAX:
        return rows, touched
    lasting = [(entry.version, key) for key, entry in head.hot.items() if not entry.session]
    firsts = [ref.first for ref in head.refs]
    for version, key in sorted(lasting):
        if size_bytes <= HOT_BYTES_KEPT:
            break
        near = _near(head.refs, firsts, key)
        if near is not None and near not in touched:
            if len(touched) == TOUCHED_MAX:
                continue  # the next spill takes it
            touched.add(near)
        entry = head.hot[key]
        rows.append(Row(key, entry.value, version))
        size_bytes -= entry_bytes(key, entry.value)
    return rows, touched


def _near(refs: tuple[LeafRef, ...], firsts: list[str], key: str) -> LeafRef | None:
    """The leaf that must take the key because it lies in its span, or the small one to its left, which may grow."""
    at = bisect_left(firsts, key) - 1
    if at < 0:
        return None
    ref = refs[at]
    return ref if key <= ref.last or ref.size_bytes < LEAF_BYTES // 2 else None


def _window(refs: tuple[LeafRef, ...]) -> tuple[LeafRef, ...]:
    """The neighbours whose merging costs least; none when even that would not make fewer of them."""
    windows = [refs[at : at + TOUCHED_MAX] for at in range(len(refs) - TOUCHED_MAX + 1)]
    best = min(windows, key=lambda window: sum(ref.size_bytes for ref in window))
    size_bytes = sum(ref.size_bytes for ref in best)
    return best if size_bytes // LEAF_MERGED_BYTES_MAX + 1 < len(best) // 2 else ()


def _chunks(rows: list[Row], borders: list[str], size_bytes_max: int) -> list[list[Row]]:
    """Rows in leaves of about the size, none of which spans a leaf that stays."""
    chunks: list[list[Row]] = []
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
