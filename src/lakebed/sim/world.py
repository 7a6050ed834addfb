"""A seeded world: processes on one virtual clock and one store, faults, crashes, and invariants checked at every step.

A step is one operation at the store. After each, every invariant is checked; the first that does not hold ends the
world with the seed, the step, the last lines of the trace and the command that replays it. The same seed gives the same
trace, byte for byte.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import hashlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from structlog.testing import capture_logs

from lakebed.sim.faults import Faults, attempt, immediate
from lakebed.sim.loop import SimClock, SimLoop
from lakebed.sim.process import Process, belongs_to_the_dead, belongs_to_the_stopped, drop
from lakebed.store.memory import MemoryBucket, MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject

STEPS_MAX = 10_000  # steps at the store before a world is stopped
TAIL = 30  # lines of the trace shown with a broken invariant

__all__ = ["STEPS_MAX", "Event", "InvariantBroken", "Process", "World", "line"]

Event = tuple[int, float, str, str, str, str]  # step, time, node, verb, key, outcome


class InvariantBroken(AssertionError):
    """A broken invariant: which, at which step, the trace before it, and the command that replays it."""

    def __init__(self, what: str, *, seed: int, step: int, tail: list[str], replay: str) -> None:
        super().__init__(f"{what}\n  seed {seed}, step {step}\n  " + "\n  ".join(tail) + f"\n  replay: {replay}")
        self.what, self.seed, self.step, self.tail, self.replay = what, seed, step, tail, replay


class World:
    """One simulated world. `steps` bounds it, `faults` may change while it runs, `rng` is for its script."""

    def __init__(self, seed: int, *, name: str = "", steps: int = STEPS_MAX, faults: Faults | None = None) -> None:
        self.seed, self.name, self.steps_max = seed, name, steps
        self.faults = faults or Faults()
        self.rng = random.Random(f"{seed}/script")
        self.fault_rng = random.Random(f"{seed}/faults")
        self.loop = SimLoop(random.Random(f"{seed}/schedule"))
        self.loop.forget, self.loop.hold = belongs_to_the_dead, belongs_to_the_stopped
        self.loop.set_exception_handler(self._callback_failed)
        self.clock = SimClock(self.loop)
        self.bucket = MemoryBucket(clock=self.clock)
        self.store = MemoryStore(clock=self.clock, bucket=self.bucket)  # without faults: for checks from outside
        self.outside = contextvars.copy_context()
        self.processes: list[Process] = []
        self.trace: list[Event] = []
        self.steps = 0
        self.cut = False  # ended by the limit on steps
        self._boots: dict[str, int] = {}
        self._flights = 0
        self._invariants: list[tuple[str, Callable[[], str | None]]] = []
        self._failure: Exception | None = None

    # What a script is written with.

    def process(self, name: str, *, skew_s: float = 0.0, crash_at_await: int = 0) -> Process:
        """A new process; the second of one name is its next boot, with nothing kept but the store."""
        boot = self._boots[name] = self._boots.get(name, 0) + 1
        process = Process(self, name, boot, skew_s=skew_s, crash_at_await=crash_at_await)
        self.processes.append(process)
        self.note(process.node, "boot")
        return process

    def crash(self, process: Process) -> None:
        """kill -9. Nothing of the process runs any more; its writes under way land, now or later, or do not."""
        if not process.alive:
            return
        process.die()
        self.note(process.node, "crash")
        for verb, key, write in process.wire.flying.values():
            if self.fault_rng.random() < self.faults.lands_after_crash:
                self.land_later(process.node, verb, key, write)
        process.wire.flying.clear()

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP: nothing of the process runs for a while, though time and the others go on."""
        if process.stopped is not None:
            return
        process.stopped = []
        self.note(process.node, "pause")

        def resume() -> None:
            if process.alive and process.stopped is not None:
                self.note(process.node, "resume")
                self.loop.call_again(process.stopped)
            process.stopped = None

        self.loop.call_later(seconds, resume, context=self.outside)

    async def keep(
        self,
        name: str,
        body: Callable[[Process], Coroutine[Any, Any, Any]],
        *,
        down_s: float = 1.0,
        skew_s: float = 0.0,
        crash_at_await: int = 0,
    ) -> Process:
        """Runs `body` in a process of this name, in a new one after each crash, until it returns; gives the last.

        With `crash_at_await` the first of them dies there.
        """
        while True:
            process = self.process(name, skew_s=skew_s, crash_at_await=crash_at_await)
            crash_at_await = 0
            if await process.spawn(body(process)):
                return process
            await asyncio.sleep(self.rng.uniform(0.0, down_s))

    def invariant(self, name: str, holds: Callable[[], str | None]) -> None:
        """Calls `holds` after every step: it returns a sentence that says what is broken, or None."""
        self._invariants.append((name, holds))

    def check(self, condition: bool, what: str) -> None:
        """Ends the world when the condition does not hold."""
        if not condition:
            self.fail(what)
            raise self._broken(what)

    def heal(self, faults: Faults) -> None:
        """Changes what goes wrong from here on, e.g. to nothing, to see that the world then comes to rest."""
        self.faults = faults
        self.note("world", "heal")

    def peek(self, key: str) -> StoredObject | None:
        """The object at the key now, without a step: for invariants."""
        word, found = attempt(lambda: self.store.get(key))
        return found if word == "done" and isinstance(found, StoredObject) else None

    def keys(self, prefix: str) -> list[ObjectInfo]:
        async def collect() -> list[ObjectInfo]:
            return [info async for info in self.store.list(prefix)]

        return immediate(collect())

    def note(self, node: str, verb: str, key: str = "", outcome: str = "") -> None:
        """Adds a line to the trace; it is part of the digest."""
        self.trace.append((self.steps, self.loop.time(), node, verb, key, outcome))

    # Running it.

    def run(self, script: Callable[[World], Awaitable[Any]]) -> None:
        """Plays the script to its end or to the limit on steps. Raises InvariantBroken, whatever went wrong."""

        async def play() -> None:
            await script(self)

        collecting = gc.isenabled()
        gc.disable()  # a collection at a chance moment would finalize things in another order
        try:
            task = self.loop.create_task(play())
            task.add_done_callback(lambda _: self.loop.stop())
            with capture_logs():  # logs of simulated processes are not ours
                self.loop.run_forever()
            if self._failure is None and not self.cut:
                task.result()
        except Exception as error:  # of the script, or of the loop: deadlock or livelock
            self.fail(f"the world failed: {error!r}", error)
        finally:
            self._close()
            if collecting:
                gc.enable()
        if self._failure is not None:
            raise self._failure

    def digest(self) -> str:
        """One number for the whole trace."""
        return hashlib.sha256("\n".join(map(line, self.trace)).encode()).hexdigest()[:16]

    @property
    def replay(self) -> str:
        return f"lakebed sim --world {self.name or '?'} --seed {self.seed} --steps {self.steps_max}"

    # What the store handles call.

    def step(self, node: str, verb: str, key: str, outcome: str) -> bool:
        """Counts a step and checks the invariants; False when the world is over."""
        self.steps += 1
        self.note(node, verb, key, outcome)
        for name, holds in self._invariants:
            try:
                complaint = holds()
            except Exception as error:  # raised from here it would reach library code
                self.fail(f"{name}: {error!r}", error)
                return False
            if complaint:
                self.fail(f"{name}: {complaint}")
                return False
        if self.steps >= self.steps_max:
            self.cut = True
            self.loop.stop()
            return False
        return True

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        """Ends the world from a place where raising would reach library code."""
        if self._failure is None:
            self._failure = cause if isinstance(cause, InvariantBroken) else self._broken(what)
            self._failure.__cause__ = cause if cause is not self._failure else None
        self.loop.stop()

    def land_later(self, node: str, verb: str, key: str, write: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """A write on the wire: it reaches the store later, even if its sender is dead."""

        def land() -> None:
            self.step(node, verb, key, f"landed late, {attempt(write)[0]}")

        self.loop.call_later(self.fault_rng.random() * self.faults.late_s, land, context=self.outside)

    def next_flight(self) -> int:
        self._flights += 1
        return self._flights

    async def forever(self) -> None:
        await self.loop.create_future()

    def _broken(self, what: str) -> InvariantBroken:
        tail = [line(event) for event in self.trace[-TAIL:]]
        return InvariantBroken(what, seed=self.seed, step=self.steps, tail=tail, replay=self.replay)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "never retrieved" not in context.get("message", ""):
            self.fail(f"{context.get('message')}: {context.get('exception')!r}", context.get("exception"))

    def _close(self) -> None:
        """Drops every task that did not end. Their `finally` blocks run now, in a world where nothing answers."""
        for process in self.processes:
            process.alive = False
        for task in self.loop.tasks:
            if not task.done():
                drop(task)
        self.loop.close()


def line(event: Event) -> str:
    step, at_s, node, verb, key, outcome = event
    return f"{step:5d} {at_s:10.4f}s {node:<10} {verb:<9} {key} {outcome}".rstrip()
