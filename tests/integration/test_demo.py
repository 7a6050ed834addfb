"""The demo, small: every scenario on a real stack, its faults, its totals and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import terminal

pytestmark = pytest.mark.full

SMALL = "0.05"
DEADLINE_S = 540  # of a busy machine; a quiet one needs a tenth


def lakebed(*words: str) -> str:
    env = {**os.environ, "LAKEBED_PIPELINE_WARM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "lakebed", *words], capture_output=True, text=True, env=env, timeout=180
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_the_demo_proves_its_totals_in_a_pipe(tmp_path: Path) -> None:
    """Every part plays with its faults, all invariants hold, lines are plain, and the page has every plot. A stack on
    the folder that was kept has the demo's ticks and tables."""
    page, kept = tmp_path / "demo.html", str(tmp_path / "kept")

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lakebed",
            "demo",
            "--scale",
            SMALL,
            "--report",
            str(page),
            "--keep",
            kept,
            "-o",
            "json",
        ],
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
    assert {"agent", "queue", "log", "ticks", "lifecycle", "store", "pipeline", "totals"} <= {
        each["scenario"] for each in outcome["proven"]
    }
    assert {"agent", "queue", "log", "ticks"} <= {each["scenario"] for each in outcome["faults"]}
    assert "\x1b[" not in done.stderr, "no bars in a pipe"
    assert 0 < outcome["moving_s"] < outcome["total_s"]
    text = page.read_text()
    for title in ("Throughput", "Latency", "Duplicates and conflicts", "Lag", "Requests and their cost"):
        assert title in text
    assert outcome["report"] == str(page)
    assert f"report: {page}" in done.stderr
    assert "Next:" in done.stderr

    lakebed("up", "--detach", "--dir", kept)
    try:
        ticks = json.loads(lakebed("ticks", "list", "--dir", kept, "-o", "json"))
        tables = json.loads(lakebed("tables", "list", "--dir", kept, "-o", "json"))
    finally:
        lakebed("down", "--dir", kept)
    assert ["20261115T120000__demo"] == [tick["tick_id"] for project in ticks for tick in project["ticks"]]
    assert "gold/acme/shop/spent_by_country" in {table["name"] for table in tables}


def test_on_a_terminal_bars_move_and_a_broken_invariant_exits_non_zero(tmp_path: Path) -> None:
    """The live table is drawn over and over; a total that does not add up is named, and the exit code reports it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import lakebed.store.demo as scenario\n"
        "async def play(stage):\n"
        "    stage.counted('things', 'before', 2)\n"
        "    stage.counted('things', 'after', 1)\n"
        "scenario.play = play\n"
    )
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    shown = terminal.run(
        [sys.executable, "-m", "lakebed", "demo", "store", "--report", str(tmp_path / "p.html")],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        terminal=True,
    )
    text = shown.err.decode(errors="replace")

    assert 1 == shown.code
    assert "BROKEN  totals: things add up: 2 before → 1 after" in text
    assert text.count("requests to the store") > 3, "the table is drawn again and again"
    assert "\x1b[" in text
