"""HTTP to collectors and scrape targets, bounded in time and size.

Redirects are not followed: a token goes only to the configured address. The client is `httpx2` because it is
a dependency already and gets TLS, pooling and timeouts right; its millisecond of CPU is paid once a batch, not once a
sample (see docs/parts/agent.md).
"""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Protocol, Self

import httpx2

from lakebed.agent.verdict import CollectorResponse
from lakebed.core.errors import Invalid, OutcomeUnknown, Unavailable
from lakebed.core.traces import outgoing, span

ANSWER_BYTES_MAX = 64 * 1024  # a collector's responses are small
BATCHES_PATH = "/v1/batches"
FRAME_TYPE = "application/vnd.lakebed.lmbatch"


class Transport(Protocol):
    async def post(self, url: str, frame: bytes) -> CollectorResponse:
        """Sends a frame. Raises Unavailable when nothing was sent, OutcomeUnknown when it may have arrived."""


class HttpTransport:
    def __init__(
        self,
        *,
        token: str = "",
        timeout_s: float,
        connect_timeout_s: float,
        concurrency: int,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(timeout_s, connect=connect_timeout_s),
            limits=httpx2.Limits(max_connections=4 * concurrency, max_keepalive_connections=2 * concurrency),
            follow_redirects=False,
            verify=verify,
            headers={"user-agent": "lakebed-agent"},
        )

    async def post(self, url: str, frame: bytes) -> CollectorResponse:
        with span("agent send", "client", url=url):
            return await self._post(url, frame, {**self._headers, **outgoing(), "content-type": FRAME_TYPE})

    async def _post(self, url: str, frame: bytes, headers: dict[str, str]) -> CollectorResponse:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", url + BATCHES_PATH, content=frame, headers=headers) as response,
            ):
                return CollectorResponse(
                    response.status_code, _lower(response), await _read(response, ANSWER_BYTES_MAX)
                )
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise Unavailable(f"{url} cannot be reached: {_why(error)}") from error
        except (httpx2.HTTPError, httpx2.StreamError, TimeoutError, Invalid) as error:
            raise OutcomeUnknown(f"no response from {url}: {_why(error)}") from error

    async def get(self, url: str, *, accept: str, timeout_s: float, bytes_max: int) -> bytes:
        """The body of a 200, at most `bytes_max` decompressed bytes. Raises Unavailable or Invalid."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("GET", url, headers={"accept": accept}, timeout=timeout_s) as response,
            ):
                if response.status_code != 200:
                    raise Invalid(f"{url} returned {response.status_code}")
                return await _read(response, bytes_max)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, TimeoutError) as error:
            raise Unavailable(f"{url} cannot be read: {_why(error)}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()


async def _read(response: httpx2.Response, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > bytes_max:
            raise Invalid(f"the response of {response.url} is over {bytes_max} bytes")
    return bytes(body)


def _lower(response: httpx2.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
