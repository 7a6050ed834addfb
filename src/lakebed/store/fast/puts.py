"""Conditional PUTs over connections of our own, for stores that are reached by plain HTTP with a key pair.

The cost of a collector is its two conditional creates. Through obstore one costs 0.25 to 0.45 ms of CPU, most of it for
crossing threads; written to a socket of this event loop it costs a third. So conditional PUTs have a fast path, only
where that is simple: `http://`, a static key pair, an object that is hashed in less than 0.2 ms. Everything else, and
every other verb, uses obstore (`docs/decisions/006-fast-paths.md`).

A PUT is retried when the store returns a retryable status or the connection breaks: its condition makes that harmless,
and the caller decides by reading when the condition then fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from lakebed.core import errors
from lakebed.core.http_connection import HttpConnection, HttpResponse
from lakebed.core.runtime import Runtime
from lakebed.store.model import HashedBytes, Version
from lakebed.store.settings import StoreSettings

FAST_BYTES_MAX = 256 * 1024  # hashed in the event loop, at 1.5 GB/s; larger objects use obstore's threads
IDLE_MAX = 64  # connections kept open for the next PUT, per event loop
BACKOFF_BASE_S = 0.05
BACKOFF_CAP_S = 2.0
UNRESERVED = "/-_.~"
RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})


class Signer:
    """AWS signature version 4 for PUTs to one host; what does not change between requests is cached."""

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


class PutClient:
    """PUTs into one bucket. Connections belong to the event loop that opened them."""

    def __init__(self, settings: StoreSettings, runtime: Runtime) -> None:
        where = urlsplit(settings.endpoint)
        self._host, self._port = where.hostname or "", where.port or 80
        self._signer = Signer(
            settings.access_key_id.reveal(), settings.secret_access_key.reveal(), settings.region, where.netloc
        )
        self._bucket = f"{where.path.rstrip('/')}/{settings.url.removeprefix('s3://').strip('/')}"
        self._settings, self._clock, self._ids = settings, runtime.clock, runtime.ids
        self._idle: dict[asyncio.AbstractEventLoop, list[HttpConnection]] = {}

    @staticmethod
    def applies(settings: StoreSettings) -> bool:
        """Whether the fast path is on and the store is reached by plain HTTP, with a static key pair and no proxy."""
        host = urlsplit(settings.endpoint).hostname or ""
        plain = settings.url.startswith("s3://") and settings.endpoint.startswith("http://")
        proxied = bool(getproxies().get("http")) and not proxy_bypass(host)
        signed = bool(settings.access_key_id) and not settings.encryption  # its header is obstore's to send
        return settings.fast_path and plain and signed and not proxied

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        """One conditional PUT, as in `BucketClient.put`.

        Raises Conflict when the condition does not hold (perhaps because of an earlier attempt of this call), Denied,
        NotFound for a missing bucket, and Unavailable for everything else.
        """
        condition = b"if-none-match: *" if instead_of is None else f"if-match: {instead_of}".encode()
        path = quote(f"{self._bucket}/{key}", safe=UNRESERVED)
        digest = data.sha256 if isinstance(data, HashedBytes) else hashlib.sha256(data).hexdigest()
        give_up_s = self._clock.monotonic_s() + self._settings.retry_timeout_s
        for attempt in range(self._settings.retries + 1):
            last = attempt == self._settings.retries or self._clock.monotonic_s() >= give_up_s
            head = self._signer.head(path, digest, len(data), condition, self._clock.now_ns() // 1_000_000_000)
            try:
                answer = await self._send(head, data)
            except OSError as error:
                if last:
                    raise errors.Unavailable(f"put {key!r}: {str(error) or type(error).__name__}") from error
            else:
                if answer.status == 200 and answer.etag:
                    return Version(answer.etag)
                if answer.status not in RETRYABLE or last:  # a 200 without an ETag is not a success
                    raise _refusal(answer, key, repeated=attempt > 0)
            await self._clock.sleep(self._ids.jitter_s(attempt, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
        raise AssertionError("unreachable")

    async def _send(self, head: bytes, data: bytes) -> HttpResponse:
        loop = asyncio.get_running_loop()
        idle = self._idle.get(loop)
        if idle is None:  # a new loop; connections of closed loops are dropped
            open_ = {other: kept for other, kept in list(self._idle.items()) if not other.is_closed()}
            idle = open_[loop] = []
            self._idle = open_
        connection = idle.pop() if idle else None
        if connection is None or connection.is_closed:
            connection = await self._open()
        try:
            answer = await connection.send(head, data, self._settings.timeout_s)
        except BaseException:
            connection.close()
            raise
        if connection.keeps and len(idle) < IDLE_MAX:
            idle.append(connection)
        else:
            connection.close()
        return answer

    async def _open(self) -> HttpConnection:
        return await HttpConnection.open(self._host, self._port, timeout_s=self._settings.connect_timeout_s)


def _refusal(answer: HttpResponse, key: str, *, repeated: bool) -> errors.LakebedError:
    """What a final response means. One to a `repeated` request says nothing about those before it."""
    refusal = _error(answer, key)
    if isinstance(refusal, errors.Conflict):
        refusal.repeated = repeated
    elif repeated:
        return errors.Unavailable(f"first no success, then refused: {refusal.message}")
    return refusal


def _error(answer: HttpResponse, key: str) -> errors.LakebedError:
    text = answer.body.decode("utf-8", "replace")
    code = text.partition("<Code>")[2].partition("</Code>")[0] or text[:200]
    message = f"put {key!r}: {answer.status} {code}".rstrip()
    if answer.status in (409, 412) or (answer.status == 404 and code == "NoSuchKey"):  # 404: If-Match on a missing key
        return errors.Conflict(message)
    if answer.status == 404:
        return errors.NotFound(message)
    if answer.status in (401, 403):
        return errors.Denied(message)
    return errors.Unavailable(message)
