"""`lakebed serve` and `lakebed work`, the two long-running processes, and `lakebed trail`.

Once a process accepts requests it prints one line of JSON with its address on stdout; logs go to stderr.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit
from lakebed.cli.where import Where, in_loop
from lakebed.core.errors import Invalid
from lakebed.core.trail import FIRST, OperatorAction, TrailHead

Parts = Annotated[str, Parameter(help="parts to run, separated by commas (default: all)")]
Log = Annotated[Literal["debug", "info", "warning", "error"], Parameter(help="lowest level that is logged")]


def serve(
    *,
    parts: Parts = "",
    host: Annotated[str | None, Parameter(help="address to listen on (default: gateway.host)")] = None,
    port: Annotated[int | None, Parameter(help="port to listen on, 0 for a free one (default: gateway.port)")] = None,
    kafka_port: Annotated[
        int | None, Parameter(help="port for Kafka clients, 0 for a free one (default: log.kafka_port)")
    ] = None,
    read_only: Annotated[bool | None, Parameter(help="register no route that writes", negative="")] = None,
    log: Log = "info",
    where: Where = Where(),
) -> None:
    """Run a gateway until SIGTERM or Ctrl-C, then drain it."""
    from lakebed.core import logs
    from lakebed.wiring.processes import serve as run

    logs.configure(log)
    flags = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.read_only": read_only,
        "log.kafka_port": kafka_port,
    }
    run(where.reaching(_given(flags)), _names(parts), ready=_print_ready)


def work(
    *,
    parts: Annotated[
        str,
        Parameter(
            help="parts to run, separated by commas (default: all); ticks, silver, bronze and pipeline each include "
            "the worker that loads sources and dispatches silver and gold, silver nothing else"
        ),
    ] = "",
    host: Annotated[str | None, Parameter(help="address for health and metrics (default: gateway.host)")] = None,
    port: Annotated[int | None, Parameter(help="port for health and metrics (default: gateway.work_port)")] = None,
    log: Log = "info",
    where: Where = Where(),
) -> None:
    """Run the workers beside the gateway until SIGTERM or Ctrl-C, then drain them."""
    from lakebed.core import logs
    from lakebed.wiring.processes import work as run

    logs.configure(log)
    run(where.reaching(_given({"gateway.host": host, "gateway.work_port": port})), _names(parts), ready=_print_ready)


def _names(parts: str) -> list[str]:
    return [name.strip() for name in parts.split(",") if name.strip()]


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value is not None}


def _print_ready(ready: Any) -> None:
    import sys

    emit(ready, "jsonl")
    sys.stdout.flush()


app = App(name="trail", help="Show operator actions: who, when, why, and the result.")


@app.command
def verify(
    *,
    noted: Annotated[str, Parameter(help="an end of the trail that was printed before, NUMBER:SHA256")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Read the whole trail and check that no entry was changed, inserted or removed. Keep the printed end elsewhere."""
    context = where.context("trail")
    number, _, sha256 = noted.partition(":")
    if noted and not (number.isdecimal() and len(sha256) == len(FIRST)):
        raise Invalid(f"{noted!r} is not an end of a trail", hint="NUMBER:SHA256, as lakebed trail verify prints it")
    before = TrailHead(int(number), sha256) if noted else TrailHead()
    head = in_loop(lambda: context.trail.verify(before))
    emit({"entries": head.number, "end": str(head)}, output)


@app.default
def trail(*, limit: int = 50, where: Where = Where(), output: Output = "table") -> None:
    """Show the operator actions, newest first: who, from where, when, what, why, and the outcome.

    Parameters
    ----------
    limit
        how many to show.
    """
    context = where.context("trail")
    found = in_loop(lambda: context.trail.latest(limit))
    emit([_row(action) for action in found] if output == "table" else found, output)


def _row(action: OperatorAction) -> dict[str, str]:
    """A table row with a readable time; -o json has every field."""
    at = datetime.fromtimestamp(action.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    subject = ", ".join(f"{name} {value}" for name, value in action.subject.items() if value)
    who = f"{action.who} ({action.address})" if action.address else action.who
    row = {"at": at, "who": who, "what": action.what, "subject": subject, "reason": action.reason}
    return row | {"outcome": action.outcome or "begun", "detail": action.detail}
