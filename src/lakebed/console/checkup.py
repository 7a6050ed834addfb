"""`lakebed doctor` run from a page: in a thread with its own store client, one at a time, verdicts as they fall."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.context import Diagnosis, make_context
from lakebed.doctor.checks import examine
from lakebed.errors import LakebedError
from lakebed.settings import Settings

EVERY_S = 10.0  # a run races a few clients on scratch keys: not more often than this


class Findings(msgspec.Struct, frozen=True):
    running: bool = False
    started_at_ms: int = 0
    ended_at_ms: int = 0
    diagnoses: tuple[Diagnosis, ...] = ()


class Checkup:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._task: asyncio.Task[None] | None = None
        self.findings = Findings()

    async def look(self) -> Findings:
        return self.findings

    def begin(self) -> Findings:
        """Starts a run, unless one is under way or has just ended."""
        recent = now_ms(self._clock) - self.findings.ended_at_ms < EVERY_S * 1000
        if not self.findings.running and not recent:
            self.findings = Findings(True, now_ms(self._clock))
            self._task = asyncio.create_task(self._run())
        return self.findings

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def tell(diagnosis: Diagnosis) -> None:
            loop.call_soon_threadsafe(self._add, diagnosis)

        def examined() -> None:
            folder = Path(os.environ.get("LAKEBED_DIR", "."))
            asyncio.run(_examine(self._settings, folder, tell))

        try:
            await asyncio.to_thread(examined)
        except LakebedError as error:
            self._add(Diagnosis("doctor", "fail", error.message, error.hint))
        except Exception as error:
            self._add(Diagnosis("doctor", "fail", f"failed: {type(error).__name__}", "lakebed doctor tells more"))
        await asyncio.sleep(0)  # noqa: TID251  verdicts of the thread that still wait for their turn
        self.findings = msgspec.structs.replace(self.findings, running=False, ended_at_ms=now_ms(self._clock))

    def _add(self, diagnosis: Diagnosis) -> None:
        told = (*self.findings.diagnoses, diagnosis)
        self.findings = msgspec.structs.replace(self.findings, diagnoses=told)


async def _examine(settings: Settings, folder: Path, tell: object) -> None:
    await examine(make_context(settings, role="doctor"), folder, tell)  # type: ignore[arg-type]
