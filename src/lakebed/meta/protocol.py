"""The meta seam: a small, strongly consistent, ordered key-value store.

Keys sort by their UTF-8 bytes and look like paths. Every entry has a version that never repeats at its key, also not
after a delete, so a compare-and-swap cannot be fooled by a value that came back. One call is atomic; there are no
transactions over several keys.

`partition_key` names the group a key belongs to; it routes on backends with shards. A key is always used with the same
one. A range scan without it looks at all groups; everything else concerns one group.

A call that changes something and whose answer is lost raises OutcomeUnknown: read, compare, decide. Unavailable means
that nothing was changed. Backends that can find out by reading do so before they raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lakebed.errors import LakebedError
from lakebed.meta.model import Entry, Put


class Session(Protocol):
    """The life of a process as others see it: entries put under it vanish when it ends.

    Opened by `Meta.open_session`, which keeps it alive with heartbeats until `close`, or until the process dies or is
    silent for longer than the session's timeout.
    """

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool:
        """False once the session is known to have ended: what was put under it may be somebody else's by now."""

    async def close(self) -> None:
        """Ends the session and deletes its entries. Idempotent."""


@runtime_checkable
class Grouped(Protocol):
    """A backend that can name its groups, which is cheaper than to look through their keys."""

    async def groups(self) -> list[str]:
        """The partition keys of all groups that were ever written, sorted."""


class Meta(Protocol):
    async def get(self, key: str, *, partition_key: str = "") -> Entry:
        """The entry at `key`. Raises NotFound."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: Session | None = None,
        partition_key: str = "",
    ) -> Entry:
        """Stores the value and gives the new entry, with its version.

        `expected=None` puts whatever stands there; `expected=ABSENT` only where nothing does, else AlreadyExists;
        a version only over exactly that one, else Stale. Both carry the Entry that stands there in `current` (None
        when the key is gone). With `session` the entry is ephemeral; Fenced when that session has ended. A put
        without `session` over an ephemeral entry makes it a lasting one.
        """

    async def put_all(self, puts: Sequence[Put]) -> list[Entry | LakebedError]:
        """Makes each put as `put` does, and each on its own: gives the new entry or the error of each, in their order.

        One call for what would be many; nothing is atomic over them. Raises only what concerns them all.
        """

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        """Removes the entry. Without `expected` a missing one is fine; with it, Stale unless exactly it stood there."""

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> Entry | None:
        """The entry with the lowest key that is `key` or above and starts with `prefix` (which ends in '/')."""

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[Entry]:
        """The first `limit` entries with start <= key < end, in key order, as of one instant within a group.

        `start` and `end` are compared only; they need not be well-formed keys (a prefix does).
        """

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        """Removes every entry with start <= key < end. Atomic within a group."""

    async def open_session(self, *, timeout_s: float) -> Session:
        """Starts a session that others see end `timeout_s` after its last heartbeat."""

    async def close(self) -> None:
        """Ends this client's sessions and lets go of its resources. Calls after it raise Unavailable."""
