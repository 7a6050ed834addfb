"""The root of the `lakebed` command: noun, then verb. Each noun is loaded only when it is used."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from lakebed import __version__
from lakebed.cli import exits
from lakebed.cli.output import say
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, LakebedError, Unavailable
from lakebed.wiring.part import Command
from lakebed.wiring.parts import DATA, OPERATE, PARTS, TABLES

COMPLETION = "Print the completion script of a shell; --install adds it to the shell's startup file."
ABOUT = """A data lake on one bucket: ingest, log, queue, uploads, Spark pipeline, lifecycle rules.

First: lakebed up --detach, then lakebed status. Each command explains itself: lakebed queue --help.
"""

# Plain text: loading a renderer of Markdown would take half of the time of `lakebed --help`.
app = App(
    name="lakebed",
    help=ABOUT,
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(validator=lambda kind, value: _not_negative(value)),
)


def _not_negative(value: object) -> None:
    """No number that a command takes (a count, a limit, a port, seconds) may be below 0."""
    if isinstance(value, int | float) and value < 0:
        raise ValueError(f"{value} is below 0")


OWN: dict[str, tuple[Command, ...]] = {
    "Begin": (
        Command(
            "lakebed.embedded.commands:up",
            "up",
            "Start the whole stack on this machine and keep it.",
            "Begin",
            extra="embedded",
        ),
        Command("lakebed.embedded.commands:status", "status", "Show what runs and whether it is healthy.", "Begin"),
        Command("lakebed.embedded.commands:down", "down", "Stop the stack; its data stays.", "Begin"),
        Command("lakebed.embedded.commands:env", "env", "Print exports for boto3, the AWS CLI and Spark.", "Begin"),
        Command(
            "lakebed.demo.commands:demo",
            "demo",
            "Run every part with faults and check the totals.",
            "Begin",
            extra="all",
        ),
        Command(
            "lakebed.wiring.doctor:doctor",
            "doctor",
            "Check this machine and the store, with a fix for each problem.",
            "Begin",
            extra="server",
        ),
        Command("lakebed.cli.where:settings", "settings", "Show the settings, their values and sources.", "Begin"),
    ),
    DATA: (),
    TABLES: (Command("lakebed.lake.commands:sql", "sql", "Query the tables with SQL.", TABLES, extra="sql"),),
    OPERATE: (
        Command("lakebed.wiring.commands:serve", "serve", "Run a gateway.", OPERATE, extra="server"),
        Command("lakebed.wiring.commands:work", "work", "Run the workers beside the gateway.", OPERATE, extra="server"),
        Command(
            "lakebed.wiring.commands:app", "trail", "Show operator actions: who, when, why, and the result.", OPERATE
        ),
        Command(
            "lakebed.console.dashboards.commands:app",
            "dashboards",
            "Grafana dashboards, Prometheus alert rules.",
            OPERATE,
            extra="server",
        ),
    ),
    "Prove": (
        Command(
            "lakebed.sim.commands:sim",
            "sim",
            "Run seeded simulations; replay one by its seed.",
            "Prove",
            extra="server",
        ),
        Command(
            "lakebed.bench.commands:bench",
            "bench",
            "Measure a part relative to the raw store or server below it.",
            "Prove",
            extra="all",
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
app.command("lakebed.cli.completion:completion", name="completion", group=others, help=COMPLETION)
app["--help"].group = app["--version"].group = (others,)

# Commands that run until they are stopped: how long they ran is no news.
STAYS = ("agent", "serve", "up", "work")
SLOW_S = 3.0  # a command that took longer ends with the time it took

_OS_HINTS = {
    errno.EACCES: "name a path that this user may write, or run as its owner",
    errno.EROFS: "the file system is read-only: name a path on another one",
    errno.ENOSPC: "the disk is full: free some space, or name a path on another disk",
    errno.EDQUOT: "the disk quota is used up: free some space, or name a path on another disk",
    errno.ENOTDIR: "a part of the path is a file: name a folder",
    errno.EEXIST: "something else is at this path: name another one",
    errno.EISDIR: "the path is a folder: name a file",
}


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. A LakebedError prints its message and hint, not a traceback."""
    clock = SystemClock()
    started_s = clock.monotonic_s()
    code = _run(argv)
    took_s = clock.monotonic_s() - started_s
    if took_s > SLOW_S and code != exits.INTERRUPTED and argv[:1] and argv[0] not in STAYS:
        say(f"{' '.join(_command(argv))}: {'done' if code == exits.OK else f'exit code {code}'} after {took_s:.1f} s")
    return code


