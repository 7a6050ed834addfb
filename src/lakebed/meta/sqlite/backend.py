"""The meta store in one SQLite file: the default, for any number of processes on one host.

All calls run in one thread of their own. What waits while a transaction commits goes into the next one together (group
commit): concurrent puts share one fsync. Other processes are kept out by SQLite's own lock for as long as a
transaction lasts, and waited for up to `busy_timeout_s`, after which the call raises Unavailable with nothing changed.

Between groups, when the answers are on their way, the WAL file is grown ahead of the commits: a commit then syncs bytes
inside the file, which costs a half to a third of a sync that also makes the file longer.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from lakebed.core import private
from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, LakebedError, OutcomeUnknown, Overloaded, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.meta.model import MetaEntry, Put, check_key, check_limit, check_value, prefix_end
from lakebed.meta.protocol import HeartbeatSession, MetaSession
from lakebed.meta.sqlite.statements import SCHEMA, SCHEMA_VERSION, Statements

R = TypeVar("R")

VERBS = ("get", "put", "delete", "ceiling", "range", "delete_range", "session")
GROUP_MAX = 512  # calls in one transaction: bounds how long other processes are kept waiting
WAITING_MAX = 50_000  # calls waiting for the thread before new ones are refused
WAL_PAGES_MAX = 8192  # 32 MiB between two checkpoints: a page that changes often is written to the file once
WAL_BYTES_MAX = WAL_PAGES_MAX * (4096 + 24)  # a page and the header of its frame
AHEAD_COMMITS = 64  # of one process between two growths of the WAL: with three pages each they need less than it grows
AHEAD_BYTES = 1024 * 1024
AHEAD_FIRST = 8  # a command makes fewer commits than this
OPENING_BUSY_S = 30.0  # creating the tables waits for other processes that open the same new file
OPENINGS_MAX = 100  # attempts to switch a new file to WAL mode while other processes do the same
OPENING_PAUSE_S = 0.02


class _Call:
    def __init__(self, run: Callable[[Statements], Any], writes: bool, done: asyncio.Future[Any]) -> None:
        self.run, self.writes, self.done = run, writes, done
        self.loop = done.get_loop()
        self.result: Any = None
        self.error: BaseException | None = None


class SqliteMeta:
    """The meta store in the file at `path`, made on first use.

    `sync="full"` survives power loss, `"normal"` only a crash of the process.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        *,
        busy_timeout_s: float = 5.0,
        sync: Literal["full", "normal"] = "full",
    ) -> None:
        self._path, self._clock, self._ids = path, runtime.clock, runtime.ids
        self._busy_timeout_s, self._sync = busy_timeout_s, sync
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._committed, self._ahead_due = 0, False
        self._sessions: list[HeartbeatSession] = []
        requests = runtime.metrics.counter("lakebed_meta_requests_total")
        self._requests = {verb: requests.labels(verb=verb) for verb in VERBS}
        self._commits = runtime.metrics.counter("lakebed_meta_commits_total")

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        check_key(key)
        return await self._call("get", lambda sql: sql.get(key, now_ms(self._clock)))

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
        owner = session.id if session is not None else None
        return await self._call(
            "put", lambda sql: sql.put(key, value, expected, owner, now_ms(self._clock)), writes=True
        )

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        for put in puts:
            check_value(check_key(put.key), put.value)
            if put.first is not None:
                check_value(check_key(put.first[0]), put.first[1])
        return await self._call("put", lambda sql: sql.put_all(puts, now_ms(self._clock)), writes=True, count=len(puts))

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        check_key(key)
        await self._call("delete", lambda sql: sql.delete(key, expected, now_ms(self._clock)), writes=True)

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        end = prefix_end(prefix)
        start = max(key, prefix)
        found = await self._call("ceiling", lambda sql: sql.range(start, end, 1, now_ms(self._clock)))
        return found[0] if found else None

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        check_limit(limit)
        return await self._call("range", lambda sql: sql.range(start, end, limit, now_ms(self._clock)))

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        await self._call("delete_range", lambda sql: sql.delete_range(start, end), writes=True)

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        id, timeout_ms = self._ids.uuid(), round(timeout_s * 1000)

        def expires() -> int:
            return now_ms(self._clock) + timeout_ms

        async def beat() -> None:
            await self._call("session", lambda sql: sql.beat(id, expires(), now_ms(self._clock)), writes=True)

        async def end() -> None:
            await self._call("session", lambda sql: sql.end_session(id), writes=True)

        opened_s = self._clock.monotonic_s()
        await self._call("session", lambda sql: sql.begin_session(id, expires()), writes=True)
        session = HeartbeatSession(id, timeout_s=timeout_s, clock=self._clock, beat=beat, end=end, opened_s=opened_s)
        self._sessions = [open for open in self._sessions if open.alive] + [session]
        return session

    async def close(self) -> None:
        if self._closed:
            return
        for session in self._sessions:
            await session.close()
        self._closed = True
        if self._thread is not None:
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)

    async def _call(self, verb: str, run: Callable[[Statements], R], *, writes: bool = False, count: int = 1) -> R:
        if self._closed:
            raise Unavailable("this meta client is closed")
        if self._calls.qsize() >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} calls are already waiting for {self._path.name}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="lakebed-meta", daemon=True)
            self._thread.start()
        self._requests[verb].inc(count)
        call = _Call(run, writes, asyncio.get_running_loop().create_future())
        self._calls.put(call)
        try:
            return cast(R, await call.done)
        finally:
            del call  # an error refers to this frame: a cycle would keep the caller until the garbage collector runs

    def _serve(self) -> None:
        """The thread: runs all waiting calls in one transaction, and repeats until it is stopped."""
        connection: sqlite3.Connection | None = None
        sql: Statements | None = None
        stopping = False
        while not stopping:
            group, stopping = self._take()
            try:
                if connection is None or sql is None:
                    connection = self._open()
                    sql = Statements(connection)
                self._answer(connection, sql, group)
            except (sqlite3.Error, OSError, LakebedError) as error:
                for call in group:
                    call.error = translate(error, self._path).with_traceback(None)
                if connection is not None:  # reopened for the next group; a transaction left open would lock the file
                    with suppress(sqlite3.Error):
                        connection.close()
                connection = sql = None
            _settle(group)
            group.clear()  # what callers hold does not wait for the next group
            if connection is not None and self._ahead_due:
                self._grow_wal(connection)
        if connection is not None:
            connection.close()

    def _take(self) -> tuple[list[_Call], bool]:
        group: list[_Call] = []
        first = self._calls.get()
        while first is not None:
            group.append(first)
            if len(group) == GROUP_MAX or self._calls.empty():
                return group, False
            first = self._calls.get()
        return group, True

    def _open(self) -> sqlite3.Connection:
        private.folder(self._path.parent)
        private.create(self._path)  # SQLite gives its other files the same mode
        connection = sqlite3.connect(self._path, timeout=OPENING_BUSY_S, isolation_level=None, check_same_thread=False)
        for attempt in range(OPENINGS_MAX):
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:  # SQLite does not wait here, whatever the timeout
                if attempt == OPENINGS_MAX - 1:
                    raise
                threading.Event().wait(OPENING_PAUSE_S)
        connection.execute(f"PRAGMA synchronous = {self._sync}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES_MAX}")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found not in (0, SCHEMA_VERSION):
            raise Corrupt(f"{self._path.name} has schema version {found}, this Lakebed knows {SCHEMA_VERSION}")
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        self._wait_for_others(connection)
        return connection

    def _answer(self, connection: sqlite3.Connection, sql: Statements, group: list[_Call]) -> None:
        writes = any(call.writes for call in group)
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            if writes:
                sql.sweep(now_ms(self._clock))
            for call in group:
                try:
                    call.result = call.run(sql)
                except LakebedError as error:
                    call.error = error.with_traceback(None)  # its frames hold all calls of the group
        except BaseException:
            sql.rolled_back()
            connection.execute("ROLLBACK")
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise OutcomeUnknown(f"{self._path.name}: the outcome of a commit is unknown: {error}") from error
        if writes:
            self._commits.inc()
            self._committed += 1
            if self._sync == "full" and self._committed % AHEAD_COMMITS == AHEAD_FIRST:
                self._ahead_due = True

    def _grow_wal(self, connection: sqlite3.Connection) -> None:
        """Writes zeros behind the end of the WAL, which are no frames to SQLite.

        Inside a write transaction, because nobody else writes to the WAL then. What is locked, full or gone is left to
        a later commit: this only makes commits cheaper.
        """
        with suppress(sqlite3.Error, OSError):
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                connection.execute("BEGIN IMMEDIATE")
                self._ahead_due = False
                with Path(f"{self._path}-wal").open("r+b", buffering=0) as wal:
                    if 0 < wal.seek(0, os.SEEK_END) < WAL_BYTES_MAX:
                        wal.write(bytes(AHEAD_BYTES))
                        os.fsync(wal.fileno())
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._wait_for_others(connection)

    def _wait_for_others(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA busy_timeout = {round(self._busy_timeout_s * 1000)}")


def translate(error: BaseException, path: Path) -> LakebedError:
    """The Lakebed error for one from SQLite: nothing was changed, unless a commit was left unanswered."""
    if isinstance(error, LakebedError):
        return error
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return Corrupt(f"{path.name}: {error}", hint="the file is damaged: restore a backup, or move the file away")
    return Unavailable(f"{path.name}: {error}", hint="another process locks the file for too long, or the disk is full")


def _settle(group: list[_Call]) -> None:
    """Hands the answers to their event loops, one wake-up per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
    for call in group:
        by_loop.setdefault(call.loop, []).append(call)
    for loop, calls in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, calls)
        except RuntimeError:
            continue  # the event loop of these callers is closed


def _resolve(calls: list[_Call]) -> None:
    for call in calls:
        if call.done.done():
            continue  # its caller was cancelled; its change remains
        if call.error is not None:
            call.done.set_exception(call.error)
        else:
            call.done.set_result(call.result)
