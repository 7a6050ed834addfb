"""Watches how near the cursors are to the end of the log, and acts before events could be lost unseen.

At half of the room it warns, at four fifths it has the buckets scanned now, at nineteen twentieths it goes on by scans
alone until an operator reseeds. The room is what the log keeps behind the sweep's own delay.
"""

from __future__ import annotations

import msgspec

from lakebed.errors import Unavailable
from lakebed.lifecycle.engine import ActionRef, Snapshot
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import Degraded, Mode
from lakebed.lifecycle.modes import Lag, judge_lag, known_retention
from lakebed.lifecycle.resolver import Resolver
from lakebed.lifecycle.seams import EventSource
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import BucketState
from lakebed.logs import logger

log = logger("lifecycle")


class Watch:
    """`retention_ns` is how long the log keeps events, as far as is known; None is for ever."""

    def __init__(
        self, source: EventSource, resolver: Resolver, shelf: Shelf, settings: LifecycleSettings, gauges: Gauges
    ) -> None:
        self._source, self._resolver, self._shelf = source, resolver, shelf
        self._settings, self._gauges = settings, gauges
        self.retention_ns = settings.retention_ns

    async def probe(self) -> None:
        """Looks how far back the log reaches: gates and thresholds go by the shorter of that and the settings."""
        try:
            begins_ns = await self._source.begins_ns()
        except Unavailable as error:  # what was known last stays; sweeping will meet the same and say so
            log.info("lifecycle_log_not_probed", error=error.message)
            return
        self.retention_ns = known_retention(self._settings.retention_ns, begins_ns, self._shelf.clock.now_ns())
        self._gauges.retention(self.retention_ns)

    async def judge(self, snapshot: Snapshot) -> None:
        state, now_ns = (await self._shelf.reader.read()).value, self._shelf.clock.now_ns()
        for delay_ns in [*snapshot.original_delay_groups, *([None] if snapshot.predicate_actions else [])]:
            cursor = state.cursor(delay_ns)
            if cursor is None:
                continue
            lag_ns = now_ns - cursor.ts_ns
            verdict = judge_lag(lag_ns, self.retention_ns, delay_ns or 0)
            # Rules may be due at midnight only: what waits for it is not behind.
            due_ns = now_ns if delay_ns is None else snapshot.calendar.cutoff(now_ns, delay_ns)
            self._gauges.lag(delay_ns, due_ns - cursor.ts_ns, high=verdict is not Lag.HEALTHY)
            for ref in sorted(
                snapshot.predicate_actions if delay_ns is None else snapshot.original_delay_groups[delay_ns]
            ):
                await self._apply(ref, verdict, now_ns)

    async def _apply(self, ref: ActionRef, verdict: Lag, now_ns: int) -> None:
        if verdict is Lag.DEMOTE:
            return await self._resolver.demote(ref, Degraded.LAG_HIGH, "the cursor nears the end of the log")

        def mark(state: BucketState) -> BucketState:
            known = state.action(ref.key)
            if known is None or known.mode is not Mode.EVENT_DRIVEN:
                return state
            high = verdict is not Lag.HEALTHY
            if high == (known.degraded is Degraded.LAG_HIGH) and verdict is not Lag.FORCE_SCAN:
                return state
            after = msgspec.structs.replace(
                known,
                degraded=Degraded.LAG_HIGH if high else Degraded.NONE,
                degraded_since_ns=(known.degraded_since_ns or now_ns) if high else 0,
                next_scan_ns=min(known.next_scan_ns, now_ns) if verdict is Lag.FORCE_SCAN else known.next_scan_ns,
            )
            return state if after == known else state.having(ref.key, after)

        register = self._shelf.bucket(ref.bucket)
        known = (await register.read()).value
        if mark(known) is not known:
            await register.change(changed(mark))
        return None
