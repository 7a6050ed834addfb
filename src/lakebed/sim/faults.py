"""What can go wrong between one process and the bucket, and the process's own end.

Faults happen on the wire, below `BucketStore`: a request is refused, lost, or carried out without its response coming
back; it arrives late, or a second time; the client repeats it, so that its response is a conflict with itself; a
response is cut short; the network is down for a while. The same code as on a real bucket handles the lost response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lakebed.core.errors import Conflict, LakebedError, Unavailable
from lakebed.store.memory import MemoryBucket
from lakebed.store.model import ObjectInfo, StoredObject, Version

if TYPE_CHECKING:
    from lakebed.sim.process import Process
    from lakebed.sim.world import World

T = TypeVar("T")


class Crashed(BaseException):
    """This process was killed: nothing it still runs reaches the store. Not an Exception, so no handler catches it."""


class Unanswered(Unavailable):
    """A write without a response: done, not done, or done later."""


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong, and how often: chances per request, `_s` the longest time it takes."""

    latency_s: float = 0.02
    slow: float = 0.01  # a request that takes up to slow_s
    slow_s: float = 4.0
    unavailable: float = 0.03  # refused with 503 before anything was done
    unknown: float = 0.02  # a write that never arrived
    lost: float = 0.04  # a write that was done, and its response lost or cut short
    late: float = 0.03  # a write whose sender gave up, and which is done up to late_s afterwards
    late_s: float = 3.0
    repeated: float = 0.03  # a write that the client sends twice: the response is the second one's
    repeat_s: float = 1.0
    duplicated: float = 0.02  # a write that was done and answered, and arrives again up to late_s afterwards
    cut: float = 0.02  # a read whose answer is cut short
    outage: float = 0.4  # after a write without an answer: this process reaches nothing for up to outage_s
    outage_s: float = 2.0
    crash: float = 0.0  # per await at the store
    pause: float = 0.0  # per await at the store: the whole process stops for up to pause_s
    pause_s: float = 15.0
    lands_after_crash: float = 0.5  # a write on its way when its process dies
    list_page: int = 3  # keys per page of a listing; the store may change between pages


NONE = Faults(
    latency_s=0.0, slow=0.0, unavailable=0.0, unknown=0.0, lost=0.0, late=0.0, repeated=0.0, duplicated=0.0, cut=0.0
)
CALM = msgspec.structs.replace(NONE, latency_s=0.02)  # delays only: every write gets its response
UNANSWERED = ("unknown", "lost", "late")


