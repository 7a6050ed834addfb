"""One process's handle to the shared store, with everything that can go wrong between the two.

It shows what a caller of the seam may see, not what a wire does: the adapter has already retried and read back, so what
is left of a bad network is delay, Unavailable (nothing done), OutcomeUnknown (done, not done, or done later), a
conflict with one's own overwritten write, and the end of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lakebed.errors import LakebedError, OutcomeUnknown, Unavailable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject

if TYPE_CHECKING:
    from lakebed.sim.process import Process
    from lakebed.sim.world import World

T = TypeVar("T")


class Crashed(BaseException):
    """This process was killed: nothing it still runs can reach the store. Not an Exception, so nobody handles it."""


class Faults(msgspec.Struct, frozen=True):
    """What goes wrong, and how often: chances per operation, `_s` the longest time it takes."""

    latency_s: float = 0.02
    slow: float = 0.01  # an operation that takes up to slow_s
    slow_s: float = 4.0
    unavailable: float = 0.03  # refused before anything was done
    unknown: float = 0.02  # a write that did nothing, and nobody can say so
    lost: float = 0.03  # a write that was done, and its answer lost
    late: float = 0.02  # a write whose caller gave up, and which lands up to late_s afterwards
    late_s: float = 3.0
    doubted: float = 0.03  # 409, 412 or 503 on a write that was perhaps done: the adapter looks, decides or tries again
    doubt_s: float = 1.0
    crash: float = 0.0  # per await at the store
    pause: float = 0.0  # per await at the store: the whole process stands still for up to pause_s
    pause_s: float = 15.0
    lands_after_crash: float = 0.5  # a write on its way when its process dies
    list_page: int = 3  # keys per page of a listing; the store may change between pages


NONE = Faults(latency_s=0.0, slow=0.0, unavailable=0.0, unknown=0.0, lost=0.0, late=0.0, doubted=0.0)
CALM = msgspec.structs.replace(NONE, latency_s=0.02)  # delays only: every write is answered truly


class FaultyStore:
    """A `Store` for one process. Awaits at the store are counted, two for each operation (going, and coming back)."""

    def __init__(self, world: World, process: Process, inner: MemoryStore) -> None:
        self._world, self._process, self._inner = world, process, inner
        self._rng = world.fault_rng
        self.awaits = 0
        self.flying: dict[int, tuple[str, str, Callable[[], Any]]] = {}

    async def get(self, key: str) -> StoredObject:
        return await self._read("get", key, lambda: self._inner.get(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._read("get_range", key, lambda: self._inner.get_range(key, start, length))

    async def head(self, key: str) -> ObjectInfo:
        return await self._read("head", key, lambda: self._inner.head(key))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        size = self._world.faults.list_page

        async def page(last: str) -> list[ObjectInfo]:
            found: list[ObjectInfo] = []
            async for info in self._inner.list(prefix, after=last):
                found.append(info)
                if len(found) == size:
                    break
            return found

        while True:
            infos = await self._read("list", prefix, partial(page, after))
            for info in infos:
                yield info
            if len(infos) < size:
                return
            after = infos[-1].key

    async def children(self, prefix: str) -> Sequence[str]:
        return await self._read("children", prefix, lambda: self._inner.children(prefix))

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        return await self._write("create", key, lambda: self._inner.create(key, data))

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        return await self._write("replace", key, lambda: self._inner.replace(key, data, etag))

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        parts: list[bytes] = []
        async for chunk in chunks:
            await self._travel()
            parts.append(chunk)

        async def whole() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        return await self._write("upload", key, lambda: self._inner.upload(key, whole()))

    async def delete(self, key: str) -> None:
        await self._write("delete", key, lambda: self._inner.delete(key))

    async def _read(self, verb: str, key: str, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._travel()
        if self._rng.random() < self._world.faults.unavailable:
            raise await self._refusal(verb, key)
        word, result = attempt(read)
        await self._step(verb, key, "read" if word == "done" else word)
        await self._travel()
        return _unwrap(result)

    async def _write(self, verb: str, key: str, write: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Goes out, is done or not, and comes back or not.

        Conditional writes are idempotent by content, so an adapter that is in doubt, looks, and tries again where
        nothing stands is the same call made twice.
        """
        flight = self._world.next_flight()
        self.flying[flight] = (verb, key, write)
        await self._travel()
        del self.flying[flight]
        fault = self._draw()
        if fault == "unavailable":
            raise await self._refusal(verb, key)
        if fault == "late":
            self._world.land_later(self._process.node, verb, key, write)
        if fault in ("late", "unknown"):
            await self._step(verb, key, f"unanswered ({fault})")
            await self._travel()
            raise OutcomeUnknown(f"{verb} {key!r}: simulated", retry_after_s=0.1)
        if fault == "doubted":
            done = self._rng.random() < 0.5
            await self._step(verb, key, f"doubted, {attempt(write)[0]}" if done else "doubted, not done")
            await self._travel(self._world.faults.doubt_s)
        word, result = attempt(write)
        await self._step(verb, key, f"{word}, answer lost" if fault == "lost" else word)
        await self._travel()
        if fault == "lost":
            raise OutcomeUnknown(f"{verb} {key!r}: simulated", retry_after_s=0.1)
        return _unwrap(result)

    def _draw(self) -> str:
        faults, dice = self._world.faults, self._rng.random()
        for name in ("unavailable", "unknown", "lost", "late", "doubted"):
            dice -= getattr(faults, name)
            if dice < 0:
                return name
        return ""

    async def _refusal(self, verb: str, key: str) -> Unavailable:
        await self._step(verb, key, "unavailable")
        return Unavailable(f"{verb} {key!r}: simulated", retry_after_s=0.1)

    async def _travel(self, most_s: float | None = None) -> None:
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
        await asyncio.sleep(delay_s)  # half of them in no time: others run in between, the clock stands still

    async def _step(self, verb: str, key: str, outcome: str) -> None:
        """Counts one step of the world; does not come back when that was its last."""
        if not self._world.step(self._process.node, verb, key, outcome):
            await self._world.forever()


def immediate(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as the memory store's do."""
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
