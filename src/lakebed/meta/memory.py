"""The meta store in memory: the deterministic fake of simulation and unit tests.

`MemoryState` is the server, shared; each process of a test or simulation has its own `MemoryMeta` on it, whose
sessions end when that process stops sending heartbeats.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Fenced, LakebedError, NotFound, Stale, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.meta.model import ABSENT, MetaEntry, Put, check_key, check_limit, check_value, prefix_end
from lakebed.meta.protocol import HeartbeatSession, MetaSession, put_each


class MemoryState:
    """What all clients share: entries in key order, and who is alive until when."""

    def __init__(self) -> None:
        self.entries: dict[str, MetaEntry] = {}
        self.keys: list[str] = []
        self.owners: dict[str, str] = {}  # ephemeral key → session
        self.sessions: dict[str, int] = {}  # session → expires at, ms
        self.version = 0

    def sweep(self, now: int) -> None:
        for session in [session for session, expires_at in self.sessions.items() if expires_at <= now]:
            self.end(session)

    def end(self, session: str) -> None:
        self.sessions.pop(session, None)
        for key in [key for key, owner in self.owners.items() if owner == session]:
            self.remove(key)

    def store(self, key: str, value: bytes, session: str | None) -> MetaEntry:
        self.version += 1
        if key not in self.entries:
            insort(self.keys, key)
        self.entries[key] = MetaEntry(key, bytes(value), str(self.version))
        self.owners.pop(key, None)
        if session is not None:
            self.owners[key] = session
        return self.entries[key]

    def remove(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            del self.keys[bisect_left(self.keys, key)]
            self.owners.pop(key, None)

    def between(self, start: str, end: str) -> list[str]:
        return self.keys[bisect_left(self.keys, start) : bisect_left(self.keys, end)]


class MemoryMeta:
    def __init__(self, runtime: Runtime, state: MemoryState) -> None:
        self._state, self._clock, self._ids = state, runtime.clock, runtime.ids
        self._sessions: list[HeartbeatSession] = []
        self._closed = False

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        found = self._now().entries.get(check_key(key))
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
        check_value(check_key(key), value)
        state = self._now()
        if session is not None and session.id not in state.sessions:
            raise Fenced(f"session {session.id} has ended, so {key!r} was not put")
        current = state.entries.get(key)
        if expected == ABSENT and current is not None:
            raise AlreadyExists(f"meta entry {key!r} already exists", current=current)
        if expected:
            self._demand(key, current, expected)
        return state.store(key, value, session.id if session is not None else None)

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        return await put_each(self, puts)

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        state = self._now()
        if expected is not None:
            self._demand(key, state.entries.get(check_key(key)), expected)
        state.remove(check_key(key))

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        state = self._now()
        found = state.between(max(key, prefix), prefix_end(prefix))[:1]
        return state.entries[found[0]] if found else None

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        state = self._now()
        return [state.entries[key] for key in state.between(start, end)[: check_limit(limit)]]

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        state = self._now()
        for key in state.between(start, end):
            state.remove(key)

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        id, timeout_ms = self._ids.uuid(), round(timeout_s * 1000)

        async def beat() -> None:
            state = self._now()
            if id not in state.sessions:
                raise Fenced(f"session {id} has ended")
            state.sessions[id] = now_ms(self._clock) + timeout_ms

        async def end() -> None:
            self._state.end(id)

        self._now().sessions[id] = now_ms(self._clock) + timeout_ms
        session = HeartbeatSession(id, timeout_s=timeout_s, clock=self._clock, beat=beat, end=end)
        self._sessions.append(session)
        return session

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        self._closed = True

    def _now(self) -> MemoryState:
        """The state as of now, expired sessions swept."""
        if self._closed:
            raise Unavailable("this meta client is closed")
        self._state.sweep(now_ms(self._clock))
        return self._state

    @staticmethod
    def _demand(key: str, current: MetaEntry | None, expected: str) -> None:
        if current is None or current.version != expected:
            raise Stale(f"meta entry {key!r} has changed or is gone", current=current)
