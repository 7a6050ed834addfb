"""The fetcher answers a consume request: tail cache first, then the reader, then the long poll.

A fetch at the known end waits for this broker's own appends without asking anybody, and looks for those of other
brokers every `poll_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.clock import Clock
from lakebed.errors import LakebedError
from lakebed.log.cache import TailCache
from lakebed.log.model import OffsetOutOfRange, TopicPartition
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

    async def fetch(
        self, wants: Sequence[Want], *, bytes_max: int, bytes_min: int = 1, wait_s: float = 0.0
    ) -> list[Fetched | LakebedError]:
        """An answer for each want: records, an empty one at the end of the log, or why not.

        Returns once `bytes_min` are there, something failed, or `wait_s` is over; gives at most about `bytes_max`.
        """
        deadline_s = self._clock.monotonic_s() + wait_s
        while True:
            events = self._cache.changes([want.tp for want in wants])
            answers = await self._once(wants, bytes_max)
            have = sum(answer.size for answer in answers if isinstance(answer, Fetched))
            left_s = deadline_s - self._clock.monotonic_s()
            if have >= bytes_min or left_s <= 0 or any(isinstance(answer, LakebedError) for answer in answers):
                return answers
            await self._woken(events, min(left_s, self._settings.poll_s))
            await self._look([want.tp for want, event in zip(wants, events, strict=True) if not event.is_set()])

    async def _once(self, wants: Sequence[Want], bytes_max: int) -> list[Fetched | LakebedError]:
        await self._take_news(wants)
        answers: dict[int, Fetched | LakebedError] = {}
        left = bytes_max
        for index, want in enumerate(wants):
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
        return [answers.get(index) or self._nothing(want) for index, want in enumerate(wants)]

    async def _take_news(self, wants: Sequence[Want]) -> None:
        """What other brokers of this host have appended since, where they share a folder with us."""
        if self._shared is None:
            return
        for want in wants:
            if want.offset > self._cache.end(want.tp):
                for start_offset, records in await self._shared.news(want.tp):
                    self._cache.add(want.tp, start_offset, records)

    def _nothing(self, want: Want) -> Fetched:
        """The answer is full: this partition comes first next time."""
        return Fetched(want.offset, want.offset, max(self._cache.end(want.tp), want.offset - 1), 0)

    async def _read(self, wants: Sequence[Want]) -> list[Fetched | LakebedError]:
        try:
            found: list[Fetched | LakebedError] = [
                *await self._reader.read_many([(want.tp, want.offset, want.bytes_max) for want in wants])
            ]
        except LakebedError as error:
            if len(wants) == 1:
                if isinstance(error, OffsetOutOfRange):
                    self._cache.forget(wants[0].tp)
                return [error]
            found = [(await self._read([want]))[0] for want in wants]  # one bad partition must not fail the others
        for want, answer in zip(wants, found, strict=True):
            if isinstance(answer, Fetched):
                self._cache.saw(want.tp, answer.high_watermark, answer.log_start_offset)
        return found

    async def _look(self, tps: Sequence[TopicPartition]) -> None:
        """Learns of other brokers' appends to partitions that were quiet here."""
        for tp in tps:
            try:
                now = await self._reader.control(tp)
            except LakebedError:
                continue  # the next fetch says it to the caller
            if now.log_state == "DELETED":
                self._cache.forget(tp)
            else:
                self._cache.saw(tp, now.sequence_counter, now.log_start_offset)

    async def _woken(self, events: Sequence[asyncio.Event], timeout_s: float) -> None:
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in events]
        waiting.append(asyncio.ensure_future(self._clock.sleep(timeout_s)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
