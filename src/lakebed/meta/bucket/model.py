"""What the bucket backend stores: a head per group, immutable leaves, sessions; their limits, bytes and keys."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise

import msgspec

from lakebed.core.errors import Corrupt, Invalid
from lakebed.meta.model import MetaEntry

HEAD_SCHEMA = "lakebed.meta.head.v1"
BIN_SCHEMA = "lakebed.meta.bin.v1"
LEAF_SCHEMA = "lakebed.meta.leaf.v1"
SEPARATOR = "\0"  # between a partition key and a key in a bin: neither contains it

HOT_BYTES_MAX = 32 * 1024  # beyond this the oldest entries are spilled: a head is put on every change
HOT_BYTES_KEPT = 16 * 1024  # what a spill leaves in the head
HOT_BYTES_HARD_MAX = 2 * 1024 * 1024  # beyond this a put waits for the spill
LEAF_BYTES = 128 * 1024  # size a new leaf aims at: one quick GET
LEAF_MERGED_BYTES_MAX = 1024 * 1024  # size that merging neighbours may reach (one value may be 512 KiB)
REFS_MAX = 256  # beyond this neighbours are merged
REFS_HARD_MAX = 512  # beyond this a group is full
BIN_SCALE = 8  # how much larger the hot part and the leaves of a bin may be
WRITERS_MAX = 32  # processes a head remembers; a forgotten one with a lost response gets OutcomeUnknown
ENTRY_OVERHEAD_BYTES = 32  # version, quotes and commas around an entry
GROUP_BYTES_MAX = 512  # of a partition key
GROUP_NAME_MAX = 160  # of its folder's name; longer ones end in a hash
SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


class HotEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry in the head. `session` is empty for a permanent one."""

    value: bytes
    version: int
    session: str = ""


class LeafRef(msgspec.Struct, frozen=True, array_like=True):
    """The visible part of a leaf: its entries from `first` to `last`, both of which exist in it."""

    id: str
    first: str
    last: str
    count: int
    size_bytes: int


class BinSplit(msgspec.Struct, frozen=True, array_like=True):
    """Partition keys below `at` are in the bin `left`, the others in `right`."""

    at: str
    left: str
    right: str


class Head(msgspec.Struct, frozen=True):
    """A group of keys, or a bin of many groups.

    `refs` are in key order and do not overlap; no key is both hot and visible in a leaf.

    `writers` are the processes that wrote it last, each with the number of its last change that is in it: so a
    process whose write succeeded, was overwritten and then reported as a conflict still detects that it succeeded.

    A bin has the groups of `members`, and each key after its partition key. Once it has a `split` it never changes.
    """

    schema: str = HEAD_SCHEMA
    partition_key: str = ""
    version: int = 0
    fence: int = 0
    writers: dict[str, int] = {}
    hot: dict[str, HotEntry] = {}
    refs: tuple[LeafRef, ...] = ()
    members: tuple[str, ...] = ()
    split: BinSplit | None = None

    @property
    def scale(self) -> int:
        return BIN_SCALE if self.schema == BIN_SCHEMA else 1


class SessionRecord(msgspec.Struct, frozen=True):
    """A session. A missing object reads as this, ended: ids are never used again."""

    expires_at_ms: int = 0
    ended: bool = True


class LeafRow(msgspec.Struct, frozen=True, array_like=True):
    """An entry in a leaf."""

    key: str
    value: bytes
    version: int


class _LeafFile(msgspec.Struct, frozen=True):
    schema: str
    entries: list[LeafRow]


def entry_of(key: str, stored: HotEntry | LeafRow) -> MetaEntry:
    """An entry as callers see it."""
    return MetaEntry(plain(key), stored.value, str(stored.version))


def plain(key: str) -> str:
    """A stored key as callers name it: in a bin it follows its partition key."""
    return key.rpartition(SEPARATOR)[2]


def entry_bytes(key: str, value: bytes) -> int:
    """What an entry takes in a head or leaf, about: base64 makes four bytes of three."""
    return len(key) + len(value) * 4 // 3 + ENTRY_OVERHEAD_BYTES


def hot_bytes(hot: dict[str, HotEntry]) -> int:
    return sum(entry_bytes(key, entry.value) for key, entry in hot.items())


