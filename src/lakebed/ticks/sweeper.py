"""Sweeps abandoned uploads, parts that are in bronze, parts that no tick refers to, old states and expired rows.

A part is only deleted when its tick's register does not refer to it: the register is changed first.
An abandoned finalize is not deleted but finished: its rows may be in bronze, and its manifest and parts are in the
bucket, so it needs no client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.ticks import commit_times, paths
from lakebed.ticks import transitions as tick
from lakebed.ticks.audit import AuditTable
from lakebed.ticks.model import TickId, TickState
from lakebed.ticks.receiver import register_of
from lakebed.ticks.settings import TicksSettings

log = logger("ticks")


class TickSweeper:
    """`finish` finalizes a tick with the manifest that is pinned in its state."""

    def __init__(
        self,
        context: Context,
        *,
        audits: Sequence[AuditTable] = (),
        finish: Callable[[TickId, bytes], Awaitable[Any]] | None = None,
    ) -> None:
        self._context, self._clock = context, context.clock
        self._settings = context.settings.of(TicksSettings)
        self._audits, self._finish = audits, finish
        self._looked_ms = -1  # every state that was last changed before it was looked at, and
        self._open: set[str] = set()  # only these of them may still change before their retention ends
        self._finished = context.metrics.counter("lakebed_ticks_finished_total")
        self._expired = context.metrics.counter("lakebed_ticks_expired_total")
        self._swept = context.metrics.counter("lakebed_ticks_swept_total")

    async def run(self) -> None:
        while True:
            await self.round()
            await self._clock.sleep(self._settings.sweep_interval_s)

    @traced("ticks sweep")
    async def round(self) -> None:
        """One round over every tick; one that fails is logged and does not block the others."""
        settings, now = self._settings, now_ms(self._clock)
        least_s = min(settings.finalizing_s, settings.upload_ttl_s, settings.state_retention_s)
        until_ms, retained_ms = (now - round(age_s * 1000) for age_s in (least_s, settings.state_retention_s))
        still_open: set[str] = set()
        async for info in self._context.store.list(f"{paths.ROOT}/state/"):
            if info.modified_ms > until_ms:
                continue  # too young to be changed: not even read
            settled = info.modified_ms <= self._looked_ms and info.key not in self._open
            if settled and info.modified_ms > retained_ms:
                continue
            of = _tick_of(info.key, f"{paths.ROOT}/state/")
            if of is None:
                continue  # not ours
            try:
                settled = await self._sweep_tick(of)
            except LakebedError as error:
                settled = False
                log.warning("tick could not be swept", tick=of.path, error=error.message)
            if not settled:
                still_open.add(info.key)
        self._looked_ms, self._open = until_ms, still_open
        await self._sweep_orphans()
        for table in self._audits:
            await table.sweep()
        await commit_times.sweep(self._context, ttl_s=self._settings.audit_ttl_s)

    async def _sweep_tick(self, of: TickId) -> bool:
        """Expires or removes one tick's state. True when nothing changes it before its retention ends."""
        now, settings = now_ms(self._clock), self._settings
        register = register_of(self._context, of)
        state = (await register.read()).value
        abandoned = state.state == "finalizing" and now - state.updated_at_ms >= settings.finalizing_s * 1000
        if abandoned and self._finish is not None:
            await self._finish(of, msgspec.json.encode(state.manifest))
            self._finished.inc()
            return False
        expired = await register.change(
            lambda state: tick.expire(state, before_ms=now - round(settings.upload_ttl_s * 1000), now_ms=now)
        )
        if expired:
            self._expired.inc()
            return False
        if state.state not in ("committed", "failed"):
            return False
        if now - state.updated_at_ms >= settings.state_retention_s * 1000:
            # The commit record stays: a late finalize still finds its result there.
            await self._context.store.delete(paths.state(of))
        return not state.parts or state.state == "committed"

    async def _sweep_orphans(self) -> None:
        known: tuple[TickId | None, TickState] = (None, TickState())
        async for info in self._context.store.list(f"{paths.ROOT}/parts/"):
            age_s = (now_ms(self._clock) - info.modified_ms) / 1000
            if age_s < min(self._settings.orphan_s, self._settings.parts_retention_s):
                continue
            of = _tick_of(info.key.rpartition("/")[0], f"{paths.ROOT}/parts/")
            if of is None:
                continue  # not ours
            if known[0] != of:
                known = (of, (await register_of(self._context, of).read()).value)
            why = self._why(known[1], info.key, info.modified_ms)
            if why:
                await self._context.store.delete(info.key)
                self._swept.labels(why=why).inc()

    def _why(self, state: TickState, key: str, modified_ms: int) -> str:
        """Why this part may be deleted; empty when it may not."""
        now = now_ms(self._clock)
        if state.state == "committed":
            return "committed" if now - state.committed_at_ms >= self._settings.parts_retention_s * 1000 else ""
        if any(part.key == key for part in state.parts.values()):
            return ""
        return "orphan" if now - modified_ms >= self._settings.orphan_s * 1000 else ""


def _tick_of(key: str, below: str) -> TickId | None:
    """The tick of a key or a folder `below`; None for what is no tick's."""
    names = key.removeprefix(below).split("/") if key.startswith(below) else []
    return TickId(names[0], names[1], names[2].removesuffix(".json")) if len(names) == 3 else None
