"""A session on Oxia: a client of its own, whose sessions (one per shard) the client keeps alive from its own threads.

The client silently replaces an expired session by a new one. Entries of the old one are deleted then, so here the first
such replacement ends the session.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

from lakebed.core.clock import Clock
from lakebed.meta.protocol import BEATS_PER_TIMEOUT


def open_client(address: str, namespace: str, timeout_s: float, session_timeout_ms: int, identity: str | None) -> Any:
    """A client, put together from its own parts: made as a whole it waits half a minute for a silent server, keeps a
    thread retrying, and sends heartbeats at most every two seconds. Raises RuntimeError."""
    from oxia.internal.connection_pool import ConnectionPool  # type: ignore[import-untyped,unused-ignore]
    from oxia.internal.sessions import SessionManager  # type: ignore[import-untyped,unused-ignore]

    import oxia  # type: ignore[import-untyped,unused-ignore]

    client = oxia.Client.__new__(oxia.Client)
    client._closed, client._connections = False, ConnectionPool()
    client._service_discovery = _discovery(address, client._connections, namespace, timeout_s)
    client._session_manager = SessionManager(
        client._service_discovery,
        session_timeout_ms,
        identity,
        heartbeat_interval_ms=max(1, session_timeout_ms // BEATS_PER_TIMEOUT),
    )
    return client


def _discovery(address: str, connections: Any, namespace: str, timeout_s: float) -> Any:
    """The part of the client that discovers shards, started as its constructor does, but in order: the constructor
    starts the thread before it creates what the thread uses, and the thread blocks at the second update."""
    from oxia.internal.service_discovery import ServiceDiscovery  # type: ignore[import-untyped,unused-ignore]

    made = ServiceDiscovery.__new__(ServiceDiscovery)
    made._assignments, made._service_address, made._namespace = {}, address, namespace
    made._connection_pool, made._closed, made._lock = connections, False, threading.Lock()
    made._init_barrier = first = _First()
    made._thread = threading.Thread(target=made.get_assignments, daemon=True)
    made._thread.start()
    if not first.came.wait(timeout_s):
        made._closed = True  # its thread ends with its connection
        connections.close()
        raise RuntimeError(f"{address} did not report its shards within {timeout_s:g} s")
    return made


class _First:
    """In place of the client's barrier: the thread that reaches it has an update, and continues at once."""

    def __init__(self) -> None:
        self.came = threading.Event()

    def wait(self, timeout_s: float | None = None) -> None:
        self.came.set()


class SessionReplaced(Exception):
    """The client had replaced its session: the entry that was put under the new one was deleted again."""


class OxiaSession:
    def __init__(
        self,
        id: str,
        client: Any,
        *,
        timeout_s: float,
        clock: Clock,
        close: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._id, self._client, self._timeout_s, self._clock, self._close = id, client, timeout_s, clock, close
        self._used: dict[int, Any] = {}  # shard → the client's session there
        self._using = threading.Lock()
        self._ended = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def alive(self) -> bool:
        """By the last heartbeat that was answered on every shard where something was put."""
        oldest_s = self._clock.monotonic_s() - self._timeout_s
        used = list(self._used.values())
        return not self._ended and all(not one.is_closed() and one._last_successful_response > oldest_s for one in used)

    def put(self, key: str, value: bytes, **options: Any) -> Any:
        """Puts an ephemeral entry and gives its version. Blocks. Raises Replaced when the session has ended."""
        if not self.alive:
            self._ended = True
            raise SessionReplaced
        _, version = self._client.put(key, value, ephemeral=True, **options)
        with self._using:
            now = dict(self._client._session_manager.sessions_by_shard)
            replaced = any(now.get(shard) is not session for shard, session in self._used.items())
            self._used |= now if not replaced else {}
        if replaced:
            self._ended = True
            self._client.delete(
                key, partition_key=options.get("partition_key"), expected_version_id=version.version_id()
            )
            raise SessionReplaced
        return version

    async def close(self) -> None:
        if self._client is None:
            return
        self._ended = True
        client, self._client = self._client, None
        await self._close(client)
