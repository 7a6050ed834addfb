"""Runs of jobs in the bucket: one write for a short one, beats for a long one, none for one without work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import structlog

from lakebed.core import logs, runs
from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.errors import Invalid, NotFound, Unavailable
from lakebed.core.runs import RecordedRun, RunLog, RunReader, heard, read_run
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject
from support.counting_store import CountingStore
from support.runtimes import runtime_on

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def logged() -> Iterator[None]:
    """Lines are captured as a process configures it; others are not changed."""
    before = structlog.get_config()
    logs.configure("info", as_json=True)
    yield
    structlog.configure(**before)


async def test_a_run_is_one_record_with_its_duration_rows_and_log() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    runtime = runtime_on(store, clock)
    async with RunLog(runtime, "log", node="n1").record("log compaction", "clicks/0", {"topic": "clicks"}) as run:
        logs.logger("log").info("compacted", blobs=3)
        await clock.advance(2.0)
        run.rows_in, run.rows_out = 10, 9

    (found,) = await RunReader(runtime, "log").latest(10)
    whole = await read_run(runtime, found.name)

    assert ("done", 10, 9, "n1", {"topic": "clicks"}) == (
        found.state, found.rows_in, found.rows_out, found.node, found.fields
    )  # fmt: skip
    assert 2000 == found.heard_ms - found.began_ms
    assert "info compacted blobs=3" in whole.log[0]
    assert 1 == len([info async for info in store.list("")])


async def test_a_run_with_nothing_to_do_leaves_nothing() -> None:
    runtime = runtime_on(MemoryStore(clock=SystemClock()))
    async with RunLog(runtime, "log").record("log compaction") as run:
        run.idle = True

    assert [] == await RunReader(runtime, "log").latest(10)


async def test_a_failure_is_recorded_with_its_reason_and_raised() -> None:
    """Also of a run that would have been idle; the same one again, only after a minute."""
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    log = RunLog(runtime, "rollups")

    async def fail(why: str) -> None:
        with pytest.raises(Unavailable):
            async with log.record("rollups") as run:
                run.idle = True
                raise Unavailable(why)

    await fail("the store is away")
    await fail("the store is away")
    await fail("no disk")
    await clock.advance(runs.REPEATED_MS / 1000)
    await fail("no disk")

    found = await RunReader(runtime, "rollups").latest(10)
    assert ["no disk", "no disk", "the store is away"] == [run.reason for run in found]
    assert {"failed"} == {run.state for run in found}


async def test_every_gateway_sees_the_progress_of_a_long_run() -> None:
    """From its first beat on; when its process dies, that is seen after a while."""
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    going = asyncio.Event()

    async def work() -> None:
        async with RunLog(runtime, "audit", node="n1").record("audit") as run:
            run.progress("comparing", 8, 3)
            await going.wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    before = await RunReader(runtime, "audit").latest(1)
    await clock.advance(runs.BEAT_S)
    elsewhere = RunReader(runtime, "audit")
    (running,) = await elsewhere.latest(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clock.advance(runs.STALE_S + 1)
    (dead,) = await elsewhere.latest(1)

    assert [] == before
    assert ("running", "comparing", 8, 3) == (running.state, running.phase, running.tasks, running.tasks_done)
    assert "failed" == dead.state and "n1 has stopped" in dead.reason


async def test_a_run_that_goes_on_for_long_is_never_taken_for_dead() -> None:
    """However long it runs, it is heard of again before it would count as stopped."""
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    states: set[str] = set()
    async with RunLog(runtime, "audit").record("audit", at_once=True):
        for _ in range(60):
            await clock.advance(10.0)
            states |= {run.state for run in await RunReader(runtime, "audit").latest(1)}

    assert {"running"} == states


async def test_a_job_of_a_thread_is_heard_of_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By beats from a thread of their own: the job waits for nothing."""
    monkeypatch.setattr(runs, "BEAT_S", 0.01)
    runtime = runtime_on(MemoryStore(clock=SystemClock()))
    ending = threading.Event()

    def work() -> None:
        with RunLog(runtime, "tables").job("bronze load") as run:
            run.progress("reading", 4, 1)
            ending.wait(30)

    working = asyncio.create_task(asyncio.to_thread(work))
    async with asyncio.timeout(30):
        while not (found := await RunReader(runtime, "tables").latest(1)):
            await asyncio.sleep(0.01)
    ending.set()
    await working

    assert ("running", "reading") == (found[0].state, found[0].phase)
    assert ["done"] == [run.state for run in await RunReader(runtime, "tables").latest(1)]


