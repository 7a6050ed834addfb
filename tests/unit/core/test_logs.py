"""Logs are structured and never carry a secret."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from lakebed.core import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Anyone who logs after these tests does not write to their captured, closed stderr."""
    yield
    structlog.reset_defaults()


def test_a_line_is_one_json_object_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal every line is JSON with level, time and part."""
    logs.configure("info", as_json=True)

    logs.logger("queue").info("stored", size=3)

    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["size"], line["part"], line["level"]) == ("stored", 3, "queue", "info")
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize("name", ["secret", "api_key", "Authorization", "agent_token", "secret_access_key"])
def test_secrets_are_masked_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A value under a reporting name never reaches the log."""
    logs.configure("info", as_json=True)

    logs.logger("gateway").info("request", **{name: "s3cret"})

    assert "s3cret" not in capsys.readouterr().err


def test_a_terminal_gets_readable_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal a line is for reading, not JSON."""
    logs.configure("info", as_json=False)

    logs.logger("queue").info("stored", size=3)

    text = capsys.readouterr().err
    assert "stored" in text
    assert not text.startswith("{")


def test_a_closed_stderr_never_breaks_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that outlives its stderr reports nothing, and raises nothing."""
    logs.configure("info", as_json=True)
    logger = logs.logger("queue")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)

    logger.error("nobody hears this")


def test_words_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger made before stderr was replaced writes to the new one."""
    logs.configure("info", as_json=True)
    logger = logs.logger("queue")
    logger.info("first")
    heard = io.StringIO()
    monkeypatch.setattr("sys.stderr", heard)

    logger.info("second")

    assert "second" in heard.getvalue()
