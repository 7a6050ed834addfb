"""The supervisor as a process, and how others start, see and stop it."""

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

from lakebed.clock import Clock
from lakebed.embedded.child import TAIL_LINES
from lakebed.embedded.endpoints import SUPERVISOR, Endpoints, Process, find
from lakebed.embedded.health import ask
from lakebed.embedded.lock import is_held, start_ticks
from lakebed.embedded.program import BUCKET_GRACE_S, DRAIN_S
from lakebed.embedded.stack import Stack, bury
from lakebed.errors import Conflict, NotFound, Unavailable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DOWN_S = DRAIN_S + BUCKET_GRACE_S + 15.0  # every grace there is, and some seconds for the kernel
UP_S = 240.0  # three programs at 60 s each, and some more
POLL_S = 0.1
SUPERVISOR_LOG = "supervisor.log"


async def run(stack: Stack, *, ready: Callable[[Endpoints], None] = lambda _: None) -> None:
    """Keeps the stack until SIGTERM, Ctrl-C or a closed terminal, then drains it; a second signal ends it at once.

    Raises what `Stack.start` and `Stack.watch` raise, with nothing left running.
    """
    asked, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup means it
    for number in heeded:
        loop.add_signal_handler(number, lambda: hurried.set() if asked.is_set() else asked.set())

    async def keep() -> None:
        ready(await stack.start())
        await stack.watch()

    kept = asyncio.create_task(keep())
    try:
        await _first(kept, asked)
    finally:
        stopped = asyncio.create_task(stack.stop())
        try:
            await _first(stopped, hurried)
        finally:
            for number in heeded:
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


class Row(msgspec.Struct, frozen=True):
    """One line of `lakebed status`."""

    name: str
    state: Literal["ok", "degraded", "down", "gone"]
    url: str
    pid: int
    restarts: int
    ready_s: float
    detail: str = ""


async def status(folder: Path) -> list[Row]:
    """Every process of the stack, asked whether it is well. Raises NotFound when no stack runs there."""
    endpoints = find(folder)
    return list(await asyncio.gather(*(_row(process) for process in endpoints.processes)))


async def _row(process: Process) -> Row:
    state, detail = await _condition(process)
    return Row(process.name, state, process.url, process.pid, process.restarts, process.ready_s, detail)


async def _condition(process: Process) -> tuple[Literal["ok", "degraded", "down", "gone"], str]:
    if process.start_ticks and start_ticks(process.pid) != process.start_ticks:
        return "gone", "it died; the supervisor starts it again"
    if not process.url:
        return "ok", ""
    if process.name == "bucket":
        answer = await ask(process.url, "/")
        return ("ok", "") if answer.status else ("down", answer.body)  # it refuses strangers, but it answers
    answer = await ask(process.url, "/healthz")
    if answer.status == 200:
        return ("degraded", answer.body) if '"degraded"' in answer.body else ("ok", "")
    return "down", answer.body[:500]


async def down(folder: Path, *, clock: Clock, now: bool = False) -> Literal["stopped", "cleared", "none"]:
    """Stops the stack in the folder and waits until nothing of it is left; clears what a killed one has left.

    With `now` it is not drained. Raises Unavailable when it does not end in time.
    """
    try:
        supervisor = find(folder).process(SUPERVISOR)
    except NotFound:
        if not is_held(folder):
            return "cleared" if await bury(folder, clock=clock) else "none"
        raise
    deadline = clock.monotonic_s() + DOWN_S
    _signal(supervisor)
    while is_held(folder):
        if clock.monotonic_s() >= deadline:
            raise Unavailable(
                f"the stack in {folder} did not stop within {DOWN_S:.0f} s", hint="lakebed down --now ends it at once"
            )
        await clock.sleep(POLL_S)
        if now:
            _signal(supervisor)
    return "stopped"


def _signal(supervisor: Process) -> None:
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
    folder: Path, argv: Sequence[str], *, clock: Clock, tell: Callable[[Process], None] = lambda _: None
) -> Endpoints:
    """Starts `lakebed up` as a process of its own, which outlives us, and returns once the stack is ready.

    Tells each process as it becomes ready. Raises what stopped it, with its last words.
    """
    if is_held(folder):
        raise Conflict(
            f"a stack already runs in {folder}", hint="look at it with lakebed status, stop it with lakebed down"
        )
    supervisor = _spawn(folder / SUPERVISOR_LOG, argv)
    deadline = clock.monotonic_s() + UP_S
    told = {SUPERVISOR}
    while clock.monotonic_s() < deadline:
        code = supervisor.poll()
        if code is not None:
            raise Unavailable(f"the stack did not start (code {code}):\n{_last_words(folder)}")
        endpoints = _found(folder, supervisor.pid)
        for process in endpoints.processes if endpoints else ():
            if process.name not in told:
                told.add(process.name)
                tell(process)
        if endpoints and endpoints.state == "ready":
            return endpoints
        await clock.sleep(POLL_S)
    supervisor.terminate()
    raise Unavailable(f"the stack was not ready within {UP_S:.0f} s:\n{_last_words(folder)}")


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


def _last_words(folder: Path) -> str:
    return "\n".join((folder / SUPERVISOR_LOG).read_text(errors="replace").splitlines()[-TAIL_LINES:])
