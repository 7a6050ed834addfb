"""A child process that never outlives its parent, even when the parent is killed with -9.

Each child leads its own session, so a Ctrl-C in the terminal reaches only the parent, which drains its children in
order; processes that a child started are killed with it. The kernel binds the parent-death signal to the spawning
thread: call `start` from a thread that lives as long as the child should (an event loop's main thread).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lakebed.core.clock import Clock
from lakebed.core.errors import Unavailable
from lakebed.embedded import launch

POLL_S = 0.05  # how often an exit is checked
KILLED_WAIT_S = 10.0  # a killed process is gone at once unless the kernel holds it in I/O
LOG_BYTES_MAX = 32 * 1024 * 1024  # a larger log is rotated to <name>.1; one older log is kept
TAIL_LINES = 12
TAIL_BYTES = 8 * 1024


class Child:
    """One program and its log. `name` is shown to users."""

    def __init__(self, name: str, log: Path, *, clock: Clock) -> None:
        self.name = name
        self.log = log
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """0 when it was never started."""
        return self._process.pid if self._process else 0

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Starts the program with its output appended to the log. Raises Unavailable when it cannot be spawned."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.rotate_log()
        launcher = [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid())]
        with self.log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    [*launcher, *command],
                    env=dict(os.environ if env is None else env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"{self.name} cannot be started: {error}") from error

    def running(self) -> bool:
        return self._process is not None and self._exit_seen() is None

    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it, as in subprocess."""
        return self._exit_seen() if self._process else None

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting at most `timeout_s` for that."""
        deadline = self._clock.monotonic_s() + timeout_s
        while self.running():
            if self._clock.monotonic_s() >= deadline:
                return False
            await self._clock.sleep(POLL_S)
        return True

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, at most `grace_s` to finish, then SIGKILL for it and all it started. True when SIGTERM was enough.

        When cancelled it still kills: no process is left.
        """
        if self._process is None:
            return True
        try:
            self._signal(signal.SIGTERM)
            willing = await self.wait(grace_s)
        finally:
            self.kill()
        await self.wait(KILLED_WAIT_S)
        return willing

    def kill(self) -> None:
        """SIGKILL for the child and for everything in its session's process group. Harmless when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WAIT_S)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def rotate_log(self) -> None:
        """Keeps the log bounded. Copies and truncates it, since the child keeps appending to the same file."""
        try:
            if self.log.stat().st_size <= LOG_BYTES_MAX:
                return
        except FileNotFoundError:
            return
        self.log.with_name(self.log.name + ".1").write_bytes(self.log.read_bytes())
        os.truncate(self.log, 0)

    def ended(self, why: str, *, hint: str = "") -> Unavailable:
        """The error for an unexpected end, or a child that is not ready, with its last log lines."""
        code = self.exit_code()
        how = "is still running" if code is None else f"ended with code {code}"
        return Unavailable(
            f"{why}: {self.name} {how}; last lines of {self.log}:\n{self.tail()}",
            hint=hint or f"read {self.log}",
            log=str(self.log),
        )

    def _exit_seen(self) -> int | None:
        """Checks without reaping: while the leader is a zombie its process group keeps its number."""
        assert self._process is not None
        if self._process.returncode is not None:
            return self._process.returncode
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaps at once, and the group may outlive its leader
            return self._process.poll()
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
