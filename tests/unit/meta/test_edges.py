"""Sessions, limits and the embedded backends of meta, on a clock that moves on request."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import AlreadyExists, Corrupt, Fenced, Invalid, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Contradiction
from lakebed.meta.bucket.group import LeafCache
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import (
    ABSENT,
    RANGE_LIMIT_MAX,
    VALUE_BYTES_MAX,
    MetaEntry,
    Put,
    check_limit,
    check_value,
    prefix_end,
)
from lakebed.meta.protocol import HeartbeatSession
from lakebed.meta.settings import MetaSettings
from lakebed.meta.sqlite.backend import AHEAD_BYTES, AHEAD_COMMITS, SqliteMeta, translate
from lakebed.meta.sqlite.statements import SCHEMA, VERSIONS_BLOCK, Statements
from support.references import is_freed_after


class Beats:
    """A backend's side of a session: counts heartbeats and ends, and fails as configured."""

    def __init__(self) -> None:
        self.beats, self.ends = 0, 0
        self.error: Exception | None = None

    async def beat(self) -> None:
        self.beats += 1
        if self.error is not None:
            raise self.error

    async def end(self) -> None:
        self.ends += 1


def session(clock: ManualClock, beats: Beats, **more: Any) -> HeartbeatSession:
    return HeartbeatSession("s", timeout_s=30.0, clock=clock, beat=beats.beat, end=beats.end, **more)


async def test_a_session_beats_three_times_per_timeout_and_lives_by_its_last_good_beat(
    manual_clock: ManualClock,
) -> None:
    """A beat that fails is tried again at the next turn; a timeout after the last good one it calls itself dead."""
    beats = Beats()
    open_ = session(manual_clock, beats)
    await settle()
    await manual_clock.advance(9.9)
    assert 0 == beats.beats
    await manual_clock.advance(0.2)
    assert 1 == beats.beats and open_.alive
    beats.error = Unavailable("away")
    await manual_clock.advance(29.0)
    assert open_.alive and beats.beats == 3
    await manual_clock.advance(1.1)
    assert not open_.alive
    beats.error = None
    await manual_clock.advance(10.0)
    assert open_.alive
    await open_.close()
    assert (1, False) == (beats.ends, open_.alive)


async def test_a_session_that_others_ended_is_over_for_good(manual_clock: ManualClock) -> None:
    """It beats no more; closing it queries nothing of the backend."""
    beats = Beats()
    open_ = session(manual_clock, beats)
    await settle()
    beats.error = Fenced("ended")
    await manual_clock.advance(10.1)
    assert not open_.alive
    await manual_clock.advance(30.0)
    assert 1 == beats.beats
    await open_.close()
    assert 0 == beats.ends


async def test_a_heartbeat_counts_from_when_it_was_sent(manual_clock: ManualClock) -> None:
    """A process that is paused during its heartbeat calls itself dead when others do: a late answer is no new life."""
    beats, answered = Beats(), asyncio.Event()
    open_ = session(manual_clock, beats)
    plain = beats.beat

    async def late() -> None:
        await plain()
        await answered.wait()

    open_._beat = late
    await settle()
    await manual_clock.advance(10.0)  # sent
    await manual_clock.advance(25.0)
    assert 1 == beats.beats
    answered.set()
    await settle()

    assert open_.alive
    await manual_clock.advance(4.9)
    assert open_.alive
    open_._beat = plain
    beats.error = Unavailable("away")
    await manual_clock.advance(0.2)

    assert not open_.alive
    await open_.close()


async def test_a_session_counts_from_when_its_opening_was_sent(manual_clock: ManualClock) -> None:
    """A slow answer shortens it."""
    open_ = session(manual_clock, Beats(), opened_s=manual_clock.monotonic_s() - 25.0)
    await manual_clock.advance(4.9)
    assert open_.alive
    await manual_clock.advance(0.2)
    assert not open_.alive
    await open_.close()


def test_values_limits_and_prefixes_have_bounds() -> None:
    """Exactly the bound is taken."""
    assert VALUE_BYTES_MAX == len(check_value("k", b"x" * VALUE_BYTES_MAX))
    with pytest.raises(Invalid):
        check_value("k", b"x" * (VALUE_BYTES_MAX + 1))
    assert (1, RANGE_LIMIT_MAX) == (check_limit(1), check_limit(RANGE_LIMIT_MAX))
    for wrong in (0, -1, RANGE_LIMIT_MAX + 1):
        with pytest.raises(Invalid):
            check_limit(wrong)
    assert "a/b/" < "a/b/zzz" < prefix_end("a/b/") <= "a/b0"
    with pytest.raises(Invalid):
        prefix_end("a/b")
    for wrong_s in ({"busy_timeout_s": 0.0}, {"timeout_s": 0.0}):
        with pytest.raises(Contradiction):
            MetaSettings.of(wrong_s)


