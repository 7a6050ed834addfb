"""The upload service of ticks without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2

from lakebed.core.clock import SystemClock


class NoWait(SystemClock):
    """A clock that never waits; `now` replaces the system's time."""

    def __init__(self, now: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._now = now

    def now_ns(self) -> int:
        return self._now() if self._now else super().now_ns()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(0.0)


class Wire(httpx2.ASGITransport):
    """The way to the service; a test may break it, and it counts."""

    def __init__(self, app: Any) -> None:
        super().__init__(app=app)
        self.sent: list[tuple[str, str, int]] = []
        self.answer: Callable[[httpx2.Request], httpx2.Response] | None = None
        self.bend: Callable[[httpx2.Request], httpx2.Request | None] = lambda request: request

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        if self.answer is not None:
            return self.answer(request)
        bent = self.bend(request)
        if bent is None:
            raise httpx2.ConnectError("the line is cut", request=request)
        answer = await super().handle_async_request(bent)
        self.sent.append((request.method, request.url.path.rsplit("/", 1)[-1], answer.status_code))
        return answer
