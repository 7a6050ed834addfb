"""Ownership for a while: one owner at a time, taken over after expiry, with an epoch that fences the late.

A lease alone cannot stop an owner that paused past its expiry; its epoch does. Every write under a lease goes to a
register with `epoch=held.epoch`, and the first write of the next owner fences all earlier ones.
"""

from __future__ import annotations

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import Conflict, Fenced
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register


class LeaseRecord(msgspec.Struct, frozen=True):
    """The stored lease. `term` counts acquisitions; it is the epoch its holder writes under.

    `claim_id` tells contenders of one name apart: two tasks of one process exclude each other like two processes.
    """

    owner: str = ""
    term: int = 0
    expires_at_ms: int = 0
    claim_id: str = ""


class Held(msgspec.Struct, frozen=True):
    """Proof of ownership, good until `expires_at_ms` by the holder's own clock."""

    owner: str
    epoch: int
    expires_at_ms: int


class HeldByAnother(Conflict):
    code = "held_by_another"


class Lease:
    """The lease at `key`. `lease_s` is how long an owner may be silent; `skew_s` how far clocks may differ.

    One object is one contender, whatever its owner is called; asking again while it holds starts a new term.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        owner: str,
        lease_s: float,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        skew_s: float = 1.0,
    ) -> None:
        self._clock, self._owner, self._claim_id = clock, owner, ids.token()
        self._lease_ms, self._skew_ms = round(lease_s * 1000), round(skew_s * 1000)
        self._register = Register(
            store, key, LeaseRecord, LeaseRecord(), clock=clock, ids=ids, metrics=metrics, name="lease"
        )

    async def acquire(self) -> Held:
        """Takes the lease when it is free, expired or already this object's, under a new epoch. Raises HeldByAnother.

        After OutcomeUnknown, ask again: if the first asking took it, the second takes it over at once.
        """

        def take(record: LeaseRecord) -> tuple[LeaseRecord, Held]:
            now = now_ms(self._clock)
            if record.owner and record.claim_id != self._claim_id and now < record.expires_at_ms + self._skew_ms:
                left_s = (record.expires_at_ms + self._skew_ms - now) / 1000
                raise HeldByAnother(
                    f"{self._register.key!r} is held by {record.owner} for another {left_s:.1f} s", owner=record.owner
                )
            after = LeaseRecord(self._owner, record.term + 1, now + self._lease_ms, self._claim_id)
            return after, Held(after.owner, after.term, after.expires_at_ms)

        return await self._register.change(take)

    async def renew(self, held: Held) -> Held:
        """Prolongs a lease that is still ours, even a late one nobody took. Raises Fenced when somebody did."""

        def prolong(record: LeaseRecord) -> tuple[LeaseRecord, Held]:
            self._still_ours(record, held)
            expires_at_ms = max(record.expires_at_ms, now_ms(self._clock) + self._lease_ms)
            after = msgspec.structs.replace(record, expires_at_ms=expires_at_ms)
            return after, Held(after.owner, after.term, after.expires_at_ms)

        return await self._register.change(prolong)

    async def release(self, held: Held) -> None:
        """Gives the lease back; one that another has taken over is left alone. Idempotent."""

        def free(record: LeaseRecord) -> tuple[LeaseRecord, None]:
            if record.owner != held.owner or record.term != held.epoch:
                return record, None
            return LeaseRecord("", record.term, 0), None

        await self._register.change(free)

    async def holder(self) -> LeaseRecord:
        return (await self._register.read()).value

    def _still_ours(self, record: LeaseRecord, held: Held) -> None:
        if record.owner != held.owner or record.term != held.epoch:
            raise Fenced(f"{self._register.key!r} was taken over by {record.owner or 'nobody'}", owner=record.owner)
