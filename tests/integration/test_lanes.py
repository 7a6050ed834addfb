"""`make test` and `make test-full` with tools that only note their words: every lane runs, and a failure shows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import guarantees

DEADLINE_S = 120.0
FULL = ("unit", "conformance", "sim", "integration", "spark", "cluster", "interop", "browser")
# Notes its process and its words; sleeps or fails where a word of them is listed in the file of that name.
TOOL = """#!/bin/sh
echo "$$ $(basename "$0") $*" >> ran
for word in $*; do
  if grep -qsx "$word" sleep; then exec sleep 600; fi
  if grep -qsx "$word" fail; then echo "FAILED $word/test_it.py::test_it"; echo "1 failed in 0.10s"; exit 1; fi
done
echo "1 passed in 0.10s"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile in a folder whose environment is ready, and has these tools in it."""
    for name in ("Makefile", "requirements-dev.lock", "pyproject.toml"):
        shutil.copyfile(guarantees.ROOT / name, tmp_path / name)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "pytest", "ruff", "mypy", "lint-imports"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    return tmp_path


def start(checkout: Path, target: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["make", target],
        cwd=checkout,
        env=env,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ran(checkout: Path) -> list[str]:
    noted = checkout / "ran"
    return noted.read_text().splitlines() if noted.exists() else []


def folders(checkout: Path) -> list[str]:
    """The folders that pytest was given, each once for each time."""
    return sorted(folder for line in ran(checkout) if " pytest " in line for folder in re.findall(r"tests/(\w+)", line))


@pytest.mark.parametrize(("target", "expected"), [("test", guarantees.QUICK), ("test-full", FULL)])
def test_every_lane_runs_once_and_reports_its_closing_line(
    checkout: Path, target: str, expected: tuple[str, ...]
) -> None:
    """The folders of the quick lanes are those that touch every guarantee; lint belongs to `make test`."""
    process = start(checkout, target)
    shown, _ = process.communicate(timeout=DEADLINE_S)

    assert 0 == process.returncode, shown
    assert sorted(expected) == folders(checkout)
    assert len([line for line in ran(checkout) if " pytest " in line]) <= shown.count("1 passed in ")
    assert (target == "test") == any(" mypy " in line for line in ran(checkout))


@pytest.mark.parametrize(("target", "lane"), [("test", "sim"), ("test", "browser"), ("test-full", "cluster")])
def test_a_lane_that_fails_fails_the_run_and_stops_no_other(checkout: Path, target: str, lane: str) -> None:
    """Its failed tests and its name are shown; the lanes behind it run all the same."""
    (checkout / "fail").write_text(f"tests/{lane}\n")

    process = start(checkout, target)
    shown, _ = process.communicate(timeout=DEADLINE_S)

    assert 0 != process.returncode
    assert f"FAILED tests/{lane}/test_it.py::test_it" in shown
    assert re.search(rf"^failed: \S*{lane}$", shown, re.M), shown
    assert set(guarantees.QUICK if target == "test" else FULL) == set(folders(checkout))


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_an_interrupt_ends_both_streams_and_leaves_no_process(checkout: Path, target: str) -> None:
    """Ctrl-C reaches what runs in each stream; no further lane starts."""
    (checkout / "sleep").write_text("tests/unit\ntests/integration\ntests/spark\n")
    process = start(checkout, target)
    held = ["tests/unit" if target == "test" else "tests/spark", "tests/integration"]
    wait_for(lambda: all(any(folder in line for line in ran(checkout)) for folder in held))

    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)

    assert 0 != process.returncode
    pids = [int(line.split()[0]) for line in ran(checkout)]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert len(held) == len([line for line in ran(checkout) if " pytest " in line])


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
