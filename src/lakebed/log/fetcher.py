"""The fetcher answers a consume request: tail cache first, then the reader, then the long poll.

What a consumer is told is at most `poll_s` older than its request, whether it waits or not. Before the cache answers,
the partition's control record has been looked at within `poll_s`; where that fails, the caller gets the error and not
what was known before. This broker's own appends wake a long poll at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import LakebedError
from lakebed.log import control
from lakebed.log.cache import UNKNOWN, TailCache
from lakebed.log.columns import Columns
from lakebed.log.looks import Looks
from lakebed.log.model import TopicPartition, UnknownTopicPartition
from lakebed.log.reader import Fetched, Reader
from lakebed.log.settings import LogSettings
from lakebed.log.shared_cache import SharedTail


class Want(msgspec.Struct, frozen=True):
    tp: TopicPartition
    offset: int
    bytes_max: int


class Fetcher:
    def __init__(
        self,
        reader: Reader,
        cache: TailCache,
        settings: LogSettings,
        *,
        clock: Clock,
        shared: SharedTail | None = None,
    ) -> None:
        self._reader, self._cache, self._settings, self._clock = reader, cache, settings, clock
        self._shared = shared
        self._looks = Looks(self._look, every_s=settings.poll_s, clock=clock)

    async def fetch(
        self, wants: Sequence[Want], *, bytes_max: int, bytes_min: int = 1, wait_s: float = 0.0
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
            await self._woken(events, min(deadline_s, self._looks.due_s(tps), now_s + self._settings.poll_s) - now_s)

    def appended(self, tp: TopicPartition, start_offset: int, records: Columns) -> None:
        """This broker has appended: its own consumers see it at once."""
        self._cache.add(tp, start_offset, records, at_ms=now_ms(self._clock))
        self._looks.passed(tp)

    def forget(self, tp: TopicPartition) -> None:
        """This broker has trimmed or deleted the log."""
        self._cache.forget(tp)
        self._looks.forget(tp)

    async def _once(self, wants: Sequence[Want], bytes_max: int) -> list[Fetched | LakebedError]:
        await self._take_news(wants)
        answers: dict[int, Fetched | LakebedError] = {}
        # Of a partition that is not known the reader asks for the control record itself.
        unsure = await self._looks.fresh([want.tp for want in wants if self._cache.end(want.tp) != UNKNOWN])
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
            share = max(1, left // len(missing))
            asked = [wants[index] for index in missing]
            read = await self._read([Want(want.tp, want.offset, min(share, want.bytes_max)) for want in asked])
            answers |= dict(zip(missing, read, strict=True))
        return [answers.get(index) or await self._nothing(want) for index, want in enumerate(wants)]

    async def _take_news(self, wants: Sequence[Want]) -> None:
        """What other brokers of this host have appended since, where they share a folder with us."""
        if self._shared is None:
            return
        for want in wants:
            if want.offset > self._cache.end(want.tp):
                for start_offset, records, at_ms in await self._shared.news(want.tp):
                    self._cache.add(want.tp, start_offset, records, at_ms=at_ms)

    async def _nothing(self, want: Want) -> Fetched | LakebedError:
        """The answer is full: this partition comes first next time."""
        error = (await self._looks.fresh([want.tp])).get(want.tp)
        if error is not None:
            return error
        return Fetched(want.offset, want.offset, self._cache.end(want.tp), self._cache.start(want.tp))

    async def _read(self, wants: Sequence[Want]) -> list[Fetched | LakebedError]:
        at_ms = now_ms(self._clock)
        try:
            found: list[Fetched | LakebedError] = [
                *await self._reader.read_many([(want.tp, want.offset, want.bytes_max) for want in wants])
            ]
        except LakebedError as error:
            if len(wants) == 1:
                return [error]
            found = [(await self._read([want]))[0] for want in wants]  # one bad partition must not fail the others
        for want, answer in zip(wants, found, strict=True):
            if isinstance(answer, Fetched):
                self._cache.saw(want.tp, answer.high_watermark, answer.log_start_offset, at_ms=at_ms)
                self._looks.passed(want.tp)
        return found

    async def _look(self, tp: TopicPartition) -> None:
        """Learns what other brokers have done to a partition. Raises when that is not known, or it is deleted."""
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
