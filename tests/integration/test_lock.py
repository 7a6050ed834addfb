"""The folder's lock: one holder, visible to others, let go by the kernel, and not disturbed by those who look."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lakebed.core.errors import Conflict, NotFound
from lakebed.embedded.endpoints import FolderLock, find, is_held, start_ticks

HOLDER = """
import pathlib, sys, time
from lakebed.embedded.endpoints import FolderLock
FolderLock(pathlib.Path(sys.argv[1])).take()
"""


def test_only_one_holds_it(tmp_path: Path) -> None:
    """The second is refused until the first lets go; looking changes nothing."""
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()

    with pytest.raises(Conflict):
        second.take()
    assert all(is_held(tmp_path) for _ in range(3))
    first.release()

    assert not is_held(tmp_path)
    second.take()
    second.release()


def test_it_is_let_go_when_its_holder_ends(tmp_path: Path) -> None:
    """A process that ends without a word holds nothing any more."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], env=env, check=True, timeout=60)

    assert (tmp_path / "lock").exists()
    assert not is_held(tmp_path)


def test_nothing_is_found_where_nothing_runs(tmp_path: Path) -> None:
    """A missing folder and one whose bucket is not there yet are both NotFound, with what to do."""
    with pytest.raises(NotFound) as absent:
        find(tmp_path / "nowhere")
    lock = FolderLock(tmp_path)
    lock.take()
    with pytest.raises(NotFound) as early:
        find(tmp_path)
    lock.release()

    assert f"lakebed up --dir {tmp_path / 'nowhere'}" in absent.value.hint
    assert "no bucket yet" in early.value.message


def test_a_start_time_belongs_to_one_process() -> None:
    """It stays the same while a process lives and is 0 for one that is gone."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()

    assert start_ticks(os.getpid()) == start_ticks(os.getpid()) > 0
    assert start_ticks(ended.pid) == 0
