"""Lifecycle's values: rules, objects as rules see them, outcomes, positions of streams. All frozen.

Times are nanoseconds since the Unix epoch, durations nanoseconds; days are counted by a `Calendar`, so that a test's
day may last seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal

import msgspec

SECOND_NS = 1_000_000_000
DAY_S = 86_400
BEFORE_FIRST = -1
RULE_HASH_VERSION = b"lakebed.lifecycle.rule.v1"


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
    """The engine's identity of an action; a delete goes ahead only while the policy has it."""

    rule_hash: str  # 16 hex digits
    kind: ActionKind

    def __str__(self) -> str:
        return f"{self.rule_hash}/{self.kind.value}"


class ObjectIdentity(msgspec.Struct, frozen=True):
    """Which bytes and which tags: a delete that meets another identity does nothing.

    The head chunk distinguishes a restored object with an old time from the one it replaced.
    """

    mtime_ns: int
    size: int
    head_fid: str = ""
    extended_hash: str = ""


class ObjectEntry(msgspec.Struct, frozen=True):
    """An object, a version, a delete marker or an upload, as it is now.

    `noncurrent_since_ns` is when its successor was made: `since_noted` when that is part of its own identity, otherwise
    it is read from the successor. `newer_noncurrent` counts noncurrent versions newer than it; `alone` is set when no
    other version of the key is left.
    """

    bucket: str
    key: str
    identity: ObjectIdentity
    version_id: str = ""
    upload_id: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    latest: bool = True
    marker: bool = False
    alone: bool = True
    noncurrent_since_ns: int | None = None
    since_noted: bool = True
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

    @property
    def rounding_ns(self) -> int:
        """The longest time that rounding adds to a delay."""
        return 0 if self.rounding == "exact" else self.day_ns

    def due(self, origin_ns: int, delay_ns: int) -> int:
        """The instant `delay_ns` after the origin, or the first midnight (UTC) not before it."""
        at = origin_ns + delay_ns
        return at if self.rounding == "exact" else -(-at // self.day_ns) * self.day_ns

    def cutoff(self, now_ns: int, delay_ns: int) -> int:
        """The latest origin whose due instant has come: `due(cutoff, delay) <= now < due(cutoff + 1, delay)`."""
        reached = now_ns if self.rounding == "exact" else now_ns // self.day_ns * self.day_ns
        return reached - delay_ns


class DeleteOutcome(StrEnum):
    """The outcome of one guarded delete."""

    DELETED = "DELETED"
    NOT_FOUND = "NOT_FOUND"
    STALE_IDENTITY = "STALE_IDENTITY"
    STALE_POLICY = "STALE_POLICY"
    NO_LONGER_ELIGIBLE = "NO_LONGER_ELIGIBLE"
    SKIPPED_OBJECT_LOCK = "SKIPPED_OBJECT_LOCK"
    SKIPPED_RESERVED = "SKIPPED_RESERVED"  # a key of Lakebed's own
    TRANSPORT_ERROR = "TRANSPORT_ERROR"
    FATAL_EVENT_ERROR = "FATAL_EVENT_ERROR"


class StreamResolution(StrEnum):
    """What an outcome means for a stream: the first two let its cursor pass, the others do not."""

    DONE = "DONE"
    NOOP_RESOLVED = "NOOP_RESOLVED"
    RETRY_LATER = "RETRY_LATER"
    BLOCKED = "BLOCKED"

    @property
    def resolved(self) -> bool:
        return self in (StreamResolution.DONE, StreamResolution.NOOP_RESOLVED)


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


class Position(msgspec.Struct, frozen=True, order=True, gc=False):
    """A position in the event stream. A cursor is at the last resolved event: reading continues strictly after it."""

    ts_ns: int = 0
    offset: int = -1  # -1 is before every event of its instant


# Hashes. Every field is written with its length first, so that no value can be mistaken for a border between two.


def rule_hash(rule: Rule) -> str:
    """16 hex digits over filter and actions. The id, the status and the order of tags or elements do not count."""
    fields: list[bytes] = [RULE_HASH_VERSION, rule.prefix.encode()]
    fields += [_number(len(rule.tags))]
    for key, value in sorted(rule.tags):
        fields += [key.encode(), value.encode()]
    for number in (
        rule.size_greater_than,
        rule.size_less_than,
        rule.expiration_days,
        rule.expiration_date_ns,
        int(rule.expired_delete_marker),
        rule.noncurrent_days,
        rule.newer_noncurrent,
        rule.abort_days,
    ):
        fields.append(_number(number))
    return _digest(fields)


def extended_hash(extended: Mapping[str, bytes]) -> str:
    """16 hex digits over an entry's extended attributes, in any order."""
    return _digest(part for key in sorted(extended) for part in (key.encode(), extended[key]))


def _number(number: int | None) -> bytes:
    return b"" if number is None else str(number).encode()


def _digest(fields: Iterable[bytes]) -> str:
    whole = b"".join([part for field in fields for part in (len(field).to_bytes(8, "big"), field)])
    return hashlib.sha256(whole).hexdigest()[:16]