class Leaf:
    """A decoded leaf: rows in key order, with sums that give the size of any slice at once."""

    def __init__(self, rows: list[LeafRow]) -> None:
        self.rows = rows
        self.keys = [row.key for row in rows]
        self._sums = list(accumulate((entry_bytes(row.key, row.value) for row in rows), initial=0))
        self.size_bytes = self._sums[-1]

    def find(self, key: str) -> LeafRow | None:
        at = bisect_left(self.keys, key)
        return self.rows[at] if at < len(self.keys) and self.keys[at] == key else None

    def visible(self, ref: LeafRef) -> list[LeafRow]:
        return self.rows[bisect_left(self.keys, ref.first) : bisect_right(self.keys, ref.last)]

    def part(self, id: str, low: int, high: int) -> tuple[LeafRef, ...]:
        """The reference that shows rows low to high (exclusive); none for an empty part."""
        if low >= high:
            return ()
        size_bytes = self._sums[high] - self._sums[low]
        return (LeafRef(id, self.keys[low], self.keys[high - 1], high - low, size_bytes),)

    def whole(self, id: str) -> LeafRef:
        return self.part(id, 0, len(self.rows))[0]

    def without(self, ref: LeafRef, start: str, end: str) -> tuple[LeafRef, ...]:
        """What `ref` shows besides start <= key < end: the reference itself, trimmed, in two parts, or nothing."""
        low, high = bisect_left(self.keys, ref.first), bisect_right(self.keys, ref.last)
        cut_low = min(max(bisect_left(self.keys, start), low), high)
        cut_high = min(max(bisect_left(self.keys, end), cut_low), high)
        if cut_low == cut_high:
            return (ref,)
        return self.part(ref.id, low, cut_low) + self.part(ref.id, cut_high, high)


_HEAD = msgspec.json.Decoder(Head)


def decode_head(data: bytes, key: str) -> Head:
    """Raises Corrupt unless the bytes are a head of the schema this Lakebed knows."""
    try:
        head = _HEAD.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key!r} does not decode: {error}", hint="nothing was changed; inspect the object") from error
    if head.schema not in (HEAD_SCHEMA, BIN_SCHEMA):
        raise Corrupt(f"{key!r} has schema {head.schema!r}, this Lakebed knows {HEAD_SCHEMA!r} and {BIN_SCHEMA!r}")
    return head


def encode_leaf(rows: Iterable[LeafRow]) -> bytes:
    return msgspec.json.encode(_LeafFile(LEAF_SCHEMA, list(rows)))


_LEAF = msgspec.json.Decoder(_LeafFile)


def decode_leaf(data: bytes, key: str) -> Leaf:
    """Raises Corrupt unless the bytes are a leaf with its keys in order."""
    try:
        file = _LEAF.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key!r} does not decode: {error}", hint="nothing was changed; inspect the object") from error
    leaf = Leaf(file.entries)
    if file.schema != LEAF_SCHEMA or not leaf.rows:
        raise Corrupt(f"{key!r} is not a leaf of schema {LEAF_SCHEMA}")
    if any(one >= other for one, other in pairwise(leaf.keys)):
        raise Corrupt(f"{key!r} has keys out of order")
    return leaf


def group_name(partition_key: str) -> str:
    """The folder of a group. Different partition keys give different names, readable ones for ordinary topics."""
    raw = partition_key.encode()
    if len(raw) > GROUP_BYTES_MAX:
        raise Invalid(f"a partition key has at most {GROUP_BYTES_MAX} bytes, not {len(raw)}")
    name = "".join(chr(byte) if chr(byte) in SAFE else f"={byte:02X}" for byte in raw) or "="
    if len(name) > GROUP_NAME_MAX:
        return f"{name[:80]}=={hashlib.sha256(raw).hexdigest()}"
    return name


class BucketPaths:
    """The keys below the backend's folder. Heads share one folder, so that one list finds them all."""

    def __init__(self, root: str) -> None:
        self.heads = f"{root}/heads/"
        self.sessions = f"{root}/sessions/"
        self._leaves = f"{root}/leaves/"

    def head(self, group: str) -> str:
        return f"{self.heads}{group}.json"

    def group(self, head: str) -> str:
        return head.removeprefix(self.heads).removesuffix(".json")

    def leaves(self, group: str) -> str:
        return f"{self._leaves}{group}/"

    def leaf(self, group: str, id: str) -> str:
        return f"{self.leaves(group)}{id}.json"

    def session(self, id: str) -> str:
        return f"{self.sessions}{id}.json"


class BinPaths(BucketPaths):
    """The keys of bins. All bins share one folder of leaves: those of a split bin are referred to by its halves."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.heads = f"{root}/bins/"
        self._leaves = f"{root}/bin-leaves/"

    def leaves(self, group: str) -> str:
        return self._leaves
