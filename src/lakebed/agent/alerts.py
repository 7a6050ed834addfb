"""Local alerts: a log line, a metric and a file. `alerts/<kind>.json` exists exactly as long as the problem does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lakebed.agent.model import AgentAlert
from lakebed.core import logs
from lakebed.core.metrics import Metrics

KINDS = {
    "identity_conflict": "another batch was accepted under the identity of a queued one; see lakebed agent conflicts",
    "boot_quarantined": "an operator quarantined this boot: restart the agent; see lakebed agent conflicts",
    "rejected": "a collector rejected a queued batch for good; see lakebed agent conflicts",
    "corrupt": "a queued batch is damaged on this disk; see lakebed agent conflicts",
    "denied": "collectors reject the agent's token or its agent_id",
    "misrouted": "the server at a collector's address is not a collector",
    "queue_full": "the queue is full",
    "disk_trouble": "the disk of the queue fails",
    "tick_refused": "a tick was rejected for good; see lakebed agent ticks list",
    "ticks_stuck": "ticks are waiting, and the service does not accept them now",
    "config_stale": "the configuration snapshot is not refreshed: the last good one is used",
}
PARKED_KINDS = (
    "identity_conflict",
    "boot_quarantined",
    "rejected",
    "corrupt",
)  # these last until the owner has settled what is parked


class Alerts:
    def __init__(self, folder: Path, *, metrics: Metrics, now_ms: Callable[[], int]) -> None:
        self._folder, self._metrics, self._now_ms = folder, metrics, now_ms
        self._log = logs.logger("agent")
        self._on: dict[str, AgentAlert] = {alert.kind: alert for alert in read_alerts(folder)}
        self._shown_on()

    def on(self, kind: str, message: str, **detail: Any) -> None:
        """Raises the alert, or counts it once more. Never fails: the disk may be the very thing in trouble."""
        now, before = self._now_ms(), self._on.get(kind)
        first, count = (before.first_at_ms, before.count + 1) if before else (now, 1)
        alert = AgentAlert(kind, message, first, now, count, detail)
        self._on[kind] = alert
        self._metrics.counter("lakebed_agent_alerts_total").labels(kind).inc()
        self._shown_on()
        if before is None or count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th…: loud, but never a flood
            self._log.error("alert", kind=kind, message=message, count=count, **detail)
        with contextlib.suppress(OSError):
            path = self._folder / f"{kind}.json"
            path.with_suffix(".tmp").write_bytes(msgspec.json.encode(alert))
            path.with_suffix(".tmp").replace(path)

    def off(self, kind: str) -> None:
        if self._on.pop(kind, None) is None:
            return
        self._shown_on()
        self._log.info("alert over", kind=kind)
        with contextlib.suppress(OSError):
            (self._folder / f"{kind}.json").unlink()

    def _shown_on(self) -> None:
        for kind in KINDS:
            self._metrics.gauge("lakebed_agent_alert_on").labels(kind).set(kind in self._on)


class AlertSources:
    """For several that raise the same alerts: one ends when none of them has it on.

    A source that has not reported yet may be the one that raised it in an earlier run.
    """

    def __init__(self, alert: Callable[[str, str | None], None]) -> None:
        self._alert = alert
        self._on: list[dict[str, bool]] = []  # of each source: kinds that it has reported

    def source(self) -> Callable[[str, str | None], None]:
        """Takes a kind with a message, or with None when it is over for this source. Make all before one reports."""
        mine: dict[str, bool] = {}
        self._on.append(mine)

        def alert(kind: str, message: str | None) -> None:
            mine[kind] = message is not None
            if message is not None or not any(each.get(kind, True) for each in self._on):
                self._alert(kind, message)

        return alert


def read_alerts(folder: Path) -> list[AgentAlert]:
    """The alerts that are on, oldest first."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=AgentAlert))
    return sorted(found, key=lambda alert: alert.first_at_ms)
