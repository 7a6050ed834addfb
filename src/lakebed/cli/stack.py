"""`lakebed up`, `status`, `down` and `env`: the whole stack on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import DEFAULT_DIR, Where, in_loop
from lakebed.clock import SystemClock
from lakebed.errors import NotFound
from lakebed.ids import Ids

if TYPE_CHECKING:
    from lakebed.embedded.endpoints import Endpoints, Process
    from lakebed.embedded.stack import Event

NOT_A_STACK = "this is about `lakebed up`: ask processes of your own at /healthz, and the store with lakebed doctor"


def up(
    *,
    detach: Annotated[bool, Parameter(help="return once it is ready and leave it running", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Start the whole stack on this machine and keep it until Ctrl-C, SIGTERM or `lakebed down`.

    State is kept in the folder given by --dir (default: .lakebed); ports are chosen free and written there to
    endpoints.json. Starting again in the same folder keeps the data and the credentials.
    """
    from lakebed.embedded.stack import Stack
    from lakebed.embedded.supervise import detach as start_detached
    from lakebed.embedded.supervise import run

    folder = where.folder
    if where.config is not None:
        _tell_children(where.config)
    if detach:
        work = start_detached(folder, ["up", "--dir", str(folder)], clock=SystemClock(), tell=_tell_process)
        _started(in_loop(lambda: work))
        return
    stack = Stack(folder, clock=SystemClock(), ids=Ids(), tell=_tell)
    in_loop(lambda: run(stack, ready=_started))


def status(*, where: Where = Where(), output: Output = "table") -> int:
    """Show what runs and whether it is healthy. Exits 1 when something is not."""
    from lakebed.embedded.supervise import status as ask_all

    try:
        rows = in_loop(lambda: ask_all(where.folder))
    except NotFound as error:
        if where.names_a_bucket:  # processes of a deployment are not ours to find: whoever started them knows where
            raise NotFound(error.message, hint=NOT_A_STACK) from error
        raise
    emit(rows, output)
    return exits.OK if all(row.state in ("ok", "degraded") for row in rows) else exits.FAILED


def down(
    *,
    now: Annotated[bool, Parameter(help="end it at once instead of draining it", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Stop the stack and wait until nothing of it is left; its data stays. Fine when none runs."""
    from lakebed.embedded.supervise import down as stop

    stopped = in_loop(lambda: stop(where.folder, clock=SystemClock(), now=now))
    told = {
        "stopped": f"stopped; the data stays in {where.folder}",
        "cleared": f"the stack was killed before; what it left is cleared, the data stays in {where.folder}",
        "none": f"nothing runs in {where.folder}",
    }
    say(told[stopped])


def env(*, where: Where = Where(), output: Output = "table") -> None:
    """Print exports for boto3, the AWS CLI, delta-rs and Spark: eval "$(lakebed env)"."""
    from lakebed.embedded.endpoints import environment, find

    values = environment(find(where.folder))
    if output == "table":
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items()))
    else:
        emit(values, output)


def _tell_children(config: Path) -> None:
    """The gateway and the workers read the settings file we were given."""
    os.environ["LAKEBED_CONFIG"] = str(config.absolute())


def _tell(event: Event) -> None:
    if event.what == "ready":
        _ready(event.name, event.seconds, event.detail)
    elif event.what == "died":
        say(f"{event.name:<10} died     {event.detail}")
    else:
        say(f"{event.name:<10} stopped  {event.seconds:5.1f} s")


def _tell_process(process: Process) -> None:
    _ready(process.name, process.ready_s, process.url)


def _ready(name: str, seconds: float, url: str) -> None:
    say(f"{name:<10} ready    {seconds:5.1f} s  {url}")


def _started(endpoints: Endpoints) -> None:
    flag = "" if Path(endpoints.folder) == DEFAULT_DIR.absolute() else f" --dir {shlex.quote(endpoints.folder)}"
    say("")
    say(f'next:  eval "$(lakebed env{flag})"    lakebed status{flag}    lakebed down{flag}')
    print(endpoints.gateway, flush=True)
