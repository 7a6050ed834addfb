"""Errors become problems in one place: every kind has a status, facts are shown, secrets and causes are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException

from lakebed.core import errors
from lakebed.gateway.body_limits import SlowBody
from lakebed.gateway.problems import STATUSES, problem, status_of


def kinds(root: type[errors.LakebedError] = errors.LakebedError) -> list[type[errors.LakebedError]]:
    own = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(each for kind in own for each in kinds(kind))]


def reported(error: Exception) -> dict[str, Any]:
    decoded = msgspec.json.decode(problem(error, "r-1").body)
    assert isinstance(decoded, dict)
    return decoded


def test_every_kind_of_the_tree_has_a_status() -> None:
    """No kind answers by accident: each is in the table itself."""
    assert [kind.__name__ for kind in kinds() if kind not in STATUSES] == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.Invalid, 400),
        (errors.TooLarge, 413),
        (errors.UnsupportedEncoding, 415),
        (errors.Unprocessable, 422),
        (SlowBody, 408),
        (errors.Unauthenticated, 401),
        (errors.Denied, 403),
        (errors.NotFound, 404),
        (errors.Conflict, 409),
        (errors.AlreadyExists, 409),
        (errors.Stale, 409),
        (errors.Fenced, 409),
        (errors.Overloaded, 503),
        (errors.Unavailable, 503),
        (errors.TooEarly, 425),
        (errors.OutcomeUnknown, 503),
        (errors.Corrupt, 500),
    ],
)
def test_each_kind_answers_with_its_status(kind: type[errors.LakebedError], status: int) -> None:
    """The status reports what the client does next."""
    answer = problem(kind("what happened", hint="what next"), "r-1")

    assert answer.status == status
    assert dict(answer.headers)[b"content-type"] == b"application/problem+json"
    assert msgspec.json.decode(answer.body) == {
        "type": f"urn:lakebed:problem:{kind.code}",
        "title": msgspec.json.decode(answer.body)["title"],
        "status": status,
        "code": kind.code,
        "message": "what happened",
        "hint": "what next",
        "request_id": "r-1",
    }


def test_a_parts_own_kind_answers_as_its_parent_with_its_own_code() -> None:
    """A subclass that the table does not know keeps its code."""

    class Parked(errors.Conflict):
        code = "parked"

    assert status_of(Parked) == 409
    assert reported(Parked("two hashes"))["code"] == "parked"


def test_details_stand_at_top_level_and_never_hide_a_field() -> None:
    """Facts for machines are fields of the answer; a fact named like a field does not replace it."""
    answer = reported(errors.Conflict("two hashes", accepted="aa", status="mine", code="mine", type="mine"))

    assert (answer["accepted"], answer["status"], answer["code"]) == ("aa", 409, "conflict")


def test_a_detail_that_is_not_json_is_shown_as_text() -> None:
    """An odd fact never hides the error it belongs to."""
    assert "object" in reported(errors.Conflict("odd", thing=object()))["thing"]
    assert reported(errors.Conflict("odd", thing={1: {object(): 2}}))["message"] == "odd"


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (7.1, b"8"), (1e9, b"3600")])
def test_retry_after_is_whole_seconds_within_an_hour(seconds: float, header: bytes) -> None:
    """A client that must wait learns how long, in a form every client reads."""
    for kind in (errors.Overloaded, errors.Unavailable, errors.OutcomeUnknown):
        assert dict(problem(kind("wait", retry_after_s=seconds), "r").headers)[b"retry-after"] == header


def test_a_program_is_challenged_with_bearer_and_a_browser_with_basic() -> None:
    """An unknown caller learns how to become known."""
    error = errors.Unauthenticated("no key")
    program = problem(error, "r", {"headers": [(b"accept", b"*/*")]})
    browser = problem(error, "r", {"headers": [(b"accept", b"text/html,*/*")]})

    assert dict(program.headers)[b"www-authenticate"].startswith(b"Bearer")
    assert dict(browser.headers)[b"www-authenticate"].startswith(b"Basic")


@pytest.mark.parametrize(
    "error", [RuntimeError("password=hunter2"), KeyError("hunter2"), HTTPException(502, "hunter2")]
)
def test_an_unexpected_error_tells_nothing_of_itself(error: Exception) -> None:
    """What is not Lakebed's own may hold anything, so nothing of it is shown."""
    answer = problem(error, "r-1")

    assert answer.status >= 500
    assert answer.code == "internal"
    assert b"hunter2" not in answer.body
    assert b"r-1" in answer.body
