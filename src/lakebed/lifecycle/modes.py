"""How an action is enforced, by events or by scans, and the monitor that changes it when a cursor lags.

Retention `None` means the event log keeps everything. Sibling actions of one rule are decided apart.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from lakebed.core.errors import Unavailable
from lakebed.core.logs import logger
from lakebed.lifecycle.engine import ActionRef, PolicySnapshot
from lakebed.lifecycle.evaluate import event_log_horizon, min_trigger_age
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import ActionKind, Calendar, Degraded, Mode, Rule
from lakebed.lifecycle.resolver import Resolver
from lakebed.lifecycle.seams import EventSource
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import BucketLifecycle, LifecycleState, changed

LAG_WARN, LAG_FORCE_SCAN, LAG_DEMOTE = 0.5, 0.8, 0.95  # of the log's retention
log = logger("lifecycle")


def decide_mode(
    rule: Rule,
    kind: ActionKind,
    calendar: Calendar,
    *,
    retention_ns: int | None,
    lookback_ns: int,
    paused: bool = False,
    lost_log: bool = False,
) -> tuple[Mode, Degraded]:
    """The mode an action should run in, and why it is not the best one."""
    if paused:
        return Mode.DISABLED, Degraded.OPERATOR_PAUSED
    if not rule.enabled:
        return Mode.DISABLED, Degraded.NONE
    if kind is ActionKind.EXPIRATION_DATE:
        return Mode.SCAN_AT_DATE, Degraded.NONE
    if lost_log:
        return Mode.SCAN_ONLY, Degraded.LOST_LOG
    if retention_ns is not None and retention_ns < event_log_horizon(rule, kind, calendar) + lookback_ns:
        return Mode.SCAN_ONLY, Degraded.RETENTION_BELOW_HORIZON
    return Mode.EVENT_DRIVEN, Degraded.NONE


class LagLevel(StrEnum):
    """What a stream's lag requires."""

    HEALTHY = "healthy"
    WARN = "warn"  # mark the actions LAG_HIGH
    FORCE_SCAN = "force_scan"  # also run the next safety scan now
    DEMOTE = "demote"  # and use scans only until an operator reseeds


def judge_lag(lag_ns: int, retention_ns: int | None, delay_ns: int = 0) -> LagLevel:
    """`lag_ns` is how far the cursor is behind now. A sweep of a delay is behind by that delay when all is well, so
    what counts is how much of the rest of the log it has used up.
    """
    if retention_ns is None:
        return LagLevel.HEALTHY
    behind_ns, room_ns = max(0, lag_ns - delay_ns), max(1, retention_ns - delay_ns)
    if behind_ns < room_ns * LAG_WARN:
        return LagLevel.HEALTHY
    if behind_ns < room_ns * LAG_FORCE_SCAN:
        return LagLevel.WARN
    return LagLevel.FORCE_SCAN if behind_ns < room_ns * LAG_DEMOTE else LagLevel.DEMOTE


def known_retention(said_ns: int | None, begins_ns: int, now_ns: int) -> int | None:
    """How long the log keeps events: the setting, or less when the log itself begins later."""
    if not begins_ns:
        return said_ns
    seen_ns = max(0, now_ns - begins_ns)
    return seen_ns if said_ns is None else min(said_ns, seen_ns)


def safety_scan_every(rule: Rule, kind: ActionKind, calendar: Calendar) -> int:
    """The time between two scans, unless an operator set another."""
    age, day = min_trigger_age(rule, kind, calendar), calendar.day_ns
    if kind in (ActionKind.EXPIRATION_DAYS, ActionKind.NONCURRENT_DAYS):
        return min(max(age or 0, 7 * day), 30 * day)
    if kind is ActionKind.ABORT_MPU:
        return max(age or 0, day)
    return day if kind is ActionKind.EXPIRATION_DATE else 7 * day


class LagMonitor:
    """Compares each cursor's lag with the log's retention, and acts before events can be lost.

    It warns at 0.5 of the room, requests a scan of the buckets at 0.8, and demotes to scans at 0.95 until an operator
    reseeds. The room is the retention beyond the sweep's own delay. `retention_ns` is the known retention; None is
    forever.
    """

    def __init__(
        self,
        source: EventSource,
        resolver: Resolver,
        state: LifecycleState,
        settings: LifecycleSettings,
        gauges: Gauges,
    ) -> None:
        self._source, self._resolver, self._state = source, resolver, state
        self._settings, self._gauges = settings, gauges
        self.retention_ns = settings.retention_ns

    async def probe(self) -> None:
        """Reads how far back the log reaches. Modes and thresholds use the shorter of that and the setting."""
        try:
            begins_ns = await self._source.begins_ns()
        except Unavailable as error:  # the last known value stays; the sweep that follows reports the same error
            log.info("event log not probed", error=error.message)
            return
        self.retention_ns = known_retention(self._settings.retention_ns, begins_ns, self._state.clock.now_ns())
        self._gauges.retention(self.retention_ns)

    async def judge(self, snapshot: PolicySnapshot) -> None:
        state, now_ns = (await self._state.reader.read()).value, self._state.clock.now_ns()
        for delay_ns in [*snapshot.original_delay_groups, *([None] if snapshot.predicate_actions else [])]:
            cursor = state.cursor(delay_ns)
            if cursor is None:
                continue
            lag_ns = now_ns - cursor.ts_ns
            verdict = judge_lag(lag_ns, self.retention_ns, delay_ns or 0)
            # Rules may be due at midnight only: what waits for it is not behind.
            due_ns = now_ns if delay_ns is None else snapshot.calendar.cutoff(now_ns, delay_ns)
            self._gauges.lag(delay_ns, due_ns - cursor.ts_ns, high=verdict is not LagLevel.HEALTHY)
            for ref in sorted(
                snapshot.predicate_actions if delay_ns is None else snapshot.original_delay_groups[delay_ns]
            ):
                await self._apply(ref, verdict, now_ns)

    async def _apply(self, ref: ActionRef, verdict: LagLevel, now_ns: int) -> None:
        if verdict is LagLevel.DEMOTE:
            return await self._resolver.demote(
                ref, Degraded.LAG_HIGH, "the cursor is close to the end of the log's retention"
            )

        def mark(state: BucketLifecycle) -> BucketLifecycle:
            known = state.action(ref.key)
            if known is None or known.mode is not Mode.EVENT_DRIVEN:
                return state
            high = verdict is not LagLevel.HEALTHY
            if high == (known.degraded is Degraded.LAG_HIGH) and verdict is not LagLevel.FORCE_SCAN:
                return state
            after = msgspec.structs.replace(
                known,
                degraded=Degraded.LAG_HIGH if high else Degraded.NONE,
                degraded_since_ns=(known.degraded_since_ns or now_ns) if high else 0,
                next_scan_ns=min(known.next_scan_ns, now_ns) if verdict is LagLevel.FORCE_SCAN else known.next_scan_ns,
            )
            return state if after == known else state.having(ref.key, after)

        register = self._state.bucket(ref.bucket)
        known = (await register.read()).value
        if mark(known) is not known:
            await register.change(changed(mark))
        return None
