"""What a scenario plays on: a running stack, a place to say what happens, and the list of what was proven."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from lakebed.clock import SystemClock
from lakebed.context import Context, make_context
from lakebed.embedded.child import Child
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.errors import Unavailable
from lakebed.ids import Ids
from lakebed.settings import Settings

READY_S = 60.0


class Proven(msgspec.Struct, frozen=True):
    """An invariant that a scenario checked, with the numbers it saw."""

    scenario: str
    name: str
    held: bool
    seen: str


class Stage:
    def __init__(
        self,
        *,
        folder: Path,
        settings: Settings,
        environment: dict[str, str],
        gateway_url: str,
        scale: float,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self.folder, self.settings, self.gateway_url = folder, settings, gateway_url
        self.scale, self.seed = scale, seed
        self.proven: list[Proven] = []
        self.scenario = ""
        self._environment, self._tell = environment, tell
        self._children: list[Child] = []

    def tell(self, line: str) -> None:
        """One line for the person who watches."""
        self._tell(line)

    def check(self, name: str, held: bool, seen: str) -> None:
        """Records an invariant; the demo fails at its end when one did not hold."""
        self.proven.append(Proven(self.scenario, name, held, seen))
        self._tell(f"{'✓' if held else '✗'} {name}: {seen}")

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def context(self, role: str = "demo") -> Context:
        """A client's context on the same bucket, with metrics of its own."""
        return make_context(self.settings, role=role)

    def process(self, name: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Starts `python -m <arguments>` against the same bucket. It may be killed with `.kill()`, as by `kill -9`."""
        child = Child(name, self.folder / "demo" / f"{name}.log", clock=SystemClock())
        child.start([sys.executable, "-m", *arguments], env={**os.environ, **self._environment, **(env or {})})
        self._children.append(child)
        return child

    async def gateway(
        self, name: str, *, parts: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> tuple[Child, str]:
        """Starts one more gateway beside the stack's own, and waits until it answers. Returns it and its address."""
        chosen = ["--parts", ",".join(parts)] if parts else []
        with HeldPorts(Ids()) as held:
            url = f"http://{HOST}:{(port := held.take())}"
            child = self.process(name, ["lakebed", "serve", "--port", str(port), *chosen], env=env)
            await answers(f"{url}/healthz", child)
        return child, url

    async def clear(self) -> None:
        """Ends every process that the scenarios started."""
        for child in self._children:
            await child.stop(grace_s=2.0)
        self._children.clear()


async def answers(url: str, child: Child) -> None:
    """Waits until the address answers 200, by asking. Raises Unavailable with the child's last words otherwise."""
    import httpx2

    clock = SystemClock()
    deadline = clock.monotonic_s() + READY_S
    async with httpx2.AsyncClient(timeout=2.0) as client:
        while clock.monotonic_s() < deadline and child.running():
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            await clock.sleep(0.05)
    raise child.ended(f"{url} did not answer") if not child.running() else Unavailable(f"{url} did not answer in time")


async def exited(child: Child, timeout_s: float) -> int:
    """The child's exit code, waiting for it. Raises Unavailable when it is still running."""
    if not await child.wait(timeout_s):
        raise child.ended(f"{child.name} did not finish in {timeout_s:.0f} s")
    return child.exit_code() or 0
