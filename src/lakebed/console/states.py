"""The state of each part as the console draws it: green, amber, red, or grey when nothing is known. Pure.

A state needs evidence: a component that answered its health check, or a level that was read from the bucket a short
while ago. Without it the state is grey. Amber and red come from the limits that the alerts have, and name the alert,
whose runbook entry says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from lakebed.console.dashboards.alerts import ALERTS
from lakebed.console.dashboards.thresholds import THRESHOLDS, Threshold
from lakebed.core.context import Health

StateName = Literal["ok", "degraded", "down", "quiet"]
RANK: dict[StateName, int] = {"quiet": 0, "ok": 1, "degraded": 2, "down": 3}
SEVERITY: dict[str, StateName] = {alert.name: "down" if alert.severity == "page" else "degraded" for alert in ALERTS}
SUMMARY = {alert.name: alert.summary for alert in ALERTS}
UNKNOWN = "Not heard from: no data was read from the bucket in the last minutes."


class PartState(msgspec.Struct, frozen=True):
    """`reason` is one sentence or two; `alert` is the alert whose limit is exceeded, or empty."""

    state: StateName
    reason: str
    alert: str = ""


def judge(
    component: str, watches: Sequence[str], health: Mapping[str, Health] | None, levels: Mapping[str, float | None]
) -> PartState:
    """The worst of what is known: the component's own health, and each level against its limit."""
    own = _own(component, health)
    found = [own] if own is not None else []
    found += [state for one in THRESHOLDS if one.level in watches and (state := _exceeded(one, levels)) is not None]
    worst = max(found, key=lambda each: RANK[each.state], default=None)
    if worst is not None and worst.state in ("degraded", "down"):
        return worst
    if own is not None:
        return own
    if any(levels.get(name) is not None for name in watches):
        return PartState("ok", "Within its limits.")
    return PartState("quiet", UNKNOWN)


def worst_of(states: Mapping[str, PartState]) -> StateName:
    """The state of the whole: the worst that is known; grey when nothing is."""
    return max((one.state for one in states.values()), key=RANK.__getitem__, default="quiet")


def _own(component: str, health: Mapping[str, Health] | None) -> PartState | None:
    if not component:
        return None
    if health is None:
        return PartState("quiet", "Not heard from: no health report yet.")
    if component not in health:
        return PartState("quiet", f"This gateway does not serve {component}.")
    status, detail = health[component].status, health[component].detail
    if status not in ("ok", "degraded", "down"):
        return PartState("quiet", f"The health check returned {status!r}.")
    return PartState(status, detail or {"ok": "Its health check passed."}.get(status, "Its health check failed."))


def _exceeded(one: Threshold, levels: Mapping[str, float | None]) -> PartState | None:
    value = levels.get(one.level)
    if value is None or value <= one.limit:
        return None
    unit = " s" if one.unit == "s" else ""
    reason = f"{SUMMARY[one.alert]} Now: {one.noun} {value:,.0f}{unit}, limit {one.limit:,.0f}{unit}."
    return PartState(SEVERITY[one.alert], reason, one.alert)
