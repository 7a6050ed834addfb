"""The demo, small: every scenario on a real stack, its faults, its totals and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = "0.05"
DEADLINE_S = 300  # of a busy machine; a quiet one needs a fifth


@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_demo_proves_its_totals_in_a_pipe(tmp_path: Path) -> None:
    """Every part plays with its faults, all invariants hold, lines are plain, and the page has every plot."""
    page = tmp_path / "demo.html"

    done = subprocess.run(
        [sys.executable, "-m", "lakebed", "demo", "--scale", SMALL, "--report", str(page), "-o", "json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )

    assert 0 == done.returncode, done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert [] == [each for each in outcome["proven"] if not each["held"]]
    assert {"agents", "queue", "log", "ticks", "lifecycle", "store", "pipeline", "totals"} <= {
        each["scenario"] for each in outcome["proven"]
    }
    assert {"agents", "queue", "log", "ticks"} <= {each["scenario"] for each in outcome["faults"]}
    assert "\x1b[" not in done.stderr, "no bars in a pipe"
    text = page.read_text()
    for title in ("Throughput", "Latency", "Duplicates and conflicts", "Lag", "Requests and their price"):
        assert title in text
    assert outcome["report"] == str(page)
    assert f"the page with plots: {page}" in done.stderr
    assert "What to type next" in done.stderr


def test_a_demo_whose_invariant_fails_exits_non_zero(tmp_path: Path) -> None:
    """A scenario that cannot do its work is a broken invariant, named, and the exit code says so."""
    (tmp_path / "sitecustomize.py").write_text(
        "import lakebed.demo.store as scenario\n"
        "async def play(stage):\n"
        "    stage.counted('things', 'before', 2)\n"
        "    stage.counted('things', 'after', 1)\n"
        "scenario.play = play\n"
    )
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])

    done = subprocess.run(
        [sys.executable, "-m", "lakebed", "demo", "store", "--report", str(tmp_path / "p.html")],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )

    assert 1 == done.returncode, done.stderr[-2000:]
    assert "BROKEN  totals: things add up: 2 before → 1 after" in done.stderr
