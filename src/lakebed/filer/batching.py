"""Sends together what is asked for at the same time: one round trip for many small requests.

A request waits for nothing but the calls that are under way: alone, it is sent at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class RequestBatcher(Generic[A, B]):
    """`send` gets at most `most` requests and answers each, in order, with a value or with the exception to raise."""

    def __init__(
        self, send: Callable[[Sequence[A]], Awaitable[Sequence[B | Exception]]], *, most: int, calls_max: int
    ) -> None:
        self._send, self._most, self._calls_max = send, most, calls_max
        self._waiting: deque[tuple[A, asyncio.Future[B]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: A) -> B:
        answer: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._calls) < self._calls_max and len(self._waiting) <= 1:
            self._call()
        return await answer

    def _call(self) -> None:
        call = asyncio.ensure_future(self._run())
        self._calls.add(call)
        call.add_done_callback(self._ended)

    async def _run(self) -> None:
        """One call. It begins a turn of the loop after it was wanted, with all that was asked for until then."""
        batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
        if self._waiting and len(self._calls) < self._calls_max:
            self._call()
        batch = [one for one in batch if not one[1].done()]  # without those whose caller gave up
        if not batch:
            return
        try:
            answers = await self._send([request for request, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, answer), found in zip(batch, answers, strict=True):
            if answer.done():
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if call.cancelled():  # the loop is being closed
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting.clear()
        elif self._waiting and len(self._calls) < self._calls_max:
            self._call()
