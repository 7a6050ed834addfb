"""Requests to a gateway: over the network, or to the same routes inside this process.

A response that is a problem document is raised as the error it names, so callers handle `lakebed.core.errors` in both
cases. A request that is safe to repeat is repeated while the error says "later", until `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from lakebed.batches import model as batches
from lakebed.core import errors
from lakebed.core.clock import Clock
from lakebed.core.settings import Settings
from lakebed.core.tls import client_context
from lakebed.log import model as log
from lakebed.queue import model as queue

IN_PROCESS = "http://127.0.0.1"  # no socket: the name that a gateway without keys accepts
PARTS = ("batches", "log", "queue")  # ticks need Spark: a gateway has it
PAUSE_BASE_S = 0.1
PAUSE_CAP_S = 5.0
CONNECT_TIMEOUT_S = 10.0


PUBLIC = (errors, batches, log, queue)  # modules whose errors a caller can import and handle


def _kinds(kind: type[errors.LakebedError]) -> set[type[errors.LakebedError]]:
    """Those that a message and a hint make."""
    own = "__init__" in vars(kind) and kind.__module__ != errors.__name__
    named = {kind} if kind.__module__ in {module.__name__ for module in PUBLIC} and not own else set()
    return named.union(*map(_kinds, kind.__subclasses__()))


KINDS = {kind.code: kind for kind in sorted(_kinds(errors.LakebedError), key=lambda kind: -len(kind.__mro__))}
NAMES = {kind.__name__: kind for kind in KINDS.values()}
# By status, where the body is not ours: a proxy's page, or nothing.
BY_STATUS: dict[int, type[errors.LakebedError]] = {
    400: errors.Invalid,
    401: errors.Unauthenticated,
    403: errors.Denied,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.TooLarge,
    422: errors.Unprocessable,
    429: errors.Overloaded,
}


class LakeClient:
    """One connection pool. `close` ends it, and the routes inside this process if there are any."""

    def __init__(self, http: httpx2.AsyncClient, clock: Clock, *, timeout_s: float, stack: AsyncExitStack) -> None:
        self._http, self._clock, self._timeout_s, self._stack = http, clock, timeout_s, stack

    @classmethod
    async def to_gateway(
        cls, url: str, clock: Clock, *, key: str = "", ca_file: Path | None = None, timeout_s: float = 60.0
    ) -> LakeClient:
        """A gateway's certificate is verified with the authorities in `ca_file`, else with the system's."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        stack = AsyncExitStack()
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, verify=client_context(ca_file))
        )
        return cls(http, clock, timeout_s=timeout_s, stack=stack)

    @classmethod
    async def in_process(cls, settings: Settings, clock: Clock, *, timeout_s: float = 60.0) -> LakeClient:
        """The routes of a gateway over the settings' bucket, without a socket. Raises what a gateway's start raises."""
        from lakebed.core.logs import configure_library
        from lakebed.gateway.app import build
        from lakebed.wiring.boot import boot
        from lakebed.wiring.context import make_context
        from lakebed.wiring.parts import components

        configure_library()
        context = make_context(settings, role="lake")
        authority = await boot(context, PARTS)
        stack = AsyncExitStack()
        app = build(context, components(context, PARTS), authority=authority.authority_id, watch_keys=False)
        await stack.enter_async_context(app.router.lifespan_context(app))
        http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, raise_app_exceptions=False), base_url=IN_PROCESS, timeout=timeout_s
        )
        await stack.enter_async_context(http)
        return cls(http, clock, timeout_s=timeout_s, stack=stack)

    async def close(self) -> None:
        await self._stack.aclose()

    async def pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def now_s(self) -> float:
        return self._clock.now_ns() / 1e9

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        params: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        accept: tuple[int, ...] = (),
    ) -> httpx2.Response:
        """The response, if it is a success or its status is in `accept`; otherwise the error it names is raised.

        `repeatable`: sending it twice does no harm, so errors that say "later" are retried.
        """
        body = msgspec.json.encode(json) if json is not None else content
        sent = {"content-type": "application/json"} if json is not None else {}
        ends_s = self._clock.monotonic_s() + self._timeout_s
        pause_s = PAUSE_BASE_S
        while True:
            try:
                answer = await self._http.request(
                    method, path, content=body, params=list(params), headers={**sent, **(headers or {})}
                )
                if answer.is_success or answer.status_code in accept:
                    return answer
                error = problem_of(answer)
            except httpx2.ConnectError as cause:
                error = errors.Unavailable(
                    f"no gateway answers at {self._http.base_url}: {cause}", hint="check the address, or lakebed status"
                )
            except httpx2.HTTPError as cause:
                error = errors.OutcomeUnknown(f"{method} {path} got no response: {cause!r}", hint="read, then decide")
            later = isinstance(error, errors.Unavailable | errors.Overloaded)
            if not later or not (repeatable or isinstance(error, errors.Overloaded)):
                raise error
            wait_s = max(pause_s, float(getattr(error, "retry_after_s", 0.0)) if pause_s >= 1.0 else 0.0)
            if self._clock.monotonic_s() + wait_s >= ends_s:
                raise error
            await self._clock.sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_CAP_S)


def problem_of(answer: httpx2.Response) -> errors.LakebedError:
    """The error that a response names; by its status where the body is not a problem document of Lakebed."""
    fields: dict[str, Any] = {}
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        decoded = msgspec.json.decode(answer.content)
        fields = decoded if isinstance(decoded, dict) else {}
    retry_s = _seconds(answer.headers.get("retry-after", ""))
    if not str(fields.get("type", "")).startswith("urn:lakebed:problem:"):
        kind = BY_STATUS.get(answer.status_code, errors.Unavailable if answer.status_code >= 500 else errors.Invalid)
        error = kind(f"HTTP {answer.status_code} from {answer.request.url}", hint="is this the address of a gateway?")
    else:
        code = str(fields.get("code"))
        kind = KINDS.get(code) or BY_STATUS.get(answer.status_code, errors.LakebedError)
        error = kind(str(fields.get("message", "")), hint=str(fields.get("hint", "")), code=code)
    if hasattr(error, "retry_after_s") and retry_s is not None:
        error.retry_after_s = retry_s
    return error


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() else None
