"""Uploads the ready subfolders of a folder as ticks: the uploader that an agent runs.

A subfolder is ready once it holds `_manifest.json` (sent unchanged) or `_ready` (the manifest is made from its Parquet
files; the folder's name is the tick's id): the writer creates that file last. A ready tick is put into the outbox on
disk before anything is sent, and its folder is removed only after the service has committed it, so that a kill at any
moment loses nothing and sends nothing twice. A refused tick stays where it is, marked failed_manual.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lakebed.core.errors import Invalid, LakebedError
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.ticks import packing
from lakebed.ticks.model import FinalizeResult
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import MANIFEST_FILE, PackedTick
from lakebed.ticks.uploader import Uploader, is_away

SENT = ".sent"  # inside the folder: committed ticks, until they are deleted (never, with keep)
REFUSED, STUCK = "tick_refused", "ticks_stuck"
PAUSE_CAP_S = 60.0  # longest pause after rounds without a commit

log = logger("agent")


class FolderUploader:
    """One folder of one project. `uploaders` are the addresses of the service; another is used when one fails.

    `alert` is called in each round with a kind and a message, or None where nothing is wrong.
    """

    def __init__(
        self,
        folder: Path,
        outbox: Outbox,
        uploaders: Sequence[Uploader],
        runtime: Runtime,
        *,
        project_id: str,
        keys: Mapping[str, Sequence[str]] | None = None,
        mode: str = "delta",
        keep: bool = False,
        interval_s: float = 5.0,
        alert: Callable[[str, str | None], None] = lambda kind, message: None,
    ) -> None:
        self._folder, self._outbox, self._uploaders = folder, outbox, uploaders
        self._project_id, self._keys, self._mode, self._keep = project_id, keys or {}, mode, keep
        self._clock, self._interval_s, self._alert = runtime.clock, interval_s, alert
        self._current = self._failures = 0
        self._ticks = runtime.metrics.counter("lakebed_agent_ticks_total")
        self._waiting = runtime.metrics.gauge("lakebed_agent_waiting_ticks")

    def use(self, uploaders: Sequence[Uploader]) -> None:
        """Sends by these from the next tick on."""
        self._uploaders, self._current = uploaders, 0

    async def run(self) -> None:
        while True:
            await self.round()
            pause_s = self._interval_s * 2 ** min(self._failures, 10)
            await self._clock.sleep(min(pause_s, max(self._interval_s, PAUSE_CAP_S)))

    async def round(self) -> int:
        """Packs ready folders and sends the outbox. Returns how many ticks were committed.

        The oldest is first, and one that the service refused before comes after those that it did not: a tick that
        fails alone delays nobody. Only a service that does not answer ends the round.
        """
        stuck = await asyncio.to_thread(self._pack_ready)
        committed = 0
        for waiting in await asyncio.to_thread(self._in_turn):
            try:
                result = await self._uploaders[self._current].deliver(self._outbox, waiting)
                committed += await asyncio.to_thread(self._settle, waiting, result)
            except LakebedError as error:
                stuck = error.message
                if not is_away(error):
                    continue  # of this tick or its project: the others may succeed
                self._current = (self._current + 1) % len(self._uploaders)
                break
            except OSError as error:  # a committed tick is asked for again: the service knows it
                stuck = f"{waiting.folder}: {error}"
        self._failures = self._failures + 1 if stuck else 0
        self._alert(STUCK, stuck or None)
        self._show()
        return committed

    def _in_turn(self) -> list[OutboxTick]:
        ready = [waiting for waiting in self._outbox.waiting([]) if waiting.state == "ready"]
        return sorted(ready, key=lambda waiting: waiting.refusals)  # stable: the oldest first among equals

    def _settle(self, waiting: OutboxTick, result: FinalizeResult | None) -> bool:
        if result is None:
            self._ticks.labels(outcome="failed_manual").inc()
            log.error("tick needs a person", tick=waiting.packed.tick_id, hint="lakebed agent ticks list")
            return False
        self._remove_folder(Path(waiting.folder))
        self._outbox.remove(waiting.packed.tick_id)
        self._ticks.labels(outcome="committed").inc()
        log.info("tick committed", tick=result.tick_id, inserted=result.rows_inserted, replaced=result.rows_replaced)
        return True

    def _pack_ready(self) -> str:
        """Puts every new ready folder into the outbox, and removes refused ticks whose folder is gone.

        Returns what stays stuck: a file of the outbox that does not decode, or a folder that cannot be marked as
        refused because its name is not a tick's id.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._keep:
            shutil.rmtree(self._folder / SENT, ignore_errors=True)  # left when the process was killed
        known: dict[str, OutboxTick] = {}
        unreadable: list[str] = []
        for waiting in self._outbox.waiting(unreadable):
            if waiting.state == "failed_manual" and not Path(waiting.folder).is_dir():
                self._outbox.remove(waiting.packed.tick_id)
                log.info("refused tick removed: its folder is gone", tick=waiting.packed.tick_id)
                continue
            known[waiting.folder] = waiting
        ready = [each for each in sorted(self._folder.iterdir()) if str(each) not in known and packing.is_ready(each)]
        return next(filter(None, [*unreadable, *[self._pack(folder) for folder in ready]]), "")

    def _pack(self, folder: Path) -> str:
        now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
        try:
            if (folder / MANIFEST_FILE).is_file():
                packed = packing.pack_from_manifest(folder, project_id=self._project_id)
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
            self._outbox.put(OutboxTick(packed, folder=str(folder)))
        except (LakebedError, OSError) as error:
            return self._refuse(folder, error)
        return ""

    def _refuse(self, folder: Path, error: LakebedError | OSError) -> str:
        """Marks a folder that is not a valid tick as refused, under its own name; nothing of it was sent."""
        reason = error.message if isinstance(error, LakebedError) else str(error)
        kind = str(error.detail.get("error_class", error.code)) if isinstance(error, LakebedError) else "unreadable"
        try:
            if not self._outbox.has(folder.name):
                empty = PackedTick(folder.name, self._project_id, "", {})
                self._outbox.put(OutboxTick(empty, folder=str(folder)).refused(kind, reason))
                self._ticks.labels(outcome="failed_manual").inc()
        except Invalid:
            return f"{folder} is not a valid tick: {reason}"
        return ""

    def _remove_folder(self, folder: Path) -> None:
        """Moves a committed tick out of the folder by a rename, so that it is never half removed, and deletes it."""
        if not folder.is_dir():
            return  # an earlier run did it
        sent = self._folder / SENT
        sent.mkdir(exist_ok=True)
        target = sent / folder.name
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
        if not self._keep:
            shutil.rmtree(target, ignore_errors=True)

    def _show(self) -> None:
        states = [waiting.state for waiting in self._outbox.waiting([])]
        for state in ("ready", "failed_manual"):
            self._waiting.labels(project=self._project_id, state=state).set(states.count(state))
        refused = states.count("failed_manual")
        self._alert(REFUSED, f"{refused} ticks of {self._project_id} were refused" if refused else None)
