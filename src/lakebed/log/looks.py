"""Looks at partitions' control records, shared by all consumers of a broker.

A partition is looked at by one request to meta at a time, and at most once per `every_s`, however many consumers ask.
A look that failed is kept like any other: until the next one is due, its error is the answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from lakebed.clock import Clock
from lakebed.errors import LakebedError
from lakebed.log.model import NAMES_MAX, TopicPartition

AT_ONCE_MAX = 16  # looks under way at once: one consume may name a thousand partitions


class _Look(NamedTuple):
    due_s: float  # when it is too old, counted from its begin
    task: asyncio.Task[LakebedError | None]


class Looks:
    """`look` reads a control record and notes what it says. It raises LakebedError when nothing is known."""

    def __init__(self, look: Callable[[TopicPartition], Awaitable[None]], *, every_s: float, clock: Clock) -> None:
        self._look, self._every_s, self._clock = look, every_s, clock
        self._last: OrderedDict[TopicPartition, _Look] = OrderedDict()
        self._gate = asyncio.Semaphore(AT_ONCE_MAX)

    async def fresh(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, LakebedError]:
        """Returns when what is noted of every partition is at most `every_s` old; names those where it cannot be."""
        asked_s = self._clock.monotonic_s()
        stale = {tp for tp in tps if not self._good(tp, asked_s)}
        answers = await asyncio.gather(*(self._fresh(tp, asked_s) for tp in stale)) if stale else ()
        return {tp: error for tp, error in zip(stale, answers, strict=True) if error is not None}

    def due_s(self, tps: Iterable[TopicPartition]) -> float:
        """When the first of these has to be looked at again; infinite when none was."""
        return min((self._last[tp].due_s for tp in tps if tp in self._last), default=float("inf"))

    def forget(self, tp: TopicPartition) -> None:
        """The partition has changed: the next one to ask looks."""
        self._last.pop(tp, None)

    def passed(self, tp: TopicPartition) -> None:
        """The partition was read or appended to: an error of the last look says nothing any more."""
        last = self._last.get(tp)
        if last is not None and last.task.done() and not _succeeded(last.task):
            del self._last[tp]

    def _good(self, tp: TopicPartition, asked_s: float) -> bool:
        last = self._last.get(tp)
        return last is not None and last.due_s > asked_s and last.task.done() and _succeeded(last.task)

    async def _fresh(self, tp: TopicPartition, asked_s: float) -> LakebedError | None:
        """Joins a look that is under way. One that began too early is waited for, and then followed by another."""
        while True:
            last = self._last.get(tp)
            if last is None or (last.due_s <= asked_s and last.task.done()):
                last = self._begin(tp)
            error = await asyncio.shield(last.task)
            if last.due_s > asked_s:
                return error

    def _begin(self, tp: TopicPartition) -> _Look:
        task = asyncio.create_task(self._run(tp))
        made = self._last[tp] = _Look(self._clock.monotonic_s() + self._every_s, task)
        self._last.move_to_end(tp)
        if len(self._last) > NAMES_MAX:
            self._last.popitem(last=False)
        return made

    async def _run(self, tp: TopicPartition) -> LakebedError | None:
        async with self._gate:
            try:
                await self._look(tp)
            except LakebedError as error:
                return error
        return None


def _succeeded(task: asyncio.Task[LakebedError | None]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result() is None
