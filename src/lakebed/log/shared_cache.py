"""The tail cache shared by the brokers of one host, as files in a folder: a write broker's tail for read brokers.

A file holds the columns of one append; its name says which offsets. Files appear whole (written aside, then renamed),
and the oldest are removed when the folder grows past its limit. Like the cache in memory it may miss, never lie: what
is not there, or not readable, comes from the bucket. A thread of its own does it all: a slow disk holds up nobody.
"""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lakebed.errors import Invalid
from lakebed.log.columns import WIDTH, Columns, checked
from lakebed.log.model import TopicPartition

PREFIX = struct.Struct("<4sI")
MAGIC = b"LLT1"
FILES_MAX = 4096  # per partition; looked through in one listing
WAITING_MAX = 1024  # appends that wait for the disk; further ones are not published
PRUNE_EVERY = 64  # appends between two looks at how large the folder has become


class SharedTail:
    """The folder at `root`. `bytes_max` bounds what one process leaves behind in it."""

    def __init__(self, root: Path, *, bytes_max: int, node: str) -> None:
        self._root, self._bytes_max, self._node = root, bytes_max, node
        self._written = 0
        self._seen: dict[TopicPartition, set[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lakebed-tail")
        self._waiting: set[Future[None]] = set()

    def put(self, tp: TopicPartition, start_offset: int, records: Columns) -> None:
        """Publishes an append, soon. One too many, a full disk or a missing folder only cost others a hit."""
        if len(self._waiting) < WAITING_MAX:
            waiting = self._thread.submit(self._put, tp, start_offset, records)
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)

    async def news(self, tp: TopicPartition) -> list[tuple[int, Columns, int]]:
        """Appends that other processes have published since the last look, lowest offset first, and when (ms)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._news, tp)

    async def close(self) -> None:
        """Returns when everything is published."""
        await asyncio.to_thread(self._thread.shutdown)

    def _put(self, tp: TopicPartition, start_offset: int, records: Columns) -> None:
        folder = self._folder(tp)
        name = f"{start_offset:020d}-{records.count}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{name}.{self._node}"
            part.write_bytes(b"".join([PREFIX.pack(MAGIC, records.count), records.lengths, records.payload]))
            part.rename(folder / name)
            self._note(tp, name)
        self._written += 1
        if self._written % PRUNE_EVERY == 0:
            self._prune()

    def _note(self, tp: TopicPartition, name: str) -> None:
        """A broker that only writes never looks at the folder: its own names are kept while their files are."""
        seen = self._seen.setdefault(tp, set())
        seen.add(name)
        if len(seen) > FILES_MAX:
            seen &= {file.name for file in self._folder(tp).iterdir()}

    def _news(self, tp: TopicPartition) -> list[tuple[int, Columns, int]]:
        try:
            names = sorted(file.name for file in self._folder(tp).iterdir() if not file.name.startswith("."))
        except OSError:
            return []
        seen = self._seen.get(tp, set())
        found: list[tuple[int, Columns, int]] = []
        for name in [name for name in names[-FILES_MAX:] if name not in seen]:
            read = self._read(tp, name)
            if read is not None:
                found.append((int(name.partition("-")[0]), *read))
        self._seen[tp] = set(names)
        return found

    def _read(self, tp: TopicPartition, name: str) -> tuple[Columns, int] | None:
        try:
            file = self._folder(tp) / name
            data, at_ms = file.read_bytes(), file.stat().st_mtime_ns // 1_000_000
            magic, count = PREFIX.unpack_from(data)
            at = PREFIX.size + count * WIDTH
            if magic != MAGIC or name != f"{int(name.partition('-')[0]):020d}-{count}":
                return None
            return checked(count, memoryview(data)[PREFIX.size : at], memoryview(data)[at:]), at_ms
        except (OSError, ValueError, struct.error, Invalid):
            return None

    def _prune(self) -> None:
        with suppress(OSError):
            files = [(file.stat(), file) for file in self._root.glob("*/*/*") if file.is_file()]
            size = sum(stat.st_size for stat, _ in files)
            for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
                if size <= self._bytes_max:
                    break
                file.unlink(missing_ok=True)
                size -= stat.st_size

    def _folder(self, tp: TopicPartition) -> Path:
        return self._root / tp.topic / str(tp.partition)
