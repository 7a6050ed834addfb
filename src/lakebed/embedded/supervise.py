"""The supervisor process of a stack, and how commands start, inspect and stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import Conflict, NotFound, Unavailable
from lakebed.embedded.child import TAIL_LINES
from lakebed.embedded.endpoints import (
    SUPERVISOR,
    Endpoints,
    StackProcess,
    disk_shortage,
    find,
    is_held,
    start_ticks,
)
from lakebed.embedded.program import BUCKET_GRACE_S, DRAIN_S, probe
from lakebed.embedded.stack import Stack, clear_killed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DOWN_S = DRAIN_S + BUCKET_GRACE_S + 15.0  # all grace periods, and some seconds for the kernel
UP_S = 240.0  # three programs at 60 s each, and some more
POLL_S = 0.1
SUPERVISOR_LOG = "supervisor.log"
DETAIL_MAX = 500  # characters of the reason in a row of `status`


async def run(stack: Stack, *, ready: Callable[[Endpoints], None] = lambda _: None) -> None:
    """Runs the stack until SIGTERM, Ctrl-C or a closed terminal, then drains it; a second signal kills it at once.

    Raises what `Stack.start` and `Stack.watch` raise, with no process left.
    """
    stopping, killing = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    handled = [
        number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    ]  # ignored under nohup
    for number in handled:
        loop.add_signal_handler(number, lambda: killing.set() if stopping.is_set() else stopping.set())

    async def keep() -> None:
        ready(await stack.start())
        await stack.watch()

    kept = asyncio.create_task(keep())
    try:
        await _first(kept, stopping)
    finally:
        stopped = asyncio.create_task(stack.stop())
        try:
            await _first(stopped, killing)
        finally:
            for number in handled:
                loop.remove_signal_handler(number)


async def _first(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Returns when the task has ended (raising what it raised) or the event came, which cancels the task."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


class ProcessStatus(msgspec.Struct, frozen=True):
    """One line of `lakebed status`."""

    name: str
    state: Literal["ok", "degraded", "down", "gone"]
    url: str
    pid: int
    restarts: int
    ready_s: float
    detail: str = ""
    kafka: str = ""


async def status(folder: Path) -> list[ProcessStatus]:
    """Every process of the stack with its health. Raises NotFound when no stack runs there."""
    endpoints = find(folder)
    return list(await asyncio.gather(*(_row(process, endpoints) for process in endpoints.processes)))


async def _row(process: StackProcess, endpoints: Endpoints) -> ProcessStatus:
    state, detail = await _condition(process)
    if process.name == "bucket" and state == "ok" and (shortage := disk_shortage(Path(endpoints.folder))):
        state, detail = "down", shortage
    kafka = endpoints.kafka if process.name == "gateway" else ""
    return ProcessStatus(
        process.name, state, process.url, process.pid, process.restarts, process.ready_s, detail, kafka
    )


async def _condition(process: StackProcess) -> tuple[Literal["ok", "degraded", "down", "gone"], str]:
    if process.start_ticks and start_ticks(process.pid) != process.start_ticks:
        return "gone", "it died; the supervisor restarts it"
    if not process.url:
        return "ok", ""
    if process.name == "bucket":
        answer = await probe(process.url, "/")
        return (
            ("ok", "") if answer.status else ("down", answer.body)
        )  # any response, also a refusal, means that it runs
    answer = await probe(process.url, "/healthz")
    if answer.status == 200:
        return ("degraded", _unwell(answer.body)) if '"degraded"' in answer.body else ("ok", "")
    return "down", _unwell(answer.body)


class _Component(msgspec.Struct, frozen=True):
    status: str
    detail: str = ""


class _Report(msgspec.Struct, frozen=True):
    """What `/healthz` answers, as far as it is needed here."""

    components: dict[str, _Component]


def _unwell(body: str) -> str:
    """The components that are not well, with their reasons; another text as it is."""
    try:
        found = msgspec.json.decode(body, type=_Report).components
    except msgspec.DecodeError:
        return body[:DETAIL_MAX]
    named = [
        f"{name} is {one.status}" + (f": {one.detail}" if one.detail else "")
        for name, one in found.items()
        if one.status != "ok"
    ]
    return ("; ".join(named) or body)[:DETAIL_MAX]


async def down(folder: Path, *, clock: Clock, now: bool = False) -> Literal["stopped", "cleared", "none"]:
    """Stops the stack in the folder and waits until its processes have ended; cleans up after a killed one.

    With `now` it is not drained. Raises Unavailable when it does not end in time.
    """
    try:
        supervisor = find(folder).process(SUPERVISOR)
    except NotFound:
        if not is_held(folder):
            return "cleared" if await clear_killed(folder, clock=clock) else "none"
        raise
    deadline = clock.monotonic_s() + DOWN_S
    _signal(supervisor)
    while is_held(folder):
        if clock.monotonic_s() >= deadline:
            raise Unavailable(
                f"the stack in {folder} did not stop within {DOWN_S:.0f} s", hint="lakebed down --now kills it"
            )
        await clock.sleep(POLL_S)
        if now:
            _signal(supervisor)
    return "stopped"


def _signal(supervisor: StackProcess) -> None:
    """SIGTERM for the supervisor, if that pid is still it."""
    if supervisor.start_ticks and start_ticks(supervisor.pid) != supervisor.start_ticks:
        return
    try:
        os.kill(supervisor.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise Conflict(f"the stack belongs to another user (pid {supervisor.pid})") from error


async def detach(
    folder: Path, argv: Sequence[str], *, clock: Clock, report: Callable[[StackProcess], None] = lambda _: None
) -> Endpoints:
    """Starts `lakebed up` as a separate process that outlives this one, and returns once the stack is ready.

    Reports each process as it becomes ready. Raises Unavailable with the last log lines when the start fails.
    """
    if is_held(folder):
        raise Conflict(
            f"a stack already runs in {folder}", hint="check it with lakebed status, stop it with lakebed down"
        )
    supervisor = _spawn(folder / SUPERVISOR_LOG, argv)
    deadline = clock.monotonic_s() + UP_S
    reported = {SUPERVISOR}
    while clock.monotonic_s() < deadline:
        code = supervisor.poll()
        if code is not None:
            raise Unavailable(f"the stack did not start (code {code}):\n{_last_lines(folder)}")
        endpoints = _found(folder, supervisor.pid)
        for process in endpoints.processes if endpoints else ():
            if process.name not in reported:
                reported.add(process.name)
                report(process)
        if endpoints and endpoints.state == "ready":
            return endpoints
        await clock.sleep(POLL_S)
    supervisor.terminate()
    raise Unavailable(f"the stack was not ready within {UP_S:.0f} s:\n{_last_lines(folder)}")


def _spawn(log: Path, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "lakebed", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _found(folder: Path, pid: int) -> Endpoints | None:
    try:
        endpoints = find(folder)
    except NotFound:
        return None
    return endpoints if endpoints.process(SUPERVISOR).pid == pid else None


def _last_lines(folder: Path) -> str:
    return "\n".join((folder / SUPERVISOR_LOG).read_text(errors="replace").splitlines()[-TAIL_LINES:])
