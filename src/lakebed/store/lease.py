"""A lease: one holder at a time, failover after expiry, and an epoch that fences late holders.

A lease alone cannot stop a holder that paused past its expiry; its epoch does. Every write under a lease goes to a
register with `epoch=held.epoch`, and the first write of the next holder fences all earlier ones.
"""

from __future__ import annotations

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Conflict, Fenced
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime


class LeaseRecord(msgspec.Struct, frozen=True):
    """The stored lease. `term` counts acquisitions; it is the epoch its holder writes under.

    `claim_id` distinguishes contenders of one name: two tasks of a process exclude each other like two processes.
    """

    owner: str = ""
    term: int = 0
    expires_at_ms: int = 0
    claim_id: str = ""


class HeldLease(msgspec.Struct, frozen=True):
    """An acquired lease, valid until `expires_at_ms` by the clock of its holder."""

    owner: str
    epoch: int
    expires_at_ms: int


class HeldByAnother(Conflict):
    code = "held_by_another"


class Lease:
    """The lease at `key`. `lease_s` is the time between renewals at most; `skew_s` how far clocks may differ.

    One object is one contender, whatever the name of its owner; acquiring again while it holds starts a new term.
    """

    def __init__(self, runtime: StoreRuntime, key: str, *, owner: str, lease_s: float, skew_s: float = 1.0) -> None:
        self._clock, self._owner, self._claim_id = runtime.clock, owner, runtime.ids.token()
        self._lease_ms, self._skew_ms = round(lease_s * 1000), round(skew_s * 1000)
        self._register = Register(runtime, key, LeaseRecord, LeaseRecord(), name="lease")

    async def acquire(self) -> HeldLease:
        """Takes the lease when it is free, expired or already this object's, under a new epoch. Raises HeldByAnother.

        After OutcomeUnknown, call it again: if the first call took it, the second takes it over at once.
        """

        def take(record: LeaseRecord) -> tuple[LeaseRecord, HeldLease]:
            now = now_ms(self._clock)
            if record.owner and record.claim_id != self._claim_id and now < record.expires_at_ms + self._skew_ms:
                left_s = (record.expires_at_ms + self._skew_ms - now) / 1000
                raise HeldByAnother(
                    f"{self._register.key!r} is held by {record.owner} for another {left_s:.1f} s", owner=record.owner
                )
            after = LeaseRecord(self._owner, record.term + 1, now + self._lease_ms, self._claim_id)
            return after, HeldLease(after.owner, after.term, after.expires_at_ms)

        return await self._register.change(take)

    async def renew(self, held: HeldLease) -> HeldLease:
        """Extends a lease that is still ours, also an expired one. Raises Fenced when another holder took it."""

        def prolong(record: LeaseRecord) -> tuple[LeaseRecord, HeldLease]:
            self._still_ours(record, held)
            expires_at_ms = max(record.expires_at_ms, now_ms(self._clock) + self._lease_ms)
            after = msgspec.structs.replace(record, expires_at_ms=expires_at_ms)
            return after, HeldLease(after.owner, after.term, after.expires_at_ms)

        return await self._register.change(prolong)

    async def release(self, held: HeldLease) -> None:
        """Releases the lease, unless another holder has it. Idempotent."""

        def free(record: LeaseRecord) -> tuple[LeaseRecord, None]:
            if record.owner != held.owner or record.term != held.epoch:
                return record, None
            return LeaseRecord("", record.term, 0), None

        await self._register.change(free)

    async def holder(self) -> LeaseRecord:
        return (await self._register.read()).value

    def _still_ours(self, record: LeaseRecord, held: HeldLease) -> None:
        if record.owner != held.owner or record.term != held.epoch:
            raise Fenced(
                f"{self._register.key!r} is no longer ours; its holder is {record.owner or 'nobody'}",
                owner=record.owner,
            )
