"""What is shown, before it is written in anybody's format."""

from __future__ import annotations

from typing import Literal

import msgspec


class Query(msgspec.Struct, frozen=True):
    """One PromQL expression and how its lines are named."""

    expr: str
    legend: str = ""


class Panel(msgspec.Struct, frozen=True):
    """One plot. `unit` is one of Grafana's own names."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"


class Board(msgspec.Struct, frozen=True):
    """One dashboard; `name` is its file and its permanent id."""

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]


class Alert(msgspec.Struct, frozen=True):
    """A condition that somebody should act on. `means` and `do` are its runbook."""

    name: str
    part: str
    expr: str
    for_: str
    severity: Literal["page", "ticket"]
    summary: str
    means: str
    do: tuple[str, ...]
