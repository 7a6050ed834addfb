"""Who did what, when and why: one record for each thing an operator does by hand.

A record is created before the act, with no outcome, and replaced once after it: an act that was begun is on record
whatever dies, and a record without an outcome says that nobody knows how it ended. Keys sort by time; those of one
process sort in the order of its acts, also within a millisecond and after its clock was set back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import Corrupt, LakebedError, NotFound
from lakebed.ids import Ids
from lakebed.store.model import StoredObject, Version
from lakebed.store.protocol import Store

ROOT = "trail/v1/"
SCHEMA = "lakebed.trail.v1"
DAYS_MAX = 31  # how far back `latest` looks
DONE = "done"


class Deed(msgspec.Struct, frozen=True):
    """One act. `outcome` is empty while it is under way, or for good when its doer died."""

    deed_id: str
    at_ms: int
    who: str
    what: str
    subject: dict[str, str]
    reason: str = ""
    outcome: str = ""
    detail: str = ""
    node: str = ""
    schema: str = SCHEMA


class Told:
    """What the doer says of an act while it is under way."""

    def __init__(self) -> None:
        self.detail = ""


class Trail:
    def __init__(self, store: Store, *, clock: Clock, ids: Ids, node: str = "") -> None:
        self._store, self._clock, self._ids, self._node = store, clock, ids, node

    @asynccontextmanager
    async def record(self, who: str, what: str, subject: dict[str, str], reason: str = "") -> AsyncIterator[Told]:
        """Around an act. Raises what the store raises, before the act is begun, when it cannot be recorded."""
        at = now_ms(self._clock)
        deed = Deed(self._ids.ordered(at), at, who, what, subject, reason, node=self._node)
        key = f"{ROOT}{_day(deed.deed_id)}/{deed.deed_id}.json"
        made = await self._store.create(key, msgspec.json.encode(deed))
        told = Told()
        try:
            yield told
        except LakebedError as error:
            await self._close(key, made.etag, deed, error.code, error.message)
            raise
        await self._close(key, made.etag, deed, DONE, told.detail)

    async def latest(self, limit: int = 50) -> list[Deed]:
        """The newest deeds first, of the last days."""
        found: list[Deed] = []
        for day in list(reversed(await self._store.children(ROOT)))[:DAYS_MAX]:
            keys = [info.key async for info in self._store.list(f"{ROOT}{day}/")]
            for key in reversed(keys):
                try:
                    found.append(decode(await self._store.get(key)))
                except NotFound:
                    continue
                if len(found) == limit:
                    return found
        return found

    async def _close(self, key: str, etag: Version, deed: Deed, outcome: str, detail: str) -> None:
        closed = msgspec.structs.replace(deed, outcome=outcome, detail=detail)
        await self._store.replace(key, msgspec.json.encode(closed), etag)


def decode(stored: StoredObject) -> Deed:
    try:
        return msgspec.json.decode(stored.data, type=Deed)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{stored.key!r} does not decode: {error}", key=stored.key) from error


def _day(deed_id: str) -> str:
    """The day in the id, not the clock's: a clock that was set back over midnight must not change the order."""
    at_ms = int(deed_id.partition("-")[0])
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("date=%Y-%m-%d")
