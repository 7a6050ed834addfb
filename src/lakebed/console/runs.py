"""The runs page: what ran in the lake, from what each part records in the bucket.

A part provides a `RunsReader` in the table of parts, most of them a `RecordedRuns`. The page merges what they read,
newest first; a part that cannot be read is named with its error, and the others are shown. A recorded run of a kind
that its part can repeat is run again by `JobRunner`, in this gateway.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from lakebed.console.page import FAST_S, SLOW_S, Action, DataSource, Fields, PageRequest, PageSamples, PartPage, link
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, NotFound
from lakebed.core.logs import logger
from lakebed.core.runs import RecordedRun, RunReader, Work, read_run
from lakebed.wiring.parts import PARTS, resolve

RUNS_MAX = 100  # shown
PART_RUNS_MAX = 40  # read of one part

AGAIN = "runs.again"

RunState = Literal["done", "running", "waiting", "failed"]
log = logger("console")


class RunRecord(msgspec.Struct, frozen=True):
    """One run. 0 and None stand for what is not recorded. `action` and `fields` run it again."""

    kind: str
    subject: str
    state: RunState
    ended_at_ms: int
    started_at_ms: int = 0
    rows_in: int | None = None
    rows_out: int | None = None
    reason: str = ""
    href: str = ""
    action: str = ""
    fields: dict[str, str] = {}
    spark_page: str = ""  # where Spark shows its jobs
    log_href: str = ""  # where what it logged is shown

    @property
    def took_s(self) -> float | None:
        return (self.ended_at_ms - self.started_at_ms) / 1000 if self.started_at_ms and self.ended_at_ms else None


class RunsReader(Protocol):
    """Reads a part's last runs, at a bounded cost. Made with the context of the gateway."""

    right: ClassVar[str]  # that a caller needs to see them

    def __init__(self, context: Context) -> None: ...

    async def latest(self, limit: int) -> list[RunRecord]:
        """Newest first."""

    async def close(self) -> None: ...


class RecordedRuns:
    """The runs that jobs of a part recorded. A part adds where a run leads to, and which it can run again."""

    part: ClassVar[str]  # as in the table of parts, and in the records
    right: ClassVar[str]
    repeats: ClassVar[Collection[str]] = ()  # kinds for which there is `work`
    again_right: ClassVar[str] = "console:run"  # that a caller needs to run one again

    def __init__(self, context: Context) -> None:
        self.context = context
        self._reader = RunReader(context, self.part)
        self.jobs = JobRunner(context, self.part)

    async def latest(self, limit: int) -> list[RunRecord]:
        return [self.shown(run) for run in await self._reader.latest(limit)]

    def shown(self, run: RecordedRun) -> RunRecord:
        again = {"action": AGAIN, "fields": {"run": run.name}} if run.kind in self.repeats else {}
        return msgspec.structs.replace(shown(run), href=self.href(run), **again)

    def href(self, run: RecordedRun) -> str:
        """The page of what it ran on."""
        return ""

    def work(self, run: RecordedRun) -> Work:
        """What this run did, to be done again."""
        raise NotFound(f"{run.kind} is not run from here")

    async def close(self) -> None:
        await self.jobs.stop()


def shown(run: RecordedRun) -> RunRecord:
    """Pure: a recorded run for the page. One that goes on has its progress as its reason."""
    reason = run.reason
    if run.state == "running":
        tasks = f"{run.tasks_done} of {run.tasks} tasks" if run.tasks else ""
        reason = ", ".join(filter(None, (run.phase, tasks, run.reason)))
    return RunRecord(
        run.kind,
        run.subject,
        run.state,
        run.heard_ms,
        run.began_ms,
        rows_in=run.rows_in,
        rows_out=run.rows_out,
        reason=reason,
        log_href=run_link(run.name),
    )


def run_link(name: str) -> str:
    """Where a recorded run is shown, with its log."""
    return link("/runs", run=name) + "#run"


