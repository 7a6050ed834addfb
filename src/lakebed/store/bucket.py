"""The store seam on a real bucket, through obstore (S3 and what speaks it, GCS, Azure, memory).

Obstore retries reads and writes by itself; this adapter never retries a verb blindly on top. What it adds is the
decision after a doubtful answer to a conditional write, always by reading and comparing:

- "already exists" and "precondition failed" may be our own first write whose answer was lost (503, reset, then 412);
- 409 arrives as "already exists" though the key may be absent: absent means the write is tried again;
- a timeout says nothing: the same bytes are written again under the same condition, which is harmless.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions as obex
from obstore.store import from_url

from lakebed import errors
from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.model import ObjectInfo, StoredObject, check_key, check_prefix
from lakebed.store.puts import SHORT_BYTES_MAX, Puts
from lakebed.store.settings import StoreSettings
from lakebed.traces import span

DOUBTS_MAX = 6  # a doubtful conditional write is decided or given up as OutcomeUnknown after this many looks
DOUBT_BASE_S = 0.05
DOUBT_CAP_S = 1.0
COMPARE_BY_HASH_BYTES = 256 * 1024  # larger objects are compared by size and MD5 etag before being downloaded
PART_BYTES = 8 * 1024 * 1024

# A tokio thread that drops its last Python reference while the interpreter is being torn down aborts the process;
# a moment at exit lets those threads finish.
atexit.register(time.sleep, 0.02)


class BucketStore:
    """One bucket behind the `Store` protocol. `store` is any obstore store; `puts` a shorter way to write to it."""

    def __init__(self, store: Any, *, clock: Clock, ids: Ids, metrics: Metrics, puts: Puts | None = None) -> None:
        self._store, self._puts = store, puts
        self._clock = clock
        self._ids = ids
        requests = metrics.counter("lakebed_store_requests_total")
        self._requests = {verb: requests.labels(verb=verb) for verb in VERBS}
        self._failures = metrics.counter("lakebed_store_failures_total")
        moved = metrics.counter("lakebed_store_bytes_total")
        self._bytes_in, self._bytes_out = moved.labels(direction="in"), moved.labels(direction="out")
        self._doubts = metrics.counter("lakebed_store_doubts_total")

    async def get(self, key: str) -> StoredObject:
        found = await self._call("get", key, lambda: obstore.get_async(self._store, check_key(key)))
        data = bytes(await self._call("get", key, found.bytes_async, counted=False))
        self._bytes_out.inc(len(data))
        return StoredObject(_info(found.meta), data)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0 or length <= 0:
            raise errors.Invalid(f"range {start}+{length} of {key!r} is not a range")
        try:
            read = await self._call(
                "get_range",
                key,
                lambda: obstore.get_range_async(self._store, check_key(key), start=start, length=length),
            )
        except errors.Unavailable as error:
            if "416" in error.message or "Requested range" in error.message or "wanted range" in error.message.lower():
                raise errors.Corrupt(f"{key!r} ends before byte {start}") from error
            raise
        if len(read) != length:
            raise errors.Corrupt(f"{key!r} ends at byte {start + len(read)}, before {start + length}")
        self._bytes_out.inc(length)
        return bytes(read)

    async def head(self, key: str) -> ObjectInfo:
        return _info(await self._call("head", key, lambda: obstore.head_async(self._store, check_key(key))))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        folder = check_prefix(prefix)
        stream = obstore.list(self._store, prefix=folder or None, offset=after or None)
        while True:
            page = await self._call("list", prefix, lambda: _next_page(stream))
            if page is None:
                return
            for meta in page:
                yield _info(meta)

    async def children(self, prefix: str) -> Sequence[str]:
        folder = check_prefix(prefix)
        found = await self._call(
            "list", prefix, lambda: obstore.list_with_delimiter_async(self._store, prefix=folder or None)
        )
        return sorted(path.rsplit("/", 1)[-1] for path in found["common_prefixes"])

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        check_key(key)
        for doubt in range(DOUBTS_MAX):
            try:
                return await self._put("create", key, data, "create")
            except (errors.Conflict, errors.Unavailable) as error:
                current = await self._look(key, data, error)
                if current is True:
                    return await self.head(key)
                if isinstance(current, StoredObject):
                    raise errors.AlreadyExists(f"{key!r} already holds other bytes", current=current) from error
                await self._pause(doubt)  # absent: not created, or not yet
        raise errors.OutcomeUnknown(f"create of {key!r} was answered neither yes nor no {DOUBTS_MAX} times")

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        check_key(key)
        for doubt in range(DOUBTS_MAX):
            try:
                return await self._put("replace", key, data, {"e_tag": etag})
            except (errors.Conflict, errors.Unavailable) as error:
                current = await self._look(key, data, error)
                if current is True:
                    return await self.head(key)
                if not isinstance(current, StoredObject):
                    raise errors.Stale(f"{key!r} is gone", current=None) from error
                if current.etag != etag:
                    raise errors.Stale(f"{key!r} has changed", current=current) from error
                await self._pause(doubt)  # still the old object: not replaced, or not yet
        raise errors.OutcomeUnknown(f"replace of {key!r} was answered neither yes nor no {DOUBTS_MAX} times")

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        source = _Counted(chunks)
        try:
            await self._call(
                "upload",
                key,
                lambda: obstore.put_async(
                    self._store, check_key(key), source, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4
                ),
            )
        except errors.LakebedError:
            if source.failure is not None:  # the caller's own error, not the store's
                raise source.failure from None
            raise
        self._bytes_in.inc(source.size)
        return await self.head(key)

    async def delete(self, key: str) -> None:
        try:
            await self._call("delete", key, lambda: obstore.delete_async(self._store, check_key(key)))
        except errors.NotFound:
            return

    async def _put(self, verb: str, key: str, data: bytes, mode: Any) -> ObjectInfo:
        if (puts := self._puts) is not None and len(data) <= SHORT_BYTES_MAX:
            etag = await self._call(verb, key, lambda: puts.put(key, data, mode))
        else:
            put = await self._call(
                verb, key, lambda: obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            )
            etag = put["e_tag"] or ""
        self._bytes_in.inc(len(data))
        return ObjectInfo(key=key, size=len(data), etag=etag)

    async def _look(self, key: str, data: bytes, cause: Exception) -> StoredObject | bool:
        """What stands at the key: True for exactly `data`, the object when it differs, False when it is absent."""
        self._doubts.inc()
        try:
            if len(data) > COMPARE_BY_HASH_BYTES:
                info = await self.head(key)
                if info.size == len(data) and info.etag.strip('"') == _md5(data):
                    return True
            current = await self.get(key)
        except errors.NotFound:
            return False
        except errors.Unavailable as error:
            raise errors.OutcomeUnknown(f"{key!r} may be written; it cannot be read now: {error.message}") from cause
        return True if current.data == data else current

    async def _pause(self, doubt: int) -> None:
        await self._clock.sleep(self._ids.jitter_s(doubt, base_s=DOUBT_BASE_S, cap_s=DOUBT_CAP_S))

    async def _call(self, verb: str, key: str, call: Callable[[], Awaitable[Any]], *, counted: bool = True) -> Any:
        if not counted:  # the rest of an answer that was counted
            return await self._mapped(verb, key, call)
        self._requests[verb].inc()
        with span(f"store {verb}", "client", key=key):
            return await self._mapped(verb, key, call)

    async def _mapped(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except Exception as error:
            mapped = translate(error, verb, key)
            self._failures.labels(verb=verb, kind=mapped.code).inc()
            raise mapped from error


VERBS = ("get", "get_range", "head", "list", "create", "replace", "upload", "delete")

# Every exception obstore exports, mapped; a test enumerates them.
KINDS: dict[type[BaseException], type[errors.LakebedError]] = {
    obex.AlreadyExistsError: errors.Conflict,
    obex.PreconditionError: errors.Conflict,
    obex.NotModifiedError: errors.Conflict,
    obex.NotFoundError: errors.NotFound,
    FileNotFoundError: errors.NotFound,
    obex.PermissionDeniedError: errors.Denied,
    obex.UnauthenticatedError: errors.Denied,
    obex.InvalidPathError: errors.Invalid,
    obex.NotSupportedError: errors.Invalid,
    obex.UnknownConfigurationKeyError: errors.Invalid,
    ValueError: errors.Invalid,
    TypeError: errors.Invalid,
    obex.JoinError: errors.Unavailable,
    obex.GenericError: errors.Unavailable,
    obex.BaseError: errors.Unavailable,
    OSError: errors.Unavailable,
    asyncio.TimeoutError: errors.Unavailable,
}


def translate(error: Exception, verb: str, key: str) -> errors.LakebedError:
    """The Lakebed error for an exception from below. Unknown ones become Unavailable: nothing is known to be done."""
    if isinstance(error, errors.LakebedError):
        error.hint = error.hint or HINTS.get(type(error), "")
        return error
    kind = next((KINDS[base] for base in type(error).__mro__ if base in KINDS), errors.Unavailable)
    summary = str(error).split("Debug source", 1)[0].strip()[:400]
    hint = HINTS.get(kind, "")
    return kind(f"{verb} {key!r}: {summary}", hint=hint)


HINTS: dict[type[errors.LakebedError], str] = {
    errors.Denied: "check store.access_key_id and store.secret_access_key, and what they may do in this bucket",
    errors.Unavailable: "check that the store answers: lakebed doctor",
}


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        size=meta["size"],
        etag=meta["e_tag"] or "",
        modified_ms=int(meta["last_modified"].timestamp() * 1000),
    )


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


async def _next_page(stream: Any) -> Any:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


class _Counted:
    """Passes chunks through, remembering how many bytes went by and what stopped them."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.size = 0
        self.failure: BaseException | None = None

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._chunks.__anext__()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
        self.size += len(chunk)
        return chunk


def open_bucket(settings: StoreSettings) -> Any:
    """The obstore store for these settings. Opens no connection yet."""
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": settings.endpoint.startswith("http://"),
            "timeout": f"{settings.timeout_s}s",
            "connect_timeout": f"{settings.connect_timeout_s}s",
        },
        "retry_config": {
            "max_retries": settings.retries,
            "retry_timeout": timedelta(seconds=settings.retry_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
    }
    if settings.url.startswith("s3://"):
        options["region"] = settings.region
        if settings.endpoint:
            options["endpoint"] = settings.endpoint
        if settings.access_key_id:
            options["access_key_id"] = settings.access_key_id.reveal()
            options["secret_access_key"] = settings.secret_access_key.reveal()
    return from_url(settings.url, **options)