async def test_a_record_that_is_none_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not decode, and one that was deleted since it was listed, are left out."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    runtime = runtime_on(store, clock)
    names: list[str] = []
    for _ in range(3):
        async with RunLog(runtime, "log").record("log compaction") as run:
            await clock.advance(1.0)
        names.append(run.name)
    broken, gone, good = (runs.key_of(name) for name in names)
    await store.delete(broken)
    await store.create(broken, b"{}")
    get = store.get

    async def late(key: str) -> StoredObject:
        if key == gone:
            raise NotFound("deleted")
        return await get(key)

    monkeypatch.setattr(store, "get", late)

    assert [good] == [runs.key_of(run.name) for run in await RunReader(runtime, "log").latest(5)]


async def test_a_run_that_is_shown_at_once_ends_in_the_same_record() -> None:
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    async with RunLog(runtime, "audit").record("audit", at_once=True) as run:
        states = [one.state for one in await RunReader(runtime, "audit").latest(5)]
        run.idle = True  # it is known already: its end is recorded

    assert ["running"] == states
    assert ["done"] == [one.state for one in await RunReader(runtime, "audit").latest(5)]


async def test_a_run_inside_a_run_of_the_same_thing_is_that_run() -> None:
    """A job that records itself is run again by the console: one record. Another thing inside has its own."""
    runtime = runtime_on(MemoryStore(clock=SystemClock()))
    log = RunLog(runtime, "tables")

    def inner() -> None:
        with log.job("models", "acme/shop") as run, log.job("table compaction", "gold/x") as other:
            run.rows_out, other.rows_out = 3, 4

    async with log.record("models", "acme/shop", at_once=True):
        await asyncio.to_thread(inner)

    found = await RunReader(runtime, "tables").latest(5)
    assert {("models", 3), ("table compaction", 4)} == {(run.kind, run.rows_out) for run in found}


async def test_an_answer_that_is_no_failure_is_not_recorded() -> None:
    runtime = runtime_on(MemoryStore(clock=SystemClock()))
    with pytest.raises(NotFound):
        async with RunLog(runtime, "ticks").record("finalize") as run:
            run.answers = (NotFound,)
            raise NotFound("a part is missing")

    assert [] == await RunReader(runtime, "ticks").latest(5)


async def test_a_job_of_a_thread_is_recorded_with_what_it_logs() -> None:
    runtime = runtime_on(MemoryStore(clock=SystemClock()))

    def work() -> None:
        with RunLog(runtime, "tables").job("bronze load", "bronze/batches/samples", at_once=True) as run:
            logs.logger("bronze").info("loaded")
            run.rows_out = 5

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)

    (found,) = await RunReader(runtime, "tables").latest(5)
    assert ("done", 5) == (found.state, found.rows_out)
    assert any("loaded" in line for line in (await read_run(runtime, found.name)).log)