class JobRunner:
    """Runs jobs of a part in this gateway, as its commands do: one of a kind and subject at a time.

    A gateway that stops ends them, and their records say so after a while.
    """

    def __init__(self, context: Context, part: str) -> None:
        self._log, self._reader = context.run_log(part), RunReader(context, part)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def begin(self, kind: str, subject: str, work: Work, fields: dict[str, str] | None = None) -> None:
        """Starts it; returns when it is on record. Raises Conflict while one runs, on this gateway or another."""
        at = (kind, subject)
        others = [run for run in await self._reader.latest(PART_RUNS_MAX) if (run.kind, run.subject) == at]
        if at in self._tasks or any(run.state == "running" for run in others):
            raise Conflict(f"{kind} {subject}".strip() + " is running already", hint="wait for its end")
        recorded = asyncio.Event()
        self._tasks[at] = asyncio.create_task(self._run(at, work, fields, recorded))
        await recorded.wait()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, at: tuple[str, str], work: Work, fields: dict[str, str] | None, recorded: asyncio.Event
    ) -> None:
        try:
            async with self._log.record(*at, fields, at_once=True) as run:
                recorded.set()
                await work(run)
        except Exception as error:
            log.warning("a job failed", kind=at[0], subject=at[1], error=str(error)[:300])
        finally:
            self._tasks.pop(at, None)


async def in_thread(work: Callable[[], None]) -> None:
    """Like `asyncio.to_thread`, in a thread that no process waits for at its end: Spark cannot be cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return  # the page was stopped meanwhile
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def worked() -> None:
        failure: Exception | None = None
        try:
            work()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else OSError(type(error).__name__)
        with suppress(RuntimeError):  # the gateway has stopped: nobody reads the result
            loop.call_soon_threadsafe(settle, failure)

    threading.Thread(target=contextvars.copy_context().run, args=(worked,), name="job", daemon=True).start()
    await done


def _again_right(fields: Fields) -> str:
    """The right of the part whose run it is; a part that repeats nothing has one that opens nothing more."""
    part = fields["run"].partition("/")[0]
    places = [each.runs for each in PARTS if each.name == part and each.runs]
    kind = resolve(places[0]) if places else RecordedRuns
    return str(getattr(kind, "again_right", RecordedRuns.again_right))


async def _again(page: RunsPage, fields: Fields, who: str, reason: str) -> str:
    run = await read_run(page.context, fields["run"])
    reader = page.reader_of(run.name)
    if not isinstance(reader, RecordedRuns) or run.kind not in reader.repeats:
        raise NotFound(f"{run.kind} is not run from here", hint="see the commands of its part")
    await reader.jobs.begin(run.kind, run.subject, reader.work(run), run.fields)
    return f"{run.kind} {run.subject}".strip() + " runs; its progress is on the runs page"


class RunsPage(PartPage):
    name = "runs"
    path = "/runs"
    title = "Runs"
    about = "What ran: ticks, bronze, silver, gold, rollups, compactions, scans and audits, newest first."
    actions = {
        AGAIN: Action(
            "Run again",
            "Run",
            ("run",),
            _again_right,
            lambda f: "Runs the same job again in this gateway, on what is there now. Jobs are idempotent.",
            _again,
            needs_reason=False,
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._readers: dict[str, RunsReader] = {part.name: resolve(part.runs)(context) for part in PARTS if part.runs}

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        kind, state, name = (request.query.text(field) for field in ("kind", "state", "run"))
        sources = {part: self._source(part) for part in self._readers}
        samples = await request.load(**sources, **({"run": self._one(name)} if name else {}))
        runs = merged([run for part in self._readers for run in samples[part].value or ()])
        found = [run for run in runs if kind in ("", run.kind) and state in ("", run.state)][:RUNS_MAX]
        kinds = sorted({run.kind for run in runs})
        return samples, {"runs": found, "kinds": kinds, "kind": kind, "state": state, "run": name}

    async def stop(self) -> None:
        for reader in self._readers.values():
            await reader.close()

    def reader_of(self, name: str) -> RunsReader:
        """The reader of the part that a run's name begins with. Raises NotFound."""
        reader = self._readers.get(name.partition("/")[0])
        if reader is None:
            raise NotFound(f"no run {name[:80]}", hint="choose one of the list")
        return reader

    def _source(self, part: str) -> DataSource:
        reader = self._readers[part]
        return DataSource(reader.right, f"runs.{part}", SLOW_S, lambda: reader.latest(PART_RUNS_MAX))

    def _one(self, name: str) -> DataSource:
        """One run with its log; it needs the right of its part."""
        reader = self.reader_of(name)
        return DataSource(reader.right, f"runs.one.{name}", FAST_S, lambda: read_run(self.context, name))


def merged(runs: list[RunRecord]) -> list[RunRecord]:
    """Pure: those that run now first, then by when they ended."""
    return sorted(runs, key=lambda run: (run.state == "running", run.ended_at_ms or run.started_at_ms), reverse=True)
