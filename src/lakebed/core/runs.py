"""Runs of jobs, recorded in the bucket: what ran, how long, what it moved, how it ended, and what it logged.

A run has one object, which only its own process writes: while it runs every few seconds, from BEAT_S on, and when it
has ended. A short run is one write, and a run that found nothing to do is none. So every gateway shows the
progress of every job, whoever runs it. A run that was not heard of for STALE_S died with its process.

Records are derived: writing one never raises and never delays a job by more than WRITE_S. See docs/formats/console.md.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, LakebedError, NotFound, Stale
from lakebed.core.logs import CAPTURED_CHARS, captured, logger
from lakebed.store.model import Version, read_record
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

ROOT = "console/v1/runs/"
SCHEMA = "lakebed.run.v1"
BEAT_S, BEAT_MAX_S = 5.0, 20.0  # between two writes of a run that goes on: short at first, then 180 an hour
STALE_S = 60.0  # several beats: a busy machine is not a dead one
WRITE_S = 10.0  # longest wait for one write
REPEATED_MS = 60_000  # a loop that fails again for the same reason is recorded this often
SUBJECTS_MAX = 1_000  # whose last failures are remembered
KEEP_HOURS = 14 * 24
SWEEP_MS = 3_600_000  # how often a process deletes old records
SWEPT_MAX = 1_000  # records deleted at a time
HOURS_READ = 48  # back from the newest hour that has a run
READS_AT_ONCE = 16
TEXT_CHARS_MAX = 500
NAME = re.compile(r"[a-z]+/\d{4}-\d\d-\d\dT\d\d/[0-9]{15}-[0-9]{4}-[0-9A-Za-z_-]+")

log = logger("runs")


class RecordedRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run. `heard_ms` is when this was written: the end of a run that has ended. None is what is not known."""

    run_id: str
    part: str
    kind: str
    subject: str
    state: Literal["running", "done", "failed"]
    began_ms: int
    heard_ms: int
    rows_in: int | None = None
    rows_out: int | None = None
    reason: str = ""
    phase: str = ""
    tasks: int = 0
    tasks_done: int = 0
    log: tuple[str, ...] = ()
    fields: dict[str, str] = {}  # what it ran on, for running it again
    node: str = ""
    schema: str = SCHEMA

    @property
    def name(self) -> str:
        return name_of(self.part, self.began_ms, self.run_id)


class ActiveRun:
    """What the code of a run reports while it runs. `idle`: there was nothing to do, so nothing is recorded."""

    def __init__(self, part: str, kind: str, subject: str, fields: dict[str, str]) -> None:
        self.part, self.kind, self.subject, self.fields = part, kind, subject, fields
        self.rows_in: int | None = None
        self.rows_out: int | None = None
        self.reason = ""
        self.failed = self.idle = False
        self.answers: tuple[type[Exception], ...] = ()  # errors that are no failure of the run
        self.phase = ""
        self.tasks = self.tasks_done = 0
        self.lines: deque[str] = deque()
        self.run_id, self.began_ms = "", 0
        self.etag: Version | None = None  # of the record, once there is one

    @property
    def name(self) -> str:
        return name_of(self.part, self.began_ms, self.run_id)

    def fail(self, reason: str) -> None:
        """Reports a failure that raises nothing."""
        self.failed, self.reason = True, reason

    def note(self, words: str) -> None:
        """Adds a line to the log of the record, and to no other log."""
        self.lines.append(words[:CAPTURED_CHARS])

    def ended_by(self, error: Exception) -> None:
        if isinstance(error, self.answers):
            self.idle, self.reason = True, reason_of(error)
        else:
            self.fail(reason_of(error))

    def progress(self, phase: str, tasks: int = 0, done: int = 0) -> None:
        self.phase, self.tasks, self.tasks_done = phase, tasks, done


CURRENT: ContextVar[ActiveRun | None] = ContextVar("run", default=None)
Work = Callable[[ActiveRun], Awaitable[None]]  # a job: reports its rows and its result to the run


