"""The error tree, on one page. A kind is named by what the caller does next.

    LakebedError
    ├── Invalid             the input is wrong: fix it; retrying changes nothing
    │   ├── TooLarge        more bytes than the limit: send less at once
    │   ├── UnsupportedEncoding   an unsupported content type or encoding: use a supported one
    │   └── Unprocessable   well formed, but its values contradict: fix them
    ├── NotFound            nothing is there
    ├── Denied              this principal lacks the right: use another, or request the right
    │   └── Unauthenticated no valid key: send one
    ├── Conflict            the stored state differs: read it, then decide
    │   ├── AlreadyExists   a create found a different object, in `current`
    │   └── Stale           a replace found a different object, in `current`
    ├── Fenced              a newer lease holder exists: stop writing, release
    ├── Overloaded          too much at once: wait `retry_after_s`, then retry
    │   └── Throttled       this key is over a limit of its own: wait `retry_after_s`, or raise the limit
    ├── Unavailable         not now: wait `retry_after_s`, then retry
    │   ├── TooEarly        another process is doing the same now: wait `retry_after_s`, then retry
    │   └── OutcomeUnknown  may have happened: read, compare, decide; never assume
    └── Corrupt             stored bytes are wrong: quarantine them, alert an operator

HTTP statuses live in `gateway/problems.py`, exit codes in `cli/exits.py`; both have a test that every kind is mapped.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LakebedError(Exception):
    """Base of all errors Lakebed raises on purpose.

    `message` says what happened and why, `hint` what to do next, `detail` carries facts for machines (and is part of
    the HTTP response, so it never contains a secret).
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "", **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail


class Invalid(LakebedError):
    code = "invalid"


class TooLarge(Invalid):
    code = "too_large"


class UnsupportedEncoding(Invalid):
    code = "unsupported_encoding"


class Unprocessable(Invalid):
    code = "unprocessable"


class NotFound(LakebedError):
    code = "not_found"


class Denied(LakebedError):
    code = "denied"


class Unauthenticated(Denied):
    code = "unauthenticated"


class Conflict(LakebedError):
    """`repeated` is False when one request was sent and refused: then the conflict cannot be with our own write."""

    code = "conflict"
    repeated: bool = True


class AlreadyExists(Conflict):
    """`current` is the stored object that was observed at the key."""

    code = "already_exists"

    def __init__(self, message: str, *, current: Any = None, hint: str = "", **detail: Any) -> None:
        super().__init__(message, hint=hint, **detail)
        self.current = current


class Stale(Conflict):
    """`current` is the stored object that was observed at the key, or None when the key is gone."""

    code = "stale"

    def __init__(self, message: str, *, current: Any = None, hint: str = "", **detail: Any) -> None:
        super().__init__(message, hint=hint, **detail)
        self.current = current


class Fenced(LakebedError):
    code = "fenced"


class Overloaded(LakebedError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "", **detail: Any) -> None:
        super().__init__(message, hint=hint, **detail)
        self.retry_after_s = retry_after_s


class Throttled(Overloaded):
    """The caller's own key is over one of its limits; others are served."""

    code = "throttled"


class Unavailable(LakebedError):
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "", **detail: Any) -> None:
        super().__init__(message, hint=hint, **detail)
        self.retry_after_s = retry_after_s


class TooEarly(Unavailable):
    code = "too_early"


class OutcomeUnknown(Unavailable):
    code = "outcome_unknown"


class Corrupt(LakebedError):
    code = "corrupt"


def shown_text(text: str) -> str:
    """An error, a log line or data for a terminal: control characters, which could move its cursor or run commands of
    it, become U+FFFD.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
