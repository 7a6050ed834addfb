"""One JSON object changed by compare-and-swap: the only way Lakebed changes an object in place.

The stored object is the value's own fields plus two of ours: `epoch`, which never goes down, so an older owner is
fenced; and `attempt_id`, fresh for every write, so bytes never repeat and a writer recognises its own write when the
answer was lost.

Changes asked for while a write is under way are applied together in the next one: many callers in a process cost one
PUT, not a queue of conflicts. What is known of the object after a write is kept, so an uncontended change is one
request; a decision taken without writing is always taken again on a fresh read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from lakebed.clock import Clock
from lakebed.errors import AlreadyExists, Conflict, Corrupt, Fenced, NotFound, Overloaded, Stale
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.model import StoredObject
from lakebed.store.protocol import Store

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS_MAX = 40  # compare-and-swaps that one batch of changes may lose before its callers are told Overloaded
BACKOFF_BASE_S = 0.01
BACKOFF_CAP_S = 1.0
GROUP_MAX = 10_000  # changes waiting in one process before new ones are refused


class Snapshot(msgspec.Struct, Generic[T], frozen=True):
    """The register as it was at one instant. An absent register is its initial value at epoch 0, without an etag."""

    value: T
    epoch: int
    etag: str


class _Envelope(msgspec.Struct, frozen=True):
    epoch: int = 0
    attempt_id: str = ""


class _Waiter:
    def __init__(self, decide: Callable[[Any], tuple[Any, Any]], epoch: int | None, done: asyncio.Future[Any]) -> None:
        self.decide = decide
        self.epoch = epoch
        self.done = done


class Register(Generic[T]):
    """A register at `key` holding a msgspec struct (or dict) of type `kind`; absent means `initial`.

    `name` labels its metrics; registers of one sort share a name.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        kind: type[T],
        initial: T,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        name: str,
    ) -> None:
        self._store, self._key, self._initial = store, key, initial
        self._clock, self._ids = clock, ids
        self._decoder = msgspec.json.Decoder(kind)
        self._known: Snapshot[T] | None = None
        self._waiting: list[_Waiter] = []
        self._writer: asyncio.Task[None] | None = None
        self._writes = metrics.counter("lakebed_register_writes_total").labels(register=name)
        self._changes = metrics.counter("lakebed_register_changes_total").labels(register=name)
        self._conflicts = metrics.counter("lakebed_register_conflicts_total").labels(register=name)

    @property
    def key(self) -> str:
        return self._key

    async def read(self) -> Snapshot[T]:
        """The register as it is now. Raises Corrupt when the object does not decode."""
        try:
            self._known = self._snapshot(await self._store.get(self._key))
        except NotFound:
            self._known = Snapshot(self._initial, 0, "")
        return self._known

    async def change(self, decide: Callable[[T], tuple[T, R]], *, epoch: int | None = None) -> R:
        """Applies a pure decision: value in, (new value, result) out. Atomic; returns the result.

        `decide` may run several times and must not await. Returning the value it was given writes nothing. What it
        raises reaches the caller alone. With `epoch`, an older owner gets Fenced and a newer one raises the register's
        epoch. Raises Overloaded after too many lost races, OutcomeUnknown when the store cannot say.
        """
        if len(self._waiting) >= GROUP_MAX:
            raise Overloaded(f"{GROUP_MAX} changes of {self._key!r} are already waiting")
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(decide, epoch, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        return await done

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                try:
                    await self._write(group)
                except Exception as error:
                    _settle([(waiter, error) for waiter in group])
                except BaseException:
                    for waiter in group:
                        waiter.done.cancel()
                    raise
        finally:
            self._writer = None

    async def _write(self, group: list[_Waiter]) -> None:
        fresh = self._known is None
        snapshot = self._known or await self.read()
        for attempt in range(ATTEMPTS_MAX):
            value, epoch, results = _decide(group, snapshot)
            if value is snapshot.value and epoch == snapshot.epoch:
                if fresh:
                    return _settle(results)
                snapshot, fresh = await self.read(), True
                continue
            if not fresh and any(isinstance(result, Exception) for _, result in results):
                snapshot, fresh = await self.read(), True  # a refusal is only believed on a fresh read
                continue
            try:
                await self._put(snapshot, value, epoch)
            except Conflict as error:
                self._conflicts.inc()
                snapshot, fresh = await self._after_conflict(error, attempt), True
                continue
            except BaseException:
                self._known = None
                raise
            self._writes.inc()
            self._changes.inc(len(group))
            return _settle(results)
        raise Overloaded(f"{self._key!r} changed under us {ATTEMPTS_MAX} times", hint="fewer writers, or group them")

    async def _after_conflict(self, error: Conflict, attempt: int) -> Snapshot[T]:
        """What stands now. The first conflict brings it along; from the second on, racers spread out first."""
        current = error.current if isinstance(error, (AlreadyExists, Stale)) else None
        if attempt == 0 and current is not None:
            self._known = self._snapshot(current)
            return self._known
        await self._clock.sleep(self._ids.jitter_s(attempt, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
        return await self.read()

    async def _put(self, snapshot: Snapshot[T], value: T, epoch: int) -> None:
        data = msgspec.json.encode(
            {**msgspec.to_builtins(value), "epoch": epoch, "attempt_id": self._ids.token()},
        )
        if snapshot.etag:
            info = await self._store.replace(self._key, data, snapshot.etag)
        else:
            info = await self._store.create(self._key, data)
        self._known = Snapshot(value, epoch, info.etag)

    def _snapshot(self, stored: StoredObject) -> Snapshot[T]:
        try:
            envelope = _ENVELOPE.decode(stored.data)
            return Snapshot(self._decoder.decode(stored.data), envelope.epoch, stored.etag)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(
                f"{self._key!r} does not decode: {error}", hint="nothing was changed; look at the object", key=self._key
            ) from error


_ENVELOPE = msgspec.json.Decoder(_Envelope)


def _decide(group: list[_Waiter], snapshot: Snapshot[Any]) -> tuple[Any, int, list[tuple[_Waiter, Any]]]:
    value, epoch = snapshot.value, snapshot.epoch
    results: list[tuple[_Waiter, Any]] = []
    for waiter in group:
        try:
            if waiter.epoch is not None and waiter.epoch < epoch:
                raise Fenced(f"epoch {waiter.epoch} is over: epoch {epoch} has written", epoch=epoch)
            after, result = waiter.decide(value)
        except Exception as error:
            results.append((waiter, error))
            continue
        if after is not value and waiter.epoch is not None:
            epoch = waiter.epoch
        value = after
        results.append((waiter, result))
    return value, epoch, results


def _settle(results: list[tuple[_Waiter, Any]]) -> None:
    for waiter, result in results:
        if waiter.done.done():
            continue  # its caller was cancelled; the change stands all the same
        if isinstance(result, Exception):
            waiter.done.set_exception(result)
        else:
            waiter.done.set_result(result)
