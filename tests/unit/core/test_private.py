"""Files that hold data are for their owner alone, whatever the umask."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from lakebed.batches.landed import LandedBatches, SpoolAuthority
from lakebed.batches.model import AcceptedBatch
from lakebed.batches.segments import SpoolSegments
from lakebed.core import private
from lakebed.core.clock import SystemClock
from lakebed.log.cache import SharedTail
from lakebed.log.codec import RecordColumns
from lakebed.log.model import TopicPartition
from lakebed.meta.sqlite.backend import SqliteMeta
from lakebed.store.authority import Authority
from lakebed.store.settings import StoreSettings
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick
from support.runtimes import runtime_of


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most open umask there is."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()}


def test_a_new_file_and_a_new_folder_are_private(tmp_path: Path) -> None:
    private.folder(tmp_path / "a/b")
    private.create(tmp_path / "a/b/file")
    with open(tmp_path / "a/b/other", "wb", opener=private.opener) as out:
        out.write(b"x")

    assert 0o700 == (tmp_path / "a/b").stat().st_mode & 0o777
    assert {0o600} == set(modes(tmp_path).values())


def test_the_spool_is_private(tmp_path: Path) -> None:
    """Its segments, its lock and the list of what has landed, also after that was written anew."""
    segments = SpoolSegments(tmp_path / "spool")
    segments._open().close()
    landed = LandedBatches(tmp_path / "spool", known_max=1)
    for seq in range(3):
        landed.add(AcceptedBatch("lightmetrics.accepted_batch.v1", "a", "b", seq, seq, "", 1, "k", 1, "c", 1, 1))
        landed.sync()

    assert len(modes(tmp_path)) >= 3
    assert {0o600} == set(modes(tmp_path).values())


async def test_sqlite_and_its_other_files_are_private(tmp_path: Path) -> None:
    meta = SqliteMeta(runtime_of(SystemClock()), tmp_path / "state/meta.sqlite")
    await meta.put("key", b"value")
    found = modes(tmp_path)
    await meta.close()

    assert {"meta.sqlite", "meta.sqlite-wal", "meta.sqlite-shm"} == set(found)
    assert {0o600} == set(found.values())


async def test_the_tail_cache_and_the_outbox_are_private(tmp_path: Path) -> None:
    published = SharedTail(tmp_path / "tail", bytes_max=1 << 20, node="n")
    published.put(TopicPartition("t", 0), 0, RecordColumns(1, b"\x01\0\0\0", b"x"))
    await published.close()
    outbox = Outbox(tmp_path / "outbox")
    outbox.put(OutboxTick(PackedTick("t-1", "p", "", {})))
    outbox.attempt("t-1", 0)

    assert len(modes(tmp_path)) == 3
    assert {0o600} == set(modes(tmp_path).values())


def test_a_file_that_exists_keeps_its_locks(tmp_path: Path) -> None:
    """Closing a file drops every lock that the process has on it, and SQLite's are among them."""
    file = tmp_path / "meta.sqlite"
    private.create(file)
    other = f"import fcntl; fcntl.lockf(open({str(file)!r}, 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with file.open("r+b") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        private.create(file)

        refused = subprocess.run([sys.executable, "-c", other], capture_output=True)

    assert 0 != refused.returncode and b"BlockingIOError" in refused.stderr


def test_a_file_is_written_whole_and_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are synced under another name, then the folder with the new one: no power loss leaves an empty file."""
    file, synced, real = tmp_path / "a.json", list[tuple[str, bytes]](), os.fsync
    file.write_bytes(b"old")

    def noted(handle: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append(("folder" if is_folder else "file", file.read_bytes()))
        real(handle)

    monkeypatch.setattr(os, "fsync", noted)
    private.write(file, b"new")

    assert [("file", b"old"), ("folder", b"new")] == synced
    assert {"a.json": 0o600} == modes(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    private.write(file, b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("no space left")))

    with pytest.raises(OSError, match="no space"):
        private.write(file, b"new")

    assert b"old" == file.read_bytes()


def test_what_a_spool_remembers_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bucket and the list of what has landed, where that is written anew."""
    written: list[str] = []
    real = private.write
    monkeypatch.setattr(private, "write", lambda file, data: (written.append(file.name), real(file, data)))
    landed = LandedBatches(tmp_path, known_max=1)

    SpoolAuthority(tmp_path, StoreSettings())._remember(Authority("v1", "id", 1))
    for seq in range(3):
        landed.add(AcceptedBatch("lightmetrics.accepted_batch.v1", "a", "b", seq, seq, "", 1, "k", 1, "c", 1, 1))
        landed.sync()

    assert ["authority.json", "landed.jsonl"] == written
