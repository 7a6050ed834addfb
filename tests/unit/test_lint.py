"""The linter keeps the rules that keep the whole: time, chance, the store and Spark are reached in one place each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = [
    "import time",
    "from time import monotonic",
    "import random",
    "import secrets",
    "import uuid",
    "import obstore",
    "from obstore.store import S3Store",
    "import pyspark",
    "from pyspark.sql import DataFrame",
    "import datetime\n\nx = datetime.datetime.now()",
    "import asyncio\n\n\nasync def nap() -> None:\n    await asyncio.sleep(1)",
]


def lint(code: str, file: str) -> str:
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--stdin-filename", file, "-"]
    return subprocess.run(command, input=code + "\n", capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.parametrize("code", BANNED)
def test_direct_use_is_caught_in_a_part(code: str) -> None:
    """A part that reads time, draws chance or goes round a seam fails the lint."""
    assert "TID251" in lint(code, "src/lakebed/queue/anything.py")


@pytest.mark.parametrize(
    ("code", "file"),
    [
        ("import time", "src/lakebed/core/clock.py"),
        ("import random", "src/lakebed/core/ids.py"),
        ("import obstore", "src/lakebed/store/obstore_client.py"),
        ("import pyspark", "src/lakebed/pipeline/anything.py"),
    ],
)
def test_the_one_place_may(code: str, file: str) -> None:
    """The module that owns a thing may use it."""
    assert "TID251" not in lint(code, file)
