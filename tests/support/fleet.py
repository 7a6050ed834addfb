"""Real processes of Lakebed under test: started with settings, found by name, killed and started again."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from httpx2 import AsyncClient, HTTPError

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name, load
from lakebed.embedded.child import Child
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections

DEADLINE_S = 150.0  # for a process to become ready on a busy machine; a pass waits for none of it
TESTS = Path(__file__).parent.parent


class Fleet:
    """Processes with one set of settings. `start` with a name that was used before starts it again, on its port."""

    def __init__(self, folder: Path, settings: Mapping[str, object], ports: HeldPorts) -> None:
        self.folder, self.settings = folder, dict(settings)
        self._ports, self._clock = ports, SystemClock()
        self._commands: dict[str, tuple[list[str], int]] = {}
        self.children: dict[str, Child] = {}

    async def gateway(self, name: str, part: str) -> str:
        """Starts `lakebed serve` for one part and waits until it is ready. Gives its address."""
        self._start_lakebed(name, "serve", part)
        return await self._ready(name)

    async def worker(self, name: str, part: str) -> str:
        """The same for `lakebed work`."""
        self._start_lakebed(name, "work", part)
        return await self._ready(name)

    def script(self, name: str, arguments: Sequence[str]) -> Child:
        """Starts a Python program: a path below `tests`, and its arguments."""
        return self._start(name, [sys.executable, str(TESTS / arguments[0]), *arguments[1:]])

    async def kill(self, name: str) -> None:
        """kill -9."""
        self.children[name].kill()
        assert await self.children[name].wait(DEADLINE_S)

    async def restart(self, name: str) -> str:
        """Starts a process of that name again, with the same arguments, and waits until it is ready."""
        self._start(name, self._commands[name][0])
        return await self._ready(name)

    def said(self, name: str) -> list[Any]:
        """The JSON lines that it printed, in all its lives. A line that a kill cut short is left out."""
        lines = self.children[name].log.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]

    async def stop(self) -> None:
        for child in self.children.values():
            child.kill()

    def _start_lakebed(self, name: str, command: str, part: str) -> None:
        port = self._ports.take()
        arguments = ["lakebed", command, "--parts", part, "--port", str(port), "--log", "warning"]
        self._commands[name] = ([sys.executable, "-m", *arguments], port)
        self._start(name, self._commands[name][0])

    def _start(self, name: str, command: Sequence[str]) -> Child:
        child = Child(name, self.folder / f"{name}.log", clock=self._clock)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("LAKEBED_")}
        child.start(command, env={**clean, **environment(self.settings), "PYTHONPATH": os.pathsep.join(sys.path)})
        self.children[name] = child
        return child

    async def _ready(self, name: str) -> str:
        url = f"http://{HOST}:{self._commands[name][1]}"
        deadline_s = self._clock.monotonic_s() + DEADLINE_S
        async with AsyncClient(timeout=2.0) as client:
            while self._clock.monotonic_s() < deadline_s and self.children[name].running():
                try:
                    if (await client.get(f"{url}/healthz")).status_code == 200:
                        return url
                except HTTPError:
                    pass
                await self._clock.sleep(0.05)
        raise AssertionError(f"{name} is not ready; its last lines:\n{self.children[name].tail()}")


@asynccontextmanager
async def fleet_of(folder: Path, settings: Mapping[str, object]) -> AsyncIterator[Fleet]:
    with HeldPorts(Ids()) as ports:
        fleet = Fleet(folder, settings, ports)
        try:
            yield fleet
        finally:
            await fleet.stop()


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    return {env_name(key): str(value) for key, value in settings.items() if value != ""}


def behind(store: StoreSettings, endpoint: str) -> StoreSettings:
    """The same bucket through another address, with the patience that a deployment has by default."""
    default = StoreSettings()
    return msgspec.structs.replace(
        store, endpoint=endpoint, timeout_s=default.timeout_s, retry_timeout_s=default.retry_timeout_s
    )


def context_of(settings: Mapping[str, object]) -> Context:
    """A process's context in this one: own store client, own ids, own metrics."""
    return make_context(load(sections(), env=environment(settings)), role="test")
