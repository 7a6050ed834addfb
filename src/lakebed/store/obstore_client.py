"""The bucket client on obstore: S3-compatible stores, GCS, Azure, memory.

Obstore repeats requests after 5xx responses and broken connections, also conditional PUTs, so a Conflict may be caused
by our own first write: 503 or a reset, then 412. Small PUTs use `puts` where the settings allow it.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions as obex
from obstore.store import from_url

from lakebed.core import errors
from lakebed.store.fast.puts import FAST_BYTES_MAX, PutClient
from lakebed.store.model import ObjectInfo, StoredObject, Version
from lakebed.store.settings import StoreSettings

PART_BYTES = 8 * 1024 * 1024
READS_MAX = 4  # requests for one read whose response was truncated
TRUNCATED = "response body error"  # obstore repeats a truncated object, not a truncated 404 or page of a listing
SENT_ONCE = re.compile(r"Error performing PUT \S+ in [0-9.]+\S+ - Server returned")  # retries are named before the dash

# A tokio thread that drops its last Python reference while the interpreter is being torn down aborts the process;
# a moment at exit lets those threads finish.
atexit.register(time.sleep, 0.02)


class ObstoreClient:
    """`store` is any obstore store; `puts` a faster path for small conditional PUTs into the same bucket."""

    def __init__(self, store: Any, puts: PutClient | None = None) -> None:
        self._store, self._puts = store, puts

    async def get(self, key: str) -> StoredObject:
        found = await _read("get", key, lambda: obstore.get_async(self._store, key))
        data = bytes(await _mapped("get", key, found.bytes_async))
        info = _info(found.meta)
        if len(data) != info.size:
            raise errors.Unavailable(f"get {key!r}: the response ended after {len(data)} of {info.size} bytes")
        return StoredObject(info, data)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        read = await _read(
            "get_range", key, lambda: obstore.get_range_async(self._store, key, start=start, length=length)
        )
        return bytes(read)

    async def head(self, key: str) -> ObjectInfo:
        return _info(await _mapped("head", key, lambda: obstore.head_async(self._store, key)))

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        stream: Any = None

        async def next_page() -> Any:
            nonlocal stream
            if stream is None:  # at the start, and after a truncated page: goes on after the last key that arrived
                stream = obstore.list(self._store, prefix=prefix or None, offset=after or None)
            try:
                return await stream.__anext__()
            except StopAsyncIteration:
                return None
            except Exception:
                stream = None
                raise

        while (page := await _read("list", prefix, next_page)) is not None:
            after = page[-1]["path"]
            yield [_info(meta) for meta in page]

    async def children(self, prefix: str) -> Sequence[str]:
        found = await _read(
            "list", prefix, lambda: obstore.list_with_delimiter_async(self._store, prefix=prefix or None)
        )
        return [path.rsplit("/", 1)[-1] for path in found["common_prefixes"]]

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        if (puts := self._puts) is not None and len(data) <= FAST_BYTES_MAX:
            return await puts.put(key, data, instead_of)
        verb = "create" if instead_of is None else "replace"
        mode: Any = "create" if instead_of is None else {"e_tag": instead_of}
        put = await _mapped(
            verb, key, lambda: obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
        )
        return versioned(key, put["e_tag"])

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        source = _Counted(chunks)
        try:
            put = await _mapped(
                "upload",
                key,
                lambda: obstore.put_async(
                    self._store, key, source, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4
                ),
            )
        except errors.LakebedError:
            if source.failure is not None:  # the caller's own error, not the store's
                raise source.failure from None
            raise
        return ObjectInfo(key=key, size=source.size, etag=put["e_tag"] or "")

    async def delete(self, key: str) -> None:
        await _mapped("delete", key, lambda: obstore.delete_async(self._store, key))


def versioned(key: str, etag: str | None) -> Version:
    """The version in the response to a PUT. Without one the next replace would have no condition."""
    if not etag:
        raise errors.Unavailable(f"put {key!r}: the response has no ETag")
    return Version(etag)


async def _mapped(verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except Exception as error:
        raise translate(error, verb, key) from error


async def _read(verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeats a read whose response was truncated: reading again is harmless."""
    for left in reversed(range(READS_MAX)):
        try:
            return await _mapped(verb, key, call)
        except errors.Unavailable as error:
            if not left or not _is_truncated(error):
                raise
    raise AssertionError("the last attempt returns or raises")


def _is_truncated(error: errors.LakebedError) -> bool:
    return TRUNCATED in str(error.__cause__)


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
    """The Lakebed error for an exception from below. Unknown ones become Unavailable: the outcome is open."""
    if isinstance(error, errors.LakebedError):
        return error
    kind = next((KINDS[base] for base in type(error).__mro__ if base in KINDS), errors.Unavailable)
    summary = str(error).split("Debug source", 1)[0].strip()[:400]
    translated = kind(f"{verb} {key!r}: {summary}")
    if isinstance(translated, errors.Conflict):
        translated.repeated = SENT_ONCE.search(summary) is None
    return translated


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        size=meta["size"],
        etag=meta["e_tag"] or "",
        modified_ms=int(meta["last_modified"].timestamp() * 1000),
    )


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
        if settings.encryption:
            options["aws_server_side_encryption"] = settings.encryption
        if settings.endpoint:
            options["endpoint"] = settings.endpoint
        if settings.access_key_id:
            options["access_key_id"] = settings.access_key_id.reveal()
            options["secret_access_key"] = settings.secret_access_key.reveal()
    return from_url(settings.url, **options)
