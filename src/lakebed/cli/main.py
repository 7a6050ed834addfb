"""The root of the `lakebed` command: noun, then verb. Each noun is loaded only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from lakebed import __version__
from lakebed.cli import exits
from lakebed.cli.output import say
from lakebed.core.errors import Invalid, LakebedError
from lakebed.wiring.parts import DATA, OPERATE, PARTS, TABLES, Command

ABOUT = """Everything that lies under a data lake, on one bucket.

First: lakebed up --detach, then lakebed status. Each command explains itself: lakebed queue --help.
"""

app = App(name="lakebed", help=ABOUT, version=__version__)

OWN: dict[str, tuple[Command, ...]] = {
    "Begin": (
        Command("lakebed.embedded.commands:up", "up", "Start the whole stack on this machine and keep it.", "Begin"),
        Command("lakebed.embedded.commands:status", "status", "Show what runs and whether it is healthy.", "Begin"),
        Command("lakebed.embedded.commands:down", "down", "Stop the stack; its data stays.", "Begin"),
        Command("lakebed.embedded.commands:env", "env", "Print exports for boto3, the AWS CLI and Spark.", "Begin"),
        Command("lakebed.demo.commands:demo", "demo", "Run every part with faults and check the totals.", "Begin"),
        Command(
            "lakebed.wiring.doctor:doctor",
            "doctor",
            "Check this machine and the store, with a fix for each problem.",
            "Begin",
        ),
        Command("lakebed.cli.where:settings", "settings", "Show the settings, their values and sources.", "Begin"),
    ),
    DATA: (),
    TABLES: (),
    OPERATE: (
        Command("lakebed.wiring.commands:serve", "serve", "Run a gateway.", OPERATE),
        Command("lakebed.wiring.commands:work", "work", "Run the workers beside the gateway.", OPERATE),
        Command(
            "lakebed.wiring.commands:trail", "trail", "Show operator actions: who, when, why, and the result.", OPERATE
        ),
        Command(
            "lakebed.dashboards.commands:app", "dashboards", "Grafana dashboards, Prometheus alert rules.", OPERATE
        ),
    ),
    "Prove": (
        Command("lakebed.sim.commands:sim", "sim", "Run seeded simulations; replay one by its seed.", "Prove"),
        Command(
            "lakebed.bench.commands:bench",
            "bench",
            "Measure a part relative to the raw store or server below it.",
            "Prove",
        ),
    ),
}
# The commands of no part, then those of the parts; modules are imported on use.
GROUPS: dict[str, tuple[Command, ...]] = {
    group: (*own, *(command for part in PARTS for command in part.commands if command.group == group))
    for group, own in OWN.items()
}
COMMANDS: tuple[Command, ...] = tuple(row for rows in GROUPS.values() for row in rows)

for order, (title, rows) in enumerate(GROUPS.items()):
    group = Group(title, sort_key=order)
    for within, row in enumerate(rows):
        app.command(row.place, name=row.name, help=row.about, group=group, sort_key=within)
others = Group("Others", sort_key=len(GROUPS))
app.register_install_completion_command(name="completion", group=others)
app["--help"].group = app["--version"].group = (others,)


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. A LakebedError prints its message and hint, not a traceback."""
    try:
        result = app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        say(f"error: {error}")
        say(f"next:  {' '.join(('lakebed', *(error.command_chain or ())))} --help")
        return exits.USAGE
    except LakebedError as error:
        say(f"error: {error.message}")
        if hint := error.hint or _help_of(argv, error):
            say(f"next:  {hint}")
        return exits.code_for(error)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:  # the reader of stdout is gone: `lakebed … | head`
        sys.stderr.close()
        return exits.OK
    return result if isinstance(result, int) else exits.OK


def _help_of(argv: Sequence[str], error: LakebedError) -> str:
    """The help of the command, for invalid input whose error has no hint."""
    if not isinstance(error, Invalid):
        return ""
    return " ".join(("lakebed", *app.parse_commands(list(argv))[0], "--help"))
