"""Simulated worlds of the store: processes that share a register, contend for a lease, and start at once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lakebed.core.errors import Fenced, OutcomeUnknown, Overloaded, Unavailable
from lakebed.sim.faults import CALM
from lakebed.sim.history import ACKNOWLEDGED, History
from lakebed.sim.world import Process, World
from lakebed.store.authority import claim
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.prover import prove
from lakebed.store.register import Register

KEY = "world/register.json"
LEASE_KEY = "world/lease.json"
LEASE_S = 10.0
SKEW_S = 1.0
CRASH = 0.01  # per await at the store: about one life in five ends early
PAUSE = 0.01


class JournalChange(msgspec.Struct, frozen=True):
    """One change as it is stored: its id, and the epoch its maker owned the register under, if any."""

    id: str
    epoch: int | None = None


class Journal(msgspec.Struct, frozen=True):
    """The value of the register: every change ever applied, in order."""

    applied: tuple[JournalChange, ...] = ()


class _Stored(msgspec.Struct, frozen=True):
    applied: tuple[JournalChange, ...] = ()
    epoch: int = 0


_STORED = msgspec.json.Decoder(_Stored)


class RegisterWatch:
    """The invariants of a register, checked after every step: no lost update, no double update, no lower epoch."""

    def __init__(self, world: World, key: str = KEY) -> None:
        self.history = History()
        self._world, self._key = world, key
        self._etag, self._before, self._epoch = "", _Stored(), 0
        world.invariant("register", self.complaint)

    def complaint(self) -> str | None:
        stored = self._world.peek(self._key)
        if stored is None or stored.etag == self._etag:
            return None
        now, before = _STORED.decode(stored.data), self._before
        self._etag, self._before = stored.etag, now
        known = len(before.applied)
        if now.applied[:known] != before.applied:
            return "an update is lost: the journal does not continue the one before it"
        if now.epoch < before.epoch:
            return f"the epoch went from {before.epoch} to {now.epoch}"
        for change in now.applied[known:]:
            if change.epoch is not None and change.epoch < self._epoch:
                return f"{change.id} was written under epoch {change.epoch}, after epoch {self._epoch}"
            self._epoch = max(self._epoch, change.epoch or 0)
        return self.history.judge(change.id for change in now.applied)

    def verdict(self) -> None:
        """The end of the world: every acknowledged change is there."""
        self.complaint()
        wrong = self.history.judge(change.id for change in self._before.applied)
        self._world.check(wrong is None, f"register: {wrong}")


def open_journal(process: Process, kind: type[Register[Journal]] = Register) -> Register[Journal]:
    return kind(process.runtime, KEY, Journal, Journal(), name="world")


def open_lease(process: Process) -> Lease:
    return Lease(process.runtime, LEASE_KEY, owner=process.node, lease_s=LEASE_S, skew_s=SKEW_S)


def append(change: JournalChange) -> Any:
    def decide(journal: Journal) -> tuple[Journal, int]:
        return Journal((*journal.applied, change)), len(journal.applied)

    return decide


async def write(
    watch: RegisterWatch, journal: Register[Journal], name: str, epoch: int | None, patience_s: float
) -> None:
    """Requests one change and records what its caller may believe."""
    change = watch.history.requested(name)
    try:
        async with asyncio.timeout(patience_s):
            await journal.change(append(JournalChange(change, epoch)), epoch=epoch)
    except (OutcomeUnknown, TimeoutError):
        return
    except (Unavailable, Overloaded, Fenced):
        watch.history.refused(change)
    else:
        watch.history.acknowledged(change)


async def look(world: World, watch: RegisterWatch, journal: Register[Journal]) -> None:
    """A decision that changes nothing sees at least what was acknowledged before it began."""
    before = watch.history.those(ACKNOWLEDGED)
    try:
        applied = await journal.change(lambda journal: (journal, journal.applied))
    except (Unavailable, Overloaded):
        return
    missing = set(before) - {change.id for change in applied}
    world.check(not missing, f"register: a decision did not see {sorted(missing)}")


async def register(world: World, kind: type[Register[Journal]] = Register) -> None:
    """Several processes, several callers and registers in each, change one object; some own it under an epoch."""
    watch = RegisterWatch(world)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, pause=PAUSE)
    rng = world.rng
    processes, callers, changes = rng.randint(2, 3), rng.randint(1, 3), rng.randint(2, 4)

    async def caller(process: Process, journal: Register[Journal], name: str) -> None:
        for number in range(changes):
            epoch = rng.choice((None, None, process.boot, process.boot + 1))
            patience_s = rng.choice((0.05, 2.0, 60.0, 60.0))
            await write(watch, journal, f"{name}-{number}", epoch, patience_s)
            if rng.random() < 0.2:
                await look(world, watch, journal)
            if rng.random() < 0.3:
                await process.clock.sleep(rng.uniform(0.0, 1.0))

    async def body(process: Process) -> None:
        journals = [open_journal(process, kind) for _ in range(rng.randint(1, 2))]
        await asyncio.gather(
            *(caller(process, rng.choice(journals), f"{process.node}-{number}") for number in range(callers))
        )

    await asyncio.gather(*(world.keep(f"p{number}", body) for number in range(processes)))
    await asyncio.sleep(world.faults.late_s)
    watch.verdict()


async def crowd(world: World, writers: int) -> None:
    """More processes than a register records change one object; without lost answers no outcome is in doubt."""
    watch = RegisterWatch(world)
    doubts = 0

    async def body(process: Process) -> None:
        nonlocal doubts
        journal = open_journal(process)
        await process.clock.sleep(world.rng.uniform(0.0, 2.0))
        for number in range(2):
            change = watch.history.requested(f"{process.node}-{number}")
            try:
                await journal.change(append(JournalChange(change)))
                watch.history.acknowledged(change)
            except OutcomeUnknown:
                doubts += 1
            except (Unavailable, Overloaded):
                watch.history.refused(change)
            await process.clock.sleep(world.rng.uniform(0.0, writers / 10))

    await asyncio.gather(*(world.keep(f"p{number}", body) for number in range(writers)))
    await asyncio.sleep(world.faults.late_s)
    watch.verdict()
    world.check(not doubts or world.faults != CALM, f"register: {doubts} outcomes are unknown, and no answer was lost")


async def lease(world: World) -> None:
    """Several processes, whose clocks differ, want one lease, some twice; a holder writes, stalls, renews, dies."""
    watch = RegisterWatch(world)
    terms: dict[int, str] = {}
    believers: dict[str, tuple[Process, HeldLease]] = {}
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, pause=PAUSE)
    rng = world.rng

    def believing(process: Process, held: HeldLease) -> bool:
        return process.alive and process.clock.now_ns() // 1_000_000 < held.expires_at_ms

    def one_believer() -> str | None:
        names = sorted(name for name, (process, held) in believers.items() if believing(process, held))
        return f"{' and '.join(names)} both believe they hold it" if len(names) > 1 else None

    world.invariant("lease", one_believer)

    def took(process: Process, name: str, held: HeldLease) -> HeldLease:
        holder = terms.setdefault(held.epoch, name)
        world.check(holder == name, f"lease: {holder} and {name} both hold term {held.epoch}")
        believers[name] = (process, held)
        return held

    async def hold(process: Process, name: str, mine: Lease, held: HeldLease, journal: Register[Journal]) -> None:
        for number in range(rng.randint(1, 3)):
            await write(watch, journal, f"{name}-{held.epoch}-{number}", held.epoch, 60.0)
            await process.clock.sleep(rng.choice((0.1, 1.0, LEASE_S * 1.5)))
            held = took(process, name, await mine.renew(held))
        if rng.random() < 0.5:
            del believers[name]
            await mine.release(held)

    async def contend(process: Process, name: str) -> None:
        mine, journal = open_lease(process), open_journal(process)
        for _ in range(rng.randint(1, 3)):
            try:
                held = took(process, name, await mine.acquire())
                await hold(process, name, mine, held, journal)
            except (HeldByAnother, Unavailable, Overloaded, Fenced):
                await process.clock.sleep(rng.uniform(0.0, LEASE_S))
            believers.pop(name, None)

    async def body(process: Process) -> None:
        await asyncio.gather(*(contend(process, f"{process.node}/{n}") for n in range(rng.choice((1, 1, 2)))))

    count = rng.randint(2, 4)
    skews = [rng.uniform(-SKEW_S / 2, SKEW_S / 2) for _ in range(count)]
    await asyncio.gather(*(world.keep(f"p{number}", body, skew_s=skews[number]) for number in range(count)))
    await _acquirable(world)
    watch.verdict()


async def _acquirable(world: World) -> None:
    """When faults are over, a newcomer has the lease after at most one term of silence."""
    world.heal(CALM)
    newcomer = world.process("newcomer")
    latecomer = open_lease(newcomer)

    async def insist() -> None:
        while True:
            try:
                await latecomer.acquire()
                return
            except HeldByAnother:
                await newcomer.clock.sleep(0.5)

    ended = newcomer.spawn(insist())
    await asyncio.sleep(world.faults.late_s + LEASE_S + 2 * SKEW_S + 2.0)
    world.check(ended.done(), "lease: nobody holds it, and a newcomer cannot take it")


async def boot(world: World) -> None:
    """Processes start on a fresh bucket, at once and after crashes: they agree on whose it is, and prove it."""
    claimed: dict[str, str] = {}
    world.faults = msgspec.structs.replace(world.faults, crash=10 * CRASH, pause=PAUSE)

    def one_authority() -> str | None:
        return f"two authorities: {claimed}" if len(set(claimed.values())) > 1 else None

    world.invariant("authority", one_authority)

    async def body(process: Process) -> None:
        while process.node not in claimed:
            try:
                found = await claim(process.runtime, expected="")
                claimed[process.node] = found.authority_id
            except Unavailable:
                await process.clock.sleep(world.rng.uniform(0.0, 1.0))

    await asyncio.gather(*(world.keep(f"p{number}", body) for number in range(world.rng.randint(2, 4))))
    await asyncio.sleep(world.faults.late_s)
    world.check(one_authority() is None, f"authority: {one_authority()}")

    world.heal(CALM)
    rivals = [world.process(f"rival{number}") for number in range(3)]
    proof = await prove([rival.store for rival in rivals], rivals[0].runtime, rounds=2)
    world.check(proof.held, f"prover: a good store is refused: {proof.findings}")
