from __future__ import annotations

import msgspec
import pytest

from lakebed.agent.verdict import CollectorResponse, SendOutcome, judge

MINE, OTHER = "aa" * 32, "bb" * 32
NOW_S = 1_760_000_000.0
OURS = {"type": "urn:lakebed:problem:any"}


def outcome(status: int, body: object = None, raw: bytes | None = None) -> SendOutcome:
    data = raw if raw is not None else msgspec.json.encode(body or {})
    return judge(CollectorResponse(status, {}, data), frame_sha256=MINE, now_s=NOW_S).outcome


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"duplicate": False}, SendOutcome.ACCEPTED),
        (200, {"duplicate": True, "frame_sha256": MINE}, SendOutcome.DUPLICATE),
        (409, OURS | {"code": "identity_conflict", "accepted_frame_sha256": OTHER}, SendOutcome.CONFLICT),
        (409, OURS | {"code": "boot_quarantined"}, SendOutcome.QUARANTINED),
        (409, {"code": "conflict"}, SendOutcome.BUSY),
        (400, OURS, SendOutcome.REJECTED),
        (413, OURS, SendOutcome.REJECTED),
        (415, OURS, SendOutcome.REJECTED),
        (422, OURS, SendOutcome.REJECTED),
        (401, {}, SendOutcome.DENIED),
        (403, {}, SendOutcome.DENIED),
        (408, {}, SendOutcome.BUSY),
        (429, {}, SendOutcome.BUSY),
        (500, {}, SendOutcome.BUSY),
        (503, {}, SendOutcome.BUSY),
        (301, {}, SendOutcome.MISROUTED),
        (404, {}, SendOutcome.MISROUTED),
        (201, {"duplicate": False}, SendOutcome.MISROUTED),
    ],
)
def test_every_status_has_its_meaning(status: int, body: object, expected: SendOutcome) -> None:
    """The table of the module, row by row."""
    assert expected == outcome(status, body)


@pytest.mark.parametrize("status", [400, 413, 415, 422, 409])
@pytest.mark.parametrize(
    "body",
    [b"<html>413 Request Entity Too Large</html>", b"", b'{"code": "identity_conflict"}', b'{"type": "about:blank"}'],
)
def test_what_a_proxy_refuses_is_not_parked(status: int, body: bytes) -> None:
    """Only a gateway's problem document, by its type, takes a batch out of the queue; the rest is retried."""
    assert outcome(status, raw=body) in (SendOutcome.MISROUTED, SendOutcome.BUSY)


@pytest.mark.parametrize(
    "body", [b"", b"<html>welcome</html>", b"[]", b'{"ok": true}', b'{"duplicate": "no"}', b"\xff", b'{"duplicate"']
)
def test_a_200_that_no_collector_gives_deletes_nothing(body: bytes) -> None:
    """A proxy's page with status 200 is not acceptance."""
    assert outcome(200, raw=body) == SendOutcome.MISROUTED


def test_a_200_for_other_bytes_deletes_nothing() -> None:
    """When the answer names a hash, it has to be ours."""
    assert outcome(200, {"duplicate": True, "frame_sha256": OTHER}) == SendOutcome.MISROUTED


def test_a_conflict_with_our_own_hash_is_no_conflict() -> None:
    """An answer that contradicts itself is queried again, never parked."""
    assert outcome(409, OURS | {"code": "identity_conflict", "accepted_frame_sha256": MINE}) == SendOutcome.BUSY


def test_a_conflict_carries_the_accepted_hash_from_either_place() -> None:
    """The hash is found in the body or in its detail."""
    for body in ({"accepted_frame_sha256": OTHER}, {"detail": {"accepted_frame_sha256": OTHER}}):
        data = msgspec.json.encode(OURS | {"code": "identity_conflict", **body})
        assert judge(CollectorResponse(409, {}, data), frame_sha256=MINE, now_s=NOW_S).accepted_frame_sha256 == OTHER


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("Thu, 09 Oct 2025 08:54:20 GMT", 60.0),
        ("Thu, 09 Oct 2025 08:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_read_in_both_forms(header: str, expected: float | None) -> None:
    """Seconds or a date; nonsense is no header at all."""
    answer = CollectorResponse(503, {"retry-after": header}, b"")
    now_s = 1_760_000_000.0  # Thu, 09 Oct 2025 08:53:20 GMT

    assert expected == judge(answer, frame_sha256=MINE, now_s=now_s).retry_after_s
