"""The meta store on an Oxia cluster, through the Python client, which is synchronous: its calls run in threads.

Keys are stored unchanged, so other clients of the cluster see the keys of the log's contract. A server that sorts by
folders is queried for byte order in several ranges (`order.py`). A range in one folder, or a whole folder, is one
atomic operation; any other range is not. Findings about Oxia and its client: docs/decisions/005-meta-on-oxia.md.
"""

from __future__ import annotations

import asyncio
import heapq
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Literal, TypeVar

from lakebed.core.errors import (
    AlreadyExists,
    Fenced,
    Invalid,
    LakebedError,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Stale,
    Unavailable,
)
from lakebed.core.runtime import Runtime
from lakebed.meta.model import ABSENT, MetaEntry, Put, check_key, check_limit, check_value, prefix_end
from lakebed.meta.oxia.order import KeyRange, is_whole_folder, key_ranges
from lakebed.meta.oxia.session import OxiaSession, SessionReplaced, open_client
from lakebed.meta.protocol import MetaSession, put_each

R = TypeVar("R")
Sorting = Literal["hierarchical", "natural"]

THREADS = 16  # calls under way at once; each holds a thread for its round trip
WAITING_MAX = 10_000  # calls waiting for a thread before new ones are refused
TIMEOUT_S = 10.0
SESSION_S_MIN = 2.0  # the server's own limit
MUST_BE_ABSENT = -1  # the client's expected_version_id for it


def load() -> Any:
    """The client's package. Raises Invalid where it is not installed, or not in versions that go together."""
    try:
        import oxia  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise Invalid(
            f"meta.backend = 'oxia' needs the Oxia client: {error}", hint="pip install 'lakebed[oxia]'"
        ) from error
    return oxia


