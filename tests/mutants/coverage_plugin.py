"""A pytest plugin: which lines each test runs, and how long it takes, into the folder of LAKEBED_MUTANTS."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

FOLDER = Path(os.environ["LAKEBED_MUTANTS"])
SEEN = coverage.Coverage(
    data_file=str(FOLDER / f"lines.{os.getpid()}"), source_pkgs=["lakebed"], concurrency=["thread"]
)
SEEN.start()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, None]:
    SEEN.switch_context(item.nodeid)
    began_s = time.perf_counter()
    yield
    with (FOLDER / f"seconds.{os.getpid()}").open("a") as file:
        file.write(f"{time.perf_counter() - began_s:.4f}\t{item.nodeid}\n")
    SEEN.switch_context("")


@atexit.register
def _saved() -> None:
    SEEN.stop()
    SEEN.save()
