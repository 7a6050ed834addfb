"""Dashboards and alerts as values, independent of an output format."""

from __future__ import annotations

from typing import Literal

import msgspec


class PanelQuery(msgspec.Struct, frozen=True):
    """One PromQL expression and the legend of its lines."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True):
    """One plot. `unit` is one of Grafana's own names."""

    title: str
    about: str
    queries: tuple[PanelQuery, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"


class Board(msgspec.Struct, frozen=True):
    """One dashboard; `name` is its file and its permanent id."""

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]


class Alert(msgspec.Struct, frozen=True):
    """A condition that needs action. `means` and `do` are its runbook entry."""

    name: str
    part: str
    expr: str
    for_: str
    severity: Literal["page", "ticket"]
    summary: str
    means: str
    do: tuple[str, ...]
