"""The `Store` protocol on a bucket: the outcome of a conditional write is decided by reading when it is in doubt.

A `BucketClient` sends the requests. Every response to a conditional write other than success leaves a doubt:

- "precondition failed" may be caused by our own first write, when its response was lost and the request repeated;
- 409 is a conflict although the key may be absent: when it is absent the write is retried;
- a timeout, a reset or a truncated response leaves the outcome open: the same bytes are written again under the same
  condition, which is harmless;
- a refusal may be the response to a repeated request, too.

So the object is read and compared with what was to be written. The returned version is that of the compared response;
a second request could return the version of another writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from lakebed.core import errors
from lakebed.core.runtime import Runtime
from lakebed.core.traces import span
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written, check_key, check_prefix

T = TypeVar("T")
DOUBTS_MAX = 6  # attempts to decide a conditional write before OutcomeUnknown is raised
DOUBT_BASE_S = 0.05
DOUBT_CAP_S = 1.0
READ_FIRST = "read the object before you retry"
COMPARE_BY_HASH_BYTES = 256 * 1024  # larger objects are compared by size and MD5 etag before being downloaded
VERBS = ("get", "get_range", "head", "list", "create", "replace", "upload", "delete")
HINTS: dict[type[errors.LakebedError], str] = {
    errors.Denied: "check store.access_key_id and store.secret_access_key, and their permissions in this bucket",
    errors.Unavailable: "check that the store is reachable: lakebed doctor",
}


class BucketClient(Protocol):
    """The requests of a bucket, one method each: the interface below `BucketStore`.

    A client sends a request and reports the response; it never decides what a missing response means. So `BucketStore`
    makes these decisions alike on a real bucket, in memory and in simulation.

    Raises Conflict when a condition does not hold, NotFound, Denied, Invalid, and Unavailable for every request without
    a response, also for a write that took place. A client may repeat a request, so a Conflict can be caused by its own
    first attempt; a client that knows it sent only one sets `repeated` to False.
    """

    async def get(self, key: str) -> StoredObject:
        """The object with the version of the same response; Unavailable when the response was truncated."""

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`: fewer, or Unavailable, when the object or the response ends before."""

    async def head(self, key: str) -> ObjectInfo: ...

    def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        """Every object under a folder, page by page, after the key `after`."""

    async def children(self, prefix: str) -> Sequence[str]:
        """The names of the folders directly under a folder, in any order."""

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        """One conditional PUT: only if the object still has this version, or, with None, only if there is no object.

        Returns the version of the response; a response without one is Unavailable.
        """

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Stores a large object in parts, without a condition."""

    async def delete(self, key: str) -> None: ...


class BucketStore:
    """One bucket behind the `Store` protocol."""

    def __init__(self, client: BucketClient, runtime: Runtime) -> None:
        self._client, self._clock, self._ids, metrics = client, runtime.clock, runtime.ids, runtime.metrics
        requests = metrics.counter("lakebed_store_requests_total")
        self._requests = {verb: requests.labels(verb=verb) for verb in VERBS}
        self._failures = metrics.counter("lakebed_store_failures_total")
        moved = metrics.counter("lakebed_store_bytes_total")
        self._bytes_in, self._bytes_out = moved.labels(direction="in"), moved.labels(direction="out")
        self._doubts = metrics.counter("lakebed_store_doubts_total")

    async def get(self, key: str) -> StoredObject:
        check_key(key)
        found = await self._call("get", key, lambda: self._client.get(key))
        self._bytes_out.inc(len(found.data))
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0 or length <= 0:
            raise errors.Invalid(f"range {start}+{length} of {key!r} is not a range")
        check_key(key)
        try:
            read = await self._call("get_range", key, lambda: self._client.get_range(key, start, length))
        except errors.Unavailable as error:
            await self._reaches(key, start + length, error)
            raise
        if len(read) != length:
            await self._reaches(key, start + length, None)
            raise errors.Unavailable(f"get_range {key!r}: the response ended after {len(read)} of {length} bytes")
        self._bytes_out.inc(length)
        return read

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return await self._call("head", key, lambda: self._client.head(key))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        pages = self._client.pages(check_prefix(prefix), after)
        while (page := await self._call("list", prefix, lambda: anext(pages, None))) is not None:
            for info in page:
                yield info

    async def children(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        return sorted(await self._call("list", prefix, lambda: self._client.children(prefix)))

    async def create(self, key: str, data: bytes) -> Written:
        check_key(key)
        for doubt in range(DOUBTS_MAX):
            try:
                return await self._put("create", key, data, None)
            except errors.LakebedError as error:
                found = await self._look(key, data, error, doubt)
                if isinstance(found, Written):
                    return found
                if found is not None:
                    taken = errors.AlreadyExists(f"{key!r} already exists with other bytes", current=found)
                    raise _plain(taken, error, doubt) from error
                await self._again(doubt, error)  # absent: not created, or not yet
        raise errors.OutcomeUnknown(
            f"the outcome of creating {key!r} is unknown after {DOUBTS_MAX} attempts", hint=READ_FIRST
        )

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        check_key(key)
        for doubt in range(DOUBTS_MAX):
            try:
                return await self._put("replace", key, data, etag)
            except errors.LakebedError as error:
                found = await self._look(key, data, error, doubt)
                if isinstance(found, Written):
                    return found
                if found is None:
                    raise errors.Stale(f"{key!r} was deleted", current=None) from error
                if found.etag != etag:
                    raise _plain(errors.Stale(f"{key!r} has changed", current=found), error, doubt) from error
                await self._again(doubt, error)  # still the old object: not replaced, or not yet
        raise errors.OutcomeUnknown(
            f"the outcome of replacing {key!r} is unknown after {DOUBTS_MAX} attempts", hint=READ_FIRST
        )

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        check_key(key)
        stored = await self._unconditional("upload", key, lambda: self._client.upload(key, chunks))
        self._bytes_in.inc(stored.size)
        return stored

    async def delete(self, key: str) -> None:
        check_key(key)
        try:
            await self._unconditional("delete", key, lambda: self._client.delete(key))
        except errors.NotFound:
            return

    async def _put(self, verb: str, key: str, data: bytes, instead_of: Version | None) -> Written:
        etag = await self._call(verb, key, lambda: self._client.put(key, data, instead_of))
        self._bytes_in.inc(len(data))
        return Written(key=key, size=len(data), etag=etag)

    async def _look(
        self, key: str, data: bytes, cause: errors.LakebedError, doubt: int
    ) -> Written | StoredObject | None:
        """What one read finds at the key: our bytes with their version, another object, or None."""
        self._doubts.inc()
        try:
            if len(data) > COMPARE_BY_HASH_BYTES:
                info = await self.head(key)
                if info.size == len(data) and info.etag.strip('"') == _md5(data):
                    return _ours(info)
            current = await self.get(key)
        except errors.NotFound:
            return None
        except errors.Denied:
            if isinstance(cause, errors.Denied) and not doubt:
                raise cause from None  # neither writing nor reading was ever allowed: there is no doubt
            raise errors.OutcomeUnknown(f"{key!r} may have been written, and reading it is denied") from cause
        except errors.Unavailable as error:
            raise errors.OutcomeUnknown(
                f"{key!r} may have been written, and cannot be read now: {error.message}"
            ) from cause
        return _ours(current.info) if current.data == data else current

    async def _again(self, doubt: int, cause: errors.LakebedError) -> None:
        """Waits before the write is retried; a refusal that the read confirms is final."""
        if not isinstance(cause, (errors.Conflict, errors.Unavailable)):
            if doubt:
                raise errors.OutcomeUnknown(f"first no response, then refused: {cause.message}") from cause
            raise cause
        await self._clock.sleep(self._ids.jitter_s(doubt, base_s=DOUBT_BASE_S, cap_s=DOUBT_CAP_S))

    async def _reaches(self, key: str, end: int, cause: errors.Unavailable | None) -> None:
        """Raises Corrupt when the object itself ends before `end`; otherwise the response was truncated."""
        try:
            size = (await self.head(key)).size
        except errors.Unavailable:
            return  # the size is not known
        if size < end:
            raise errors.Corrupt(f"{key!r} ends at byte {size}, before {end}") from cause

    async def _unconditional(self, verb: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """A write without a condition: without a response, it may have happened."""
        try:
            return await self._call(verb, key, call)
        except errors.Unavailable as error:
            if type(error) is not errors.Unavailable:  # a more specific error
                raise
            raise errors.OutcomeUnknown(error.message, hint=error.hint, retry_after_s=error.retry_after_s) from error

    async def _call(self, verb: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        self._requests[verb].inc()
        with span(f"store {verb}", "client", key=key):
            try:
                return await call()
            except errors.LakebedError as error:
                self._failures.labels(verb=verb, kind=error.code).inc()
                error.hint = error.hint or HINTS.get(type(error), "")
                raise


def _ours(info: ObjectInfo) -> Written:
    return Written(key=info.key, size=info.size, etag=Version(info.etag), modified_ms=info.modified_ms)


def _plain(conflict: errors.Conflict, cause: errors.LakebedError, doubt: int) -> errors.Conflict:
    """The conflict, marked when the very first request was refused: our bytes were never stored."""
    conflict.repeated = doubt > 0 or not isinstance(cause, errors.Conflict) or cause.repeated
    return conflict


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