def _command(argv: Sequence[str]) -> list[str]:
    return ["lakebed", *app.parse_commands(list(argv))[0]]


def _run(argv: Sequence[str]) -> int:
    try:
        if _empty_reason(argv):
            raise Invalid("--reason is empty: a reason is required", hint="the audit trail keeps it: --reason TEXT")
        _load_commands_of_group(argv)
        result = app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        surplus = error.unused_tokens if isinstance(error, UnusedCliTokensError) else None
        say(f"error: unexpected argument: {' '.join(surplus)}" if surplus else f"error: {error}")
        say(f"next:  {' '.join(('lakebed', *(error.command_chain or ())))} --help")
        return exits.USAGE
    except LakebedError as error:
        say(f"error: {error.message}")
        if hint := _full_disk(argv, error) or error.hint or _help_of(argv, error):
            say(f"next:  {hint}")
        return exits.code_for(error)
    except ImportError as error:
        if not (package := _missing_package(error)):
            raise
        say(f"error: this needs the Python package {package}, which is not installed")
        say(f"next:  pip install 'lakebed[{_extra_of(argv)}]'")
        return exits.USAGE
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:  # the reader of stdout is gone: `lakebed … | head`
        sys.stderr.close()
        return exits.OK
    except TimeoutError as error:  # an OSError too, but not of a path
        say(f"error: no answer in time{f': {error}' if str(error) else ''}")
        say("next:  try again; lakebed status shows what is running")
        return exits.FAILED
    except OSError as error:  # a folder that is a file, a read-only place, a full disk
        say(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        say(f"next:  {_OS_HINTS.get(error.errno or 0, 'check the path and the permissions, then try again')}")
        return exits.FAILED
    return result if isinstance(result, int) else exits.OK


def _load_commands_of_group(argv: Sequence[str]) -> None:
    """Loads the commands of the group that is named alone, because its help shows a command's text only when loaded.

    The commands of `lakebed` itself stay unloaded: the table above has their texts.
    """
    _, apps, _ = app.parse_commands([word for word in argv if word not in app.help_flags])
    group = apps[-1]
    if group is app or group.default_command is not None:
        return
    with suppress(ImportError):  # of an extra: the group's other commands have their help all the same
        for name in group:
            group[name]


def _empty_reason(argv: Sequence[str]) -> bool:
    """Whether an empty reason is given, as by an unset variable of a script. Every command names it `--reason`."""
    given = [word.partition("=")[2] for word in argv if word.startswith("--reason=")]
    given += [after for word, after in pairwise(argv) if word == "--reason"]
    return any(not reason.strip() for reason in given)


def _missing_package(error: BaseException | None) -> str:
    """The package of others that an import did not find; empty when something else is wrong with it."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").split(".")[0]) not in ("", "lakebed"):
            return name
        error = error.__cause__ or error.__context__
    return ""


def _extra_of(argv: Sequence[str]) -> str:
    """The extra that brings what a command needs."""
    return next((row.extra for row in COMMANDS if argv[:1] == [row.name] and row.extra), "all")


def _full_disk(argv: Sequence[str], error: LakebedError) -> str:
    """What to do about a full disk of the local stack: its bucket answers a refused write with a bare error."""
    if not isinstance(error, Unavailable):
        return ""
    from lakebed.cli.where import Where
    from lakebed.embedded.endpoints import ENDPOINTS_FILE, disk_shortage

    named = next((Path(after) for word, after in pairwise(argv) if word == "--dir"), None)
    folder = Where(named).folder
    mine = folder if argv[0] == "up" else folder / ENDPOINTS_FILE
    return disk_shortage(folder) if mine.exists() else ""


def _help_of(argv: Sequence[str], error: LakebedError) -> str:
    """The help of the command, for invalid input whose error has no hint."""
    if not isinstance(error, Invalid):
        return ""
    return " ".join((*_command(argv), "--help"))
