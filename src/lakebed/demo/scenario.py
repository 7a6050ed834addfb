"""What a demo scenario gets: a running stack, a progress log, and checks whose results the demo collects."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.demo.metrics import ENV, Observer
from lakebed.embedded.child import Child
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.wiring.context import make_context

READY_S = 60.0


class CheckResult(msgspec.Struct, frozen=True):
    """An invariant that a scenario checked, with the numbers it found."""

    scenario: str
    name: str
    held: bool
    seen: str


class Fault(msgspec.Struct, frozen=True):
    """A fault that was injected, and when."""

    scenario: str
    what: str
    at_s: float


class StepCount(msgspec.Struct, frozen=True):
    """How many of a thing there were after a step. All steps of a thing must count the same number."""

    thing: str
    step: str
    count: int


class DemoLog:
    """The results of all scenarios, in the order in which they happened."""

    def __init__(self) -> None:
        self.proven: list[CheckResult] = []
        self.faults: list[Fault] = []
        self.counted: list[StepCount] = []
        self.expected: dict[str, float] = {}


class ProgressLine(msgspec.Struct, frozen=True):
    """One line of progress."""

    scenario: str
    kind: Literal["begin", "line", "fault", "held", "broken", "end"]
    line: str


class ScenarioContext:
    """One scenario's view of the stack. `of(name)` makes the one of another scenario, on the same log."""

    def __init__(
        self,
        *,
        folder: Path,
        settings: Settings,
        environment: dict[str, str],
        gateway_url: str,
        scale: float,
        seed: int,
        report: Callable[[ProgressLine], None],
        observer: Observer | None = None,
        log: DemoLog | None = None,
        scenario: str = "",
    ) -> None:
        self.folder, self.settings, self.gateway_url = folder, settings, gateway_url
        self.scale, self.seed, self.scenario = scale, seed, scenario
        self.observer = observer or Observer(SystemClock())
        self.log = log or DemoLog()
        self._environment, self._report = environment, report
        self._children: list[Child] = []

    def of(self, scenario: str) -> ScenarioContext:
        return ScenarioContext(
            folder=self.folder,
            settings=self.settings,
            environment=self._environment,
            gateway_url=self.gateway_url,
            scale=self.scale,
            seed=self.seed,
            report=self._report,
            observer=self.observer,
            log=self.log,
            scenario=scenario,
        )

    def report(self, line: str) -> None:
        """Shows one line of progress."""
        self.emit("line", line)

    def emit(self, kind: Literal["begin", "line", "fault", "held", "broken", "end"], line: str) -> None:
        self._report(ProgressLine(self.scenario, kind, line))

    def check(self, name: str, held: bool, seen: str) -> None:
        """Records an invariant; the demo fails at its end when one did not hold."""
        self.log.proven.append(CheckResult(self.scenario, name, held, seen))
        self.emit("held" if held else "broken", f"{name}: {seen}")

    def fault(self, what: str) -> None:
        """Records a fault that was just injected; the plots mark its time."""
        self.log.faults.append(Fault(self.scenario, what, self.observer.now_s()))
        self.emit("fault", what)

    def counted(self, thing: str, step: str, count: int) -> None:
        """How many of `thing` there are after `step`; at the end all steps of it must agree."""
        self.log.counted.append(StepCount(thing, step, count))

    def expect(self, flow: str, count: float) -> None:
        """The total that a progress bar of the live display reaches (see display.FLOWS)."""
        self.log.expected[flow] = self.log.expected.get(flow, 0.0) + count

    def scaled(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def context(self, role: str = "demo") -> Context:
        """A client's context on the same bucket, with metrics of its own."""
        made = make_context(self.settings, role=role)
        self.watch(made.metrics)
        return made

    def watch(self, metrics: Metrics) -> None:
        """Includes this registry's metrics in the live display and the report."""
        self.observer.watch(metrics)

    def process(self, name: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Starts `python -m <arguments>` on the same bucket. `.kill()` ends it like `kill -9`."""
        child = Child(name, self.folder / "demo" / f"{name}.log", clock=SystemClock())
        kept = self.folder / "demo" / f"{name}.numbers"
        environment = {**os.environ, **self._environment, ENV: str(kept), **(env or {})}
        child.start([sys.executable, "-m", *arguments], env=environment)
        self._children.append(child)
        self.observer.watch(kept)
        return child

    async def gateway(
        self, name: str, *, parts: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> tuple[Child, str]:
        """Starts another gateway on the same bucket and waits until it is healthy. Returns it and its address."""
        chosen = ["--parts", ",".join(parts)] if parts else []
        with HeldPorts(Ids()) as held:
            url = f"http://{HOST}:{(port := held.take())}"
            child = self.process(name, ["lakebed", "serve", "--port", str(port), *chosen], env=env)
            await answers(f"{url}/healthz", child)
        self.observer.watch(url)
        return child, url

    async def clear(self) -> None:
        """Stops every process that the scenario started."""
        for child in self._children:
            await child.stop(grace_s=2.0)
        self._children.clear()


async def answers(url: str, child: Child) -> None:
    """Polls the address until it answers 200. Raises Unavailable with the child's last log lines otherwise."""
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
