"""The tail cache: records that this broker has just appended, for its consumers. It may miss, but is never wrong.

A partition's records are kept as the columns they came in, in runs without gaps; another broker's append leaves a gap,
and a consumer of those records uses the reader. The oldest chunks of all partitions are dropped first.

What other brokers do to a partition (append, trim, delete, create again) is learned from its control record, which the
fetcher looks at before the cache may answer. A control record that changed its state after something was cached may
belong to a partition that was deleted and created again, where the same offsets hold other records: then all of it is
dropped.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lakebed.core import private
from lakebed.core.errors import Corrupt
from lakebed.core.metrics import Metrics
from lakebed.log import codec
from lakebed.log.codec import WIDTH, BatchSegment, RecordColumns, Records
from lakebed.log.model import NAMES_MAX, Control, TopicPartition
from lakebed.log.reader import Fetched

UNKNOWN = -1  # no high watermark is known; an empty log has 0
CHUNK_OVERHEAD_BYTES = 256  # so that a flood of tiny chunks is counted too

FILES_MAX = 4096  # per partition; looked through in one listing
WAITING_MAX = 1024  # appends that wait for the disk; further ones are not published
PRUNE_EVERY = 64  # appends between two looks at how large the folder has become


class _Tail:
    def __init__(self) -> None:
        self.starts: list[int] = []
        self.chunks: list[Records] = []
        self.high_watermark = UNKNOWN
        self.log_start_offset = 1
        self.since_ms: int | None = None  # when the oldest of what is known here was learned
        self.changed_at_ms = 0  # of the control record when it was last read
        self.changed: asyncio.Event | None = None  # created when a consumer waits

    def add(self, start: int, records: Records) -> bool:
        if not self.starts or start > self.starts[-1]:  # as nearly always
            self.starts.append(start)
            self.chunks.append(records)
            return True
        at = bisect_right(self.starts, start)
        if at and self.starts[at - 1] == start:
            return False  # known already
        self.starts.insert(at, start)
        self.chunks.insert(at, records)
        return True

    def learned(self, at_ms: int) -> None:
        self.since_ms = at_ms if self.since_ms is None else min(self.since_ms, at_ms)

    def reached(self, high_watermark: int) -> None:
        if high_watermark > self.high_watermark:
            self.high_watermark = high_watermark
            self.wake()

    def change(self) -> asyncio.Event:
        """Set when the end moves."""
        if self.changed is None:
            self.changed = asyncio.Event()
        return self.changed

    def wake(self) -> None:
        if self.changed is not None:
            self.changed.set()
            self.changed = None

    def drop(self, start: int) -> int:
        at = bisect_right(self.starts, start) - 1
        if at < 0 or self.starts[at] != start:
            return 0
        size = _held(self.chunks[at])
        del self.starts[at], self.chunks[at]
        return size


class TailCache:
    def __init__(self, bytes_max: int, *, metrics: Metrics) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._tails: OrderedDict[TopicPartition, _Tail] = OrderedDict()  # the longest unused first
        self._age: deque[tuple[TopicPartition, int]] = deque()
        self._hits = metrics.counter("lakebed_log_cache_reads_total").labels(outcome="hit")
        self._waits = metrics.counter("lakebed_log_cache_reads_total").labels(outcome="at_end")
        self._misses = metrics.counter("lakebed_log_cache_reads_total").labels(outcome="miss")
        metrics.gauge("lakebed_log_cache_bytes").set_function(lambda: self._bytes)

    def add(self, tp: TopicPartition, start_offset: int, records: Records, *, at_ms: int) -> None:
        """Adds records that are in the log from `start_offset` on since `at_ms`. Wakes consumers that wait for them."""
        tail = self._tail(tp)
        if at_ms < tail.changed_at_ms or not tail.add(start_offset, records):
            return
        tail.learned(at_ms)
        self._age.append((tp, start_offset))
        self._bytes += _held(records)
        tail.reached(start_offset + records.count - 1)
        while self._bytes > self._bytes_max and self._age:
            old, start = self._age.popleft()
            held = self._tails.get(old)
            self._bytes -= held.drop(start) if held is not None else 0

    def looked(self, tp: TopicPartition, now: Control, *, at_ms: int) -> None:
        """Notes the control record that was read at `at_ms`."""
        tail = self._tails.get(tp)
        if tail is not None and tail.since_ms is not None and now.changed_at_ms > tail.since_ms:
            self.forget(tp)
        tail = self._tail(tp)
        tail.changed_at_ms = max(tail.changed_at_ms, now.changed_at_ms)
        self.saw(tp, now.sequence_counter, now.log_start_offset, at_ms=at_ms)

    def saw(self, tp: TopicPartition, high_watermark: int, log_start_offset: int, *, at_ms: int) -> None:
        """What a reader found of the log's ends. They only go forward."""
        tail = self._tail(tp)
        tail.learned(at_ms)
        tail.log_start_offset = max(tail.log_start_offset, log_start_offset)
        tail.reached(high_watermark)

    def read(self, tp: TopicPartition, offset: int, bytes_max: int) -> Fetched | None:
        """Records from `offset` on, or none of them when it is the known end; None when the reader must read them."""
        tail = self._tails.get(tp)
        if tail is None or offset < tail.log_start_offset or offset > tail.high_watermark + 1:
            self._misses.inc()
            return None
        if offset == tail.high_watermark + 1:
            self._waits.inc()
            return Fetched(offset, offset, tail.high_watermark, tail.log_start_offset)
        parts, behind = _run(tail, offset, bytes_max)
        if not parts:
            self._misses.inc()
            return None
        self._hits.inc()
        return Fetched(offset, behind, tail.high_watermark, tail.log_start_offset, tuple(parts))

    def end(self, tp: TopicPartition) -> int:
        """The last offset that is known to exist, or UNKNOWN."""
        tail = self._tails.get(tp)
        return tail.high_watermark if tail is not None else UNKNOWN

    def start(self, tp: TopicPartition) -> int:
        """The first offset that readers may have, as far as it is known."""
        tail = self._tails.get(tp)
        return tail.log_start_offset if tail is not None else 1

    def changes(self, tps: Sequence[TopicPartition]) -> list[asyncio.Event]:
        """Events that are set when the known end of one of these partitions moves."""
        return [self._tail(tp).change() for tp in tps]

    def wake(self, tp: TopicPartition) -> None:
        """Wakes consumers that wait for a partition, to look again."""
        tail = self._tails.get(tp)
        if tail is not None:
            tail.wake()

    def forget(self, tp: TopicPartition) -> None:
        """Drops what is known: the log was deleted or trimmed."""
        tail = self._tails.pop(tp, None)
        if tail is None:
            return
        if tail.chunks:
            self._bytes -= sum(map(_held, tail.chunks))
            self._age = deque(entry for entry in self._age if entry[0] != tp)
        tail.wake()

    def _tail(self, tp: TopicPartition) -> _Tail:
        found = self._tails.get(tp)
        if found is None:
            found = self._tails[tp] = _Tail()
            if len(self._tails) > NAMES_MAX:
                self.forget(next(iter(self._tails)))
        else:
            self._tails.move_to_end(tp)
        return found


