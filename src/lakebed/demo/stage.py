"""What a scenario plays on: a running stack, a place to say what happens, and the list of what was proven."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.clock import SystemClock
from lakebed.context import Context, make_context
from lakebed.demo import numbers
from lakebed.demo.numbers import Observer
from lakebed.embedded.child import Child
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.errors import Unavailable
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings

READY_S = 60.0


class Proven(msgspec.Struct, frozen=True):
    """An invariant that a scenario checked, with the numbers it saw."""

    scenario: str
    name: str
    held: bool
    seen: str


class Fault(msgspec.Struct, frozen=True):
    """Something that was broken on purpose, and when."""

    scenario: str
    what: str
    at_s: float


class Counted(msgspec.Struct, frozen=True):
    """How many of a thing were there after a step. All steps of a thing must have seen the same number."""

    thing: str
    step: str
    count: int


class Record:
    """What all scenarios write down, in the order it happened."""

    def __init__(self) -> None:
        self.proven: list[Proven] = []
        self.faults: list[Fault] = []
        self.counted: list[Counted] = []
        self.expected: dict[str, float] = {}


class Told(msgspec.Struct, frozen=True):
    """A line for the person who watches."""

    scenario: str
    kind: Literal["begin", "line", "fault", "held", "broken", "end"]
    line: str


class Stage:
    """One scenario's view of the stack. `of(name)` gives the next scenario its own on the same record."""

    def __init__(
        self,
        *,
        folder: Path,
        settings: Settings,
        environment: dict[str, str],
        gateway_url: str,
        scale: float,
        seed: int,
        tell: Callable[[Told], None],
        observer: Observer | None = None,
        record: Record | None = None,
        scenario: str = "",
    ) -> None:
        self.folder, self.settings, self.gateway_url = folder, settings, gateway_url
        self.scale, self.seed, self.scenario = scale, seed, scenario
        self.observer = observer or Observer(SystemClock())
        self.record = record or Record()
        self._environment, self._tell = environment, tell
        self._children: list[Child] = []

    def of(self, scenario: str) -> Stage:
        return Stage(
            folder=self.folder,
            settings=self.settings,
            environment=self._environment,
            gateway_url=self.gateway_url,
            scale=self.scale,
            seed=self.seed,
            tell=self._tell,
            observer=self.observer,
            record=self.record,
            scenario=scenario,
        )

    def tell(self, line: str) -> None:
        """One line for the person who watches."""
        self.say("line", line)

    def say(self, kind: Literal["begin", "line", "fault", "held", "broken", "end"], line: str) -> None:
        self._tell(Told(self.scenario, kind, line))

    def check(self, name: str, held: bool, seen: str) -> None:
        """Records an invariant; the demo fails at its end when one did not hold."""
        self.record.proven.append(Proven(self.scenario, name, held, seen))
        self.say("held" if held else "broken", f"{name}: {seen}")

    def fault(self, what: str) -> None:
        """Says that something was broken on purpose just now; the plots mark the instant."""
        self.record.faults.append(Fault(self.scenario, what, self.observer.now_s()))
        self.say("fault", what)

    def counted(self, thing: str, step: str, count: int) -> None:
        """How many of `thing` there are after `step`; at the end all steps of it must agree."""
        self.record.counted.append(Counted(thing, step, count))

    def expect(self, flow: str, count: float) -> None:
        """How far a bar of the live view has to go (see live.FLOWS)."""
        self.record.expected[flow] = self.record.expected.get(flow, 0.0) + count

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def context(self, role: str = "demo") -> Context:
        """A client's context on the same bucket, with metrics of its own."""
        made = make_context(self.settings, role=role)
        self.watch(made.metrics)
        return made

    def watch(self, metrics: Metrics) -> None:
        """Lets the live view and the report count what this registry counts."""
        self.observer.watch(metrics)

    def process(self, name: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Starts `python -m <arguments>` against the same bucket. It may be killed with `.kill()`, as by `kill -9`."""
        child = Child(name, self.folder / "demo" / f"{name}.log", clock=SystemClock())
        kept = self.folder / "demo" / f"{name}.numbers"
        told = {**os.environ, **self._environment, numbers.ENV: str(kept), **(env or {})}
        child.start([sys.executable, "-m", *arguments], env=told)
        self._children.append(child)
        self.observer.watch(kept)
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
        self.observer.watch(url)
        return child, url

    async def clear(self) -> None:
        """Ends every process that the scenario started."""
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
