"""A board in Grafana's JSON. The ids are fixed, so importing a newer one replaces the older."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.dashboards.model import Board, Panel

SCHEMA = 39  # of Grafana 10.4 and newer
COLUMNS, PANEL_W, PANEL_H, STAT_W, STAT_H = 24, 12, 8, 6, 4
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(board: Board) -> dict[str, Any]:
    return {
        "uid": f"lakebed-{board.name}",
        "title": board.title,
        "description": board.about,
        "tags": ["lakebed"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _instance()]},
        "links": [{"type": "dashboards", "title": "Lakebed", "tags": ["lakebed"], "asDropdown": True}],
        "panels": _laid(board.panels),
    }


def encode(board: Board) -> str:
    return msgspec.json.format(msgspec.json.encode(dashboard(board)), indent=2).decode() + "\n"


def _laid(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """From left to right, a new row where one is full or the height changes."""
    out: list[dict[str, Any]] = []
    x = y = row_h = 0
    for number, panel in enumerate(panels, 1):
        width, height = (STAT_W, STAT_H) if panel.kind == "stat" else (PANEL_W, PANEL_H)
        if x + width > COLUMNS or (row_h and height != row_h):
            x, y = 0, y + row_h
        out.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x, row_h = x + width, height
    return out


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"custom": {"fillOpacity": 10, "showPoints": "never"}} if panel.kind == "timeseries" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if panel.kind == "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expr, "legendFormat": query.legend, "datasource": SOURCE}
            for at, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _instance() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(lakebed_build_info, instance)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
