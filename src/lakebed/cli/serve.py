"""`lakebed serve` and `lakebed work`: the two long-running processes.

Once requests are answered, one line of JSON on stdout says where; everything else is logs, on stderr.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from lakebed.cli.output import emit
from lakebed.cli.where import Where

Parts = Annotated[str, Parameter(help="parts to run, separated by commas (default: all)")]
Log = Annotated[Literal["debug", "info", "warning", "error"], Parameter(help="least level that is logged")]


def serve(
    *,
    parts: Parts = "",
    host: Annotated[str | None, Parameter(help="address to listen on (default: gateway.host)")] = None,
    port: Annotated[int | None, Parameter(help="port to listen on, 0 for a free one (default: gateway.port)")] = None,
    read_only: Annotated[bool | None, Parameter(help="register no route that writes", negative="")] = None,
    log: Log = "info",
    where: Where = Where(),
) -> None:
    """Run a gateway until SIGTERM or Ctrl-C, then drain it."""
    from lakebed import logs
    from lakebed.gateway.serve import serve as run

    logs.configure(log)
    flags = {"gateway.host": host, "gateway.port": port, "gateway.read_only": read_only}
    run(where.reaching(_given(flags)), _names(parts), ready=_say)


def work(
    *,
    parts: Parts = "",
    host: Annotated[str | None, Parameter(help="address for health and metrics (default: gateway.host)")] = None,
    port: Annotated[int | None, Parameter(help="port for health and metrics (default: gateway.work_port)")] = None,
    log: Log = "info",
    where: Where = Where(),
) -> None:
    """Run the workers beside the gateway until SIGTERM or Ctrl-C, then drain them."""
    from lakebed import logs
    from lakebed.gateway.work import work as run

    logs.configure(log)
    run(where.reaching(_given({"gateway.host": host, "gateway.work_port": port})), _names(parts), ready=_say)


def _names(parts: str) -> list[str]:
    return [name.strip() for name in parts.split(",") if name.strip()]


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value is not None}


def _say(ready: Any) -> None:
    import sys

    emit(ready, "jsonl")
    sys.stdout.flush()
