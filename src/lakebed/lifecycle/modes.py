"""How an action is enforced, and what lag does to it: pure decisions over durations.

Retention `None` means the event log keeps everything. Sibling actions of one rule are decided apart.
"""

from __future__ import annotations

from enum import StrEnum

from lakebed.lifecycle.evaluate import event_log_horizon, min_trigger_age
from lakebed.lifecycle.model import ActionKind, Calendar, Degraded, Mode, Rule

LAG_WARN, LAG_FORCE_SCAN, LAG_DEMOTE = 0.5, 0.8, 0.95  # of the log's retention


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


class Lag(StrEnum):
    """What a stream's lag asks for."""

    HEALTHY = "healthy"
    WARN = "warn"  # say so, and mark the actions LAG_HIGH
    FORCE_SCAN = "force_scan"  # and run the next safety scan now
    DEMOTE = "demote"  # and go on by scans alone until an operator reseeds


def judge_lag(lag_ns: int, retention_ns: int | None, delay_ns: int = 0) -> Lag:
    """`lag_ns` is how far the cursor is behind now. A sweep of a delay is behind by that delay when all is well, so
    what counts is how much of the rest of the log it has used up.
    """
    if retention_ns is None:
        return Lag.HEALTHY
    behind_ns, room_ns = max(0, lag_ns - delay_ns), max(1, retention_ns - delay_ns)
    if behind_ns < room_ns * LAG_WARN:
        return Lag.HEALTHY
    if behind_ns < room_ns * LAG_FORCE_SCAN:
        return Lag.WARN
    return Lag.FORCE_SCAN if behind_ns < room_ns * LAG_DEMOTE else Lag.DEMOTE


def known_retention(said_ns: int | None, begins_ns: int, now_ns: int) -> int | None:
    """How long the log keeps events: what the settings say, or less when the log itself shows less."""
    if not begins_ns:
        return said_ns
    seen_ns = max(0, now_ns - begins_ns)
    return seen_ns if said_ns is None else min(said_ns, seen_ns)


def safety_scan_every(rule: Rule, kind: ActionKind, calendar: Calendar) -> int:
    """How long after one scan the next is due, when no operator said otherwise."""
    age, day = min_trigger_age(rule, kind, calendar), calendar.day_ns
    if kind in (ActionKind.EXPIRATION_DAYS, ActionKind.NONCURRENT_DAYS):
        return min(max(age or 0, 7 * day), 30 * day)
    if kind is ActionKind.ABORT_MPU:
        return max(age or 0, day)
    return day if kind is ActionKind.EXPIRATION_DATE else 7 * day