def sqlite(path: Path, clock: ManualClock, **more: Any) -> SqliteMeta:
    runtime = Runtime(clock, Ids.seeded(1), more.pop("metrics", Metrics()))
    return SqliteMeta(runtime, path / "deep" / "meta.sqlite", **more)


def memory(path: Path, clock: ManualClock) -> MemoryMeta:
    return MemoryMeta(Runtime(clock, Ids.seeded(1), Metrics()), MemoryState())


@pytest.mark.parametrize("connect", [sqlite, memory])
async def test_entries_are_put_swapped_and_deleted(connect: Any, tmp_path: Path, manual_clock: ManualClock) -> None:
    """Each condition that does not hold names what is there instead."""
    meta = connect(tmp_path, manual_clock)
    first = await meta.put("a/1", b"x", expected=ABSENT)
    with pytest.raises(AlreadyExists) as taken:
        await meta.put("a/1", b"y", expected=ABSENT)
    assert b"x" == taken.value.current.value
    second = await meta.put("a/1", b"y", expected=first.version)
    assert first.version != second.version and b"y" == (await meta.get("a/1")).value
    for work in (meta.put("a/1", b"z", expected=first.version), meta.delete("a/1", expected=first.version)):
        with pytest.raises(Stale) as stale:
            await work
        assert b"y" == stale.value.current.value
    for key in ("a/2", "a/10", "b/1"):
        await meta.put(key, key.encode())
    assert ["a/1", "a/10"] == [entry.key for entry in await meta.range("a/", "a0", limit=2)]
    assert ["a/10", "a/2"] == [entry.key for entry in await meta.range("a/10", "b/1", limit=9)]
    found = await meta.ceiling("a/11", prefix="a/")
    assert found is not None and "a/2" == found.key
    assert await meta.ceiling("a/3", prefix="a/") is None
    low = await meta.ceiling("", prefix="a/")
    assert low is not None and "a/1" == low.key
    await meta.delete_range("a/1", "a/2")
    assert ["a/2", "b/1"] == [entry.key for entry in await meta.range("a/", "c/", limit=9)]
    await meta.delete("a/2")
    await meta.delete("a/2")
    with pytest.raises(NotFound):
        await meta.get("a/2")
    good, bad = await meta.put_all([Put("c/1", b"1", ABSENT), Put("b/1", b"2", ABSENT)])
    assert b"1" == good.value and isinstance(bad, AlreadyExists)
    for wrong in (meta.get("/a"), meta.put("a//b", b""), meta.range("a/", "b/", limit=0)):
        with pytest.raises(Invalid):
            await wrong
    await meta.close()
    with pytest.raises(Unavailable):
        await meta.get("b/1")


@pytest.mark.parametrize("connect", [sqlite, memory])
async def test_ephemeral_entries_go_with_their_session(connect: Any, tmp_path: Path, manual_clock: ManualClock) -> None:
    """At its timeout without a beat, or when it is closed; a plain overwrite makes an entry permanent."""
    meta = connect(tmp_path, manual_clock)
    one = await meta.open_session(timeout_s=30.0)
    two = await meta.open_session(timeout_s=30.0)
    one._beating.cancel()
    two._beating.cancel()
    await meta.put("a/one", b"", session=one)
    await meta.put("a/two", b"", session=two)
    await meta.put("a/kept", b"", session=one)
    await meta.put("a/kept", b"")
    await two.close()
    assert ["a/kept", "a/one"] == [entry.key for entry in await meta.range("a/", "a0", limit=9)]
    await manual_clock.advance(29.999)
    assert "a/one" == (await meta.get("a/one")).key
    await manual_clock.advance(0.001)
    with pytest.raises(NotFound):
        await meta.get("a/one")
    with pytest.raises(Fenced):
        await meta.put("a/one", b"", session=one)
    await meta.put("a/one", b"other", expected=ABSENT)
    assert ["a/kept", "a/one"] == [entry.key for entry in await meta.range("a/", "a0", limit=9)]
    await meta.close()


