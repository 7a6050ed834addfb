"""The local stack in one folder: the bucket starts first, then the gateway and the workers; they stop in reverse order.

One process, the supervisor, is the parent of all. It holds the folder's lock, keeps `endpoints.json` up to date,
restarts a program that dies, and stops with an error when it keeps dying. However the supervisor ends, no process
is left.
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

from lakebed.core import private
from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Conflict, LakebedError, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.embedded.endpoints import (
    DISK_FULL_BYTES,
    DISK_LOW_BYTES,
    ENDPOINTS_FILE,
    SUPERVISOR,
    TARGETS_FILE,
    Endpoints,
    FolderLock,
    StackProcess,
    disk_shortage,
    free_bytes,
    read,
    sha256_of,
    start_ticks,
    write,
    write_targets,
)
from lakebed.embedded.ports import HeldPorts
from lakebed.embedded.program import BucketProgram, Program, ServerCommand, ServerProgram
from lakebed.embedded.weed import Weed

WATCH_EVERY_S = 0.2
RESTARTS_MAX = 5  # of one program within the window, before the stack gives up
RESTART_WINDOW_S = 120.0
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.2, 5.0
LOCK_TRIES, LOCK_EVERY_S = (
    10,
    0.05,
)  # a process that only checks the lock holds it for an instant, a stack for all tries
ORPHANS_WAIT_S = 5.0  # the kernel kills orphans at once; their end may take a moment

DEFAULT_SETTINGS = Path("lakebed.toml")
COMMANDS = (
    ServerCommand(
        "gateway", (sys.executable, "-m", "lakebed", "serve", "--port", "{port}", "--kafka-port", "{kafka_port}")
    ),
    ServerCommand("workers", (sys.executable, "-m", "lakebed", "work", "--port", "{port}")),
)


class StackEvent(msgspec.Struct, frozen=True):
    """What a program of the stack did. `seconds` is how long it took."""

    name: str
    what: Literal["ready", "died", "full", "stopped"]
    seconds: float = 0.0
    detail: str = ""


class Stack:
    """The stack in `folder`, which keeps the data, the credentials, the logs and the ports over restarts."""

    def __init__(
        self,
        folder: Path,
        *,
        runtime: Runtime,
        report: Callable[[StackEvent], None] = lambda _: None,
        commands: Sequence[ServerCommand] = COMMANDS,
        settings_file: Path = DEFAULT_SETTINGS,
    ) -> None:
        self.folder = folder.absolute()
        self._settings_file = settings_file.absolute()
        self._settings_sha256 = sha256_of(self._settings_file)
        self._clock, self._ids, self._report = runtime.clock, runtime.ids, report
        self._lock = FolderLock(self.folder)
        self._bucket = BucketProgram(Weed(self.folder / "bucket", runtime=runtime))
        self._commands = commands
        self._servers: list[ServerProgram] = []
        self._ready_s: dict[str, float] = {}
        self._restarted_s: dict[str, list[float]] = {}
        self._restarts: dict[str, int] = {}
        self._started_at_ms = 0
        self._disk_full = False

    @property
    def _programs(self) -> list[Program]:
        return [self._bucket, *self._servers]

    async def start(self) -> Endpoints:
        """Starts everything, each once what it needs is ready. Raises Conflict when a stack already runs in the folder,
        Unavailable when a program does not come up; in both cases no new process is left.
        """
        await self._take_lock()
        try:
            await clear_killed(self.folder, clock=self._clock)
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
        """Restarts programs that die, and the bucket after a full disk; never returns. Raises Unavailable when one
        keeps dying.
        """
        while True:
            await self._watch_disk()
            for program in self._programs:
                program.child.rotate_log()
                if not program.child.running():
                    await self._restart(program)
            await self._clock.sleep(WATCH_EVERY_S)

    async def stop(self, *, hurry: bool = False) -> None:
        """Drains the gateway and the workers, then the bucket; with `hurry`, kills them all at once.

        When cancelled it still kills them all. Does nothing when nothing was started.
        """
        if not self._lock.held:
            return
        started_s = self._clock.monotonic_s()
        try:
            if not hurry:
                with suppress(LakebedError):  # it may have no bucket yet
                    self._write("stopping")
                await asyncio.gather(*(self._drain(server) for server in self._servers))
                await self._drain(self._bucket)
        finally:
            for program in reversed(self._programs):
                program.child.kill()
            self._bucket.clear()
            for name in (ENDPOINTS_FILE, TARGETS_FILE):
                (self.folder / name).unlink(missing_ok=True)
            self._lock.release()
        self._report(StackEvent("stack", "stopped", self._clock.monotonic_s() - started_s))

    async def _take_lock(self) -> None:
        for _ in range(LOCK_TRIES - 1):
            with suppress(Conflict):
                self._lock.take()
                return
            await self._clock.sleep(LOCK_EVERY_S)
        self._lock.take()

    def _plan(self, held: HeldPorts) -> list[ServerProgram]:
        """The servers, on the ports they had last time if those are still free."""
        file = self.folder / "ports.json"
        preferred: dict[str, int] = {}
        with suppress(FileNotFoundError, msgspec.DecodeError):
            preferred = msgspec.json.decode(file.read_bytes(), type=dict[str, int])
        ports = held.take_all([name for command in self._commands for name in command.ports], preferred)
        private.write(file, msgspec.json.encode(ports))
        return [
            ServerProgram(command, ports, self.folder, self._bucket, clock=self._clock) for command in self._commands
        ]

    async def _bring_up(self, program: Program) -> None:
        started_s = self._clock.monotonic_s()
        await program.start()
        self._ready_s[program.name] = self._clock.monotonic_s() - started_s
        self._write("starting")
        self._report(StackEvent(program.name, "ready", self._ready_s[program.name], program.url))

    async def _watch_disk(self) -> None:
        """Stops the bucket, which is then restarted, when the disk was full and has space again.

        Its metadata store keeps the first error of its journal and refuses every later write until it is opened again.
        """
        free = free_bytes(self.folder)
        if free < DISK_FULL_BYTES and not self._disk_full:
            self._disk_full = True
            self._report(StackEvent(self._bucket.name, "full", detail=disk_shortage(self.folder, free)))
        elif free >= DISK_LOW_BYTES and self._disk_full:
            await self._bucket.stop()
            self._disk_full = False

    async def _restart(self, program: Program) -> None:
        """Restarts a dead program, with backoff; when the bucket has a new address, also the servers that use it."""
        before = self._bucket.endpoints
        while True:
            self._report(StackEvent(program.name, "died", detail=program.child.ended("restarting it").message))
            program.child.kill()  # kills what it had started
            recent = self._count_restart(program)
            await self._clock.sleep(self._ids.jitter_s(recent, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
            try:
                await self._bring_up(program)
                break
            except Unavailable:
                if program is not self._bucket and await self._watch_bucket():
                    break
        if program is self._bucket and self._bucket.endpoints != before:
            for server in self._servers:
                await server.stop()
                with suppress(Unavailable):  # the watch finds that it does not run, and tries again
                    await self._bring_up(server)
        self._write("ready")

    async def _watch_bucket(self) -> bool:
        """Looks after the bucket while a server does not come up: without it no server does. Whether all servers were
        started again, because it has a new address.
        """
        before = self._bucket.endpoints
        await self._watch_disk()
        if not self._bucket.child.running():
            await self._restart(self._bucket)
        return self._bucket.endpoints != before

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
        self._report(StackEvent(program.name, "stopped", self._clock.monotonic_s() - started_s))

    def _write(self, state: Literal["starting", "ready", "stopping"]) -> Endpoints:
        urls = {server.name: server.url for server in self._servers}
        endpoints = Endpoints(
            folder=str(self.folder),
            state=state,
            started_at_ms=self._started_at_ms,
            bucket=self._bucket.endpoints,
            gateway=urls.get("gateway", ""),
            workers=urls.get("workers", ""),
            kafka=next((server.kafka for server in self._servers if server.kafka), ""),
            processes=(_supervisor(), *map(self._row, self._started())),
            settings_file=str(self._settings_file),
            settings_sha256=self._settings_sha256,
        )
        write(self.folder, endpoints)
        write_targets(self.folder / TARGETS_FILE, urls.values())
        return endpoints

    def _started(self) -> list[Program]:
        return [program for program in self._programs if program.name in self._ready_s]

    def _row(self, program: Program) -> StackProcess:
        pid = program.child.pid
        return StackProcess(
            name=program.name,
            pid=pid,
            start_ticks=start_ticks(pid),
            url=program.url,
            ready_s=round(self._ready_s[program.name], 3),
            restarts=self._restarts.get(program.name, 0),
        )


def _supervisor() -> StackProcess:
    return StackProcess(SUPERVISOR, os.getpid(), start_ticks(os.getpid()))


async def clear_killed(folder: Path, *, clock: Clock) -> bool:
    """Cleans up after a killed stack: waits until its processes have ended, and kills those that have not. False when
    there was nothing to do. Call it only while no stack runs in the folder: the lock is ours, or free.
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
        raise Unavailable(f"processes {alive} of an earlier stack do not end", hint="kill them, then run lakebed up")
    file.unlink(missing_ok=True)
    return found


def _end(processes: Sequence[StackProcess]) -> None:
    for process in filter(_is_alive, processes):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _is_alive(process: StackProcess) -> bool:
    return bool(process.start_ticks) and start_ticks(process.pid) == process.start_ticks