async def test_a_store_that_is_away_never_fails_the_work() -> None:
    class Away(MemoryStore):
        async def create(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            raise Unavailable("the store is away")

    async with RunLog(runtime_on(Away(clock=SystemClock())), "log").record("log compaction") as run:
        run.rows_out = 1

    assert run.etag is None


async def test_a_write_whose_answer_was_lost_is_written_over() -> None:
    class Deaf(MemoryStore):
        async def create(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            await super().create(key, data)
            raise Unavailable("no answer")

    clock = ManualClock()
    store = Deaf(clock=clock)
    async with RunLog(runtime_on(store, clock), "audit").record("audit", at_once=True) as run:
        await clock.advance(1.0)
        store.create = super(Deaf, store).create  # type: ignore[method-assign]
        run.rows_in = 7

    (found,) = await RunReader(runtime_on(store, clock), "audit").latest(5)
    assert ("done", 7) == (found.state, found.rows_in)


async def test_reading_again_costs_requests_for_new_runs_only() -> None:
    """However many look, and however many hours are shown."""
    clock = ManualClock()
    store = CountingStore(clock=clock)
    runtime = runtime_on(store, clock)
    log = RunLog(runtime, "log")
    for _ in range(6):
        async with log.record("log compaction"):
            await clock.advance(1.0)
        await clock.advance(HOUR_S)
    reader = RunReader(runtime, "log")
    first = await reader.latest(40)
    reads, lists = len(store.gets), len(store.lists)
    again = await reader.latest(40)
    async with log.record("log compaction"):
        pass
    more = await reader.latest(40)

    assert 6 == len(first) and first == again and 7 == len(more)
    assert (6, 7) == (reads, len(store.gets))
    assert 2 + 3 == len(store.lists) - lists  # the newest hours, not all seven
    assert [run.began_ms for run in more] == sorted((run.began_ms for run in more), reverse=True)


async def test_who_asks_for_few_runs_hides_none_from_who_asks_for_more() -> None:
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    log = RunLog(runtime, "log")
    for count in (5, 1, 1):
        for _ in range(count):
            async with log.record("log compaction"):
                await clock.advance(1.0)
        await clock.advance(HOUR_S)
    reader = RunReader(runtime, "log")

    few, more = await reader.latest(3), await reader.latest(9)

    assert (3, 7) == (len(few), len(more))


async def test_a_run_that_is_recorded_in_an_hour_that_is_over_is_shown() -> None:
    """It began in its last second, and its record came after the first one of the next hour was shown."""
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    log, reader = RunLog(runtime, "log"), RunReader(runtime, "log")
    async with log.record("log compaction", "before"):
        pass
    await clock.advance(HOUR_S - clock.now_ns() / 1e9 % HOUR_S - 1.0)
    async with log.record("log compaction", "across"):
        await clock.advance(2.0)
        async with log.record("log compaction", "after"):
            pass
        early = await reader.latest(40)
    late = await reader.latest(40)

    assert ["after", "before"] == [run.subject for run in early]
    assert ["after", "across", "before"] == [run.subject for run in late]


async def test_old_records_are_deleted() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    log = RunLog(runtime_on(store, clock), "log")
    for _ in range(3):
        async with log.record("log compaction"):
            pass
        await clock.advance(runs.KEEP_HOURS * HOUR_S + HOUR_S)
    async with log.record("log compaction"):
        pass

    assert 1 == len([info async for info in store.list(runs.ROOT)])


async def test_a_process_deletes_so_many_old_records_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all hours together: the end of a run does not wait for the rest, which goes an hour later."""
    monkeypatch.setattr(runs, "SWEPT_MAX", 3)
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for _ in range(4):
        for _ in range(2):  # each of a process of its own, which sweeps at its first end
            async with RunLog(runtime_on(store, clock), "log").record("log compaction"):
                await clock.advance(1.0)
        await clock.advance(HOUR_S)
    await clock.advance(runs.KEEP_HOURS * HOUR_S + HOUR_S)

    log, left = RunLog(runtime_on(store, clock), "log"), []
    for _ in range(3):
        async with log.record("log compaction"):
            pass
        left.append(len([info async for info in store.list(runs.ROOT)]))
        await clock.advance(runs.SWEEP_MS / 1000)

    assert [8 + 1 - 3, 8 + 2 - 6, 3] == left


async def test_the_last_lines_of_a_run_are_kept() -> None:
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    async with RunLog(runtime, "log").record("log compaction") as run:
        for number in range(logs.CAPTURED_LINES + 50):
            logs.logger("log").info(f"line {number} of many")

    kept = (await read_run(runtime, run.name)).log

    assert logs.CAPTURED_LINES == len(kept)
    assert "line 50 of many" in kept[0] and f"line {logs.CAPTURED_LINES + 49} of many" in kept[-1]


async def test_a_reader_remembers_no_more_than_it_shows() -> None:
    """A gateway that runs for months holds the runs of the hours in sight."""
    clock = ManualClock()
    runtime = runtime_on(MemoryStore(clock=clock), clock)
    log, reader = RunLog(runtime, "log"), RunReader(runtime, "log")
    for _ in range(20):
        async with log.record("log compaction"):
            await clock.advance(1.0)
        await reader.latest(3)
        await clock.advance(HOUR_S)

    assert 3 == len(reader._known) and len(reader._closed) <= 3


async def test_a_name_that_is_none_reaches_no_object() -> None:
    runtime = runtime_on(MemoryStore(clock=SystemClock()))

    for name in ("../keys", "log/2026-11-18T01/../../x", "", "log/2026-11-18T01/nothing"):
        with pytest.raises(Invalid):
            await read_run(runtime, name)
    with pytest.raises(NotFound):
        await read_run(runtime, "log/2026-11-18T01/000001760000000-0000-abc")


def test_a_run_that_was_heard_of_lately_still_runs() -> None:
    run = RecordedRun("1", "log", "log compaction", "", "running", 0, 1000)

    assert "running" == heard(run, 1000 + int(runs.STALE_S * 1000)).state
    assert "failed" == heard(run, 1001 + int(runs.STALE_S * 1000)).state
