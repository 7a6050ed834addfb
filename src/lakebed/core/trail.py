"""The audit trail: one record for each operator action, with who, what, when and why.

The record is created before the action, without an outcome, and replaced once after it. So an action that was started
is on record even if the process dies, and a record without an outcome means that the result is unknown. Keys sort by
time; those of one process sort in the order of its actions, also within a millisecond and after its clock was set back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, LakebedError, NotFound
from lakebed.store.model import StoredObject, Version
from lakebed.store.runtime import StoreRuntime

ROOT = "trail/v1/"
SCHEMA = "lakebed.trail.v1"
DAYS_MAX = 31  # how far back `latest` looks
DONE = "done"


class OperatorAction(msgspec.Struct, frozen=True):
    """One operator action. `outcome` is empty while it runs, and stays empty when its process dies."""

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


class ActionOutcome:
    """What the code inside `Trail.record` reports about the action's result."""

    def __init__(self) -> None:
        self.detail = ""


class Trail:
    def __init__(self, runtime: StoreRuntime, *, node: str = "") -> None:
        self._runtime, self._store, self._node = runtime, runtime.store, node

    @asynccontextmanager
    async def record(
        self, who: str, what: str, subject: dict[str, str], reason: str = ""
    ) -> AsyncIterator[ActionOutcome]:
        """Records the action that runs inside. Raises what the store raises, before the action starts, when the record
        cannot be created.
        """
        at = now_ms(self._runtime.clock)
        action = OperatorAction(self._runtime.ids.ordered(at), at, who, what, subject, reason, node=self._node)
        key = f"{ROOT}{_day(action.deed_id)}/{action.deed_id}.json"
        made = await self._store.create(key, msgspec.json.encode(action))
        outcome = ActionOutcome()
        try:
            yield outcome
        except LakebedError as error:
            await self._close(key, made.etag, action, error.code, error.message)
            raise
        await self._close(key, made.etag, action, DONE, outcome.detail)

    async def latest(self, limit: int = 50) -> list[OperatorAction]:
        """The newest actions of the last DAYS_MAX days, newest first."""
        found: list[OperatorAction] = []
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

    async def _close(self, key: str, etag: Version, action: OperatorAction, outcome: str, detail: str) -> None:
        closed = msgspec.structs.replace(action, outcome=outcome, detail=detail)
        await self._store.replace(key, msgspec.json.encode(closed), etag)


def decode(stored: StoredObject) -> OperatorAction:
    try:
        return msgspec.json.decode(stored.data, type=OperatorAction)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{stored.key!r} does not decode: {error}", key=stored.key) from error


def _day(deed_id: str) -> str:
    """The day in the id, not the clock's: a clock that was set back over midnight must not change the order."""
    at_ms = int(deed_id.partition("-")[0])
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("date=%Y-%m-%d")