async def test_one_file_is_shared_counted_and_refused_when_it_is_of_another_version(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Requests are counted by verb, commits by transactions that write; a reader's transaction is none."""
    metrics = Metrics()
    one, two = sqlite(tmp_path, manual_clock, metrics=metrics), sqlite(tmp_path, manual_clock)
    await one.put("a/1", b"x")
    await one.put_all([Put("a/2", b""), Put("a/3", b"")])
    await one.get("a/1")
    assert ["a/1", "a/2", "a/3"] == [entry.key for entry in await two.range("a/", "b/", limit=9)]
    assert (3, 1, 2) == (
        metrics.value("lakebed_meta_requests_total", verb="put"),
        metrics.value("lakebed_meta_requests_total", verb="get"),
        metrics.value("lakebed_meta_commits_total"),
    )
    await one.close()
    await two.close()
    file = tmp_path / "deep" / "meta.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    late = sqlite(tmp_path, manual_clock)
    with pytest.raises(Corrupt, match="schema version 99"):
        await late.get("a/1")
    await late.close()


def test_errors_of_the_file_say_what_to_do() -> None:
    """Damage is Corrupt, a lock or a full disk is Unavailable, our own errors are as they are."""
    path = Path("meta.sqlite")
    ours = OutcomeUnknown("x")
    assert ours is translate(ours, path)
    assert isinstance(translate(sqlite3.DatabaseError("malformed"), path), Corrupt)
    assert isinstance(translate(sqlite3.OperationalError("locked"), path), Unavailable)
    assert not isinstance(translate(sqlite3.OperationalError("locked"), path), OutcomeUnknown)


async def test_calls_that_wait_together_are_one_transaction_and_fail_apart(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """One that is refused does not undo its neighbours."""
    meta = sqlite(tmp_path, manual_clock)
    await meta.put("a/1", b"x")
    results = await asyncio.gather(
        meta.put("a/1", b"y", expected=ABSENT), meta.put("a/2", b"z"), meta.get("a/9"), return_exceptions=True
    )
    assert [AlreadyExists, True, NotFound] == [
        type(results[0]),
        getattr(results[1], "value", b"") == b"z",
        type(results[2]),
    ]
    assert b"z" == (await meta.get("a/2")).value
    await meta.close()


async def test_versions_taken_in_blocks_never_repeat_at_a_key_of_two_processes(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Each has its own block; a client that is opened again takes a new one."""
    seen: list[str] = []
    for _ in range(2):
        clients = [sqlite(tmp_path, manual_clock) for _ in range(2)]
        for number in range(10):
            made = await clients[number % 3 % 2].put_all([Put("a/k", b"same")] * (VERSIONS_BLOCK // 3))
            seen += [entry.version for entry in made if isinstance(entry, MetaEntry)]
        for client in clients:
            await client.close()

    assert 20 * (VERSIONS_BLOCK // 3) == len(seen) == len(set(seen))


def test_a_block_of_versions_that_was_rolled_back_is_not_used(tmp_path: Path) -> None:
    """Another connection may have taken the same one meanwhile."""
    with sqlite3.connect(tmp_path / "file", isolation_level=None) as one:
        one.executescript(SCHEMA)
        mine, theirs = Statements(one), Statements(one)
        one.execute("BEGIN")
        lost = mine.put("a/k", b"", None, None, 0)
        mine.rolled_back()
        one.execute("ROLLBACK")
        taken = theirs.put("a/k", b"", None, None, 0)
        after = mine.put("a/k", b"", None, None, 0)
        again = theirs.put("a/k", b"", None, None, 0)
    one.close()

    assert lost.version == taken.version
    assert 3 == len({taken.version, after.version, again.version})


async def test_the_wal_is_longer_than_its_commits_and_a_crash_recovers_all_of_them(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Two clients write while it grows. What a power cut would leave is opened: every acknowledged put is there."""
    clients = [sqlite(tmp_path, manual_clock), sqlite(tmp_path, manual_clock)]

    async def write(number: int) -> None:
        for each in range(2 * AHEAD_COMMITS):
            await clients[number].put(f"a/{number}/{each:03d}", b"%d" % each)

    await asyncio.gather(write(0), write(1))
    file, left = tmp_path / "deep" / "meta.sqlite", tmp_path / "left" / "deep"
    left.mkdir(parents=True)
    for suffix in ("", "-wal"):
        shutil.copy(f"{file}{suffix}", left / f"meta.sqlite{suffix}")
    recovered = sqlite(tmp_path / "left", manual_clock)
    found = await recovered.range("a/", "b/", limit=1000)

    assert (left / "meta.sqlite-wal").stat().st_size >= 2 * AHEAD_BYTES
    assert [f"a/{number}/{each:03d}" for number in range(2) for each in range(2 * AHEAD_COMMITS)] == [
        entry.key for entry in found
    ]
    for meta in (*clients, recovered):
        await meta.close()


def test_leaves_are_kept_up_to_a_size_and_the_longest_unused_goes() -> None:
    """At least one is kept, whatever its size."""

    class Sized:
        def __init__(self, size_bytes: int) -> None:
            self.size_bytes = size_bytes

    cache: Any = LeafCache(10)
    for name in ("a", "b"):
        cache.add(name, Sized(5))
    cache.add("b", Sized(5))
    assert cache.get("a") is not None
    cache.add("c", Sized(5))
    assert [True, False, True] == [cache.get(name) is not None for name in "abc"]
    cache.add("d", Sized(50))
    assert [False, False, True] == [cache.get(name) is not None for name in "acd"]


async def test_a_session_that_another_process_saw_end_is_over_at_its_next_heartbeat(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """The other's clock is ahead and it has taken the claim: the owner hears of it before its own time is up."""
    mine = sqlite(tmp_path, manual_clock)
    theirs = sqlite(tmp_path, ManualClock(manual_clock.now_ns() + 31 * 10**9))
    session = await mine.open_session(timeout_s=30.0)
    assert isinstance(session, HeartbeatSession)
    await mine.put("claim", b"mine", expected=ABSENT, session=session)

    await theirs.put("claim", b"theirs", expected=ABSENT)

    with pytest.raises(Fenced):
        await session._beat()
    with pytest.raises(Fenced):
        await mine.put("other", b"mine", session=session)
    assert b"theirs" == (await mine.get("claim")).value
    await mine.close()
    await theirs.close()


class SlowCommits:
    """A connection to the file whose first COMMIT is answered so late: the process was paused meanwhile."""

    def __init__(self, connection: sqlite3.Connection, pause: Callable[[], object]) -> None:
        self._connection, self._pause, self._left = connection, pause, 1

    def execute(self, sql: str, *more: Any) -> Any:
        done = self._connection.execute(sql, *more)
        if sql == "COMMIT" and self._left:
            self._left = 0
            self._pause()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_a_session_in_the_file_counts_from_when_its_opening_was_sent(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of its opening was answered late: its owner calls it over when another process takes its claim."""
    mine, theirs = sqlite(tmp_path, manual_clock), sqlite(tmp_path, manual_clock)
    loop, real = asyncio.get_running_loop(), SqliteMeta._open

    def pause() -> None:
        asyncio.run_coroutine_threadsafe(manual_clock.advance(20.0), loop).result(60)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteMeta, "_open", lambda self: SlowCommits(real(self), pause))
        session = await mine.open_session(timeout_s=30.0)
    assert isinstance(session, HeartbeatSession)
    session._beating.cancel()
    await mine.put("claim", b"mine", expected=ABSENT, session=session)
    assert session.alive

    await manual_clock.advance(10.0)
    await theirs.put("claim", b"theirs", expected=ABSENT)

    assert not session.alive
    await mine.close()
    await theirs.close()


@pytest.mark.parametrize(("sync", "level"), [("full", 2), ("normal", 1)])
def test_a_commit_waits_for_the_disk_as_the_setting_says(tmp_path: Path, sync: Any, level: int) -> None:
    """`full` makes SQLite wait for the disk at every commit, so that an acknowledged put survives a power loss."""
    meta = SqliteMeta(Runtime(ManualClock(), Ids.seeded(1), Metrics()), tmp_path / "meta.db", sync=sync)

    connection = meta._open()

    assert (level,) == connection.execute("PRAGMA synchronous").fetchone()
    connection.close()


class LostCommits:
    """A connection to the file whose COMMIT reports an error once, after it happened or instead."""

    def __init__(self, connection: sqlite3.Connection, happens: bool) -> None:
        self._connection, self._happens, self.left = connection, happens, 1

    def execute(self, sql: str, *more: Any) -> Any:
        lost = sql == "COMMIT" and self.left > 0
        done = self._connection.execute(sql, *more) if self._happens or not lost else None
        if lost:
            self.left -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("happens", [True, False])
async def test_a_commit_that_reports_an_error_may_have_happened(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    """Nobody is told that nothing was changed; the next call opens the file again, outside that transaction."""
    meta = sqlite(tmp_path, manual_clock)
    real = SqliteMeta._open
    with monkeypatch.context() as patch:
        patch.setattr(SqliteMeta, "_open", lambda self: LostCommits(real(self), happens))
        with pytest.raises(OutcomeUnknown):
            await meta.put("a/1", b"x")

    await meta.put("a/2", b"y")
    found = [entry.key for entry in await meta.range("a/", "b/", limit=9)]
    assert (["a/1", "a/2"] if happens else ["a/2"]) == found
    await meta.close()


async def test_a_call_to_sqlite_that_failed_does_not_keep_its_caller(tmp_path: Path) -> None:
    """Every look at a key that is absent fails: each would wait for the garbage collector, with what it holds."""
    meta = sqlite(tmp_path, ManualClock())
    try:
        await meta.put("there", b"v")

        assert await is_freed_after(lambda: meta.get("absent"), NotFound)
        assert await is_freed_after(lambda: meta.put("there", b"w", expected=ABSENT), AlreadyExists)
    finally:
        await meta.close()
