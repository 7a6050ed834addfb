"""The audit trail: who did what, when, from where and why; a chain of entries that are created and never changed.

An action is one entry before it starts and another when it ends, so one that was started is on record even if the
process dies, and an action without an end has an unknown result. Entry N is created under its number and contains the
SHA-256 of entry N-1: an entry that is changed, inserted or removed later breaks the chain there. The creation of the
next number is the one conditional write, so any number of processes share one chain.

What a chain cannot show is that its newest entries were removed: note its head elsewhere (`lakebed trail verify` prints
it), and let the bucket refuse deletes below `trail/` (bucket policy, Object Lock).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import msgspec

from lakebed.core.auth import Principal, owner_of
from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Conflict, LakebedError, NotFound, Overloaded
from lakebed.store.model import read_record
from lakebed.store.runtime import StoreRuntime

ROOT = "trail/v2/"
SCHEMA = "lakebed.trail.v2"
FOLDER = 1000  # entries in one folder: the newest are found with one small listing
RACES_MAX = 100  # other processes that took the next number before us
STEPS_MAX = 8  # from one entry to the next, before the end of the chain is looked up
AT_ONCE = 16
DONE = "done"
FIRST = "0" * 64  # the hash before the first entry


class Caller(msgspec.Struct, frozen=True):
    """Where the request that is being answered came from, and the tenant of its key."""

    address: str = ""
    tenant: str = ""


NO_CALLER = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=NO_CALLER)


class OperatorAction(msgspec.Struct, frozen=True):
    """One entry. `outcome` is empty at the start of an action; its end has the same `deed_id`, outcome and detail."""

    deed_id: str
    at_ms: int
    who: str
    what: str
    subject: dict[str, str]
    reason: str = ""
    outcome: str = ""
    detail: str = ""
    node: str = ""
    address: str = ""
    tenant: str = ""
    number: int = 0
    previous: str = FIRST
    schema: str = SCHEMA


class TrailHead(msgspec.Struct, frozen=True):
    """The newest entry: its number, and the hash that the next entry will contain."""

    number: int = 0
    sha256: str = FIRST

    def __str__(self) -> str:
        return f"{self.number}:{self.sha256}"


class BrokenTrail(Conflict):
    """An entry is missing, or is not the one that its successor was made after."""

    code = "broken_trail"


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
        """Records the action that runs inside. Raises what the store raises, before the action starts, when the entry
        cannot be created.
        """
        at, caller = now_ms(self._runtime.clock), CALLER.get()
        action = OperatorAction(
            self._runtime.ids.ordered(at),
            at,
            who,
            what,
            subject,
            reason,
            node=self._node,
            address=caller.address,
            tenant=caller.tenant,
        )
        head = await self._append(action, await self.head())
        outcome = ActionOutcome()
        try:
            yield outcome
        except LakebedError as error:
            await self._append(msgspec.structs.replace(action, outcome=error.code, detail=error.message), head)
            raise
        await self._append(msgspec.structs.replace(action, outcome=DONE, detail=outcome.detail), head)

    async def latest(self, limit: int = 50) -> list[OperatorAction]:
        """The newest actions, newest first, each with its outcome if it has ended."""
        found: dict[str, OperatorAction] = {}
        ended: dict[str, OperatorAction] = {}
        last = (await self.head()).number
        while last > 0 and len(found) < limit:
            numbers = range(last, max(0, last - AT_ONCE), -1)
            for entry in await asyncio.gather(*(self._read(number) for number in numbers)):
                if entry is None:
                    continue
                if entry.outcome:
                    ended[entry.deed_id] = entry
                else:
                    found[entry.deed_id] = ended.pop(entry.deed_id, entry)
            last -= len(numbers)
        return list(found.values())[:limit]

    async def head(self) -> TrailHead:
        """The end of the chain, as it is now."""
        folders = sorted(name for name in await self._store.children(ROOT) if name.isdecimal())
        if not folders:
            return TrailHead()
        last = max([_number(info.key) async for info in self._store.list(f"{ROOT}{folders[-1]}/")])
        return TrailHead(last, _sha256((await self._store.get(key_of(last))).data))

    async def verify(self, noted: TrailHead = TrailHead()) -> TrailHead:
        """Reads the whole chain; returns its end. Raises BrokenTrail with the first entry that is missing or changed,
        also when `noted`, an end that was seen before, is no longer in it.
        """
        known = TrailHead()
        async for info in self._store.list(ROOT):
            expected = known.number + 1
            if _number(info.key) != expected:
                raise BrokenTrail(f"entry {expected} of the trail is missing: {info.key} follows {known.number}")
            stored = await self._store.get(info.key)
            entry = read_record(stored, OperatorAction)
            if entry.previous != known.sha256 or entry.number != expected:
                raise BrokenTrail(f"entry {known.number} of the trail was changed, or {expected} was put after it")
            known = TrailHead(expected, _sha256(stored.data))
            if known.number == noted.number and known.sha256 != noted.sha256:
                raise BrokenTrail(f"entry {known.number} of the trail is not the one that was noted")
        if known.number < noted.number:
            raise BrokenTrail(f"the trail ends at {known.number}; it had {noted.number} entries when that was noted")
        return known

    async def _append(self, action: OperatorAction, head: TrailHead) -> TrailHead:
        """Creates the next entry after `head`, or after whatever was created since."""
        for race in range(1, RACES_MAX + 1):
            number = head.number + 1
            data = msgspec.json.encode(msgspec.structs.replace(action, number=number, previous=head.sha256))
            try:
                await self._store.create(key_of(number), data)
            except AlreadyExists as taken:
                # During a long action many others may have come: now and then it goes to the end of the chain at once.
                head = TrailHead(number, _sha256(taken.current.data)) if race % STEPS_MAX else await self.head()
                continue
            return TrailHead(number, _sha256(data))
        raise Overloaded(f"{RACES_MAX} other entries were put on the trail first", retry_after_s=1.0)

    async def _read(self, number: int) -> OperatorAction | None:
        try:
            return read_record(await self._store.get(key_of(number)), OperatorAction)
        except NotFound:
            return None


def action_of_tenant(principal: Principal, action: OperatorAction) -> bool:
    """Whether the action was by this principal's tenant, or on one of its things."""
    named = {owner_of(value) for value in action.subject.values()}
    return not principal.tenant or principal.tenant == action.tenant or principal.tenant in named


def key_of(number: int) -> str:
    return f"{ROOT}{number // FOLDER:09d}/{number:012d}.json"


def _number(key: str) -> int:
    name = key.rsplit("/", 1)[1].removesuffix(".json")
    return int(name) if name.isdecimal() else -1


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
