"""`lakebed dashboards`."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from lakebed.cli.output import Output, emit, say

app = App(name="dashboards", help="Grafana dashboards and Prometheus alert rules.")


@app.command
def export(folder: Path, *, dry_run: bool = False, output: Output = "table") -> None:
    """Write every dashboard (JSON) and the alert rules (YAML) into FOLDER."""
    from lakebed.dashboards import export as exporting

    if dry_run:
        names = [folder / name for name in exporting.files()]
    else:
        names = exporting.export(folder)
    emit([{"file": str(name)} for name in names], output)
    say("Grafana: Dashboards → New → Import. Prometheus: name the rules under rule_files.")