def _held(records: Records) -> int:
    return records.size + records.count * WIDTH + CHUNK_OVERHEAD_BYTES


def _run(tail: _Tail, offset: int, bytes_max: int) -> tuple[list[Records], int]:
    parts: list[Records] = []
    left = bytes_max
    at = bisect_right(tail.starts, offset) - 1
    while 0 <= at < len(tail.chunks):
        records = tail.chunks[at]
        first = offset - tail.starts[at]
        if not 0 <= first < records.count:
            break
        part = records.take(first, left, least=0 if parts else 1)
        parts += [part] if part.count else []
        offset, left = offset + part.count, left - part.size
        if first + part.count < records.count or left <= 0:
            break
        at += 1
    return parts, offset


class SharedTail:
    """The tail cache shared by the brokers of one host: a folder at `root` with one body (see `codec`) per append.

    A file is written under a hidden name and renamed, so it is always whole. The oldest files are deleted when the
    folder exceeds `bytes_max`. What is missing or unreadable is read from the bucket. One thread does all of it, so a
    slow disk delays no append.
    """

    def __init__(self, root: Path, *, bytes_max: int, node: str) -> None:
        self._root, self._bytes_max, self._node = root, bytes_max, node
        self._written = 0
        self._seen: dict[TopicPartition, set[str]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lakebed-tail")
        self._waiting: set[Future[None]] = set()

    def put(self, tp: TopicPartition, start_offset: int, records: Records) -> None:
        """Publishes an append in the background. A full queue or disk, or a missing folder, only costs a cache hit."""
        if len(self._waiting) < WAITING_MAX:
            waiting = self._thread.submit(self._put, tp, start_offset, records)
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)

    async def new_appends(self, tp: TopicPartition) -> list[tuple[int, Records, int]]:
        """Appends that other processes have published since the last look, lowest offset first, and when (ms)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._new_appends, tp)

    async def close(self) -> None:
        """Returns when everything is published."""
        await asyncio.to_thread(self._thread.shutdown)

    def _put(self, tp: TopicPartition, start_offset: int, records: Records) -> None:
        folder = self._folder(tp)
        name = f"{start_offset:020d}-{records.count}"
        with suppress(OSError):
            private.folder(folder)
            part = folder / f".{name}.{self._node}"
            segment = BatchSegment(records.count, records.at_ms if isinstance(records, RecordColumns) else 0)
            with open(part, "wb", opener=private.opener) as out:
                out.writelines(codec.encode([records], [segment]))
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

    def _new_appends(self, tp: TopicPartition) -> list[tuple[int, Records, int]]:
        try:
            names = sorted(file.name for file in self._folder(tp).iterdir() if not file.name.startswith("."))
        except OSError:
            return []
        seen = self._seen.get(tp, set())
        found: list[tuple[int, Records, int]] = []
        for name in [name for name in names[-FILES_MAX:] if name not in seen]:
            read = self._read(tp, name)
            if read is not None:
                found.append((int(name.partition("-")[0]), *read))
        self._seen[tp] = set(names)
        return found

    def _read(self, tp: TopicPartition, name: str) -> tuple[Records, int] | None:
        try:
            file = self._folder(tp) / name
            data, at_ms = file.read_bytes(), file.stat().st_mtime_ns // 1_000_000
            (records,) = codec.decode(data).parts()
            if name != f"{int(name.partition('-')[0]):020d}-{records.count}":
                return None
            return records, at_ms
        except (OSError, ValueError, Corrupt):
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
