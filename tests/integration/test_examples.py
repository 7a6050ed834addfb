"""What the documentation shows is run: the README's quick start and every example."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.doc_commands import ROOT

pytestmark = pytest.mark.full

DEADLINE_S = 300
EXPECTED = {
    "queue_once.py": "order-1 = 3 apples",
    "topics.py": "first offset: 1\n1 {'order': 1}\n2 {'order': 2}",
    "samples.py": "accepted: 2\ncellar 18.0",
    "asynchronous.py": "1 one\n2 two",
    "tables.py": "3 rows\nann: 12\nbob: 5",
}


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One line as a newcomer types it, with this interpreter's own lakebed."""
    ours = f"{shlex.quote(sys.executable)} -m lakebed"
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), env.get("PYTHONPATH", "")])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace(".venv/bin/lakebed", ours)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def quick_start() -> list[str]:
    text = (ROOT / "README.md").read_text()
    part = text.split("<!-- quick start", 1)[1].split("<!-- end of quick start -->", 1)[0]
    return [line for block in re.findall(r"```\n(.*?)```", part, flags=re.S) for line in block.splitlines() if line]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shell(".venv/bin/lakebed down", tmp_path)


@pytest.mark.timeout(1200)
def test_the_quick_start_and_the_examples_work(folder: Path) -> None:
    """Every line of the quick start succeeds in order and shows what it promises; so does every example."""
    lines = quick_start()
    assert ".venv/bin/lakebed up --detach" == lines[0]
    assert ".venv/bin/lakebed down" == lines[-1]
    shown: dict[str, str] = {}
    for line in lines[:-1]:
        done = shell(line, folder)
        assert 0 == done.returncode, f"{line}\n{done.stdout}\n{done.stderr}"
        shown[line] = done.stdout

    for example in sorted((ROOT / "docs/examples").glob("*.py")):
        done = shell(f"{shlex.quote(sys.executable)} {shlex.quote(str(example))}", folder)
        assert 0 == done.returncode, f"{example.name}\n{done.stdout}\n{done.stderr}"
        assert EXPECTED[example.name] in done.stdout

    assert 0 == shell(lines[-1], folder).returncode
    assert "21.5" in shown[".venv/bin/lakebed batches query room_temperature --latest"]
    assert "first\nsecond\n" == shown[".venv/bin/lakebed topics consume greetings"]
    assert "hello" in shown[".venv/bin/lakebed queue drain"]


def test_every_example_is_expected_and_listed() -> None:
    """No example without a promise that is checked, none that the list does not name."""
    files = {file.name for file in (ROOT / "docs/examples").glob("*.py")}

    assert set(EXPECTED) == files
    assert files == set(re.findall(r"\]\((\w+\.py)\)", (ROOT / "docs/examples/README.md").read_text()))
