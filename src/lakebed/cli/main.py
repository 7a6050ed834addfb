"""The command's root: noun, then verb. Each noun is loaded only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from lakebed import __version__
from lakebed.cli import exits
from lakebed.cli.output import say
from lakebed.errors import LakebedError

ABOUT = """Everything that lies under a data lake, on one bucket.

First: lakebed up --detach, then lakebed status. Each command explains itself: lakebed queue --help.
"""

app = App(name="lakebed", help=ABOUT, version=__version__)

Row = tuple[str, str, str]  # place, name, one line
# In the order people meet them; places are imported on use.
GROUPS: dict[str, tuple[Row, ...]] = {
    "Begin": (
        ("lakebed.cli.stack:up", "up", "Start the whole stack on this machine and keep it."),
        ("lakebed.cli.stack:status", "status", "Show what runs and whether it is healthy."),
        ("lakebed.cli.stack:down", "down", "Stop the stack; its data stays."),
        ("lakebed.cli.stack:env", "env", "Print exports for boto3, the AWS CLI and Spark."),
        ("lakebed.cli.demo:demo", "demo", "Run every part once, with faults, and prove the totals."),
        ("lakebed.cli.doctor:doctor", "doctor", "Check this machine and the store, with a fix for each problem."),
        ("lakebed.cli.settings:settings", "settings", "Show every setting, its value and where it comes from."),
    ),
    "Data in and out": (
        ("lakebed.cli.agent:app", "agent", "Collect samples into a disk queue and send them to collectors."),
        ("lakebed.cli.batches:app", "batches", "Metric batches: frames, conflicts, repair, garbage, queries."),
        ("lakebed.cli.topics:app", "topics", "The log: list, describe, produce, consume, trim, fence, delete."),
        ("lakebed.cli.queue:app", "queue", "Queues: status, contents, dead letters."),
        ("lakebed.cli.ticks:app", "ticks", "Ticks: upload Parquet files, see how they stand."),
    ),
    "Tables": (
        ("lakebed.cli.pipeline:app", "pipeline", "Batches and topics into bronze; compaction and vacuum of tables."),
        ("lakebed.cli.silver:app", "silver", "Silver: dispatch, dead letters, replays."),
        ("lakebed.cli.tables:app", "tables", "Tables: list, schema and versions, sample rows."),
    ),
    "Operate": (
        ("lakebed.cli.serve:serve", "serve", "Run a gateway."),
        ("lakebed.cli.serve:work", "work", "Run the workers beside the gateway."),
        ("lakebed.cli.lifecycle:app", "lifecycle", "Expiration rules that really run: put, dry-run, status, why."),
        ("lakebed.cli.audit:audit", "audit", "Join everything against one listing of the bucket; say what is wrong."),
        ("lakebed.cli.trail:trail", "trail", "Show what operators did by hand: who, when, why, and how it ended."),
        ("lakebed.cli.dashboards:app", "dashboards", "Grafana dashboards and Prometheus alert rules."),
        ("lakebed.cli.bucket:app", "bucket", "What the bucket itself must be told."),
        ("lakebed.cli.meta:app", "meta", "Look into the ordered keys the log coordinates through."),
    ),
    "Prove": (
        ("lakebed.cli.sim:sim", "sim", "Run seeded simulations; replay one by its number."),
        ("lakebed.cli.bench:bench", "bench", "Measure a part beside the bare thing beneath it."),
    ),
}
COMMANDS: tuple[Row, ...] = tuple(row for rows in GROUPS.values() for row in rows)

for order, (title, rows) in enumerate(GROUPS.items()):
    group = Group(title, sort_key=order)
    for within, (place, name, about) in enumerate(rows):
        app.command(place, name=name, help=about, group=group, sort_key=within)
others = Group("Others", sort_key=len(GROUPS))
app.register_install_completion_command(name="completion", group=others)
app["--help"].group = app["--version"].group = (others,)


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Errors made on purpose print short lines, never a trace."""
    try:
        result = app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        say(f"error: {error}")
        say(f"next:  {' '.join(('lakebed', *(error.command_chain or ())))} --help")
        return exits.USAGE
    except LakebedError as error:
        say(f"error: {error.message}")
        if error.hint:
            say(f"next:  {error.hint}")
        return exits.code_for(error)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout has gone: `lakebed … | head`
        sys.stderr.close()
        return exits.OK
    return result if isinstance(result, int) else exits.OK
