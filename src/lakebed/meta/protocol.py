"""The interface of the meta store: small, strongly consistent, ordered key-value pairs.

Keys sort by their UTF-8 bytes and look like paths. Every entry has a version that never repeats at its key, also not
after a delete, so a compare-and-swap cannot succeed on a value that was changed and restored (ABA). One call is atomic;
there are no transactions over several keys.

`partition_key` names the group a key belongs to; it routes on backends with shards. A key is always used with the same
one. A range scan without it looks at all groups; everything else concerns one group.

A change whose response is lost raises OutcomeUnknown: read, compare, decide. Unavailable means
that nothing was changed. Backends that can find out by reading do so before they raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from lakebed.core.clock import Clock
from lakebed.core.errors import AlreadyExists, Fenced, LakebedError
from lakebed.meta.model import ABSENT, MetaEntry, Put

BEATS_PER_TIMEOUT = 3  # two heartbeats may be lost before others see the session end


class MetaSession(Protocol):
    """The liveness of a process as others see it: entries put under it are deleted when it ends.

    Opened by `Meta.open_session`, which keeps it alive with heartbeats until `close`, or until the process dies or is
    silent for longer than the session's timeout.
    """

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool:
        """False once the session is known to have ended: its entries may belong to another process by now."""

    async def close(self) -> None:
        """Ends the session and deletes its entries. Idempotent."""


@runtime_checkable
class GroupedMeta(Protocol):
    """A backend that can name its groups, which is cheaper than a scan of their keys."""

    async def groups(self) -> list[str]:
        """The partition keys of all groups that have an entry, sorted. Some of them may have none any more."""


class Meta(Protocol):
    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        """The entry at `key`. Raises NotFound."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: MetaSession | None = None,
        partition_key: str = "",
    ) -> MetaEntry:
        """Stores the value and gives the new entry, with its version.

        `expected=None` overwrites any entry; `expected=ABSENT` puts only where none exists, else AlreadyExists;
        a version only over exactly that one, else Stale. Both carry the existing MetaEntry in `current` (None
        when the key is gone). With `session` the entry is ephemeral; Fenced when that session has ended. A put
        without `session` over an ephemeral entry makes it permanent.
        """

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        """Makes each put as `put` does, and each on its own: gives the new entry or the error of each, in their order.

        One call instead of many; nothing is atomic over them. A put is made only when its `first` is there. Raises
        only what concerns all of them.
        """

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        """Removes the entry. Without `expected` a missing one is fine; with it, Stale unless that version is stored."""

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        """The entry with the lowest key that is `key` or above and starts with `prefix` (which ends in '/')."""

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        """The first `limit` entries with start <= key < end, in key order, as of one instant within a group.

        `start` and `end` are compared only; they need not be well-formed keys (a prefix does).
        """

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        """Removes every entry with start <= key < end. Atomic within a group."""

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        """Starts a session that others see end `timeout_s` after its last heartbeat."""

    async def close(self) -> None:
        """Ends this client's sessions and frees its resources. Later calls raise Unavailable."""


async def put_each(meta: Meta, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
    async def one(put: Put) -> MetaEntry | LakebedError:
        try:
            if put.first is not None:
                with suppress(AlreadyExists):
                    await meta.put(*put.first, expected=ABSENT, partition_key=put.partition_key)
            return await meta.put(put.key, put.value, expected=put.expected, partition_key=put.partition_key)
        except LakebedError as error:
            return error

    return list(await asyncio.gather(*map(one, puts)))


class HeartbeatSession:
    """Calls `beat` (raises Fenced when the session has ended) a few times per timeout, and `end` on close.

    Judges its own end by its own monotonic clock too: unless a heartbeat that was *sent* within the timeout succeeded,
    it counts as ended, so a process that was paused stops before others replace it. `opened_s` is when its opening
    was sent, for backends that may be slow to answer it.
    """

    def __init__(
        self,
        id: str,
        *,
        timeout_s: float,
        clock: Clock,
        beat: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        opened_s: float | None = None,
    ) -> None:
        self._id, self._timeout_s, self._clock = id, timeout_s, clock
        self._beat, self._end = beat, end
        self._good_until_s = (clock.monotonic_s() if opened_s is None else opened_s) + timeout_s
        self._ended = False
        self._beating = asyncio.create_task(self._keep())

    @property
    def id(self) -> str:
        return self._id

    @property
    def alive(self) -> bool:
        return not self._ended and self._clock.monotonic_s() < self._good_until_s

    async def close(self) -> None:
        if self._beating.done() and self._ended:
            return
        self._ended = True
        self._beating.cancel()
        await asyncio.wait([self._beating])
        await self._end()

    async def _keep(self) -> None:
        while not self._ended:
            await self._clock.sleep(self._timeout_s / BEATS_PER_TIMEOUT)
            sent_s = self._clock.monotonic_s()
            try:
                await self._beat()
            except Fenced:
                self._ended = True
            except LakebedError:
                continue  # the next heartbeat may succeed in time
            else:
                self._good_until_s = sent_s + self._timeout_s
