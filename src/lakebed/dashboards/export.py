"""Every file that `lakebed dashboards export` writes, and that is committed under docs/dashboards."""

from __future__ import annotations

from pathlib import Path

from lakebed.dashboards import grafana
from lakebed.dashboards.boards import boards
from lakebed.dashboards.rules import rules

RULES = "alerts.rules.yaml"


def files() -> dict[str, str]:
    """{name: text}. The same table of metrics gives the same bytes."""
    return {f"{board.name}.json": grafana.encode(board) for board in boards()} | {RULES: rules()}


def export(folder: Path) -> list[Path]:
    """Writes them all; what else is in the folder stays."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written
