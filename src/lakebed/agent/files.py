"""The file operations of the disk queue, each with the fsync that makes it durable, and the ledger of the queue.

An interface on purpose: the crash tests run the queue over one that stops at every step and loses what was not synced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lakebed.agent.model import LedgerVerb
from lakebed.core import private

BLOCK_BYTES = 4096  # what a small file really takes on common file systems


class Files:
    """`fsyncs` counts the synchronous writes, the cost that matters here."""

    def __init__(self) -> None:
        self.fsyncs = 0

    def write(self, path: Path, data: bytes) -> None:
        """Creates or truncates the file; on return its bytes (not yet its name) are on the disk."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._sync_write(fd, data)
        finally:
            os.close(fd)

    def append(self, path: Path, data: bytes) -> None:
        """Adds bytes at the end of the file and makes them last."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._sync_write(fd, data)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic, and durable only after `sync_folder` of both folders."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Gone, or was gone already. Durable only after `sync_folder`."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    def make_folder(self, path: Path) -> None:
        """The folder exists and its name is on the disk, also when an earlier call made it and could not sync."""
        path.mkdir(mode=0o700, exist_ok=True)
        self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder; one that is not empty stays."""
        with contextlib.suppress(OSError):
            path.rmdir()

    def sync_folder(self, path: Path) -> None:
        private.sync_folder(path)
        self.fsyncs += 1

    def _sync_write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        self.fsyncs += 1


def disk_bytes(size_bytes: int) -> int:
    """What a file of this size costs the disk: whole blocks."""
    return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES


LEDGER_BYTES_MAX = 4 * 1024 * 1024  # then the file becomes `ledger.1.jsonl` and a new one begins


class QueueLedger:
    def __init__(self, path: Path, files: Files, now_ms: Callable[[], int]) -> None:
        self._path, self._files, self._now_ms = path, files, now_ms

    def note(self, what: LedgerVerb, **facts: Any) -> None:
        """Adds a line, synced. A disk that refuses the line must not stop the agent: the metrics still count."""
        line = msgspec.json.encode({"at_ms": self._now_ms(), "what": what, **facts}) + b"\n"
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(line) > LEDGER_BYTES_MAX:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._files.append(self._path, b"\n" + line if _is_torn(self._path) else line)


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end: a crash or a full disk cut it off."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
