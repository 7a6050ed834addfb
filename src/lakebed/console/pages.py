"""The pages of the console: the overview, the health page, and one for each part that has one in the table of parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from lakebed.console.dashboards.alerts import ALERTS
from lakebed.console.dashboards.model import Alert
from lakebed.console.page import SCAN_S, Action, DataSource, Fields, PageRequest, PageSamples, PartPage
from lakebed.console.runs import RunsPage
from lakebed.console.search import SearchPage
from lakebed.core.clock import Clock, now_ms
from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import LakebedError
from lakebed.core.settings import Settings
from lakebed.gateway.health import HealthChecker, HealthReport
from lakebed.wiring.context import make_context
from lakebed.wiring.doctor import examine
from lakebed.wiring.parts import PARTS, resolve

DOCTOR_EVERY_S = 10.0  # a run races a few clients on scratch keys: not more often than this
OVERVIEW_PATIENCE_S = 0.3  # the page fills in its numbers within a second or two: it does not wait for the slowest


class OverviewPage(PartPage):
    name = "overview"
    path = "/"
    title = "Overview"
    about = "Data flow through this lake, live."

    def __init__(self, context: Context, parts: dict[str, DataSource], health: DataSource) -> None:
        super().__init__(context)
        self._sources = {"health": health, **parts}

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        sources = self._sources
        if not request.patient:
            sources = {
                name: msgspec.structs.replace(source, patience_s=OVERVIEW_PATIENCE_S)
                for name, source in sources.items()
            }
        return await request.load(**sources), {}


class FirstStep(msgspec.Struct, frozen=True):
    """A command that a new lake begins with, and whether its data has arrived."""

    words: str
    command: str
    done: bool


def getting_started(known: dict[str, float | None]) -> list[FirstStep]:
    """The first commands; none once all their data is there, or while it is not known what is there."""
    steps = (
        (
            "agents",
            "Send a sample",
            """echo '{"metric":"room_temperature","value":21.5}' | lakebed agent run --stdin""",
        ),
        (
            "log_partitions",
            "Append records to a topic",
            "printf 'first\\nsecond\\n' | lakebed topics produce greetings",
        ),
        ("queues", "Put an entry into a queue", "lakebed queue put --value hello"),
    )
    if any(known.get(level) is None for level, _, _ in steps):
        return []
    found = [FirstStep(words, command, bool(known[level])) for level, words, command in steps]
    return [] if all(step.done for step in found) else found


class DoctorReport(msgspec.Struct, frozen=True):
    running: bool = False
    started_at_ms: int = 0
    ended_at_ms: int = 0
    diagnoses: tuple[Diagnosis, ...] = ()


class DoctorRunner:
    """Runs `lakebed doctor` in a thread with its own store client, one run at a time. Results appear as they arrive."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._task: asyncio.Task[None] | None = None
        self.report = DoctorReport()

    async def latest(self) -> DoctorReport:
        return self.report

    def begin(self) -> DoctorReport:
        """Starts a run, unless one is under way or has just ended."""
        recent = now_ms(self._clock) - self.report.ended_at_ms < DOCTOR_EVERY_S * 1000
        if not self.report.running and not recent:
            self.report = DoctorReport(True, now_ms(self._clock))
            self._task = asyncio.create_task(self._run())
        return self.report

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def add(diagnosis: Diagnosis) -> None:
            loop.call_soon_threadsafe(self._add, diagnosis)

        def examined() -> None:
            folder = Path(os.environ.get("LAKEBED_DIR", "."))
            asyncio.run(_examine(self._settings, folder, add))

        try:
            await asyncio.to_thread(examined)
        except LakebedError as error:
            self._add(Diagnosis("doctor", "fail", error.message, error.hint))
        except Exception as error:
            self._add(Diagnosis("doctor", "fail", f"failed: {type(error).__name__}", "run: lakebed doctor"))
        await asyncio.sleep(0)  # noqa: TID251  so that results of the thread that are still queued are added
        self.report = msgspec.structs.replace(self.report, running=False, ended_at_ms=now_ms(self._clock))

    def _add(self, diagnosis: Diagnosis) -> None:
        self.report = msgspec.structs.replace(self.report, diagnoses=(*self.report.diagnoses, diagnosis))


async def _examine(settings: Settings, folder: Path, add: Callable[[Diagnosis], None]) -> None:
    await examine(make_context(settings, role="doctor"), folder, add)


async def _run_doctor(page: StatusPage, fields: Fields, who: str, reason: str) -> str:
    page.doctor_runner.begin()
    return "the checks run; results appear as they arrive"


class StatusPage(PartPage):
    name = "status"
    path = "/status"
    manual = "operations/watching.md"
    title = "Health"
    about = "This gateway, its parts, and the checks of lakebed doctor."
    actions = {
        "status.doctor": Action(
            "Run the doctor",
            "Run",
            (),
            lambda f: "console:doctor",
            lambda f: "Checks this machine, and races a few clients on scratch keys of the store. Takes a few seconds.",
            _run_doctor,
            needs_reason=False,
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.doctor_runner = DoctorRunner(context.settings, context.clock)
        self.health_checker: HealthChecker | None = None  # the app's, known with the first request

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        return await request.load(health=self.health(), doctor=self.doctor()), {}

    async def stop(self) -> None:
        await self.doctor_runner.stop()

    def health(self) -> DataSource:
        return DataSource("console:read", "health", 1.0, self._report)

    def doctor(self) -> DataSource:
        return DataSource("console:read", "doctor", 0.3, self.doctor_runner.latest)

    async def _report(self) -> HealthReport:
        assert self.health_checker is not None
        return await self.health_checker.report()


class RunbookPage(PartPage):
    name = "runbook"
    path = "/runbook"
    manual = "operations/alerts.md"
    title = "Runbook"
    about = "What each alert means, and what to do. Commands start with lakebed."
    in_menu = False

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        return await request.load(alerts=DataSource("console:read", "alerts", SCAN_S, _alerts)), {}


class ManualPage(PartPage):
    """The frame of the documentation's pages; it has no data of its own."""

    name = "manual"
    path = "/manual"
    title = "Documentation"
    about = "The pages of docs/, as they are in the source tree."
    in_menu = False
    manual = ""

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        return {}, {}


async def _alerts() -> list[Alert]:
    return list(ALERTS)


PART_PAGES: tuple[type[PartPage], ...] = tuple(resolve(part.page) for part in PARTS if part.page)
PAGES: tuple[type[PartPage], ...] = (OverviewPage, RunsPage, *PART_PAGES, StatusPage, RunbookPage, SearchPage)
ACTIONS: dict[str, Action] = {name: action for page in PAGES for name, action in page.actions.items()}


def template_of(page: type[PartPage]) -> str:
    """The part's `page.html`, beside its `page.py`."""
    return files(page.__module__.rpartition(".")[0]).joinpath("page.html").read_text(encoding="utf-8")


def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
    """Pure: from the latest value of each key to every part's numbers for the overview."""
    return {name: value for page in PART_PAGES for name, value in page.levels(latest).items()}