class Wire:
    """One process's connection to what all share. Awaits are counted, two for each request (going, and coming back)."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._rng = world.fault_rng
        self._outage_until_s = 0.0
        self.awaits = 0
        self.flying: dict[int, tuple[str, str, Callable[[], Any]]] = {}

    async def read(self, verb: str, key: str, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self.travel()
        faults, dice = self._world.faults, self._rng.random()
        if self._out() or dice < faults.unavailable:
            raise await self._refusal(verb, key)
        word, result = attempt(read)
        cut = dice < faults.unavailable + faults.cut
        await self._step(verb, key, "cut short" if cut else "read" if word == "done" else word)
        await self.travel()
        if cut:
            raise Unavailable(f"{verb} {key!r}: the answer was cut short", retry_after_s=0.1)
        return _unwrap(result)

    async def write(self, verb: str, key: str, write: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Goes out, is done or not, once or twice, and comes back or not. Raises Unanswered when it does not."""
        flight = self._world.next_flight()
        self.flying[flight] = (verb, key, write)
        await self.travel()
        del self.flying[flight]
        if self._out():
            raise await self._refusal(verb, key)
        fault = self._draw()
        if fault == "unavailable":
            raise await self._refusal(verb, key)
        if fault in ("late", "duplicated"):
            self._world.land_later(self._process.node, verb, key, write)
        if fault == "repeated":
            await self._step(verb, key, f"repeated, first {attempt(write)[0]}")
            await self.travel(self._world.faults.repeat_s)
        if fault in ("late", "unknown"):
            await self._step(verb, key, f"unanswered ({fault})")
        else:
            word, result = attempt(write)
            if fault == "repeated" and isinstance(result, Conflict):
                result.repeated = True  # a client that retries says so
            await self._step(verb, key, f"{word}, {fault}" if fault else word)
        await self.travel()
        if fault in UNANSWERED:
            raise self._unanswered(verb, key)
        return _unwrap(result)

    async def travel(self, most_s: float | None = None) -> None:
        """One await at the store: time passes, and the process may die here."""
        process, faults = self._process, self._world.faults
        if not process.alive:
            raise Crashed(process.node)
        self.awaits += 1
        if self.awaits == process.crash_at_await or (faults.crash and self._rng.random() < faults.crash):
            self._world.crash(process)
            await self._world.forever()
        if faults.pause and self._rng.random() < faults.pause:
            self._world.pause(process, self._rng.random() * faults.pause_s)
        if most_s is None:
            most_s = faults.slow_s if faults.slow and self._rng.random() < faults.slow else faults.latency_s
        delay_s = self._rng.random() * most_s * 2 - most_s
        await asyncio.sleep(delay_s)  # half of them take no time: others run in between, the clock does not move

    def _draw(self) -> str:
        faults, dice = self._world.faults, self._rng.random()
        for name in ("unavailable", *UNANSWERED, "repeated", "duplicated"):
            dice -= getattr(faults, name)
            if dice < 0:
                return name
        return ""

    def _out(self) -> bool:
        return self._world.loop.time() < self._outage_until_s

    def _unanswered(self, verb: str, key: str) -> Unanswered:
        faults = self._world.faults
        if self._rng.random() < faults.outage:
            self._outage_until_s = self._world.loop.time() + self._rng.random() * faults.outage_s
        return Unanswered(f"{verb} {key!r}: simulated", retry_after_s=0.1)

    async def _refusal(self, verb: str, key: str) -> Unavailable:
        await self._step(verb, key, "unavailable")
        return Unavailable(f"{verb} {key!r}: simulated", retry_after_s=0.1)

    async def _step(self, verb: str, key: str, outcome: str) -> None:
        """Counts one step of the world; does not come back when that was its last."""
        if not self._world.step(self._process.node, verb, key, outcome):
            await self._world.forever()


class FaultyClient:
    """A `BucketClient` for one process: the shared bucket at the other end of its wire."""

    def __init__(self, wire: Wire, bucket: MemoryBucket, page: Callable[[], int]) -> None:
        self._wire, self._bucket, self._page = wire, bucket, page

    async def get(self, key: str) -> StoredObject:
        return await self._wire.read("get", key, lambda: self._bucket.get(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._wire.read("get_range", key, lambda: self._bucket.get_range(key, start, length))

    async def head(self, key: str) -> ObjectInfo:
        return await self._wire.read("head", key, lambda: self._bucket.head(key))

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        async def page(last: str, size: int) -> list[ObjectInfo]:
            return self._bucket.page(prefix, last, size)

        while True:
            size = self._page()
            infos = await self._wire.read("list", prefix, lambda last=after, size=size: page(last, size))  # type: ignore[misc]
            if infos:
                yield infos
            if len(infos) < size:
                return
            after = infos[-1].key

    async def children(self, prefix: str) -> Sequence[str]:
        return await self._wire.read("children", prefix, lambda: self._bucket.children(prefix))

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        verb = "create" if instead_of is None else "replace"
        return await self._wire.write(verb, key, lambda: self._bucket.put(key, data, instead_of))

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        parts: list[bytes] = []
        async for chunk in chunks:
            await self._wire.travel()
            parts.append(chunk)

        async def whole() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        return await self._wire.write("upload", key, lambda: self._bucket.upload(key, whole()))

    async def delete(self, key: str) -> None:
        await self._wire.write("delete", key, lambda: self._bucket.delete(key))


def immediate(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as the memory bucket's do."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("this coroutine waits for something")


def attempt(write: Callable[[], Coroutine[Any, Any, T]]) -> tuple[str, T | LakebedError]:
    """What happened, in a word for the trace, and the result or the error."""
    try:
        return "done", immediate(write())
    except LakebedError as error:
        return error.code, error


def _unwrap(result: T | LakebedError) -> T:
    if isinstance(result, LakebedError):
        raise result
    return result
