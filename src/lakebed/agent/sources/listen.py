"""The agent's own HTTP on loopback: OTLP metrics in, and its own metrics and health out.

An OTLP request gets 200 only after its samples are on disk. One that could not be stored in time gets 503 and
Retry-After, and its exporter sends it again: at least once, never silently lost. There are no keys here: a web page of
another site, which a browser on this machine could open, gets 403.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lakebed.agent.batcher import BadSampleReporter, Batcher
from lakebed.agent.sources.otlp import OtlpSamples, decode_json, decode_proto, encode_answer, encode_status, samples_of
from lakebed.agent.waiting import in_thread
from lakebed.core.errors import Invalid
from lakebed.core.local import is_local, is_own_page
from lakebed.core.runtime import Runtime

JSON, PROTO = "application/json", "application/x-protobuf"
LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 8.0  # below the 10 s after which exporters give up by default
REQUESTS_MAX = 32  # at once
INVALID_ARGUMENT, PERMISSION_DENIED, UNAVAILABLE = 3, 7, 14  # google.rpc codes


class RequestRejected(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class LocalCallers:
    """Lets programs of this machine in, and no web page of another site."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = dict(scope.get("headers", ()))
        host, origin, site = (found.get(name) for name in (b"host", b"origin", b"sec-fetch-site"))
        if (host is None or is_local(host)) and is_own_page(host, origin, site):
            return await self._app(scope, receive, send)
        why = f"only programs of this machine are served: send to {LOOPBACK} or localhost"
        return await _refusal(JSON, 403, why)(scope, receive, send)


class OtlpListener:
    """`health` gives the JSON of /health."""

    def __init__(
        self,
        runtime: Runtime,
        batcher: Batcher,
        *,
        linger_s: float,
        bytes_max: int,
        points_max: int,
        health: Callable[[], dict[str, Any]],
    ) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._batcher, self._linger_s = batcher, linger_s
        self._bytes_max, self._points_max = bytes_max, points_max
        self._clock, self._metrics, self._health = clock, metrics, health
        self._bad_samples = BadSampleReporter("otlp", metrics)
        self._one_json = asyncio.Lock()
        self.app = Starlette(
            routes=[
                Route("/v1/metrics", self._otlp, methods=["POST"]),
                Route("/metrics", self._own_metrics),
                Route("/health", self._own_health),
            ],
            middleware=[Middleware(LocalCallers)],
        )

    async def _otlp(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            return await self._export(request, kind)
        except RequestRejected as error:
            return _refusal(kind, error.status, error.message)
        except Invalid as error:
            self._bad_samples.report([(0, error.message)], origin="otlp")
            return _refusal(kind, 400, error.message)
        except ClientDisconnect:
            return Response(status_code=400)

    async def _export(self, request: Request, kind: str) -> Response:
        if kind not in (JSON, PROTO):
            raise RequestRejected(415, f"content type {kind or 'missing'}: send {PROTO} or {JSON}")
        body = _inflate(await self._body(request), request.headers.get("content-encoding", ""), self._bytes_max)
        if not self._batcher.has_room:
            raise RequestRejected(503, "the queue is busy: send again")
        received = await self._decode(kind, body)
        self._bad_samples.report(((0, reason) for reason in received.reasons), origin="otlp", count=received.rejected)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                ticket = await self._batcher.put(received.samples, within_s=self._linger_s)
                await self._batcher.durable(ticket if received.samples else 0)
        except TimeoutError as error:
            raise RequestRejected(503, "not on disk in time: send again") from error
        return _answer(kind, received)

    async def _decode(self, kind: str, body: bytes) -> OtlpSamples:
        """JSON becomes messages in Python, some 50 µs a point: in a thread, and one body at a time to bound memory."""
        points_max, now_ns = self._points_max, self._clock.now_ns()
        if kind == PROTO:
            return samples_of(decode_proto(body, points_max=points_max), now_ns=now_ns)
        async with self._one_json:
            return await in_thread(lambda: samples_of(decode_json(body, points_max=points_max), now_ns=now_ns))

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._bytes_max:
                raise RequestRejected(413, f"a body over {self._bytes_max} bytes")
        return bytes(body)

    async def _own_metrics(self, request: Request) -> Response:
        return Response(self._metrics.prometheus(), media_type="text/plain; version=0.0.4")

    async def _own_health(self, request: Request) -> Response:
        return Response(msgspec.json.encode(self._health()), media_type=JSON)


def bind(port: int) -> socket.socket:
    """A listening socket on loopback. Raises Invalid when the port is taken or may not be used."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise Invalid(f"port {port} cannot be listened on: {error}", hint="set another agent.otlp_port") from error
    return bound


class LoopbackServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the agent stops it."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=REQUESTS_MAX,
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _inflate(body: bytes, encoding: str, bytes_max: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise RequestRejected(415, f"content encoding {encoding}: send gzip or none")
    stream = zlib.decompressobj(wbits=31)
    try:
        out = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise Invalid(f"not gzip: {error}") from error
    if len(out) > bytes_max:
        raise RequestRejected(413, f"a body over {bytes_max} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise Invalid("the gzip stream does not end where the body does")
    return out


def _answer(kind: str, received: OtlpSamples) -> Response:
    why = "; ".join(received.reasons)
    if kind == PROTO:
        return Response(encode_answer(received.rejected, why), media_type=PROTO)
    partial = {"rejectedDataPoints": str(received.rejected), "errorMessage": why}
    return Response(msgspec.json.encode({"partialSuccess": partial} if received.rejected else {}), media_type=JSON)


def _refusal(kind: str, status: int, message: str) -> Response:
    code = {403: PERMISSION_DENIED, 503: UNAVAILABLE}.get(status, INVALID_ARGUMENT)
    headers = {"retry-after": "1"} if status == 503 else {}
    if kind == PROTO:
        return Response(encode_status(code, message), status, headers, PROTO)
    return Response(msgspec.json.encode({"code": code, "message": message}), status, headers, JSON)
