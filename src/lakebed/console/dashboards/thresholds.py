"""The limits that alerts and the console's states share: one number for each alert that has a level in the console.

An alert that is a page makes a state red; a ticket makes it amber. The expression of the alert is built from the same
number, so a page never shows green while its alert fires for that level.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["s", "count"]


class Threshold(msgspec.Struct, frozen=True):
    """`alert` fires, and the console shows it, when `level` is above `limit`. `noun` names the level in a sentence."""

    alert: str
    level: str
    limit: float
    noun: str
    unit: Unit = "count"


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold("BatchesConflict", "conflicts_open", 0, "open conflicts"),
    Threshold("ReconcilerBehind", "reconciler_behind_s", 3600, "age of the reconciler's checkpoint", "s"),
    Threshold("QueueBehind", "queue_oldest_s", 900, "age of the oldest pending batch", "s"),
    Threshold("QueueDeadLetters", "queue_dead", 0, "dead letters"),
    Threshold("LogNotCompacting", "log_uncompacted", 1e6, "records that wait for compaction"),
    Threshold("TicksSilverBehind", "ticks_lag_s", 1800, "age of the oldest tick that waits for silver", "s"),
    Threshold("TicksDeadLetters", "ticks_dead", 0, "dead letters of silver"),
    Threshold("LifecycleBlocked", "blockers", 0, "blocked streams"),
    Threshold("LifecycleBehind", "lifecycle_behind_s", 3600, "delay of expiration", "s"),
)
LIMITS = {one.alert: one.limit for one in THRESHOLDS}


def above(alert: str) -> str:
    """The comparison in the alert's expression."""
    limit = LIMITS[alert]
    return f"> {limit:.0f}" if limit < 1e6 else f"> {limit:.0e}".replace("e+06", "e6")
