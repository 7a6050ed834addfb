"""One program of the stack: the bucket, the gateway or the workers. How it starts, when it is ready, how it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from lakebed.clock import Clock
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import BucketEndpoints, child_environment
from lakebed.embedded.health import ask
from lakebed.embedded.weed import Weed

READY_S = 60.0  # a gateway takes 2 s on an idle machine; the first one also proves the store
ASK_EVERY_S = 0.1
DRAIN_S = 25.0  # longer than gateway.drain_s, so that a gateway's own limit is the one that counts
BUCKET_GRACE_S = 20.0  # for one that does not settle: an orderly stop takes it 15 s, waiting for its own listeners


class Program(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def child(self) -> Child: ...

    async def start(self) -> None:
        """Starts it and returns once it is ready. Raises Unavailable with its last words; then nothing is left."""

    async def stop(self) -> None:
        """Drains it and ends it. Nothing is left afterwards."""


class BucketProgram:
    """The embedded bucket in the stack."""

    name = "bucket"

    def __init__(self, weed: Weed) -> None:
        self._weed = weed

    @property
    def url(self) -> str:
        return self._weed.endpoints.s3

    @property
    def child(self) -> Child:
        return self._weed.child

    @property
    def endpoints(self) -> BucketEndpoints:
        return self._weed.endpoints

    async def start(self) -> None:
        await self._weed.start()

    async def stop(self) -> None:
        settled = await self._weed.settle()
        await self._weed.stop(0.0 if settled else BUCKET_GRACE_S)

    def clear(self) -> None:
        self._weed.clear()


class Command(msgspec.Struct, frozen=True):
    """What to run and how it is told its port; it is ready when it answers `health` with 200."""

    name: str
    argv: tuple[str, ...]
    health: str = "/healthz"

    def with_port(self, port: int) -> Sequence[str]:
        return [word.replace("{port}", str(port)) for word in self.argv]


class ServerProgram:
    """A child that serves HTTP on a given port and reaches the bucket through its environment."""

    def __init__(self, command: Command, port: int, folder: Path, bucket: BucketProgram, *, clock: Clock) -> None:
        self.name = command.name
        self.url = f"http://127.0.0.1:{port}"
        self.child = Child(command.name, folder / f"{command.name}.log", clock=clock)
        self._command, self._port, self._folder, self._bucket, self._clock = command, port, folder, bucket, clock

    async def start(self) -> None:
        environment = child_environment(self._folder, self._bucket.endpoints)
        self.child.start(self._command.with_port(self._port), env=environment)
        try:
            await self._ready()
        except BaseException:
            await self.child.stop(0.0)
            raise

    async def stop(self) -> None:
        await self.child.stop(DRAIN_S)

    async def _ready(self) -> None:
        deadline = self._clock.monotonic_s() + READY_S
        last = "it was never asked"
        while self._clock.monotonic_s() < deadline:
            if not self.child.running():
                raise self.child.ended(f"the {self.name} died while starting")
            answer = await ask(self.url, self._command.health)
            if answer.status == 200:
                return
            last = f"{answer.status}: {answer.body[:200]}" if answer.status else answer.body
            await self._clock.sleep(ASK_EVERY_S)
        raise self.child.ended(f"the {self.name} was not ready within {READY_S:.0f} s ({last})")
