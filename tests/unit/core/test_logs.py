"""Logs are structured and never carry a secret."""

from __future__ import annotations

import asyncio
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


def test_a_stranger_cannot_drive_the_terminal_that_shows_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A path, a name or an error that came over the network has no control characters there; the colours are ours."""
    logs.configure("info", as_json=False)

    logs.logger("gateway").info("seen \x1b[2J", path="/a\x1b]0;owned\x07", **{"k\x9b": "\x9bz\n\ty"}, size=3)

    text = capsys.readouterr().err
    assert not {"\x07", "\x9b"} & set(text) and "\x1b]" not in text and "\x1b[2J" not in text
    assert "/a\ufffd]0;owned\ufffd" in text and "size" in text


def test_what_is_logged_for_a_request_has_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the line names one itself; outside of a request there is none."""
    logs.configure("info", as_json=True)
    logs.logger("gateway").info("before")
    token = logs.REQUEST.set(b"r-7")
    logs.logger("gateway").info("inside")
    logs.logger("gateway").info("about another", request_id="r-8")
    logs.REQUEST.reset(token)

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    assert [None, "r-7", "r-8"] == [line.get("request_id") for line in lines]


async def test_what_a_job_logs_is_kept_with_it() -> None:
    """By its task and its threads, masked and bounded; what others log meanwhile is not in it."""
    logs.configure("info", as_json=True)
    log = logs.logger("pipeline")

    async def other() -> None:
        log.info("of another job")

    beside = asyncio.create_task(other())
    with logs.captured() as lines:
        log.info("started", ticks=2, api_key="s3cret")
        await beside
        await asyncio.to_thread(log.warning, "slow", seconds=3)
        for number in range(logs.CAPTURED_LINES):
            log.info("row", number=number, text="x" * 1000)
    log.info("after it")

    assert logs.CAPTURED_LINES == len(lines) and all(len(line) <= logs.CAPTURED_CHARS for line in lines)
    with logs.captured() as few:
        log.info("started", ticks=2, api_key="s3cret")
        await asyncio.to_thread(log.warning, "slow", seconds=3)
        await asyncio.create_task(other())
    assert ["info started ticks=2 api_key=***", "warning slow seconds=3", "info of another job"] == [
        line.partition(" ")[2] for line in few
    ]


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
