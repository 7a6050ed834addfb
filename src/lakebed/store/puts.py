"""Conditional PUTs over connections of our own, for stores that are reached by plain HTTP with a key pair.

A collector's cost is its two conditional creates. Through a general client one costs 0.25 to 0.45 ms of CPU, most of it
for crossing threads; written to a socket of this event loop it costs a third. So the one verb that every promise here
rests on has a short way, and only where that way is plain: `http://`, a static key pair, an object that is hashed
before anybody notices. Everything else, and every other verb, is the general client's (`docs/decisions/006`).

A PUT is tried again when the store says "later" or the connection breaks: its condition makes that harmless, and
whoever asked decides by reading when the condition then fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httptools

from lakebed import errors
from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.store.model import Version
from lakebed.store.settings import StoreSettings

SHORT_BYTES_MAX = 256 * 1024  # hashed in the event loop, at 1.5 GB/s; a larger object is left to other threads
IDLE_MAX = 64  # connections kept open for the next PUT, per event loop
ANSWER_BYTES_MAX = 64 * 1024  # of an answer's body: an error in XML
BACKOFF_BASE_S = 0.05
BACKOFF_CAP_S = 2.0
UNRESERVED = "/-_.~"
LATER = frozenset({408, 429, 500, 502, 503, 504})


class Puts:
    """PUTs into one bucket. Connections belong to the event loop that opened them."""

    def __init__(self, settings: StoreSettings, *, clock: Clock, ids: Ids) -> None:
        where = urlsplit(settings.endpoint)
        self._host, self._port = where.hostname or "", where.port or 80
        self._signer = Signer(
            settings.access_key_id.reveal(), settings.secret_access_key.reveal(), settings.region, where.netloc
        )
        self._bucket = f"{where.path.rstrip('/')}/{settings.url.removeprefix('s3://').strip('/')}"
        self._settings, self._clock, self._ids = settings, clock, ids
        self._idle: dict[asyncio.AbstractEventLoop, list[Connection]] = {}

    @staticmethod
    def reach(settings: StoreSettings) -> bool:
        """Whether these settings name a store of the plain kind."""
        host = urlsplit(settings.endpoint).hostname or ""
        plain = settings.url.startswith("s3://") and settings.endpoint.startswith("http://")
        proxied = bool(getproxies().get("http")) and not proxy_bypass(host)
        return plain and bool(settings.access_key_id) and not proxied

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        """One conditional PUT, as `BucketClient.put` promises it.

        Raises Conflict when the condition does not hold (perhaps because an earlier try of this call made it so),
        Denied, NotFound for a bucket that is not there, and Unavailable for all else.
        """
        condition = b"if-none-match: *" if instead_of is None else f"if-match: {instead_of}".encode()
        path = quote(f"{self._bucket}/{key}", safe=UNRESERVED)
        digest = hashlib.sha256(data).hexdigest()
        give_up_s = self._clock.monotonic_s() + self._settings.retry_timeout_s
        for attempt in range(self._settings.retries + 1):
            last = attempt == self._settings.retries or self._clock.monotonic_s() >= give_up_s
            head = self._signer.head(path, digest, len(data), condition, self._clock.now_ns() // 1_000_000_000)
            try:
                answer = await self._ask(head, data)
            except (OSError, httptools.HttpParserError) as error:
                if last:
                    raise errors.Unavailable(f"put {key!r}: {str(error) or type(error).__name__}") from error
            else:
                if answer.status == 200 and answer.etag:
                    return Version(answer.etag)
                if answer.status not in LATER or last:  # a 200 without an ETag is no answer to stand on
                    raise answer.error(key)
            await self._clock.sleep(self._ids.jitter_s(attempt, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
        raise AssertionError("unreachable")

    async def _ask(self, head: bytes, data: bytes) -> Answer:
        loop = asyncio.get_running_loop()
        idle = self._idle.get(loop)
        if idle is None:  # a new loop; those that have ended take their connections with them
            open_ = {other: kept for other, kept in list(self._idle.items()) if not other.is_closed()}
            idle = open_[loop] = []
            self._idle = open_
        connection = idle.pop() if idle else None
        if connection is None or connection.is_closed:
            connection = await self._open(loop)
        try:
            answer = await connection.ask(head, data, self._settings.timeout_s)
        except BaseException:
            connection.close()
            raise
        if connection.keeps and len(idle) < IDLE_MAX:
            idle.append(connection)
        else:
            connection.close()
        return answer

    async def _open(self, loop: asyncio.AbstractEventLoop) -> Connection:
        async with asyncio.timeout(self._settings.connect_timeout_s):
            _, connection = await loop.create_connection(lambda: Connection(loop), self._host, self._port)
        return connection


class Signer:
    """AWS signature version 4 for PUTs to one host: everything that does not change from one to the next is kept."""

    def __init__(self, key_id: str, secret: str, region: str, host: str) -> None:
        self._key_id, self._secret, self._region, self._host = key_id, secret, region, host
        self._second, self._stamp, self._day = -1, "", ""
        self._key = b""

    def head(self, path: str, digest: str, size: int, condition: bytes, now_s: int) -> bytes:
        """The signed head of a PUT of `size` bytes with this SHA-256, to a path that is already quoted."""
        if now_s != self._second:
            self._turn(now_s)
        scope = f"{self._day}/{self._region}/s3/aws4_request"
        request = (
            f"PUT\n{path}\n\nhost:{self._host}\nx-amz-content-sha256:{digest}\nx-amz-date:{self._stamp}\n\n"
            f"host;x-amz-content-sha256;x-amz-date\n{digest}"
        )
        hashed = hashlib.sha256(request.encode()).hexdigest()
        signature = hmac.digest(self._key, f"AWS4-HMAC-SHA256\n{self._stamp}\n{scope}\n{hashed}".encode(), "sha256")
        return (
            f"PUT {path} HTTP/1.1\r\nhost: {self._host}\r\nx-amz-content-sha256: {digest}\r\n"
            f"x-amz-date: {self._stamp}\r\nauthorization: AWS4-HMAC-SHA256 Credential={self._key_id}/{scope}, "
            f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature.hex()}\r\n"
            f"content-length: {size}\r\n"
        ).encode() + (condition + b"\r\n\r\n")

    def _turn(self, now_s: int) -> None:
        self._second, self._stamp = now_s, f"{datetime.fromtimestamp(now_s, UTC):%Y%m%dT%H%M%SZ}"
        day = self._stamp[:8]
        if day != self._day:
            key = f"AWS4{self._secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._day, self._key = day, key


class Answer:
    """An answer as the parser tells it."""

    def __init__(self) -> None:
        self.status = 0
        self.etag = ""
        self.body = b""

    def error(self, key: str) -> errors.LakebedError:
        said = self.body.decode("utf-8", "replace")
        code = said.partition("<Code>")[2].partition("</Code>")[0] or said[:200]
        told = f"put {key!r}: {self.status} {code}".rstrip()
        if self.status in (409, 412) or (self.status == 404 and code == "NoSuchKey"):  # 404: If-Match on a missing key
            return errors.Conflict(told)
        if self.status == 404:
            return errors.NotFound(told)
        if self.status in (401, 403):
            return errors.Denied(told)
        return errors.Unavailable(told)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._parser: Any = None
        self._answer = Answer()
        self.is_closed = False
        self.keeps = True

    async def ask(self, head: bytes, data: bytes, timeout_s: float) -> Answer:
        """Raises OSError when the connection breaks or the answer is late: the request may have been carried out."""
        self._parser, self._answer = httptools.HttpResponseParser(self), Answer()
        self._waiting = waiting = self._loop.create_future()
        late = self._loop.call_later(timeout_s, self._fail, TimeoutError(f"no answer within {timeout_s:g} s"))
        try:
            self._transport.writelines((head, data))
            answer: Answer = await waiting
            return answer
        finally:
            late.cancel()
            self._waiting = None

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail(exc or ConnectionResetError("the store closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            return self.close()  # nobody asked
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"etag":
            self._answer.etag = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if len(self._answer.body) < ANSWER_BYTES_MAX:
            self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self.keeps = self._parser.should_keep_alive()
        if self._answer.status >= 200 and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
