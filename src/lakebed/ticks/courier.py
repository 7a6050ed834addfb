"""Brings what lies ready in a folder to the service, as ticks: the uploader that an agent runs.

A subfolder is ready once it holds `_manifest.json` (sent word for word) or `_ready` (the manifest is made from its
Parquet files; the folder's name is the tick's id): whoever fills it writes that file last. A ready tick is put on disk
in the outbox before anything is sent, and its folder goes only after the service has committed it, so that a kill at
any moment loses nothing and sends nothing twice. What is refused for good stays where it is, marked failed_manual.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lakebed.clock import Clock
from lakebed.errors import Corrupt, Denied, Invalid, LakebedError
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.ticks import packing
from lakebed.ticks.model import Result
from lakebed.ticks.outbox import Outbox, Waiting
from lakebed.ticks.packing import MANIFEST_FILE, Packed
from lakebed.ticks.uploader import Uploader

SENT = ".sent"  # inside the folder: what is committed, until it is deleted (or for good, with keep)
REFUSED, STUCK = "tick_refused", "ticks_stuck"
PAUSE_CAP_S = 60.0  # longest pause after rounds that brought nothing through

log = logger("agent")


class Courier:
    """One folder of one project. `uploaders` are the ways to the service; another is tried when one fails.

    `alert` is told a kind and what happened, or None when that is over.
    """

    def __init__(
        self,
        folder: Path,
        outbox: Outbox,
        uploaders: Sequence[Uploader],
        *,
        project_id: str,
        clock: Clock,
        metrics: Metrics,
        keys: Mapping[str, Sequence[str]] | None = None,
        mode: str = "delta",
        keep: bool = False,
        interval_s: float = 5.0,
        alert: Callable[[str, str | None], None] = lambda kind, message: None,
    ) -> None:
        self._folder, self._outbox, self._uploaders = folder, outbox, uploaders
        self._project_id, self._keys, self._mode, self._keep = project_id, keys or {}, mode, keep
        self._clock, self._interval_s, self._alert = clock, interval_s, alert
        self._way = self._failures = 0
        self._told: set[str] = set()  # alerts that are on because of this folder
        self._ticks = metrics.counter("lakebed_agent_ticks_total")
        self._waiting = metrics.gauge("lakebed_agent_waiting_ticks")

    async def run(self) -> None:
        while True:
            await self.round()
            pause_s = self._interval_s * 2 ** min(self._failures, 10)
            await self._clock.sleep(min(pause_s, max(self._interval_s, PAUSE_CAP_S)))

    async def round(self) -> int:
        """Takes in what lies ready and sends all that waits, oldest first. Returns how many ticks were committed."""
        stuck = await asyncio.to_thread(self._take_in)
        committed = 0
        for waiting in await asyncio.to_thread(lambda: list(self._outbox.waiting())):
            if waiting.state != "ready":
                continue
            try:
                result = await self._uploaders[self._way].deliver(self._outbox, waiting)
            except (Denied, Invalid) as error:  # of this tick or its project: the others may get through
                stuck = error.message
                continue
            except LakebedError as error:
                stuck, self._way = error.message, (self._way + 1) % len(self._uploaders)
                break
            committed += await asyncio.to_thread(self._settle, waiting, result)
        self._failures = self._failures + 1 if stuck else 0
        self._tell(STUCK, stuck)
        self._show()
        return committed

    def _settle(self, waiting: Waiting, result: Result | None) -> bool:
        if result is None:
            self._ticks.labels(outcome="failed_manual").inc()
            return False
        self._put_away(Path(waiting.folder))
        self._outbox.remove(waiting.packed.tick_id)
        self._ticks.labels(outcome="committed").inc()
        log.info("tick committed", tick=result.tick_id, inserted=result.rows_inserted, replaced=result.rows_replaced)
        return True

    def _take_in(self) -> str:
        """Puts every ready folder that is new into the outbox, and forgets refused ones whose folder is gone.

        Returns what is wrong with a folder that cannot even be refused: its name is none for a tick.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._keep:
            shutil.rmtree(self._folder / SENT, ignore_errors=True)  # left by a kill
        known = {}
        for waiting in self._outbox.waiting():
            if waiting.state == "failed_manual" and not Path(waiting.folder).is_dir():
                self._outbox.remove(waiting.packed.tick_id)
                log.info("a refused tick is gone, and forgotten", tick=waiting.packed.tick_id)
                continue
            known[waiting.folder] = waiting
        ready = [each for each in sorted(self._folder.iterdir()) if str(each) not in known and packing.is_ready(each)]
        return next(filter(None, [self._pack(folder) for folder in ready]), "")

    def _pack(self, folder: Path) -> str:
        now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
        try:
            if (folder / MANIFEST_FILE).is_file():
                packed = packing.pack_as_told(folder, project_id=self._project_id)
            else:
                packed = packing.pack(
                    packing.find([folder]),
                    project_id=self._project_id,
                    tick_id=folder.name,
                    dt=f"{now:%Y%m%d}",
                    keys=self._keys,
                    mode=self._mode,
                )
            if self._outbox.has(packed.tick_id):
                raise Invalid(f"tick {packed.tick_id} waits already, from another folder")
            self._outbox.put(Waiting(packed, folder=str(folder)))
        except (LakebedError, OSError) as error:
            return self._refuse(folder, error)
        return ""

    def _refuse(self, folder: Path, error: LakebedError | OSError) -> str:
        """Marks a folder that cannot be a tick, under its own name; nothing of it was sent."""
        told = error.message if isinstance(error, LakebedError) else str(error)
        kind = str(error.detail.get("error_class", error.code)) if isinstance(error, LakebedError) else "unreadable"
        try:
            if not self._outbox.has(folder.name):
                empty = Packed(folder.name, self._project_id, "", {})
                self._outbox.put(Waiting(empty, folder=str(folder)).refused(kind, told))
                self._ticks.labels(outcome="failed_manual").inc()
        except Invalid:
            return f"{folder} cannot be a tick: {told}"
        return ""

    def _put_away(self, folder: Path) -> None:
        """Takes a committed tick out of the folder: first by a rename, so that it is never half there."""
        if not folder.is_dir():
            return  # a run before this one did it
        sent = self._folder / SENT
        sent.mkdir(exist_ok=True)
        target = sent / folder.name
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
        if not self._keep:
            shutil.rmtree(target, ignore_errors=True)

    def _show(self) -> None:
        try:
            states = [waiting.state for waiting in self._outbox.waiting()]
        except Corrupt as error:
            self._tell(STUCK, error.message)
            return
        for state in ("ready", "failed_manual"):
            self._waiting.labels(project=self._project_id, state=state).set(states.count(state))
        refused = states.count("failed_manual")
        self._tell(REFUSED, f"{refused} ticks of {self._project_id} wait for a person" if refused else "")

    def _tell(self, kind: str, message: str) -> None:
        """Alerts, or ends the alert that this courier has raised; another folder's is its own affair."""
        if message:
            self._told.add(kind)
            self._alert(kind, message)
        elif kind in self._told:
            self._told.discard(kind)
            self._alert(kind, None)
