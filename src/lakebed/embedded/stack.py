"""The whole stack under one folder: the bucket first, then the gateway and the workers; stopped in the other order.

One process, the supervisor, is the parent of all. It holds the folder's lock, keeps `endpoints.json` true, starts a
program again when it dies, and gives up in words when it keeps dying. Whatever ends the supervisor, nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.embedded.endpoints import ENDPOINTS_FILE, SUPERVISOR, Endpoints, Process, read, write, write_private
from lakebed.embedded.lock import FolderLock, start_ticks
from lakebed.embedded.ports import HeldPorts
from lakebed.embedded.program import BucketProgram, Command, Program, ServerProgram
from lakebed.embedded.weed import Weed
from lakebed.errors import Conflict, LakebedError, Unavailable
from lakebed.ids import Ids

WATCH_EVERY_S = 0.2
RESTARTS_MAX = 5  # of one program within the window, before the stack gives up
RESTART_WINDOW_S = 120.0
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 5.0
LOCK_TRIES, LOCK_EVERY_S = 10, 0.05  # who only looks holds the lock for an instant, a stack through all tries
ORPHANS_WAIT_S = 5.0  # the kernel kills orphans at once; it may take a moment to take them down

COMMANDS = (
    Command("gateway", (sys.executable, "-m", "lakebed", "serve", "--port", "{port}")),
    Command("workers", (sys.executable, "-m", "lakebed", "work", "--port", "{port}")),
)


class Event(msgspec.Struct, frozen=True):
    """What the stack tells while it runs. `seconds` is how long it took."""

    name: str
    what: Literal["ready", "died", "stopped"]
    seconds: float = 0.0
    detail: str = ""


class Stack:
    """The stack in `folder`, which keeps the data, the credentials, the logs and the wished ports over restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock,
        ids: Ids,
        tell: Callable[[Event], None] = lambda _: None,
        commands: Sequence[Command] = COMMANDS,
    ) -> None:
        self.folder = folder.absolute()
        self._clock, self._ids, self._tell = clock, ids, tell
        self._lock = FolderLock(self.folder)
        self._bucket = BucketProgram(Weed(self.folder / "bucket", clock=clock, ids=ids))
        self._commands = commands
        self._servers: list[ServerProgram] = []
        self._ready_s: dict[str, float] = {}
        self._restarted_s: dict[str, list[float]] = {}
        self._restarts: dict[str, int] = {}
        self._started_at_ms = 0

    @property
    def _programs(self) -> list[Program]:
        return [self._bucket, *self._servers]

    async def start(self) -> Endpoints:
        """Starts everything, each once what it needs is ready. Raises Conflict when a stack already runs in the folder,
        Unavailable when a program does not come up; either way nothing new is left running.
        """
        await self._take_lock()
        try:
            await bury(self.folder, clock=self._clock)
            self._started_at_ms = now_ms(self._clock)
            with HeldPorts(self._ids) as held:
                self._servers = self._plan(held)
                for program in self._programs:
                    await self._bring_up(program)
            return self._write("ready")
        except BaseException:
            await self.stop(hurry=True)
            raise

    async def watch(self) -> None:
        """Starts again what dies; returns never. Raises Unavailable when something keeps dying."""
        while True:
            for program in self._programs:
                program.child.set_log_aside()
                if not program.child.running():
                    await self._restart(program)
            await self._clock.sleep(WATCH_EVERY_S)

    async def stop(self, *, hurry: bool = False) -> None:
        """Drains the gateway and the workers, then the bucket they write to; in a hurry, ends them all at once.

        Cancelled half-way, it still ends them all. Harmless when nothing was started.
        """
        if not self._lock.held:
            return
        started_s = self._clock.monotonic_s()
        try:
            if not hurry:
                with suppress(LakebedError):  # it may not have come as far as having a bucket
                    self._write("stopping")
                await asyncio.gather(*(self._drain(server) for server in self._servers))
                await self._drain(self._bucket)
        finally:
            for program in reversed(self._programs):
                program.child.kill()
            self._bucket.clear()
            (self.folder / ENDPOINTS_FILE).unlink(missing_ok=True)
            self._lock.release()
        self._tell(Event("stack", "stopped", self._clock.monotonic_s() - started_s))

    async def _take_lock(self) -> None:
        for _ in range(LOCK_TRIES - 1):
            with suppress(Conflict):
                self._lock.take()
                return
            await self._clock.sleep(LOCK_EVERY_S)
        self._lock.take()

    def _plan(self, held: HeldPorts) -> list[ServerProgram]:
        """The servers on the ports they had last time, where those are still free."""
        file = self.folder / "ports.json"
        wishes: dict[str, int] = {}
        with suppress(FileNotFoundError, msgspec.DecodeError):
            wishes = msgspec.json.decode(file.read_bytes(), type=dict[str, int])
        ports = held.take_all((command.name for command in self._commands), wishes)
        write_private(file, msgspec.json.encode(ports))
        return [
            ServerProgram(command, ports[command.name], self.folder, self._bucket, clock=self._clock)
            for command in self._commands
        ]

    async def _bring_up(self, program: Program) -> None:
        started_s = self._clock.monotonic_s()
        await program.start()
        self._ready_s[program.name] = self._clock.monotonic_s() - started_s
        self._write("starting")
        self._tell(Event(program.name, "ready", self._ready_s[program.name], program.url))

    async def _restart(self, program: Program) -> None:
        """Starts a dead program again, with backoff; when the bucket moved, also those that were told where it was."""
        before = self._bucket.endpoints
        while True:
            self._tell(Event(program.name, "died", detail=program.child.ended("restarting it").message))
            program.child.kill()  # sweeps what it had started itself
            recent = self._count_restart(program)
            await self._clock.sleep(self._ids.jitter_s(recent, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
            try:
                await self._bring_up(program)
                break
            except Unavailable:
                continue
        if program is self._bucket and self._bucket.endpoints != before:
            for server in self._servers:
                await server.stop()
                await self._bring_up(server)
        self._write("ready")

    def _count_restart(self, program: Program) -> int:
        now_s = self._clock.monotonic_s()
        recent = [at for at in self._restarted_s.get(program.name, []) if now_s - at < RESTART_WINDOW_S]
        if len(recent) >= RESTARTS_MAX:
            raise program.child.ended(
                f"the {program.name} died {len(recent) + 1} times within {RESTART_WINDOW_S:.0f} s: the stack stops"
            )
        self._restarted_s[program.name] = [*recent, now_s]
        self._restarts[program.name] = self._restarts.get(program.name, 0) + 1
        return len(recent)

    async def _drain(self, program: Program) -> None:
        started_s = self._clock.monotonic_s()
        await program.stop()
        self._tell(Event(program.name, "stopped", self._clock.monotonic_s() - started_s))

    def _write(self, state: Literal["starting", "ready", "stopping"]) -> Endpoints:
        urls = {server.name: server.url for server in self._servers}
        endpoints = Endpoints(
            folder=str(self.folder),
            state=state,
            started_at_ms=self._started_at_ms,
            bucket=self._bucket.endpoints,
            gateway=urls.get("gateway", ""),
            workers=urls.get("workers", ""),
            processes=(Process(SUPERVISOR, os.getpid(), start_ticks(os.getpid())), *map(self._row, self._started())),
        )
        write(self.folder, endpoints)
        return endpoints

    def _started(self) -> list[Program]:
        return [program for program in self._programs if program.name in self._ready_s]

    def _row(self, program: Program) -> Process:
        pid = program.child.pid
        return Process(
            name=program.name,
            pid=pid,
            start_ticks=start_ticks(pid),
            url=program.url,
            ready_s=round(self._ready_s[program.name], 3),
            restarts=self._restarts.get(program.name, 0),
        )


async def bury(folder: Path, *, clock: Clock) -> bool:
    """Waits for what a killed stack left to be gone, and where the kernel did not see to it, ends it. False when there
    was nothing to bury. Only for who knows that no stack runs there: its lock is ours, or nobody's.
    """
    file = folder / ENDPOINTS_FILE
    found = file.exists()
    try:
        left = [process for process in read(folder).processes if process.name != SUPERVISOR]
    except LakebedError:
        left = []
    for end in (False, True):
        if end:
            _end(left)
        deadline = clock.monotonic_s() + ORPHANS_WAIT_S
        while any(map(_is_alive, left)) and clock.monotonic_s() < deadline:
            await clock.sleep(0.05)
    if alive := [process.pid for process in left if _is_alive(process)]:
        raise Unavailable(f"processes {alive} of an earlier stack do not end", hint="end them, then lakebed up")
    file.unlink(missing_ok=True)
    return found


def _end(processes: Sequence[Process]) -> None:
    for process in filter(_is_alive, processes):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _is_alive(process: Process) -> bool:
    return bool(process.start_ticks) and start_ticks(process.pid) == process.start_ticks
