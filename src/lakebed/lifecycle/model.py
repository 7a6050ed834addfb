"""What lifecycle speaks in: rules as the engine sees them, objects as rules see them, verdicts. All frozen values.

Times are nanoseconds since the Unix epoch, durations nanoseconds; days are counted by a `Calendar`, so that a test's
day may last seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

SECOND_NS = 1_000_000_000
DAY_S = 86_400


class ActionKind(StrEnum):
    """One per action element of a rule. Each is compiled, scheduled, gated and degraded on its own."""

    EXPIRATION_DAYS = "EXPIRATION_DAYS"
    EXPIRATION_DATE = "EXPIRATION_DATE"
    NONCURRENT_DAYS = "NONCURRENT_DAYS"
    NEWER_NONCURRENT = "NEWER_NONCURRENT"
    ABORT_MPU = "ABORT_MPU"
    EXPIRED_DELETE_MARKER = "EXPIRED_DELETE_MARKER"


class Verb(StrEnum):
    """What a due action does: remove or mark the current version, remove a version, a marker, or an upload."""

    NONE = "NONE"
    CURRENT = "CURRENT"
    VERSION = "VERSION"
    DELETE_MARKER = "DELETE_MARKER"
    ABORT_MPU = "ABORT_MPU"


class Rule(msgspec.Struct, frozen=True):
    """One rule of a checked policy, flat. `rule_id` is only shown: rules are known by their hash."""

    rule_id: str = ""
    enabled: bool = True
    prefix: str = ""
    tags: tuple[tuple[str, str], ...] = ()  # sorted by key
    size_greater_than: int | None = None
    size_less_than: int | None = None
    expiration_days: int | None = None
    expiration_date_ns: int | None = None
    expired_delete_marker: bool = False
    noncurrent_days: int | None = None
    newer_noncurrent: int | None = None
    abort_days: int | None = None


class ActionKey(msgspec.Struct, frozen=True, order=True):
    """The engine's identity of an action; also the token that a delete shows to prove the policy still wants it."""

    rule_hash: str  # 16 hex digits
    kind: ActionKind

    def __str__(self) -> str:
        return f"{self.rule_hash}/{self.kind.value}"


class Identity(msgspec.Struct, frozen=True):
    """Which bytes and which tags: a delete that meets another identity does nothing.

    The head chunk tells a restored object with an old time from the one it replaced.
    """

    mtime_ns: int
    size: int
    head_fid: str = ""
    extended_hash: str = ""


class Entry(msgspec.Struct, frozen=True):
    """An object, a version, a delete marker or an upload, as it is now.

    `noncurrent_since_ns` is when its successor was made; `newer_noncurrent` counts noncurrent versions newer than it;
    `alone` says that no other version of the key is left.
    """

    bucket: str
    key: str
    identity: Identity
    version_id: str = ""
    upload_id: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    latest: bool = True
    marker: bool = False
    alone: bool = True
    noncurrent_since_ns: int | None = None
    newer_noncurrent: int = 0
    locked: bool = False
    chunks: tuple[str, ...] = ()  # all chunk ids, where the store can guard a delete by them

    @property
    def mtime_ns(self) -> int:
        return self.identity.mtime_ns

    @property
    def size(self) -> int:
        return self.identity.size


class Calendar(msgspec.Struct, frozen=True):
    """How long a day is, when a due instant falls, and the small delay that keeps clear of writes under way."""

    day_ns: int = DAY_S * SECOND_NS
    rounding: Literal["exact", "midnight"] = "midnight"
    small_delay_ns: int = 60 * SECOND_NS

    def days(self, count: int) -> int:
        return count * self.day_ns

    def due(self, origin_ns: int, delay_ns: int) -> int:
        """The instant `delay_ns` after the origin, or the first midnight (UTC) not before it."""
        at = origin_ns + delay_ns
        return at if self.rounding == "exact" else -(-at // self.day_ns) * self.day_ns

    def cutoff(self, now_ns: int, delay_ns: int) -> int:
        """The latest origin whose due instant has come: `due(cutoff, delay) <= now < due(cutoff + 1, delay)`."""
        reached = now_ns if self.rounding == "exact" else now_ns // self.day_ns * self.day_ns
        return reached - delay_ns


class Outcome(StrEnum):
    """What became of one guarded delete."""

    DELETED = "DELETED"
    NOT_FOUND = "NOT_FOUND"
    STALE_IDENTITY = "STALE_IDENTITY"
    STALE_POLICY = "STALE_POLICY"
    NO_LONGER_ELIGIBLE = "NO_LONGER_ELIGIBLE"
    SKIPPED_OBJECT_LOCK = "SKIPPED_OBJECT_LOCK"
    SKIPPED_RESERVED = "SKIPPED_RESERVED"  # a key of Lakebed's own
    TRANSPORT_ERROR = "TRANSPORT_ERROR"
    FATAL_EVENT_ERROR = "FATAL_EVENT_ERROR"


class Resolution(StrEnum):
    """What an outcome means for a stream: the first two let its cursor pass, the others do not."""

    DONE = "DONE"
    NOOP_RESOLVED = "NOOP_RESOLVED"
    RETRY_LATER = "RETRY_LATER"
    BLOCKED = "BLOCKED"

    @property
    def resolved(self) -> bool:
        return self in (Resolution.DONE, Resolution.NOOP_RESOLVED)


class Mode(StrEnum):
    EVENT_DRIVEN = "event_driven"
    SCAN_AT_DATE = "scan_at_date"
    SCAN_ONLY = "scan_only"
    DISABLED = "disabled"


class Degraded(StrEnum):
    NONE = "NONE"
    LAG_HIGH = "LAG_HIGH"
    PENDING_FULL = "PENDING_FULL"
    DELETE_FAILURES = "DELETE_FAILURES"
    OPERATOR_PAUSED = "OPERATOR_PAUSED"
    RETENTION_BELOW_HORIZON = "RETENTION_BELOW_HORIZON"
    LOST_LOG = "LOST_LOG"


class StreamKind(StrEnum):
    ORIGINAL = "ORIGINAL"
    PREDICATE = "PREDICATE"
    BOOTSTRAP = "BOOTSTRAP"
    PENDING = "PENDING"


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in the event stream. A cursor stands on the last resolved event: reading goes on strictly behind it."""

    ts_ns: int = 0
    offset: int = -1  # -1 stands before every event of its instant


BEFORE_FIRST = -1
