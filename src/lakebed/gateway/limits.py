"""How much of a body is read, and how long it is waited for.

A declared length over the limit is refused before a byte is asked for; an undeclared one is counted while it streams.
A client that stops sending is given up after `gateway.body_timeout_s`, one that trickles after `gateway.body_total_s`.
Either way the connection closes with the answer, because the rest of the body would have to be read to reuse it.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator, Iterable
from typing import Any, cast

from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope

from lakebed.clock import Clock
from lakebed.errors import Invalid, TooLarge
from lakebed.gateway.settings import GatewaySettings
from lakebed.wire import BODY_MARK


class SlowBody(Invalid):
    """The client did not send the body it announced in time."""

    code = "slow_body"


class Limits:
    """The limits of one gateway: the setting, and what marked routes say instead."""

    def __init__(self, settings: GatewaySettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self._default = settings.body_bytes_max
        self._largest = self._default

    def register(self, routes: Iterable[BaseRoute]) -> None:
        for route in routes:
            marked = getattr(getattr(route, "endpoint", None), BODY_MARK, self._default)
            self._largest = max(self._largest, marked)

    def check(self, declared: int) -> None:
        """Raises TooLarge for a length that no route takes: known before the route is."""
        if declared > self._largest:
            raise _too_large(declared, self._largest)

    def of(self, endpoint: Any) -> int:
        limit: int = getattr(endpoint, BODY_MARK, self._default)
        return limit


class Body:
    """`receive` for one request, inside the limits. Once the body has ended, waiting has no limit."""

    __slots__ = ("_deadline_s", "_limit", "_limits", "_receive", "_scope", "_seen", "declared", "ended")

    def __init__(self, limits: Limits, scope: Scope, receive: Receive, declared: int | None) -> None:
        self._limits, self._scope, self._receive = limits, scope, receive
        self._limit = -1  # not known before the route is
        self._seen = 0
        self._deadline_s = 0.0
        self.declared = declared
        self.ended = declared == 0

    async def __call__(self) -> Message:
        if self.ended:
            return await self._receive()
        if self._limit < 0:
            self._begin()
        message = await self._next()
        self._count(message)
        return message

    async def _next(self) -> Message:
        # A timeout costs more than all else here, and most bodies have already arrived: it is only set up when the
        # first step shows that there is something to wait for.
        asking = cast(Coroutine[Any, None, Message], self._receive())
        try:
            awaited = asking.send(None)
        except StopIteration as arrived:
            return cast(Message, arrived.value)
        settings = self._limits.settings
        left_s = self._deadline_s - self._limits.clock.monotonic_s()
        try:
            async with asyncio.timeout(min(settings.body_timeout_s, left_s)):
                return await _go_on(asking, awaited)
        except TimeoutError:
            raise SlowBody(
                f"the body stopped after {self._seen} bytes",
                hint=f"{settings.body_timeout_s:g} s may pass between bytes, {settings.body_total_s:g} s in all",
                received_bytes=self._seen,
            ) from None

    def _begin(self) -> None:
        self._limit = self._limits.of(self._scope.get("endpoint"))
        self._deadline_s = self._limits.clock.monotonic_s() + self._limits.settings.body_total_s
        if self.declared is not None and self.declared > self._limit:
            raise _too_large(self.declared, self._limit)

    def _count(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.ended = True
            return
        self._seen += len(message.get("body", b""))
        if self._seen > self._limit:
            raise _too_large(self._seen, self._limit)
        self.ended = not message.get("more_body", False)


@types.coroutine
def _go_on(asking: Coroutine[Any, Any, Message], awaited: Any) -> Generator[Any, Any, Message]:
    """Awaits a coroutine whose first step was already taken and yielded `awaited`."""
    try:
        while True:
            try:
                woken = yield awaited
            except BaseException as error:
                awaited = asking.throw(error)
            else:
                awaited = asking.send(woken)
    except StopIteration as arrived:
        return cast(Message, arrived.value)


def declared_length(value: bytes) -> int:
    """The number in a Content-Length header. Raises Invalid for anything else."""
    if not value.isdigit() or len(value) > 18:
        raise Invalid("Content-Length is not a number of bytes")
    return int(value)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"a body of {size} bytes is over the limit of {limit}",
        hint="send less at once, or raise gateway.body_bytes_max",
        limit_bytes=limit,
    )
