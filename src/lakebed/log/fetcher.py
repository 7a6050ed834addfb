"""The fetcher answers a consume request: tail cache first, then the reader, then the long poll.

What a consumer gets is at most `poll_s` older than its request, whether it waits or not. Before the cache answers, the
partition's control record was read within `poll_s`; where that fails, the caller gets the error and no cached records.
This broker's own appends wake a long poll at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import LakebedError
from lakebed.core.runtime import Runtime
from lakebed.log import control
from lakebed.log.cache import UNKNOWN, SharedTail, TailCache
from lakebed.log.codec import Records
from lakebed.log.model import NAMES_MAX, TopicPartition, UnknownTopicPartition
from lakebed.log.reader import Fetched, LogReader
from lakebed.log.settings import LogSettings

CONCURRENT_MAX = 16  # concurrent reads: one consume may name a thousand partitions


class _Refresh(NamedTuple):
    due_s: float  # when it is too old, counted from its start
    task: asyncio.Task[LakebedError | None]


class ControlRefresher:
    """Reads control records for all consumers of a broker.

    A partition is read by one request at a time, and at most once per `every_s`. An error is kept like a result until
    the next read is due. `read` reads one control record and raises LakebedError on failure.
    """

    def __init__(self, read: Callable[[TopicPartition], Awaitable[None]], *, every_s: float, clock: Clock) -> None:
        self._read, self._every_s, self._clock = read, every_s, clock
        self._last: OrderedDict[TopicPartition, _Refresh] = OrderedDict()
        self._gate = asyncio.Semaphore(CONCURRENT_MAX)

    async def fresh(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, LakebedError]:
        """Returns when every partition was read within `every_s`; gives the errors of those that cannot be."""
        requested_s = self._clock.monotonic_s()
        stale = {tp for tp in tps if not self._good(tp, requested_s)}
        answers = await asyncio.gather(*(self._fresh(tp, requested_s) for tp in stale)) if stale else ()
        return {tp: error for tp, error in zip(stale, answers, strict=True) if error is not None}

    def due_s(self, tps: Iterable[TopicPartition]) -> float:
        """When the first of these is read again; infinite when none was read."""
        return min((self._last[tp].due_s for tp in tps if tp in self._last), default=float("inf"))

    def forget(self, tp: TopicPartition) -> None:
        """The partition has changed: the next consumer reads it again."""
        self._last.pop(tp, None)

    def passed(self, tp: TopicPartition) -> None:
        """The partition was read or appended to: an error of the last read is outdated."""
        last = self._last.get(tp)
        if last is not None and last.task.done() and not _succeeded(last.task):
            del self._last[tp]

    def _good(self, tp: TopicPartition, requested_s: float) -> bool:
        last = self._last.get(tp)
        return last is not None and last.due_s > requested_s and last.task.done() and _succeeded(last.task)

    async def _fresh(self, tp: TopicPartition, requested_s: float) -> LakebedError | None:
        """Joins a read in progress. One that started too early is awaited and followed by another."""
        while True:
            last = self._last.get(tp)
            if last is None or (last.due_s <= requested_s and last.task.done()):
                last = self._begin(tp)
            error = await asyncio.shield(last.task)
            if last.due_s > requested_s:
                return error

    def _begin(self, tp: TopicPartition) -> _Refresh:
        task = asyncio.create_task(self._run(tp))
        made = self._last[tp] = _Refresh(self._clock.monotonic_s() + self._every_s, task)
        self._last.move_to_end(tp)
        if len(self._last) > NAMES_MAX:
            self._last.popitem(last=False)
        return made

    async def _run(self, tp: TopicPartition) -> LakebedError | None:
        async with self._gate:
            try:
                await self._read(tp)
            except LakebedError as error:
                return error
        return None


def _succeeded(task: asyncio.Task[LakebedError | None]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result() is None


class FetchRequest(msgspec.Struct, frozen=True):
    tp: TopicPartition
    offset: int
    bytes_max: int


class Fetcher:
    def __init__(
        self,
        runtime: Runtime,
        reader: LogReader,
        cache: TailCache,
        settings: LogSettings,
        *,
        shared: SharedTail | None = None,
    ) -> None:
        self._reader, self._cache, self._settings, self._clock = reader, cache, settings, runtime.clock
        self._shared = shared
        self._refresher = ControlRefresher(self._refresh, every_s=settings.poll_s, clock=runtime.clock)

    async def fetch(
        self, wants: Sequence[FetchRequest], *, bytes_max: int, bytes_min: int = 1, wait_s: float = 0.0
    ) -> list[Fetched | LakebedError]:
        """An answer for each want: records, an empty one at the end of the log, or why not.

        Returns once `bytes_min` are there, something failed, or `wait_s` is over; gives at most about `bytes_max`.
        """
        deadline_s = self._clock.monotonic_s() + wait_s
        tps = [want.tp for want in wants]
        while True:
            events = self._cache.changes(tps)
            answers = await self._once(wants, bytes_max)
            have = sum(answer.size for answer in answers if isinstance(answer, Fetched))
            now_s = self._clock.monotonic_s()
            if have >= bytes_min or now_s >= deadline_s or any(isinstance(answer, LakebedError) for answer in answers):
                return answers
            await self._woken(
                events, min(deadline_s, self._refresher.due_s(tps), now_s + self._settings.poll_s) - now_s
            )

    def appended(self, tp: TopicPartition, start_offset: int, records: Records) -> None:
        """This broker has appended: its own consumers see it at once."""
        self._cache.add(tp, start_offset, records, at_ms=now_ms(self._clock))
        self._refresher.passed(tp)

    def moved(self, tp: TopicPartition, high_watermark: int) -> None:
        """Another broker says that it has appended: consumers that wait here look again. Nothing is taken as true."""
        if UNKNOWN != self._cache.end(tp) < high_watermark:
            self._refresher.forget(tp)
            self._cache.wake(tp)

    def forget(self, tp: TopicPartition) -> None:
        """This broker has trimmed or deleted the log."""
        self._cache.forget(tp)
        self._refresher.forget(tp)

    async def _once(self, wants: Sequence[FetchRequest], bytes_max: int) -> list[Fetched | LakebedError]:
        await self._add_shared(wants)
        answers: dict[int, Fetched | LakebedError] = {}
        # The reader itself reads the control record of a partition that is not in the cache.
        unsure = await self._refresher.fresh([want.tp for want in wants if self._cache.end(want.tp) != UNKNOWN])
        left = bytes_max
        for index, want in enumerate(wants):
            if want.tp in unsure:
                answers[index] = unsure[want.tp]
                continue
            found = self._cache.read(want.tp, want.offset, min(left, want.bytes_max)) if left > 0 else None
            if found is not None:
                answers[index] = found
                left -= found.size
        missing = [index for index in range(len(wants)) if index not in answers]
        if missing and left > 0:
            read = await self._read([wants[index] for index in missing], left)
            answers |= dict(zip(missing, read, strict=True))
        return [answers.get(index) or await self._nothing(want) for index, want in enumerate(wants)]

    async def _add_shared(self, wants: Sequence[FetchRequest]) -> None:
        """What other brokers of this host have appended since, where they share a folder with this one."""
        if self._shared is None:
            return
        for want in wants:
            if want.offset > self._cache.end(want.tp):
                for start_offset, records, at_ms in await self._shared.new_appends(want.tp):
                    self._cache.add(want.tp, start_offset, records, at_ms=at_ms)

    async def _nothing(self, want: FetchRequest) -> Fetched | LakebedError:
        """The response is full: this partition gets no records in it."""
        error = (await self._refresher.fresh([want.tp])).get(want.tp)
        if error is not None:
            return error
        return Fetched(want.offset, want.offset, self._cache.end(want.tp), self._cache.start(want.tp))

    async def _read(self, wants: Sequence[FetchRequest], left: int) -> list[Fetched | LakebedError]:
        at_ms = now_ms(self._clock)
        wanted = [(want.tp, want.offset, want.bytes_max) for want in wants]
        try:
            found: list[Fetched | LakebedError] = [*await self._reader.read_many(wanted, bytes_max=left)]
        except LakebedError as error:
            return [error] if len(wants) == 1 else await self._read_apart(wants, left)
        for want, answer in zip(wants, found, strict=True):
            if isinstance(answer, Fetched):
                self._cache.saw(want.tp, answer.high_watermark, answer.log_start_offset, at_ms=at_ms)
                self._refresher.passed(want.tp)
        return found

    async def _read_apart(self, wants: Sequence[FetchRequest], left: int) -> list[Fetched | LakebedError]:
        """One after another: one bad partition must not fail the others."""
        found: list[Fetched | LakebedError] = []
        for want in wants:
            found.append((await self._read([want], left))[0] if left > 0 else await self._nothing(want))
            left -= found[-1].size if isinstance(found[-1], Fetched) else 0
        return found

    async def _refresh(self, tp: TopicPartition) -> None:
        """Reads what other brokers have done to a partition. Raises when it is deleted or the read fails."""
        at_ms = now_ms(self._clock)
        try:
            now = await self._reader.control(tp)
            control.demand_existing(now, tp)
        except UnknownTopicPartition:
            self._cache.forget(tp)
            raise
        self._cache.looked(tp, now, at_ms=at_ms)

    async def _woken(self, events: Sequence[asyncio.Event], timeout_s: float) -> None:
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in events]
        waiting.append(asyncio.ensure_future(self._clock.sleep(timeout_s)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
