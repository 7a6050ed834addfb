"""The alerts as Prometheus rules, and as the runbook they link to."""

from __future__ import annotations

from typing import Any

import yaml

from lakebed.dashboards.alerts import ALERTS
from lakebed.dashboards.model import Alert

RUNBOOK = "docs/operations/alerts.md"


def anchor(alert: Alert) -> str:
    return alert.name.lower()


def rules() -> str:
    """A rules file for Prometheus: one group per part, in the order of ALERTS."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for alert in ALERTS:
        groups.setdefault(alert.part, []).append(
            {
                "alert": f"Lakebed{alert.name}",
                "expr": alert.expr,
                "for": alert.for_,
                "labels": {"severity": alert.severity, "part": alert.part},
                "annotations": {
                    "summary": alert.summary,
                    "description": alert.means,
                    "runbook": f"{RUNBOOK}#{anchor(alert)}",
                },
            }
        )
    listed = {"groups": [{"name": f"lakebed-{part}", "rules": found} for part, found in groups.items()]}
    text: str = yaml.safe_dump(listed, sort_keys=False, allow_unicode=True, width=1000)
    return "# Made by `lakebed dashboards export`; change lakebed/dashboards/alerts.py.\n" + text


def runbook() -> str:
    """What each alert means and what to do, as a page."""
    lines = [
        "# Alerts",
        "",
        "What each alert means and what to do.",
        "A *page* wakes somebody: data is refused or does not move, now. A *ticket* is read in the morning.",
        "This page and the rules are made from one table (`make docs`); the rules are in"
        " [alerts.rules.yaml](../dashboards/alerts.rules.yaml).",
        "",
        "| alert | part | severity | when |",
        "|---|---|---|---|",
    ]
    lines += [f"| [{a.name}](#{anchor(a)}) | {a.part} | {a.severity} | {a.summary} |" for a in ALERTS]
    for alert in ALERTS:
        lines += ["", f"## {alert.name}", "", f"{alert.summary}", f"{alert.means}", ""]
        lines += [f"{number}. {step}" for number, step in enumerate(map(_shown, alert.do), 1)]
        lines += ["", "```promql", alert.expr, "```", "", f"For {alert.for_}, then a {alert.severity}."]
    return "\n".join(lines) + "\n"


def _shown(step: str) -> str:
    """A step that is a command is shown as one."""
    if not step.startswith("lakebed "):
        return step
    command, colon, words = step.partition(": ")
    return f"`{command}`{colon}{words}"