class RunLog:
    """Records the runs of one part in this process. Keep one for a loop: it knows what failed before."""

    def __init__(self, runtime: StoreRuntime, part: str, *, node: str = "", repeated_ms: int = REPEATED_MS) -> None:
        self._runtime, self._store, self._clock = runtime, runtime.store, runtime.clock
        self._part, self._node, self._repeated_ms = part, node, repeated_ms
        self._failed: dict[tuple[str, str], tuple[str, int]] = {}
        self._swept_ms = 0

    @asynccontextmanager
    async def record(
        self, kind: str, subject: str = "", fields: dict[str, str] | None = None, *, at_once: bool = False
    ) -> AsyncIterator[ActiveRun]:
        """Records what runs inside; an error is its reason, and is raised. `at_once`: it is shown from its start.

        Inside a run of the same kind and subject it is that run.
        """
        if (outer := _current(kind, subject)) is not None:
            yield outer
            return
        run = self._begun(kind, subject, fields)
        ended = dropped = False
        with captured() as run.lines, _entered(run):
            if at_once:
                await self._write(run, "running")
            beat = asyncio.create_task(self._beat(run))
            try:
                yield run
                ended = True
            except Exception as error:
                run.ended_by(error)
                ended = True
                raise
            except GeneratorExit:  # of a loop that was closed under it: nothing can be awaited
                dropped = True
                raise
            finally:
                if not dropped:
                    beat.cancel()
                    await asyncio.gather(beat, return_exceptions=True)
                if ended:  # a run that is cancelled ends with its process: readers see that
                    await self._end(run)

    async def forever(
        self, kind: str, subject: str, work: Work, *, every_s: float, after: Callable[[], object] = lambda: None
    ) -> None:
        """Runs it again and again until cancelled. A run that failed is logged and tried again; `after` follows it."""
        while True:
            try:
                async with self.record(kind, subject) as run:
                    await work(run)
            except LakebedError as error:
                if not isinstance(error, run.answers):
                    log.warning("run failed and is retried", kind=kind, error=error.message, code=error.code)
                    after()
            await self._clock.sleep(every_s)

    @contextmanager
    def job(
        self, kind: str, subject: str = "", fields: dict[str, str] | None = None, *, at_once: bool = False
    ) -> Iterator[ActiveRun]:
        """The same for a job in a thread without an event loop."""
        if (outer := _current(kind, subject)) is not None:
            yield outer
            return
        run = self._begun(kind, subject, fields)
        over = threading.Event()

        def beats() -> None:
            for beat_s in _beats():
                if over.wait(beat_s):
                    return
                asyncio.run(self._write(run, "running"))

        beating = threading.Thread(target=beats, name="run-record", daemon=True)
        with captured() as run.lines, _entered(run):
            if at_once:
                asyncio.run(self._write(run, "running"))
            beating.start()
            try:
                yield run
            except Exception as error:
                run.ended_by(error)
                raise
            finally:
                over.set()
                beating.join()
                asyncio.run(self._end(run))

    def _begun(self, kind: str, subject: str, fields: dict[str, str] | None) -> ActiveRun:
        run = ActiveRun(self._part, kind, subject, fields or {})
        run.began_ms = now_ms(self._clock)
        run.run_id = self._runtime.ids.ordered(run.began_ms)
        return run

    async def _beat(self, run: ActiveRun) -> None:
        for beat_s in _beats():
            await self._clock.sleep(beat_s)
            await self._write(run, "running")

    async def _end(self, run: ActiveRun) -> None:
        if run.etag is None and (self._repeated(run) if run.failed else run.idle):
            return
        await self._write(run, "failed" if run.failed else "done")
        await self._sweep()

    def _repeated(self, run: ActiveRun) -> bool:
        """Whether the same failure was recorded a moment ago."""
        at, now = (run.kind, run.subject), now_ms(self._clock)
        reason, then = self._failed.get(at, ("", 0))
        if reason == run.reason and now - then < self._repeated_ms:
            return True
        if len(self._failed) >= SUBJECTS_MAX:
            self._failed.clear()
        self._failed[at] = (run.reason, now)
        return False

    async def _write(self, run: ActiveRun, state: Literal["running", "done", "failed"]) -> None:
        record = RecordedRun(
            run_id=run.run_id,
            part=run.part,
            kind=run.kind,
            subject=run.subject[:TEXT_CHARS_MAX],
            state=state,
            began_ms=run.began_ms,
            heard_ms=now_ms(self._clock),
            rows_in=run.rows_in,
            rows_out=run.rows_out,
            reason=run.reason[:TEXT_CHARS_MAX],
            phase=run.phase if state == "running" else "",
            tasks=run.tasks,
            tasks_done=run.tasks_done,
            log=tuple(run.lines),
            fields=run.fields,
            node=self._node,
        )
        try:
            async with asyncio.timeout(WRITE_S):
                await self._put(run, key_of(record.name), msgspec.json.encode(record))
        except Exception as error:
            log.warning("a run was not recorded", kind=run.kind, subject=run.subject, error=str(error)[:300])

    async def _put(self, run: ActiveRun, key: str, data: bytes) -> None:
        try:
            if run.etag is None:
                run.etag = (await self._store.create(key, data)).etag
            else:
                run.etag = (await self._store.replace(key, data, run.etag)).etag
        except (AlreadyExists, Stale) as known:  # the answer to an earlier write of ours was lost
            if known.current is None:
                return  # deleted: an operator does not want it
            run.etag = (await self._store.replace(key, data, known.current.etag)).etag

    async def _sweep(self) -> None:
        """Deletes records that are past, once an hour in each process."""
        now = now_ms(self._clock)
        if now - self._swept_ms < SWEEP_MS:
            return
        self._swept_ms = now
        oldest, folder, gone = _hour(now - KEEP_HOURS * 3_600_000), f"{ROOT}{self._part}/", 0
        try:
            for hour in [each for each in await self._store.children(folder) if each < oldest]:
                for key in [info.key async for info in self._store.list(f"{folder}{hour}/")][: SWEPT_MAX - gone]:
                    await self._store.delete(key)
                    gone += 1
        except LakebedError as error:
            log.warning("old records of runs were not deleted", part=self._part, error=error.message)


