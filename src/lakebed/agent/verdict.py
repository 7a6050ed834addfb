"""What a collector's response means for a batch. Pure: a response in, a verdict out.

    200 with a collector's body   accepted      delete
    409 identity_conflict         conflict      park, with both hashes
    409 boot_quarantined          quarantined   park: an operator quarantined this boot
    400 413 415 422 of a gateway  rejected      park
    401 403                       denied        keep, alert, retry slowly
    408 429 5xx, other 409        busy          keep, retry after a while
    anything else                 misrouted     keep, alert, retry after a while; slowly if the next batch gets it too
    no answer                     lost          keep, send again: a duplicate is answered with 200

A 200 counts only with the body a collector gives: a proxy's welcome page must not delete data. What parks a batch
counts only as a gateway's problem document, by its `type`: a proxy's page of 400 or 413 is retried.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from lakebed.core.retry import retry_after_s

REJECTED = (400, 413, 415, 422)
PROBLEM_TYPE = "urn:lakebed:problem:"
MESSAGE_CHARS_MAX = 500


class SendOutcome(Enum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    QUARANTINED = "quarantined"
    REJECTED = "rejected"
    DENIED = "denied"
    BUSY = "busy"
    MISROUTED = "misrouted"
    UNREACHED = "unreached"  # nothing was sent
    LOST = "lost"  # sent, and no answer: it may have been accepted

    @property
    def final(self) -> bool:
        """Whether another collector would return the same."""
        return self in FINAL


FINAL = (
    SendOutcome.ACCEPTED,
    SendOutcome.DUPLICATE,
    SendOutcome.CONFLICT,
    SendOutcome.QUARANTINED,
    SendOutcome.REJECTED,
)


class CollectorResponse(msgspec.Struct, frozen=True):
    """What came back over HTTP. Header names are lower case."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


class SendVerdict(msgspec.Struct, frozen=True):
    outcome: SendOutcome
    status: int = 0
    message: str = ""
    retry_after_s: float | None = None
    accepted_frame_sha256: str = ""


def judge(answer: CollectorResponse, *, frame_sha256: str, now_s: float) -> SendVerdict:
    body, status = _json(answer.body), answer.status
    message = _message(body, answer.body)
    after_s = retry_after_s(answer.headers.get("retry-after", ""), now_s)
    if status == 200:
        duplicate = body.get("duplicate")
        if not isinstance(duplicate, bool) or body.get("frame_sha256", frame_sha256) != frame_sha256:
            return SendVerdict(
                SendOutcome.MISROUTED, status, "a 200 response that no collector returns: " + message, after_s
            )
        return SendVerdict(SendOutcome.DUPLICATE if duplicate else SendOutcome.ACCEPTED, status)
    ours = str(body.get("type", "")).startswith(PROBLEM_TYPE)
    if status == 409 and ours and body.get("code") == "identity_conflict":
        accepted = body.get("accepted_frame_sha256") or _detail(body).get("accepted_frame_sha256") or ""
        if accepted == frame_sha256:  # our own bytes were accepted: retry rather than park
            return SendVerdict(SendOutcome.BUSY, status, message, after_s)
        return SendVerdict(SendOutcome.CONFLICT, status, message, accepted_frame_sha256=str(accepted))
    if status == 409 and ours and body.get("code") == "boot_quarantined":
        return SendVerdict(SendOutcome.QUARANTINED, status, message)
    if status in REJECTED and ours:
        return SendVerdict(SendOutcome.REJECTED, status, message)
    if status in (401, 403):
        return SendVerdict(SendOutcome.DENIED, status, message, after_s)
    if status in (408, 409, 425, 429) or 500 <= status <= 599:
        return SendVerdict(SendOutcome.BUSY, status, message, after_s)
    return SendVerdict(SendOutcome.MISROUTED, status, message, after_s)


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _detail(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("detail")
    return found if isinstance(found, dict) else {}


def _message(body: dict[str, Any], raw: bytes) -> str:
    message = body.get("message") or body.get("title") or body.get("detail") or raw[:200].decode(errors="replace")
    return str(message)[:MESSAGE_CHARS_MAX]
