"""The bar of Spark jobs: moving for a person, silent in a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support import terminal

JOB = """
import time
from lakebed.spark.progress import spark_progress
from lakebed.spark import progress
with spark_progress("audit"):
    time.sleep(3 * progress.POLL_S)
print("done")
"""


def _run(folder: Path, *, person: bool) -> terminal.Shown:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return terminal.run([sys.executable, "-c", JOB], env=env, cwd=folder, terminal=person)


def test_a_person_sees_what_runs_and_how_spark_is(tmp_path: Path) -> None:
    """The bar names the job and reports how far Spark itself is, and is taken away at the end."""
    shown = _run(tmp_path, person=True)

    assert (0, b"done\n") == (shown.code, shown.out)
    assert b"audit: Spark is off" in shown.err
    assert b"\x1b[?25l" in shown.err and b"\x1b[?25h" in shown.err, "the cursor is hidden, and given back"


def test_a_pipe_gets_nothing(tmp_path: Path) -> None:
    """No bar and no control character where nobody looks."""
    assert terminal.Shown(0, b"done\n", b"") == _run(tmp_path, person=False)
