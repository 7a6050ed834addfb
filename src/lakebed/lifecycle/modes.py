"""How an action is enforced, by events or by scans, and the monitor that changes it when a cursor lags.

Retention `None` means the event log keeps everything. Sibling actions of one rule are decided apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from lakebed.core.errors import Unavailable
from lakebed.core.logs import logger
from lakebed.lifecycle import paths
from lakebed.lifecycle.cluster import (
    LogDay,
    LogGap,
    LogState,
    begins_ns,
    counted,
    days_to_count,
    lost,
    missing_files,
    observed,
)
from lakebed.lifecycle.cursors import stream_cutoff
from lakebed.lifecycle.eligibility import event_log_horizon, min_trigger_age
from lakebed.lifecycle.engine import ActionRef, PolicySnapshot
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import ActionKind, Calendar, Degraded, Mode, Position, Rule
from lakebed.lifecycle.reader import CHECKPOINT_NS
from lakebed.lifecycle.resolver import Resolver
from lakebed.lifecycle.seams import EventSource
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import BucketLifecycle, LifecycleState, ScanProgress, changed, slowest

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
) -> tuple[Mode, Degraded]:
    """The mode an action should run in, and why it is not the best one."""
    if paused:
        return Mode.DISABLED, Degraded.OPERATOR_PAUSED
    if not rule.enabled:
        return Mode.DISABLED, Degraded.NONE
    if kind is ActionKind.EXPIRATION_DATE:
        return Mode.SCAN_AT_DATE, Degraded.NONE
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
    """`lag_ns` is how far the cursor is behind what is due for it. A sweep of a delay reads that far back when all is
    well (`delay_ns`, rounding included), so what counts is how much of the rest of the log it has used up.
    """
    if retention_ns is None:
        return LagLevel.HEALTHY
    behind_ns, room_ns = max(0, lag_ns), max(1, retention_ns - delay_ns)
    if behind_ns < room_ns * LAG_WARN:
        return LagLevel.HEALTHY
    if behind_ns < room_ns * LAG_FORCE_SCAN:
        return LagLevel.WARN
    return LagLevel.FORCE_SCAN if behind_ns < room_ns * LAG_DEMOTE else LagLevel.DEMOTE


def stream_lag(settings: LifecycleSettings, now_ns: int, delay_ns: int | None, cursor: Position) -> int:
    """How far a cursor is behind what is due for it. With rounding to midnight, what waits for midnight is not behind;
    what a healthy worker leaves for its next round, one poll, is none either.
    """
    cutoff_ns = stream_cutoff(settings.calendar, now_ns, delay_ns, ns(settings.flush_lag_s))
    behind_ns = cutoff_ns - cursor.ts_ns
    return behind_ns if behind_ns > ns(settings.poll_s) + CHECKPOINT_NS else 0


def known_retention(said_ns: int | None, begins: int, now_ns: int) -> int | None:
    """How long the log keeps events: the setting, or less when the log itself begins later."""
    if not begins:
        return said_ns
    seen_ns = max(0, now_ns - begins)
    return seen_ns if said_ns is None else min(said_ns, seen_ns)


def next_scan_ns(
    rule: Rule, kind: ActionKind, calendar: Calendar, scan: ScanProgress, now_ns: int, *, mode: Mode, cadence_ns: int
) -> int:
    """When the action is scanned next, after a scan that ends now.

    An action that no event drives is scanned when the first thing that the scan left is due, but not all the time: a
    scan takes at most a tenth of it. What counts is the time worked on it: one that waited out an outage cost nothing
    meanwhile, and what became due since must not wait nine times as long again.
    """
    date_ns = rule.expiration_date_ns
    if kind is ActionKind.EXPIRATION_DATE and date_ns is not None and scan.started_at_ns < date_ns:
        return date_ns
    regular_ns = scan.started_at_ns + (cadence_ns or safety_scan_every(rule, kind, calendar))
    if mode is not Mode.SCAN_ONLY or cadence_ns:
        return regular_ns
    soonest_ns = now_ns + max(calendar.day_ns // 24, 9 * scan.took_ns(now_ns))
    daily_ns = scan.started_at_ns + calendar.day_ns
    return min(regular_ns, max(soonest_ns, min(daily_ns, scan.next_due_ns or daily_ns)))


def safety_scan_every(rule: Rule, kind: ActionKind, calendar: Calendar) -> int:
    """The time between two scans, unless an operator set another."""
    age, day = min_trigger_age(rule, kind, calendar), calendar.day_ns
    if kind in (ActionKind.EXPIRATION_DAYS, ActionKind.NONCURRENT_DAYS):
        return min(max(age or 0, 7 * day), 30 * day)
    if kind is ActionKind.ABORT_MPU:
        return max(age or 0, day)
    return day if kind is ActionKind.EXPIRATION_DATE else 7 * day


def least_scan_every(kind: ActionKind, mode: Mode, calendar: Calendar) -> int:
    """The shortest time between two scans that an action of this kind has, whatever its rule."""
    daily = mode is Mode.SCAN_ONLY or kind in (ActionKind.ABORT_MPU, ActionKind.EXPIRATION_DATE)
    return calendar.day_ns if daily else 7 * calendar.day_ns


class LagMonitor:
    """Watches the log and the cursors, and acts before events can be lost, or once they are.

    A lag warns at 0.5 of the room, requests a scan of the buckets at 0.8, and demotes to scans at 0.95 until an
    operator reseeds. The room is the retention beyond what the sweep reads back when all is well.
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

    async def observe(self) -> LogState:
        """Looks at the log and puts on record what was lost of it since; a loss makes every action scan again.

        Where the store does not answer, the last known state stands: the sweep that follows reports the same error.
        """
        register = self._state.log
        known = (await register.read()).value
        try:
            reach, now_ns = await self._source.reach(), self._state.clock.now_ns()
            if observed(known, reach, now_ns) is known:
                return known
            days = days_to_count(known, reach, now_ns)
            files = await self._count(days)
        except Unavailable as error:
            log.info("event log not probed", error=error.message)
            return known
        missing = [gap for gaps, _ in files.values() for gap in gaps]
        after = await register.change(
            changed(lambda state: counted(observed(state, reach, now_ns), days, missing, now_ns))
        )
        if after.lost_ns == now_ns and after.generation > known.generation:
            self._lost(after)
        for day, (_, now) in files.items():  # once the loss is on record
            await self._state.log_day(day).change(lambda _, now=now: (now, None))  # type: ignore[misc]
        if days and days[0] <= known.counted:  # all were compared once more: those before them are no longer needed
            await self._forget_before(days[0])
        return after

    async def _forget_before(self, day: str) -> None:
        for key in [info.key async for info in self._state.store.list(paths.LOG_DAYS)]:
            if key < paths.log_day(day):
                await self._state.store.delete(key)

    async def _count(self, days: Sequence[str]) -> dict[str, tuple[Sequence[LogGap], LogDay]]:
        """Of days whose files are others than those seen before: which are gone, and those that are there."""
        found: dict[str, tuple[Sequence[LogGap], LogDay]] = {}
        for day in days:
            seen, files = (await self._state.log_day(day).read()).value, await self._source.files(day)
            if seen.files == files:
                continue
            gone = seen.files.keys() - files.keys()
            first_ns = (await self._source.reach()).first_ns if gone else None  # old ones may have been removed by now
            found[day] = missing_files(seen, files, first_ns), LogDay(files=files)
        return found

    async def lose(self, why: str) -> None:
        """A cursor in use is older than the log."""
        now_ns = self._state.clock.now_ns()
        self._lost(await self._state.log.change(changed(lambda state: lost(state, why, now_ns))))

    def _lost(self, state: LogState) -> None:
        self._state.metrics.counter("lakebed_lifecycle_lost_log_total").inc()
        log.warning("event log lost: every bucket is scanned again", error=state.lost, generation=state.generation)

    def retention_ns(self, known: LogState) -> int | None:
        """How long the log keeps events: the setting, or less when the log itself begins later. None is forever."""
        found = known_retention(self._settings.retention_ns, begins_ns(known), self._state.clock.now_ns())
        self._gauges.retention(found)
        return found

    async def judge(self, snapshot: PolicySnapshot, states: Mapping[str, BucketLifecycle]) -> None:
        """`states` are those that were compiled: a bucket whose state needs no change is not read again."""
        state, now_ns = slowest((await self._state.cursors()).values()), self._state.clock.now_ns()
        retention_ns = self.retention_ns(snapshot.log)
        streams = [*snapshot.original_delay_groups, *([None] if snapshot.predicate_actions else [])]
        self._gauges.lags_only(streams)
        for delay_ns in streams:
            cursor = state.cursor(delay_ns)
            if cursor is None:
                continue
            lag_ns = stream_lag(self._settings, now_ns, delay_ns, cursor)
            reads_back_ns = 0 if delay_ns is None else delay_ns + snapshot.calendar.rounding_ns
            verdict = judge_lag(lag_ns, retention_ns, reads_back_ns)
            self._gauges.lag(delay_ns, lag_ns, high=verdict is not LagLevel.HEALTHY)
            for ref in sorted(
                snapshot.predicate_actions if delay_ns is None else snapshot.original_delay_groups[delay_ns]
            ):
                await self._apply(ref, verdict, now_ns, states.get(ref.bucket))

    async def _apply(self, ref: ActionRef, verdict: LagLevel, now_ns: int, known: BucketLifecycle | None) -> None:
        if verdict is LagLevel.DEMOTE:
            return await self._resolver.demote(
                ref, Degraded.LAG_HIGH, "the cursor is close to the end of the log's retention"
            )

        def mark(state: BucketLifecycle) -> BucketLifecycle:
            action = state.action(ref.key)
            if action is None or action.mode is not Mode.EVENT_DRIVEN:
                return state
            high, force = verdict is not LagLevel.HEALTHY, verdict is LagLevel.FORCE_SCAN
            if high == (action.degraded is Degraded.LAG_HIGH) and not force:
                return state
            after = msgspec.structs.replace(
                action,
                degraded=Degraded.LAG_HIGH if high else Degraded.NONE,
                degraded_since_ns=(action.degraded_since_ns or now_ns) if high else 0,
                next_scan_ns=min(action.next_scan_ns, now_ns) if force else action.next_scan_ns,
            )
            return state if after == action else state.having(ref.key, after)

        if known is None or mark(known) is not known:
            await self._state.bucket(ref.bucket).change(changed(mark))
        return None
