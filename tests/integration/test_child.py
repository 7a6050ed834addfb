"""A child process: it ends on request or is killed, takes along what it started, and keeps its output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakebed.core.clock import SystemClock
from lakebed.embedded import child as child_module
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import start_ticks

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
DEADLINE_S = 60.0
# The helper would outlive the deadline: only a signal ends it in time.
WITH_HELPER = "import subprocess, time; print(subprocess.Popen(['sleep', '180']).pid, flush=True); time.sleep(60)"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child("thing", tmp_path / "thing.log", clock=SystemClock())
    yield made
    made.kill()


def first_word(child: Child) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not child.log.read_text().endswith("\n"):
        assert time.monotonic() < deadline, "it never spoke"
        time.sleep(0.02)
    return child.tail().split()[0]


async def test_ends_by_itself_when_told(child: Child) -> None:
    """SIGTERM is queried first, and enough for one that listens."""
    child.start(["/bin/sleep", "60"])

    willing = await child.stop(10.0)

    assert willing
    assert not child.running()
    assert child.exit_code() in (-15, 0)


async def test_is_killed_after_its_grace(child: Child) -> None:
    """One that ignores SIGTERM is gone a moment after its grace."""
    child.start([sys.executable, "-c", STUBBORN])
    assert first_word(child) == "deaf"

    willing = await child.stop(0.2)

    assert not willing
    assert child.exit_code() == -9


async def test_takes_along_what_it_started(child: Child) -> None:
    """A helper of the child is gone with it."""
    child.start([sys.executable, "-c", WITH_HELPER])
    helper = int(first_word(child))
    assert start_ticks(helper)

    await child.stop(5.0)

    deadline = time.monotonic() + DEADLINE_S
    while start_ticks(helper):
        assert time.monotonic() < deadline, "the helper was left behind"
        time.sleep(0.02)


async def test_tells_its_end_and_last_words(child: Child) -> None:
    """The error for a dead child carries its code and the end of its log."""
    child.start([sys.executable, "-c", "import sys; print('no disk'); sys.exit(3)"])
    assert await child.wait(DEADLINE_S)

    error = child.ended("it is needed")

    assert "ended with code 3" in error.message
    assert "no disk" in error.message
    assert str(child.log) in error.hint


async def test_a_program_that_is_not_there_is_said_so(child: Child) -> None:
    """A missing program ends at once, with the reason in the log."""
    child.start(["/nowhere/at/all"])

    assert await child.wait(DEADLINE_S)
    assert child.exit_code() == 127
    assert "/nowhere/at/all" in child.tail()


async def test_its_log_is_bounded(child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that grew too long is rotated, and the child keeps writing into an empty one."""
    monkeypatch.setattr(child_module, "LOG_BYTES_MAX", 5)
    go = tmp_path / "go"
    child.start(["/bin/sh", "-c", f"echo long enough; while [ ! -e {go} ]; do sleep 0.05; done; echo more; sleep 60"])
    assert first_word(child) == "long"

    child.rotate_log()

    assert child.log.with_name("thing.log.1").read_text() == "long enough\n"
    go.touch()
    deadline = time.monotonic() + DEADLINE_S
    while child.log.read_text() != "more\n":
        assert time.monotonic() < deadline, child.log.read_text()
        time.sleep(0.02)
