"""A filer's values: entries, events of changed entries, and conditional transactions.

Values that come by the thousand have `gc=False`: they cannot be part of a cycle, and the collector walked through all
that are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec


class FileChunk(msgspec.Struct, frozen=True, gc=False):
    """A part of a file's bytes. `fid` names it in the cluster and is never given to other bytes."""

    fid: str
    offset: int = 0
    size: int = 0
    modified_ts_ns: int = 0
    etag: str = ""


class Attributes(msgspec.Struct, frozen=True, gc=False):
    file_size: int = 0
    mtime_ns: int = 0
    crtime_ns: int = 0
    mode: int = 0
    mime: str = ""
    ttl_s: int = 0
    md5: bytes = b""


class FilerEntry(msgspec.Struct, frozen=True, gc=False):
    """A file or a folder. `raw` is how the filer wrote it: sent back as it was, it states the whole entry."""

    name: str
    is_directory: bool = False
    attributes: Attributes = Attributes()
    chunks: tuple[FileChunk, ...] = ()
    extended: Mapping[str, bytes] = {}
    content: bytes = b""
    raw: bytes = b""

    @property
    def size(self) -> int:
        ends = max([chunk.offset + chunk.size for chunk in self.chunks]) if self.chunks else 0
        return max(self.attributes.file_size, ends, len(self.content))

    @property
    def head_fid(self) -> str:
        return min(self.chunks, key=lambda chunk: chunk.offset).fid if self.chunks else ""

    def text(self, key: str) -> str:
        """An extended attribute as text; empty when it is missing."""
        return self.extended.get(key, b"").decode(errors="replace")


class SkippedEntries(msgspec.Struct, frozen=True):
    """Files of a listing that follow each other and were not decoded. `name` is the last of them."""

    name: str
    count: int


class FilerEvent(msgspec.Struct, frozen=True, gc=False):
    """One change: created (only `new`), updated or moved (both), deleted (only `old`), or nothing (a heartbeat).

    `unreadable` is why the entries of a change could not be decoded, when its path and time could.
    """

    directory: str
    ts_ns: int
    old: FilerEntry | None = None
    new: FilerEntry | None = None
    new_parent: str = ""
    unreadable: str = ""

    @property
    def heartbeat(self) -> bool:
        return self.old is None and self.new is None and not self.unreadable

    @property
    def created(self) -> bool:
        return self.new is not None and self.old is None

    @property
    def path(self) -> str:
        """Where the entry is now, or was before it was deleted; empty for a heartbeat."""
        if self.new is not None:
            return f"{self.new_parent or self.directory}/{self.new.name}"
        return f"{self.directory}/{self.old.name}" if self.old is not None else ""


class ConditionKind(IntEnum):
    """What a clause states about the entry; an old server knows fewer of them."""

    NOT_EXISTS = 1
    EXISTS = 2
    ETAG_MATCH = 3
    UNMODIFIED_SINCE = 5
    EXTENDED_NOT_EQUAL = 7
    CHUNKS_EQUAL = 9
    ENTRY_EQUAL = 10


class Clause(msgspec.Struct, frozen=True):
    kind: ConditionKind
    etags: tuple[str, ...] = ()
    unix_time_s: int = 0
    ext_key: str = ""
    ext_value: str = ""
    fids: tuple[str, ...] = ()
    expected: bytes = b""  # an entry, as the filer wrote it


class MutationKind(IntEnum):
    PUT = 0
    DELETE = 1
    PATCH_EXTENDED = 2


class Mutation(msgspec.Struct, frozen=True):
    kind: MutationKind
    directory: str
    name: str
    entry: FilerEntry | None = None
    set_extended: Mapping[str, bytes] = {}
    delete_extended: tuple[str, ...] = ()
    delete_data: bool = False
    recursive: bool = False
    remove_empty_parent: bool = False


class Transaction(msgspec.Struct, frozen=True):
    """Mutations made together, under the lock of `path`, when every clause holds for the entry at `condition_path`."""

    path: str
    clauses: tuple[Clause, ...]
    mutations: tuple[Mutation, ...]
    condition_path: str = ""
