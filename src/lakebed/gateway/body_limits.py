"""Limits on request bodies: the size of one, the memory of all, and the time to receive one.

A declared length over the limit is refused before a byte is read; an undeclared one is counted while it streams.
All bodies under way share one budget, `gateway.bodies_bytes_max`: a declared length is taken from it before the body is
read, an undeclared one as it grows, and all of it is given back when the request ends, however it ends.
A client has to send RATE_BYTES_MIN a second on average over each `gateway.body_timeout_s`, and the whole body within
`gateway.body_total_s`. When a body is refused, the connection closes with the response, because the rest of the body
would have to be read to reuse it.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator, Iterable
from typing import Any, cast

from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope

from lakebed.core.errors import Invalid, Overloaded, TooLarge
from lakebed.core.http import BODY_MARK, HELD_MARK
from lakebed.core.runtime import Runtime
from lakebed.gateway.settings import GatewaySettings

RATE_BYTES_MIN = 1024  # a second; a slow agent's link brings ten times as much
RETRY_AFTER_S = 1.0  # what a body of 64 MiB takes on a link of 512 Mbit/s


class SlowBody(Invalid):
    """The client did not send the body it announced in time."""

    code = "slow_body"


class HeadTooLarge(Invalid):
    """More bytes, or more lines, than the head of a request may have."""

    code = "head_too_large"


class BodyBudget:
    """Bytes of bodies that one gateway holds in memory. The taker gives back what it took, once."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def take(self, size: int) -> bool:
        """False, and nothing taken, when there is no room."""
        if self.held + size > self.bytes_max:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size


class BodyLimits:
    """The limits of one gateway: those of the settings, and those of marked routes."""

    def __init__(self, settings: GatewaySettings, runtime: Runtime) -> None:
        self.settings = settings
        self.clock = runtime.clock
        self.budget = BodyBudget(settings.bodies_bytes_max)
        self.window_bytes = RATE_BYTES_MIN * settings.body_timeout_s
        self._default = settings.body_bytes_max
        self._largest = self._default
        runtime.metrics.gauge("lakebed_http_body_bytes").set_function(lambda: self.budget.held)
        self._refused = runtime.metrics.counter("lakebed_http_bodies_refused_total")

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

    def held_of(self, endpoint: Any) -> int:
        """How much of a body this route holds in memory: all of it, unless it streams."""
        held: int = getattr(endpoint, HELD_MARK, self.of(endpoint))
        return held

    def hold(self, size: int) -> None:
        """Takes this many more bytes from the budget. Raises Overloaded when they do not fit now."""
        if not self.budget.take(size):
            self._refused.inc()
            raise Overloaded(
                f"request bodies use {self.budget.held} bytes; {size} more would exceed "
                f"gateway.bodies_bytes_max ({self.budget.bytes_max})",
                retry_after_s=RETRY_AFTER_S,
                hint="retry later, or send to another gateway",
            )


class RequestBody:
    """`receive` for one request, inside the limits. Once the body has ended, waiting has no limit.

    `release` gives back what the body has taken from the budget; call it at the end of the request.
    """

    __slots__ = (
        "_came", "_deadline_s", "_held", "_keeps", "_limit", "_limits", "_receive", "_scope", "_seen", "_waited_s",
        "declared", "ended",
    )  # fmt: skip

    def __init__(self, limits: BodyLimits, scope: Scope, receive: Receive, declared: int | None) -> None:
        self._limits, self._scope, self._receive = limits, scope, receive
        self._limit = -1  # not known before the route is
        self._seen = self._keeps = self._held = 0
        self._came, self._waited_s = 0, 0.0  # since the rate was last found high enough: bytes, and time spent waiting
        self._deadline_s = 0.0
        self.declared = declared
        self.ended = declared == 0

    @property
    def seen(self) -> int:
        """The bytes that have come so far."""
        return self._seen

    async def __call__(self) -> Message:
        if self.ended:
            return await self._receive()
        if self._limit < 0:
            self._begin()
        message = await self._next()
        self._count(message)
        return message

    def release(self) -> None:
        """Gives back what was taken from the budget. Harmless when called again."""
        held, self._held, self.ended = self._held, 0, True
        if held:
            self._limits.budget.give(held)

    async def _next(self) -> Message:
        # A timeout costs more than all else here, and most bodies have already arrived: it is only set up when the
        # first step shows that there is something to wait for.
        receiving = cast(Coroutine[Any, None, Message], self._receive())
        try:
            awaited = receiving.send(None)
        except StopIteration as arrived:
            return cast(Message, arrived.value)
        clock, window_s = self._limits.clock, self._limits.settings.body_timeout_s
        began_s = clock.monotonic_s()
        # Only waiting for the client counts: a route that reads slowly does not make its client slow.
        try:
            async with asyncio.timeout(min(window_s - self._waited_s, self._deadline_s - began_s)):
                message = await _resume(receiving, awaited)
        except TimeoutError:
            raise self._slow() from None
        self._waited_s += clock.monotonic_s() - began_s
        if self._waited_s >= window_s and self._came + len(message.get("body", b"")) < self._limits.window_bytes:
            raise self._slow()
        return message

    def _slow(self) -> SlowBody:
        settings = self._limits.settings
        return SlowBody(
            f"the body arrives too slowly: {self._seen} bytes so far",
            hint=f"send {RATE_BYTES_MIN} bytes a second over each {settings.body_timeout_s:g} s, and all of it within "
            f"{settings.body_total_s:g} s",
            received_bytes=self._seen,
        )

    def _begin(self) -> None:
        endpoint, limits = self._scope.get("endpoint"), self._limits
        self._keeps = limits.held_of(endpoint)
        self._limit = limits.of(endpoint)
        if self._keeps >= self._limit:  # held whole: what the budget can never hold would be retried for ever
            self._limit = min(self._limit, limits.budget.bytes_max)
        self._deadline_s = limits.clock.monotonic_s() + limits.settings.body_total_s
        if self.declared is not None:
            if self.declared > self._limit:
                raise _too_large(self.declared, self._limit)
            self._hold(self.declared)

    def _hold(self, size: int) -> None:
        more = min(size, self._keeps) - self._held
        if more > 0:
            self._limits.hold(more)
            self._held += more

    def _count(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.ended = True
            return
        came = len(message.get("body", b""))
        self._seen += came
        self._came += came
        if self._came >= self._limits.window_bytes:
            self._came, self._waited_s = 0, 0.0
        if self._seen > self._limit:
            raise _too_large(self._seen, self._limit)
        self._hold(self._seen)
        self.ended = not message.get("more_body", False)


@types.coroutine
def _resume(receiving: Coroutine[Any, Any, Message], awaited: Any) -> Generator[Any, Any, Message]:
    """Awaits a coroutine whose first step was already taken and yielded `awaited`."""
    try:
        while True:
            try:
                woken = yield awaited
            except BaseException as error:
                awaited = receiving.throw(error)
            else:
                awaited = receiving.send(woken)
    except StopIteration as arrived:
        return cast(Message, arrived.value)


def declared_length(value: bytes) -> int:
    """The number in a Content-Length header. Raises Invalid for anything else."""
    if not value.isdigit() or len(value) > 18:
        raise Invalid("Content-Length is not a number")
    return int(value)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"a body of {size} bytes is over the limit of {limit}",
        hint="send less at once, or raise gateway.body_bytes_max",
        limit_bytes=limit,
    )
