"""`lakebed up`, `status`, `down` and `env`: the local stack."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import DEFAULT_DIR, Where, as_operator, in_loop
from lakebed.core.clock import SystemClock
from lakebed.core.errors import NotFound
from lakebed.core.runtime import system_runtime

if TYPE_CHECKING:
    from lakebed.embedded.endpoints import Endpoints, StackProcess
    from lakebed.embedded.stack import StackEvent

NOT_A_STACK = (
    "status shows a stack of `lakebed up`; check your own processes at /healthz, and the store with lakebed doctor"
)


def up(
    *,
    detach: Annotated[bool, Parameter(help="return once it is ready and leave it running", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Start the stack on this machine and run it until Ctrl-C, SIGTERM or `lakebed down`.

    State is kept in the folder given by --dir (default: .lakebed); ports are chosen free and written there to
    endpoints.json. Starting again in the same folder keeps the data and the credentials.
    """
    from lakebed.embedded.stack import Stack
    from lakebed.embedded.supervise import detach as start_detached
    from lakebed.embedded.supervise import run

    folder = where.folder
    if where.config is not None:
        _configure_children(where.config)
    if detach:
        work = start_detached(folder, ["up", "--dir", str(folder)], clock=SystemClock(), report=_report_process)
        _started(in_loop(lambda: work))
        return
    stack = Stack(folder, runtime=system_runtime(), report=_report, settings_file=where.settings_file)
    in_loop(lambda: run(stack, ready=_started))


def status(*, where: Where = Where(), output: Output = "table") -> int:
    """Show the processes of the stack and their health. Exits 1 when one is down."""
    from lakebed.embedded.supervise import status as status_of
    from lakebed.wiring.parts import warnings_about

    try:
        rows = in_loop(lambda: status_of(where.folder))
    except NotFound as error:
        if where.names_a_bucket:  # only the operator knows where the processes of a deployment run
            raise NotFound(error.message, hint=NOT_A_STACK) from error
        raise
    for gateway in (row for row in rows if row.name == "gateway" and row.url):
        say(f"console    {gateway.url}/")
    for text in warnings_about(where.settings()):
        say(f"warning: {text}")
    emit(rows, output)
    return exits.OK if all(row.state in ("ok", "degraded") for row in rows) else exits.FAILED


def down(
    *,
    now: Annotated[bool, Parameter(help="kill it at once instead of draining it", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Stop the stack and wait until all its processes have ended; its data stays. Succeeds when none runs."""
    from lakebed.embedded.supervise import down as stop

    stopped = in_loop(lambda: stop(where.folder, clock=SystemClock(), now=now))
    message = {
        "stopped": f"stopped; the data stays in {where.folder}",
        "cleared": f"cleaned up after a killed stack; the data stays in {where.folder}",
        "none": f"no stack runs in {where.folder}",
    }
    say(message[stopped])


def env(*, where: Where = Where(), output: Output = "table") -> None:
    """Print exports for boto3, the AWS CLI, delta-rs and Spark: eval "$(lakebed env)"."""
    from lakebed.embedded.endpoints import environment, find

    values = environment(find(where.folder))
    if output == "table":
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items()))
    else:
        emit(values, output)


def create_bucket(
    name: Annotated[str, Parameter(help="name of the new bucket")],
    /,
    *,
    dry_run: Annotated[bool, Parameter(help="only show what would happen", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Create a bucket beside Lakebed's own, for example to try lifecycle rules on it."""
    from lakebed.store.admin import create_bucket as create
    from lakebed.store.settings import StoreSettings

    context = where.context("cli")

    async def work() -> None:
        async with as_operator(context, "bucket.create", {"bucket": name}):
            await create(context.settings.of(StoreSettings), name)

    if not dry_run:
        in_loop(work)
    say(f"{'would create' if dry_run else 'created'} the bucket {name}")


def _configure_children(config: Path) -> None:
    """The gateway and the workers read the settings file of this command."""
    os.environ["LAKEBED_CONFIG"] = str(config.absolute())


def _report(event: StackEvent) -> None:
    if event.what == "ready":
        _ready(event.name, event.seconds, event.detail)
    elif event.what == "full":
        say(f"{event.name:<10} full     {event.detail}")
    elif event.what == "died":
        say(f"{event.name:<10} died     {event.detail}")
    else:
        say(f"{event.name:<10} stopped  {event.seconds:5.1f} s")


def _report_process(process: StackProcess) -> None:
    _ready(process.name, process.ready_s, process.url)


def _ready(name: str, seconds: float, url: str) -> None:
    say(f"{name:<10} ready    {seconds:5.1f} s  {url}")


def _started(endpoints: Endpoints) -> None:
    flag = "" if Path(endpoints.folder) == DEFAULT_DIR.absolute() else f" --dir {shlex.quote(endpoints.folder)}"
    say("")
    say(f"console    {endpoints.gateway}/")
    say(f'next:  eval "$(lakebed env{flag})"    lakebed status{flag}    lakebed down{flag}')
    print(endpoints.gateway, flush=True)