def _beats() -> Iterator[float]:
    beat_s = BEAT_S
    while True:
        yield beat_s
        beat_s = min(beat_s * 2, BEAT_MAX_S)


@contextmanager
def _entered(run: ActiveRun) -> Iterator[None]:
    token = CURRENT.set(run)
    try:
        yield
    finally:
        with suppress(ValueError):  # a task that is dropped is closed in another context
            CURRENT.reset(token)


def _current(kind: str, subject: str) -> ActiveRun | None:
    run = CURRENT.get()
    return run if run is not None and (run.kind, run.subject) == (kind, subject) else None


class RunReader:
    """Reads the last runs of one part. Hours in which every run has ended are read once, and records without logs."""

    def __init__(self, runtime: StoreRuntime, part: str) -> None:
        self._store, self._clock, self._folder = runtime.store, runtime.clock, f"{ROOT}{part}/"
        self._known: dict[str, RecordedRun] = {}  # by key: runs that have ended
        self._closed: dict[str, list[str]] = {}  # by hour: the keys of one that gets no more runs

    async def latest(self, limit: int) -> list[RecordedRun]:
        """Newest first. A listing of hours, one of each hour that is new, and a request for each run that is new."""
        found: list[RecordedRun] = []
        hours = list(reversed(await self._store.children(self._folder)))[:HOURS_READ]
        for number, hour in enumerate(hours):
            keys = self._closed.get(hour) or [info.key async for info in self._store.list(f"{self._folder}{hour}/")]
            keys = sorted(keys, reverse=True)
            found += await self._read(keys[:limit])
            if number > 1 and all(key in self._known for key in keys[:limit]):
                self._closed[hour] = keys
            if len(found) >= limit:
                hours = hours[: number + 1]
                break
        self._forget(hours)
        return found[:limit]

    async def _read(self, keys: list[str]) -> list[RecordedRun]:
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def one(key: str) -> RecordedRun | None:
            if key in self._known:
                return self._known[key]
            async with gate:
                try:
                    record = await _read(self._store, key)
                except (NotFound, Corrupt):
                    return None  # deleted since it was listed, or not ours
            brief = msgspec.structs.replace(record, log=record.log[-1:])
            if brief.state != "running":
                self._known[key] = brief
            return heard(brief, now_ms(self._clock))

        return [record for record in await asyncio.gather(*map(one, keys)) if record is not None]

    def _forget(self, hours: list[str]) -> None:
        """What is out of sight is read again when it is needed."""
        self._closed = {hour: keys for hour, keys in self._closed.items() if hour in hours}
        self._known = {key: run for key, run in self._known.items() if key.split("/")[-2] in hours}


async def read_run(runtime: StoreRuntime, name: str) -> RecordedRun:
    """One run with its log. Raises Invalid for what names none, NotFound."""
    if not NAME.fullmatch(name):
        raise Invalid(f"{name[:80]!r} names no run")
    try:
        return heard(await _read(runtime.store, key_of(name)), now_ms(runtime.clock))
    except NotFound as error:
        raise NotFound(f"no run {name}", hint=f"records of runs are kept for {KEEP_HOURS // 24} days") from error


def heard(run: RecordedRun, at_ms: int) -> RecordedRun:
    """Pure: a run that was not heard of for long has failed."""
    if run.state != "running" or at_ms - run.heard_ms <= STALE_S * 1000:
        return run
    reason = f"not heard of for {STALE_S:g} s: its process {run.node} has stopped".replace("  ", " ")
    return msgspec.structs.replace(run, state="failed", reason=reason)


def reason_of(error: Exception) -> str:
    return error.message if isinstance(error, LakebedError) else f"{type(error).__name__}: {error}"


def name_of(part: str, began_ms: int, run_id: str) -> str:
    """Names a run among all."""
    return f"{part}/{_hour(began_ms)}/{run_id}"


def key_of(name: str) -> str:
    return f"{ROOT}{name}.json"


async def _read(store: Store, key: str) -> RecordedRun:
    return read_record(await store.get(key), RecordedRun)


def _hour(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H")
