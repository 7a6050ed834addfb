"""What the lifecycle worker needs from an object store, as seams. The engine knows no store; adapters know one each.

Errors carry the meaning: NotFound is "gone", Stale "another identity", Denied "object lock", Unavailable "try later",
Corrupt or Invalid "this one will never work" (it becomes a blocker), LostLog "events are missing".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from lakebed.errors import Conflict
from lakebed.lifecycle.model import Entry, Position, Verb


class LostLog(Conflict):
    """The event log no longer reaches back to the cursor: what lay between is unknown. Never to be passed over."""

    code = "lost_log"


class Facts(msgspec.Struct, frozen=True):
    """What an event says an entry was: enough to tell a new age from a change of predicates."""

    mtime_ns: int
    size: int
    fids: tuple[str, ...] = ()
    extended_hash: str = ""


class Event(msgspec.Struct, frozen=True):
    """One change of one thing in a bucket. `key` is the object's key, whichever version changed.

    `unreadable` says why the event could not be decoded; such an event blocks its stream instead of being skipped.
    `policy` says that the bucket's own lifecycle policy or versioning may have changed.
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

    def read(self, after: Position, until_ns: int) -> AsyncGenerator[Event, None]:
        """Events strictly behind `after` and not later than `until_ns`; ends there, also when nothing happens.

        Raises LostLog when the log begins behind `after`, Unavailable when no endpoint answers. The caller may stop
        iterating at any time.
        """

    async def begins_ns(self) -> int:
        """How far back the log reaches: 0 while nothing was ever removed from it. Raises Unavailable."""


class Family(msgspec.Struct, frozen=True):
    """All that there is of one key (newest version first), or one upload. `token` says where a walk goes on.

    `unreadable` says why it could not be understood: such a key holds a walk instead of being passed over.
    """

    bucket: str
    key: str
    entries: tuple[Entry, ...]
    upload_id: str = ""
    token: str = ""
    unreadable: str = ""


class Lister(Protocol):
    """The store's live state."""

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        """Everything of the key, or the upload, as it is now; no entries when nothing is left.

        Raises Unavailable, or Corrupt when an entry cannot be understood.
        """

    def walk(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        """Every key and every upload of the bucket once, behind the token `after`. Not a snapshot."""


class Removal(StrEnum):
    """What became of the bytes of something that was removed."""

    WHOLE = "whole"
    METADATA_ONLY = "metadata only"  # left to the volume they are on, which goes as a whole when its time is over


class Deleter(Protocol):
    """The store's conditional removal."""

    async def delete(self, entry: Entry, verb: Verb) -> Removal:
        """Removes exactly this entry, in one conditional step where the store offers it, and says how.

        Raises NotFound, Stale (another identity stands there), Denied (object lock), Unavailable, Corrupt or Invalid.
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
