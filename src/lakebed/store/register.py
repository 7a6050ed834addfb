"""One JSON object, changed by compare-and-swap: Lakebed changes objects in place only through this.

The stored object has the fields of the value and four more: `epoch`, which never decreases, so an older owner is
fenced; `attempt_id`, new for every write, so bytes never repeat; `earlier`, the last write of each other recent
writer; and `revision`, the number of writes. When a response was lost, a conflict may be with a write based on our own:
our attempt in the stored object means that our write took place, and that the change must not be applied again.

A conflict without our attempt is a lost race when our attempt could not have left the object yet: fewer writes than
`earlier` has room for happened since the version we built on, or `earlier` shows an older attempt of ours. When more
writers than that wrote since, the store's word decides: a refusal of the only request that was sent is a lost race,
and a refusal after a request without a response is OutcomeUnknown. So any number of writers get a decision, and a
doubt is raised only where a response was lost.

Changes requested during a write are applied together in the next one: many callers in a process cost one PUT, not a
queue of conflicts. The object is cached after a write, so an uncontended change is one request; while other processes
write, it is read first, which is cheaper than a refused PUT. A decision that writes nothing is always repeated on a
fresh read.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from lakebed.core.errors import (
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
from lakebed.store.model import StoredObject, Version
from lakebed.store.runtime import StoreRuntime

T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS_MAX = 40  # lost compare-and-swaps of one batch of changes before its callers get Overloaded
BACKOFF_BASE_S = 0.01
BACKOFF_CAP_S = 1.0
GROUP_MAX = 10_000  # changes waiting in one process before new ones are refused
WRITERS_MAX = 32  # writers recorded in the object, some 20 bytes each; behind more, a lost response stays unknown
ABSENT = Version("")  # the object does not exist
OURS = ("epoch", "attempt_id", "earlier", "revision")


class RegisterState(msgspec.Struct, Generic[T], frozen=True):
    """The register as it was at one instant. An absent register is its initial value at epoch 0, without an etag."""

    value: T
    epoch: int
    etag: Version
    attempts: tuple[str, ...] = ()
    revision: int = 0

    def holds(self, attempt: str, since: int | None = None) -> bool | None:
        """Whether this write took place; None when too many others wrote since to know.

        `since` is the revision that it was based on, None or 0 when that has no number.
        """
        if attempt in self.attempts:
            return True
        writer = attempt.partition("-")[0] + "-"
        seen = len(self.attempts) < WRITERS_MAX or any(each.startswith(writer) for each in self.attempts)
        few = bool(since) and since is not None and since <= self.revision < since + WRITERS_MAX
        return False if seen or few else None


class _Envelope(msgspec.Struct, frozen=True):
    epoch: int = 0
    attempt_id: str = ""
    earlier: tuple[str, ...] = ()
    revision: int = 0


class _Waiter:
    def __init__(self, decide: Callable[[Any], tuple[Any, Any]], epoch: int | None, done: asyncio.Future[Any]) -> None:
        self.decide = decide
        self.epoch = epoch
        self.done = done


class Register(Generic[T]):
    """A register at `key` holding a msgspec struct (or dict) of type `kind`; absent means `initial`.

    `name` labels its metrics; registers of one sort share a name.
    """

    def __init__(self, runtime: StoreRuntime, key: str, kind: type[T], initial: T, *, name: str) -> None:
        if taken := set(OURS) & set(getattr(kind, "__struct_fields__", ())):
            raise Invalid(f"a register adds {', '.join(sorted(taken))} itself: {kind.__name__} cannot have them")
        self._store, self._key, self._initial = runtime.store, key, initial
        self._clock, self._ids, metrics = runtime.clock, runtime.ids, runtime.metrics
        self._writer_id, self._attempts = runtime.ids.token(), 0
        self._decoder = msgspec.json.Decoder(kind)
        self._known: RegisterState[T] | None = None
        self._contended = False  # another process wrote since our last write: read before writing
        self._waiting: list[_Waiter] = []
        self._writer: asyncio.Task[None] | None = None
        self._writes = metrics.counter("lakebed_register_writes_total").labels(register=name)
        self._changes = metrics.counter("lakebed_register_changes_total").labels(register=name)
        self._conflicts = metrics.counter("lakebed_register_conflicts_total").labels(register=name)

    @property
    def key(self) -> str:
        return self._key

    async def read(self) -> RegisterState[T]:
        """The register as it is now. Raises Corrupt when the object does not decode."""
        try:
            self._known = self._snapshot(await self._store.get(self._key))
        except NotFound:
            self._known = RegisterState(self._initial, 0, ABSENT)
        return self._known

    async def change(self, decide: Callable[[T], tuple[T, R]], *, epoch: int | None = None) -> R:
        """Applies a pure decision: value in, (new value, result) out. Atomic; returns the result.

        `decide` may run several times and must not await. Returning the value it was given writes nothing. What it
        raises reaches the caller alone. With `epoch`, an older owner gets Fenced and a newer one raises the register's
        epoch. Raises Overloaded after too many lost races, or OutcomeUnknown; after any other error nothing was
        changed. Cancelling a caller drops its change unless its write has begun.
        """
        if len(self._waiting) >= GROUP_MAX:
            raise Overloaded(f"{GROUP_MAX} changes of {self._key!r} are already waiting")
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(decide, epoch, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        try:
            return await done
        finally:
            del done  # an error refers to this frame: a cycle would keep the caller until the garbage collector runs

    async def _write_waiting(self) -> None:
        group: list[_Waiter] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                try:
                    await self._write(group)
                except Exception as error:
                    _fail(group, error)
        except BaseException:  # the writer was cancelled, its callers were not: each gets what is known
            waiting, self._waiting = self._waiting, []
            _fail(group, OutcomeUnknown(f"the write of {self._key!r} was cancelled while it ran"))
            _fail(waiting, Unavailable(f"the write of {self._key!r} was cancelled before it began"))
            raise
        finally:
            self._writer = None

    async def _write(self, group: list[_Waiter]) -> None:
        fresh = self._known is None or self._contended
        snapshot = await self.read() if self._known is None or fresh else self._known
        self._contended = self._contended and not self._is_ours(snapshot)
        for tries in range(ATTEMPTS_MAX):
            group = [waiter for waiter in group if not waiter.done.done()]  # without cancelled callers
            if not group:
                return None
            value, epoch, results = _decide(group, snapshot)
            unchanged = value is snapshot.value and epoch == snapshot.epoch
            if unchanged and fresh:
                return _settle(results)
            if unchanged:  # a decision without a write needs a fresh read; a write is checked by its condition
                snapshot, fresh = await self.read(), True
                continue
            found = await self._swap(snapshot, value, epoch)
            if found is None:
                self._changes.inc(len(group))
                return _settle(results)
            snapshot, fresh = found, True
            if tries:
                snapshot = await self._spread_out(tries)
        raise Overloaded(f"{self._key!r} was changed by others {ATTEMPTS_MAX} times in a row", hint="use fewer writers")

    async def _swap(self, snapshot: RegisterState[T], value: T, epoch: int) -> RegisterState[T] | None:
        """One compare-and-swap: None when it took place, else the current state."""
        self._attempts += 1
        attempt = f"{self._writer_id}-{self._attempts}"
        try:
            await self._put(snapshot, value, epoch, attempt)
        except Conflict as error:
            self._conflicts.inc()
            self._contended = True
            found = await self._after_conflict(error)
            done = found.holds(attempt, snapshot.revision)
            if done is None and error.repeated:
                raise OutcomeUnknown(
                    f"{self._key!r}: a response was lost, and too many others wrote since: ours may have taken place"
                ) from error
            if not done:
                return found
        except BaseException:
            self._known = None
            raise
        self._writes.inc()
        return None

    async def _after_conflict(self, error: Conflict) -> RegisterState[T]:
        """The current state, which the conflict contains. Our write may be in it: unreadable is OutcomeUnknown."""
        self._known = None
        if isinstance(error, (AlreadyExists, Stale)):
            current = error.current
            self._known = self._snapshot(current) if current is not None else RegisterState(self._initial, 0, ABSENT)
            return self._known
        try:
            return await self.read()
        except Exception as unread:
            raise OutcomeUnknown(f"{self._key!r} may have been written, and cannot be read now: {unread}") from error

    async def _spread_out(self, tries: int) -> RegisterState[T]:
        """From the second conflict on: waits with jitter, then reads again."""
        await self._clock.sleep(self._ids.jitter_s(tries, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
        return await self.read()

    def _is_ours(self, snapshot: RegisterState[T]) -> bool:
        return snapshot.attempts[:1] != () and snapshot.attempts[0].startswith(f"{self._writer_id}-")

    async def _put(self, snapshot: RegisterState[T], value: T, epoch: int, attempt: str) -> None:
        earlier = [each for each in snapshot.attempts if not each.startswith(self._writer_id)][: WRITERS_MAX - 1]
        ours = {"epoch": epoch, "attempt_id": attempt, "earlier": earlier, "revision": snapshot.revision + 1}
        data = msgspec.json.encode({**msgspec.to_builtins(value), **ours})
        if snapshot.etag:
            info = await self._store.replace(self._key, data, snapshot.etag)
        else:
            info = await self._store.create(self._key, data)
        self._known = RegisterState(value, epoch, info.etag, (attempt, *earlier), snapshot.revision + 1)

    def _snapshot(self, stored: StoredObject) -> RegisterState[T]:
        try:
            envelope = _ENVELOPE.decode(stored.data)
            attempts = (envelope.attempt_id, *envelope.earlier)
            value = self._decoder.decode(stored.data)
            return RegisterState(value, envelope.epoch, stored.etag, attempts, envelope.revision)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise Corrupt(
                f"{self._key!r} does not decode: {error}", hint="nothing was changed; inspect the object", key=self._key
            ) from error


_ENVELOPE = msgspec.json.Decoder(_Envelope)


def _decide(group: list[_Waiter], snapshot: RegisterState[Any]) -> tuple[Any, int, list[tuple[_Waiter, Any]]]:
    value, epoch = snapshot.value, snapshot.epoch
    results: list[tuple[_Waiter, Any]] = []
    for waiter in group:
        try:
            if waiter.epoch is not None and waiter.epoch < epoch:
                raise Fenced(f"epoch {waiter.epoch} is fenced: epoch {epoch} has written", epoch=epoch)
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
            continue  # its caller was cancelled; the change took place all the same
        if isinstance(result, Exception):
            waiter.done.set_exception(result)
        else:
            waiter.done.set_result(result)


def _fail(group: list[_Waiter], error: Exception) -> None:
    """Raises the error in every caller, each with its own copy: one shared error would collect all tracebacks."""
    _settle([(waiter, _copy_of(error)) for waiter in group])


def _copy_of(error: Exception) -> Exception:
    try:
        copied = copy.copy(error)
    except TypeError:  # an exception that cannot be copied
        return error
    # Without its traceback, whose frames hold the waiting callers.
    copied.__cause__ = error.__cause__ or error.with_traceback(None)
    return copied