class OxiaMeta:
    """The meta store in `namespace` of the cluster at `address`. Connects on first use.

    `sorting` must be what the server was started with; "natural" (byte order) makes every range one operation.
    """

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        *,
        namespace: str = "default",
        timeout_s: float = TIMEOUT_S,
        sorting: Sorting = "hierarchical",
    ) -> None:
        self._oxia = load()
        self._address, self._namespace, self._timeout_s, self._sorting = address, namespace, timeout_s, sorting
        self._clock, self._ids = runtime.clock, runtime.ids
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lakebed-oxia")
        self._connecting = threading.Lock()
        self._client: Any = None
        self._sessions: list[OxiaSession] = []
        self._waiting = 0
        self._closed = False
        self._requests = runtime.metrics.counter("lakebed_meta_requests_total")

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        check_key(key)
        found = await self._call("get", lambda client: self._find(client, key, partition_key))
        if found is None:
            raise NotFound(f"no meta entry at {key!r}")
        return found

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: MetaSession | None = None,
        partition_key: str = "",
    ) -> MetaEntry:
        value = bytes(check_value(check_key(key), value))
        version = _version_id(expected)
        if session is not None and not isinstance(session, OxiaSession):
            raise Invalid(f"session {session.id} is not an Oxia session")

        def run(client: Any) -> MetaEntry:
            options = {"partition_key": partition_key or None, "expected_version_id": version}
            try:
                if session is None:
                    _, made = client.put(key, value, **options)
                else:
                    made = session.put(key, value, **options)
            except self._oxia.ex.UnexpectedVersionId as error:
                raise _refused(key, self._find(client, key, partition_key), expected) from error
            except (self._oxia.ex.SessionNotFound, SessionReplaced) as error:
                raise Fenced(f"a session has ended, so {key!r} was not put") from error
            return MetaEntry(key, value, str(made.version_id()))

        return await self._call("put", run, writes=True)

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        return await put_each(self, puts)

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        check_key(key)
        version = _version_id(expected)

        def run(client: Any) -> None:
            try:
                found = client.delete(key, partition_key=partition_key or None, expected_version_id=version)
            except self._oxia.ex.UnexpectedVersionId as error:
                raise _refused(key, self._find(client, key, partition_key), expected) from error
            if expected is not None and not found:
                raise _refused(key, None, expected)

        await self._call("delete", run, writes=True)

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        start, end = max(key, prefix), prefix_end(prefix)

        def run(client: Any) -> MetaEntry | None:
            found = [self._lowest(client, keys, start, end, partition_key) for keys in self._key_ranges(start, end)]
            return min((entry for entry in found if entry is not None), key=_by_key, default=None)

        return await self._call("ceiling", run)

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        check_limit(limit)

        def run(client: Any) -> list[MetaEntry]:
            found: list[MetaEntry] = []
            for keys in self._key_ranges(start, end):
                scan = self._scan(client, keys, start, end, partition_key)
                found += islice(scan, limit) if keys.sorted else heapq.nsmallest(limit, scan, key=_by_key)
            return sorted(found, key=_by_key)[:limit]

        return await self._call("range", run)

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        routed = partition_key or None

        def run(client: Any) -> None:
            for keys in self._key_ranges(start, end):
                if keys.sorted or is_whole_folder(start, end):
                    client.delete_range(keys.start, keys.end, partition_key=routed)
                else:
                    for entry in self._scan(client, keys, start, end, partition_key):
                        client.delete(entry.key, partition_key=routed)

        await self._call("delete_range", run, writes=True)

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        if timeout_s < SESSION_S_MIN:
            raise Invalid(f"Oxia accepts no session timeout below {SESSION_S_MIN:g} s")
        id = self._ids.uuid()
        client = await self._call("session", lambda _: self._connect(round(timeout_s * 1000), id))
        session = OxiaSession(id, client, timeout_s=timeout_s, clock=self._clock, close=self._close_client)
        self._sessions = [open for open in self._sessions if open.alive] + [session]
        return session

    async def close(self) -> None:
        if self._closed:
            return
        for session in self._sessions:
            await session.close()
        self._closed = True
        if self._client is not None:
            await self._close_client(self._client)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, verb: str, run: Callable[[Any], R], *, writes: bool = False) -> R:
        """Runs a call of the client in a thread. A call that exceeds the timeout is abandoned."""
        if self._closed:
            raise Unavailable("this meta client is closed")
        if self._waiting >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} calls are already waiting for Oxia")
        self._requests.labels(verb=verb).inc()
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await asyncio.wait_for(loop.run_in_executor(self._threads, self._run, run, writes), self._timeout_s)
        except TimeoutError as error:
            raise self._failed(f"no response within {self._timeout_s:g} s", writes) from error
        finally:
            self._waiting -= 1

    def _run(self, run: Callable[[Any], R], writes: bool) -> R:
        with self._connecting:
            if self._client is None:
                self._client = self._connect(30_000, None)
        try:
            return run(self._client)
        except LakebedError:
            raise
        except Exception as error:  # the client raises gRPC's errors, its own, and bare ones
            raise self._failed(_message(error), writes) from error

    def _connect(self, session_timeout_ms: int, identity: str | None) -> Any:
        """A new client. Blocks."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=self._timeout_s).close()
            return open_client(self._address, self._namespace, self._timeout_s, session_timeout_ms, identity)
        except ValueError as error:
            raise Invalid(f"meta.address {self._address!r} is not host:port") from error
        except (OSError, RuntimeError) as error:
            raise self._failed(str(error), writes=False) from error

    async def _close_client(self, client: Any) -> None:
        closing = asyncio.get_running_loop().run_in_executor(self._threads, client.close)
        try:
            await asyncio.wait_for(closing, self._timeout_s)
        except Exception:  # the server may be gone: its sessions expire
            client._connections.close()  # frees the threads that still wait for it

    def _find(self, client: Any, key: str, partition_key: str) -> MetaEntry | None:
        try:
            return _entry(*client.get(key, partition_key=partition_key or None))
        except self._oxia.ex.KeyNotFound:
            return None

    def _lowest(self, client: Any, keys: KeyRange, start: str, end: str, partition_key: str) -> MetaEntry | None:
        """The lowest entry of the range in `keys`. The server's ceiling may be outside of it: then there is none."""
        if not keys.sorted:
            return min(self._scan(client, keys, start, end, partition_key), key=_by_key, default=None)
        ceiling = self._oxia.ComparisonType.CEILING
        try:
            found = _entry(*client.get(keys.start, partition_key=partition_key or None, comparison_type=ceiling))
        except self._oxia.ex.KeyNotFound:
            return None
        ends_here = self._sorting == "natural" or found.key.count("/") == keys.start.count("/")
        return found if start <= found.key < end and ends_here else None

    def _scan(self, client: Any, keys: KeyRange, start: str, end: str, partition_key: str) -> Iterator[MetaEntry]:
        rows: Iterable[Any] = client.range_scan(keys.start, keys.end, partition_key=partition_key or None)
        return (_entry(*row) for row in rows if start <= row[0] < end)

    def _key_ranges(self, start: str, end: str) -> list[KeyRange]:
        if self._sorting == "hierarchical":
            return key_ranges(start, end)
        return [KeyRange(start, end, True)] if start < end else []

    def _failed(self, why: str, writes: bool) -> Unavailable:
        if writes:
            return OutcomeUnknown(f"Oxia at {self._address}: {why}", hint="it may have happened: read, then decide")
        return Unavailable(f"Oxia at {self._address}: {why}", hint="check meta.address, and that the server is running")


_by_key: Callable[[MetaEntry], str] = lambda entry: entry.key  # noqa: E731


def _entry(key: str, value: bytes | None, version: Any) -> MetaEntry:
    return MetaEntry(key, value or b"", str(version.version_id()))  # an empty value arrives as none


def _version_id(expected: str | None) -> int | None:
    if expected is None:
        return None
    if expected == ABSENT:
        return MUST_BE_ABSENT
    try:
        return int(expected)
    except ValueError as error:
        raise Invalid(f"{expected!r} is not an Oxia version") from error


def _refused(key: str, current: MetaEntry | None, expected: str | None) -> LakebedError:
    if expected == ABSENT:
        return AlreadyExists(f"meta entry {key!r} already exists", current=current)
    return Stale(f"meta entry {key!r} has changed or is gone", current=current)


def _message(error: Exception) -> str:
    """The message of an exception in one line: gRPC's own text has five."""
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error)[:400] or type(error).__name__
