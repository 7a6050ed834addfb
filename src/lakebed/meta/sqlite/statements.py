"""The operations of the meta store as SQL on one open connection, inside a transaction of the caller.

An entry of an expired session counts as absent: reads skip it, and every writing transaction sweeps first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from lakebed.core.errors import AlreadyExists, Fenced, LakebedError, NotFound, Stale
from lakebed.meta.model import ABSENT, MetaEntry, Put

SCHEMA_VERSION = 1
VERSIONS_BLOCK = 1000  # versions that a connection takes at once: most commits leave that page alone
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_of_session ON entries (session) WHERE session IS NOT NULL;
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, expires_at_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO versions VALUES (1, 0);
"""


class Statements:
    """The operations of one connection, for as long as it is open. `now_ms` decides which sessions are alive.

    Versions are taken from the file in blocks: what is left of a block when the connection ends is never given out.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection.execute
        self._last = self._end = 0  # of the block: the last version that was given out, and the last of all

    def sweep(self, now_ms: int) -> None:
        """Removes expired sessions and their entries. Cheap when there are none."""
        if self._sql("SELECT 1 FROM sessions WHERE expires_at_ms <= ? LIMIT 1", (now_ms,)).fetchone():
            self._sql(
                "DELETE FROM entries WHERE session IN (SELECT id FROM sessions WHERE expires_at_ms <= ?)", (now_ms,)
            )
            self._sql("DELETE FROM sessions WHERE expires_at_ms <= ?", (now_ms,))

    def find(self, key: str, now_ms: int) -> MetaEntry | None:
        row = self._sql(f"SELECT key, value, version FROM entries WHERE key = ? AND {LIVE}", (key, now_ms)).fetchone()
        return _entry(row) if row else None

    def get(self, key: str, now_ms: int) -> MetaEntry:
        found = self.find(key, now_ms)
        if found is None:
            raise NotFound(f"no meta entry at {key!r}")
        return found

    def put(self, key: str, value: bytes, expected: str | None, session: str | None, now_ms: int) -> MetaEntry:
        """One statement where nothing is in its way."""
        if session is not None and not self._lives(session, now_ms):
            raise Fenced(f"session {session} has ended, so {key!r} was not put")
        version = self._next_version()
        if expected is None:
            self._sql(OVERWRITE, (key, value, version, session))
        elif expected == ABSENT:
            if self._sql(CREATE, (key, value, version, session)).rowcount != 1:
                raise AlreadyExists(f"meta entry {key!r} already exists", current=self.find(key, now_ms))
        elif self._sql(SWAP, (value, version, session, key, _number(expected))).rowcount != 1:
            raise Stale(f"meta entry {key!r} has changed or is gone", current=self.find(key, now_ms))
        return MetaEntry(key, value, str(version))

    def put_all(self, puts: Sequence[Put], now_ms: int) -> list[MetaEntry | LakebedError]:
        """Each put on its own. One statement each: SQLite takes twice as long over one statement with many rows."""
        made: list[MetaEntry | LakebedError] = []
        for put in puts:
            try:
                made.append(self.put(put.key, put.value, put.expected, None, now_ms))
                if put.first is not None:  # in the same transaction
                    self._sql(CREATE, (*put.first, self._next_version(), None))
            except LakebedError as error:
                made.append(error)
        return made

    def rolled_back(self) -> None:
        """The block may have been taken in the transaction that was undone: others may take the same one."""
        self._last = self._end = 0

    def _next_version(self) -> int:
        if self._last == self._end:
            self._sql("UPDATE versions SET last = last + ?", (VERSIONS_BLOCK,))
            (self._end,) = self._sql("SELECT last FROM versions").fetchone()
            self._last = self._end - VERSIONS_BLOCK
        self._last += 1
        return self._last

    def delete(self, key: str, expected: str | None, now_ms: int) -> None:
        if expected is not None:
            current = self.find(key, now_ms)
            if current is None or current.version != expected:
                raise Stale(f"meta entry {key!r} has changed or is gone", current=current)
        self._sql("DELETE FROM entries WHERE key = ?", (key,))

    def range(self, start: str, end: str, limit: int, now_ms: int) -> Sequence[MetaEntry]:
        rows = self._sql(
            f"SELECT key, value, version FROM entries WHERE key >= ? AND key < ? AND {LIVE} ORDER BY key LIMIT ?",
            (start, end, now_ms, limit),
        )
        return [_entry(row) for row in rows]

    def delete_range(self, start: str, end: str) -> None:
        self._sql("DELETE FROM entries WHERE key >= ? AND key < ?", (start, end))

    def begin_session(self, session: str, expires_at_ms: int) -> None:
        self._sql("INSERT INTO sessions VALUES (?, ?)", (session, expires_at_ms))

    def beat(self, session: str, expires_at_ms: int, now_ms: int) -> None:
        if not self._lives(session, now_ms):
            raise Fenced(f"session {session} has ended")
        self._sql("UPDATE sessions SET expires_at_ms = ? WHERE id = ?", (expires_at_ms, session))

    def end_session(self, session: str) -> None:
        self._sql("DELETE FROM entries WHERE session = ?", (session,))
        self._sql("DELETE FROM sessions WHERE id = ?", (session,))

    def _lives(self, session: str, now_ms: int) -> bool:
        return bool(
            self._sql("SELECT 1 FROM sessions WHERE id = ? AND expires_at_ms > ?", (session, now_ms)).fetchone()
        )


INSERT = "INSERT INTO entries VALUES (?, ?, ?, ?)"
CREATE = f"{INSERT} ON CONFLICT DO NOTHING"
OVERWRITE = (
    f"{INSERT} ON CONFLICT (key) DO UPDATE"
    " SET value = excluded.value, version = excluded.version, session = excluded.session"
)
SWAP = "UPDATE entries SET value = ?, version = ?, session = ? WHERE key = ? AND version = ?"
LIVE = "(session IS NULL OR session IN (SELECT id FROM sessions WHERE expires_at_ms > ?))"


def _entry(row: tuple[str, bytes, int]) -> MetaEntry:
    return MetaEntry(row[0], bytes(row[1]), str(row[2]))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else -1
