"""One JSON object changed by compare-and-swap: the only way Lakebed changes an object in place.

The stored object is the value's own fields plus three of ours: `epoch`, which never goes down, so an older owner is
fenced; `attempt_id`, fresh for every write, so bytes never repeat; and `earlier`, the last write of each other recent
writer. When an answer was lost, a conflict may be with a write that built upon our own: finding our attempt in the
stored object says that it took place, and that the change must not be made again.

Changes asked for while a write is under way are applied together in the next one: many callers in a process cost one
PUT, not a queue of conflicts. What is known of the object after a write is kept, so an uncontended change is one
request; a decision taken without writing is always taken again on a fresh read.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from lakebed.clock import Clock
from lakebed.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    Stale,
    Unavailable,
)
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.model import StoredObject, Version
from lakebed.store.protocol import Store

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS_MAX = 40  # compare-and-swaps that one batch of changes may lose before its callers are told Overloaded
BACKOFF_BASE_S = 0.01
BACKOFF_CAP_S = 1.0
GROUP_MAX = 10_000  # changes waiting in one process before new ones are refused
WRITERS_MAX = 32  # writers remembered in the object, some 20 bytes each; behind more, a lost answer stays unknown
ABSENT = Version("")  # no object stands there
OURS = ("epoch", "attempt_id", "earlier")


class Snapshot(msgspec.Struct, Generic[T], frozen=True):
    """The register as it was at one instant. An absent register is its initial value at epoch 0, without an etag."""

    value: T
    epoch: int
    etag: Version
    attempts: tuple[str, ...] = ()

    def holds(self, attempt: str) -> bool | None:
        """Whether this write took place; None when so many others wrote since that the object cannot tell."""
        if attempt in self.attempts:
            return True
        writer = attempt.partition("-")[0] + "-"
        seen = len(self.attempts) < WRITERS_MAX or any(each.startswith(writer) for each in self.attempts)
        return False if seen else None


class _Envelope(msgspec.Struct, frozen=True):
    epoch: int = 0
    attempt_id: str = ""
    earlier: tuple[str, ...] = ()


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
        if taken := set(OURS) & set(getattr(kind, "__struct_fields__", ())):
            raise Invalid(f"a register adds {', '.join(sorted(taken))} itself: {kind.__name__} cannot have them")
        self._store, self._key, self._initial = store, key, initial
        self._clock, self._ids = clock, ids
        self._writer_id, self._attempts = ids.token(), 0
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
            self._known = Snapshot(self._initial, 0, ABSENT)
        return self._known

    async def change(self, decide: Callable[[T], tuple[T, R]], *, epoch: int | None = None) -> R:
        """Applies a pure decision: value in, (new value, result) out. Atomic; returns the result.

        `decide` may run several times and must not await. Returning the value it was given writes nothing. What it
        raises reaches the caller alone. With `epoch`, an older owner gets Fenced and a newer one raises the register's
        epoch. Raises Overloaded after too many lost races, OutcomeUnknown when the store cannot say; after any other
        error nothing was changed. A caller that is cancelled gives its change up if it is not on its way yet.
        """
        if len(self._waiting) >= GROUP_MAX:
            raise Overloaded(f"{GROUP_MAX} changes of {self._key!r} are already waiting")
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(decide, epoch, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        return await done

    async def _write_waiting(self) -> None:
        group: list[_Waiter] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                try:
                    await self._write(group)
                except Exception as error:
                    _fail(group, error)
        except BaseException:  # the writer itself was cancelled, its callers were not: they are told what is known
            waiting, self._waiting = self._waiting, []
            _fail(group, OutcomeUnknown(f"the write of {self._key!r} was stopped half-way"))
            _fail(waiting, Unavailable(f"the write of {self._key!r} was stopped before it began"))
            raise
        finally:
            self._writer = None

    async def _write(self, group: list[_Waiter]) -> None:
        fresh = self._known is None
        snapshot = self._known or await self.read()
        for tries in range(ATTEMPTS_MAX):
            group = [waiter for waiter in group if not waiter.done.done()]  # who was cancelled has given up
            if not group:
                return None
            value, epoch, results = _decide(group, snapshot)
            unchanged = value is snapshot.value and epoch == snapshot.epoch
            if unchanged and fresh:
                return _settle(results)
            if unchanged:  # to refuse, or to leave things as they are, takes a fresh read; a write proves itself
                snapshot, fresh = await self.read(), True
                continue
            found = await self._swap(snapshot, value, epoch)
            if found is None:
                self._changes.inc(len(group))
                return _settle(results)
            snapshot, fresh = found, True
            if tries:
                snapshot = await self._spread_out(tries)
        raise Overloaded(f"{self._key!r} changed under us {ATTEMPTS_MAX} times", hint="fewer writers, or group them")

    async def _swap(self, snapshot: Snapshot[T], value: T, epoch: int) -> Snapshot[T] | None:
        """One compare-and-swap: None when it took place, else what stands there instead."""
        self._attempts += 1
        attempt = f"{self._writer_id}-{self._attempts}"
        try:
            await self._put(snapshot, value, epoch, attempt)
        except Conflict as error:
            self._conflicts.inc()
            found = await self._after_conflict(error)
            done = found.holds(attempt)
            if done is None:
                raise OutcomeUnknown(f"{self._key!r}: too many others wrote to tell our own write") from error
            if not done:
                return found
        except BaseException:
            self._known = None
            raise
        self._writes.inc()
        return None

    async def _after_conflict(self, error: Conflict) -> Snapshot[T]:
        """What stands now; the conflict brings it along. Our write may be in it, so what cannot be read is unknown."""
        self._known = None
        if isinstance(error, (AlreadyExists, Stale)):
            current = error.current
            self._known = self._snapshot(current) if current is not None else Snapshot(self._initial, 0, ABSENT)
            return self._known
        try:
            return await self.read()
        except Exception as unread:
            raise OutcomeUnknown(f"{self._key!r} may be written; it cannot be read now: {unread}") from error

    async def _spread_out(self, tries: int) -> Snapshot[T]:
        """From the second conflict on, racers wait a little, each another while, and look again."""
        await self._clock.sleep(self._ids.jitter_s(tries, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
        return await self.read()

    async def _put(self, snapshot: Snapshot[T], value: T, epoch: int, attempt: str) -> None:
        earlier = [each for each in snapshot.attempts if not each.startswith(self._writer_id)][: WRITERS_MAX - 1]
        data = msgspec.json.encode(
            {**msgspec.to_builtins(value), "epoch": epoch, "attempt_id": attempt, "earlier": earlier}
        )
        if snapshot.etag:
            info = await self._store.replace(self._key, data, snapshot.etag)
        else:
            info = await self._store.create(self._key, data)
        self._known = Snapshot(value, epoch, info.etag, (attempt, *earlier))

    def _snapshot(self, stored: StoredObject) -> Snapshot[T]:
        try:
            envelope = _ENVELOPE.decode(stored.data)
            attempts = (envelope.attempt_id, *envelope.earlier)
            return Snapshot(self._decoder.decode(stored.data), envelope.epoch, stored.etag, attempts)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
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


def _fail(group: list[_Waiter], error: Exception) -> None:
    """Tells everybody, each with an error of their own: raising one in many tasks would pile up their tracebacks."""
    _settle([(waiter, _twin(error)) for waiter in group])


def _twin(error: Exception) -> Exception:
    try:
        twin = copy.copy(error)
    except TypeError:  # an exception whose arguments are not what it was made from
        return error
    twin.__cause__ = error.__cause__ or error
    return twin
