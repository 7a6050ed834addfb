"""Runs each model when it is due: by its schedule, by the lag of a topic, or after a source moved. In `lakebed work`.

Models run apart from each other and from the rounds that look for work, so no round waits for its slowest. Any number
of processes may do this at once: tables decide, and a later run finds the work done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, Invalid, LakebedError, NotFound
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.pipeline.bronze.places import LAKE
from lakebed.pipeline.models.definition import ModelOptions
from lakebed.pipeline.models.graph import Graph
from lakebed.pipeline.models.plan import ModelStep
from lakebed.pipeline.models.runs import ModelReport
from lakebed.pipeline.models.schedule import due, lagging

PARALLEL = 4  # models of this process that run at once; the others wait
PAUSE_MAX_MS = 600_000  # longest pause of a model that fails again and again
PAUSE_MS = 15_000
UNREADABLE = (Corrupt, Invalid, NotFound)  # of one table: others can be read

log = logger("pipeline")


class ModelService(Protocol):
    """What the worker needs of the pipeline; it blocks, so it is called in threads."""

    @property
    def graph(self) -> Graph: ...

    @property
    def late(self) -> Collection[tuple[str, str, str]]: ...

    def projects(self) -> list[tuple[str, str]]: ...

    def lags(self, words: Collection[str]) -> dict[str, int]: ...

    def load(self, words: Collection[str]) -> None: ...

    def plan_models(self, org_id: str, project_id: str, names: list[str]) -> dict[str, ModelStep]: ...

    def run_models(self, org_id: str, project_id: str, names: list[str], *, trigger: str) -> list[ModelReport]: ...


class _Tried(msgspec.Struct):
    """What this process knows of a model in a project."""

    last_ms: int = -1
    failures: int = 0


class ModelWorker:
    """Looks for models that are due, and starts each. A model that runs is not started again."""

    def __init__(self, service: ModelService, runtime: Runtime) -> None:
        self._service, self._clock = service, runtime.clock
        self._tried: dict[tuple[str, str, str], _Tried] = {}
        self._running: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(PARALLEL)

    async def run(self, every_s: float) -> None:
        try:
            while True:
                try:
                    await self.round()
                except LakebedError as error:  # of a listing: the next round lists again
                    log.warning("models could not be planned", error=error.message)
                await self._clock.sleep(every_s)
        finally:
            for task in self._running.values():
                task.cancel()

    async def round(self) -> list[str]:
        """Starts what is due, and returns at once; gives the names."""
        started = []
        words = sorted({word for model in self._service.graph.models.values() for word in model.options.lag})
        lags = await self._lags(words)
        projects = await asyncio.to_thread(self._service.projects)
        for org_id, project_id in dict.fromkeys([*projects, LAKE] if words else projects):
            whose = [name for name in self._service.graph.models if self._by_worker((org_id, project_id, name))]
            idle = [name for name in whose if (org_id, project_id, name) not in self._running]
            for name, step in (await self._planned(org_id, project_id, idle)).items():
                at = (org_id, project_id, name)
                if self._due(at, step, lags):
                    self._running[at] = asyncio.create_task(self._make(at, lags))
                    started.append(name)
        return started

    async def _lags(self, words: list[str]) -> dict[str, int]:
        """By word. One whose table cannot be read is left out: only the models that wait for it are held up."""
        found: dict[str, int] = {}
        for word in words:
            try:
                found |= await asyncio.to_thread(self._service.lags, [word])
            except UNREADABLE as error:
                log.warning("a lag is not known", source=word, error=error.message)
        return found

    async def _planned(self, org_id: str, project_id: str, names: list[str]) -> dict[str, ModelStep]:
        """What a run would do. Where a table cannot be read, only the models that need it are left out."""
        try:
            return await asyncio.to_thread(self._service.plan_models, org_id, project_id, names)
        except UNREADABLE as error:
            if len(names) < 2:
                where = f"{org_id}/{project_id}"
                log.warning("a model could not be planned", model=", ".join(names), project=where, error=error.message)
                return {}
        return {
            name: step for each in names for name, step in (await self._planned(org_id, project_id, [each])).items()
        }

    def _due(self, at: tuple[str, str, str], step: ModelStep, lags: Mapping[str, int]) -> bool:
        tried, options = self._tried.get(at, _Tried()), self._options(at)
        now = now_ms(self._clock)
        if tried.failures and now - tried.last_ms < min(PAUSE_MS * 2**tried.failures, PAUSE_MAX_MS):
            return False
        if at[:2] == LAKE and lagging(options, lags):
            return True
        if not step.works and not options.scheduled:
            return False
        last_ms = max(step.made_ms, tried.last_ms)
        return due(options, last_ms=last_ms, now_ms=now, moved=step.works)

    def _by_worker(self, at: tuple[str, str, str]) -> bool:
        options = self._options(at)
        return options.scheduled or bool(options.lag) or options.on == "change"

    def _options(self, at: tuple[str, str, str]) -> ModelOptions:
        """A model whose tick did not make it follows its sources until a tick does."""
        options = self._service.graph.models[at[2]].options
        return msgspec.structs.replace(options, on="change") if at in self._service.late else options

    async def _make(self, at: tuple[str, str, str], lags: Mapping[str, int]) -> None:
        org_id, project_id, name = at
        options = self._service.graph.models[name].options
        trigger = "schedule" if options.scheduled else "change"
        tried = self._tried.setdefault(at, _Tried())
        try:
            async with self._turns:
                tried.last_ms = now_ms(self._clock)
                if at[:2] == LAKE and lagging(options, lags):
                    trigger = "lag"
                    await asyncio.to_thread(self._service.load, sorted(options.lag))
                made = await asyncio.to_thread(self._service.run_models, org_id, project_id, [name], trigger=trigger)
            tried.failures = 0
            for each in (one for one in made if one.state == "made"):
                log.info("model made", model=name, project=f"{org_id}/{project_id}", rows=each.rows, reason=each.reason)
        except Exception as error:  # whatever it is: the worker goes on with the other models
            tried.failures += 1
            log.warning("a model failed", model=name, project=f"{org_id}/{project_id}", error=str(error)[:300])
        finally:
            del self._running[at]
