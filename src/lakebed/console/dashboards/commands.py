"""`lakebed dashboards`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say

app = App(name="dashboards", help="Grafana dashboards and Prometheus alert rules.")


@app.command
def export(
    folder: Annotated[Path, Parameter(help="folder for the files")],
    *,
    dry_run: Annotated[bool, Parameter(help="print the file names, write nothing", negative="")] = False,
    output: Output = "table",
) -> None:
    """Write every dashboard (JSON) and the alert rules (YAML) into FOLDER."""
    from lakebed.console.dashboards import export as exporting

    if dry_run:
        names = [folder / name for name in exporting.files()]
    else:
        names = exporting.export(folder)
    emit([{"file": str(name)} for name in names], output)
    say("Grafana: Dashboards → New → Import. Prometheus: add the rules to rule_files.")
