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
from lakebed.lifecycle.model import ObjectEntry, Position, Verb


class LostLog(Conflict):
    """The event log no longer reaches back to the cursor: the events between are unknown. It is never skipped."""

    code = "lost_log"


class Facts(msgspec.Struct, frozen=True):
    """An entry as an event describes it: enough to distinguish a new age from a change of predicates."""

    mtime_ns: int
    size: int
    fids: tuple[str, ...] = ()
    extended_hash: str = ""


class ChangeEvent(msgspec.Struct, frozen=True):
    """One change of one thing in a bucket. `key` is the object's key, whichever version changed.

    `unreadable` is why the event could not be decoded; such an event blocks its stream instead of being skipped.
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

    async def begins_ns(self) -> int:
        """How far back the log reaches: 0 while nothing was ever removed from it. Raises Unavailable."""


class Family(msgspec.Struct, frozen=True):
    """All that there is of one key (newest version first), or one upload. A scan continues behind `token`.

    `unreadable` is why it could not be read: such a key blocks a scan instead of being skipped.
    """

    bucket: str
    key: str
    entries: tuple[ObjectEntry, ...]
    upload_id: str = ""
    token: str = ""
    unreadable: str = ""


class Lister(Protocol):
    """The store's live state."""

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        """Everything of the key, or the upload, as it is now; no entries when nothing is left.

        Raises Unavailable, or Corrupt when an entry cannot be understood.
        """

    def scan(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        """Every key and every upload of the bucket once, behind the token `after`. Not a snapshot."""


class Removal(StrEnum):
    """What became of the bytes of something that was removed."""

    WHOLE = "whole"
    METADATA_ONLY = "metadata only"  # left to their TTL volume, which is dropped as a whole


class Deleter(Protocol):
    """The store's conditional removal."""

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        """Removes exactly this entry, in one conditional step where the store offers it, and returns how.

        Raises NotFound, Stale (the identity changed), Denied (object lock), Unavailable, Corrupt or Invalid.
        """


class Policy(msgspec.Struct, frozen=True):
    """One bucket's policy, verbatim, and whether it keeps (or kept) versions."""

    bucket: str
    text: bytes
    versioned: bool = False


class Policies(Protocol):
    """Where policies are kept."""

    async def all(self) -> Sequence[Policy]:
        """Every bucket that has a policy, with it."""

    async def get(self, bucket: str) -> Policy | None:
        """The policy in force now, read from the store itself, never from a cache."""

    async def put(self, bucket: str, text: bytes) -> None:
        """Puts the policy, in constant time whatever the size of the bucket; empty text removes it."""
