"""What lifecycle needs from an object store, as protocols. The engine knows no store; each adapter knows one.

Errors carry the meaning: NotFound is "gone", Stale "another identity", Denied "object lock", Unavailable "try later",
Corrupt or Invalid "this one will never work" (it becomes a blocker), LostLog "events are missing".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from lakebed.core.errors import Conflict
from lakebed.lifecycle.cluster import LogReach
from lakebed.lifecycle.model import ObjectEntry, Position, Verb

UPLOADS = ".uploads/"  # the prefix under which a scan lists uploads


class LostLog(Conflict):
    """The event log no longer reaches back to the cursor: the events between are unknown. It is never skipped."""

    code = "lost_log"


class Facts(msgspec.Struct, frozen=True, gc=False):
    """An entry as an event describes it: enough to distinguish a new age from a change of predicates."""

    mtime_ns: int
    size: int
    fids: tuple[str, ...] = ()
    extended_hash: str = ""


class ChangeEvent(msgspec.Struct, frozen=True, gc=False):
    """One change of one thing in a bucket. `key` is the object's key, whichever version changed.

    `unreadable` is why the event could not be decoded; such an event is isolated with that reason.
    `policy` is set when the bucket's own lifecycle policy or versioning may have changed.
    """

    position: Position
    bucket: str
    key: str = ""
    version_id: str = ""
    upload_id: str = ""
    old: Facts | None = None
    new: Facts | None = None
    policy: bool = False
    unreadable: str = ""


class EventSource(Protocol):
    """The store's log of changes, ordered by position."""

    def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        """Events strictly behind `after` and not later than `until_ns`; ends there, also when nothing happens.

        Raises LostLog when the log begins behind `after`, Unavailable when no endpoint answers. The caller may stop
        iterating at any time.
        """

    async def reach(self) -> LogReach:
        """How far back the log reaches, and which servers write it. Raises Unavailable."""

    async def files(self, day: str) -> dict[str, int]:
        """The log's files of a day (`2026-11-18`, UTC), and the second at which each begins. Raises Unavailable."""


class Family(msgspec.Struct, frozen=True):
    """All that there is of one key (newest version first), or one upload. A scan continues behind `token`.

    `unreadable` is why it could not be read: such a key is isolated with that reason.
    """

    bucket: str
    key: str
    entries: tuple[ObjectEntry, ...]
    upload_id: str = ""
    token: str = ""
    unreadable: str = ""
    skipped: int = 0  # in place of entries: so many keys up to the token were too young to be read


class Lister(Protocol):
    """The store's live state."""

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        """Everything of the key, or the upload, as it is now; no entries when nothing is left.

        Raises Unavailable, or Corrupt when an entry cannot be understood.
        """

    def scan(
        self, bucket: str, after: str = "", *, prefix: str = "", until: str = "", newest_ns: int | None = None
    ) -> AsyncGenerator[Family, None]:
        """Every key and every upload of the bucket once, behind the token `after` and, where `until` is given, not
        behind that token. With `prefix`, only keys that begin with it are listed; `UPLOADS` lists the uploads alone.
        With `newest_ns`, objects without versions that were written later may be counted and not read.
        Not a snapshot.
        """

    async def split(self, bucket: str, prefix: str = "") -> Sequence[str]:
        """Tokens between which a scan of the prefix can be divided, in order; none for what is small or cannot be."""


class Removal(StrEnum):
    """What became of the bytes of something that was removed."""

    WHOLE = "whole"
    METADATA_ONLY = "metadata only"  # left to their TTL volume, which is dropped as a whole
    COMPLETED = "completed upload"  # left to the object that was completed from them


class Deleter(Protocol):
    """The store's conditional removal."""

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        """Removes exactly this entry, in one conditional step where the store offers it, and returns how.

        Raises NotFound, Stale (the identity changed, a noncurrent version became the current one or the reverse, was
        current meanwhile if `since_noted`, a delete marker is not alone), Denied (object lock), Unavailable,
        Corrupt or Invalid.
        """


class Policy(msgspec.Struct, frozen=True):
    """One bucket's policy, verbatim, and whether it keeps (or kept) versions.

    `incarnation` tells a bucket that was deleted and made again from the one before.
    """

    bucket: str
    text: bytes
    versioned: bool = False
    incarnation: str = ""


class Policies(Protocol):
    """Where policies are kept."""

    async def all(self) -> Sequence[Policy]:
        """Every bucket that has a policy, with it."""

    async def get(self, bucket: str) -> Policy | None:
        """The policy in force now, read from the store itself, never from a cache."""

    def changes(self) -> AsyncGenerator[str, None]:
        """Buckets whose own entry changed from now on: policy or versioning may be another. Raises Unavailable."""

    async def put(self, bucket: str, text: bytes) -> None:
        """Puts the policy, in constant time whatever the size of the bucket; empty text removes it."""
