"""Worlds of lifecycle: clients write, tag and overwrite, operators edit the policy, workers expire, all die at will.

Three promises. Nothing is deleted that the policy keeps: every removal is judged, at its instant, by the policy and the
object as they are then (a policy may be as old as the one read for that delete). Nothing of Lakebed's own is deleted,
whatever a policy says. And, once the faults are over, everything that is due is deleted.
One world has plain buckets, one has versions, switched on and suspended while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from lakebed.core.errors import Unavailable
from lakebed.lifecycle.cluster import LogReach
from lakebed.lifecycle.eligibility import action_kinds, due_at
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.engine import action_keys
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import Calendar, ObjectEntry, Position, Rule, Verb
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seams import ChangeEvent, Family, Policy, Removal
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LifecycleState
from lakebed.lifecycle.stored_policy import stored_policy
from lakebed.sim.faults import CALM
from lakebed.sim.world import Process, World

T = TypeVar("T")

BUCKET = "b"
RESERVED = ReservedKeys("lakebed", "own/")
DAY_S = 20.0
LIFE_S = 4 * DAY_S  # of clients and of faults
REST_DAYS = 2.5  # afterwards, in calm: longer than any rule; all ends before a safety scan, which would hide a miss
PATIENCE_S = 15.0  # what became due at the very end has gone after as many polls
CRASH = 0.004
OLD = 8  # objects from before the first policy
RACE = 0.3  # deletes that meet a client's write
REFUSED = 0.3  # looks and deletes that the lake refuses while faults last
REFUSED_DELETE = REFUSED  # the same, for deletes alone
POLICY_WINDOW_S = 12.0  # how old the policy behind a delete can be: one slow look, one pause of its process
SETTINGS = LifecycleSettings(
    day_s=DAY_S,
    rounding="exact",
    small_delay_s=0.5,
    flush_lag_s=0.0,
    lookback_s=DAY_S / 2,
    poll_s=3.0,
    policy_fresh_s=0.0,
    lease_s=5.0,
    batch=3,
    retries_max=1000,
    retry_age_s=10_000.0,
)
RULES = (
    Rule("days", prefix="a", expiration_days=1),
    Rule("longer", prefix="a", expiration_days=2),
    Rule("tagged", prefix="", tags=(("tmp", "1"),), expiration_days=1),
    Rule("big", prefix="b", size_greater_than=5, expiration_days=2),
    Rule("uploads", abort_days=1),
)
VERSION_RULES = (
    *RULES,
    Rule("old versions", prefix="a", noncurrent_days=1),
    Rule("few versions", prefix="b", newer_noncurrent=1),
    Rule("both", noncurrent_days=1, newer_noncurrent=1),
    Rule("markers", expired_delete_marker=True),
)


class RemoteLake:
    """One process's way to the lake: every call takes time, may fail, and is a place to die."""

    def __init__(self, world: World, process: Process, lake: MemoryLake) -> None:
        self._world, self._process, self._lake = world, process, lake

    async def _travel(self) -> None:
        await self._process.wire.travel()  # the same awaits, crashes and pauses as at the store

    async def _go(self, verb: str, key: str) -> None:
        await self._travel()
        chance = self._world.faults.unavailable
        if chance and verb in ("look", "delete"):
            chance = REFUSED if verb == "look" else REFUSED_DELETE
        if self._world.fault_rng.random() < chance:
            raise Unavailable(f"{verb} {key}: simulated")

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        await self._go("events", "")
        async for event in self._lake.read(after, until_ns):
            yield event

    async def changes(self) -> AsyncGenerator[str, None]:
        await self._go("changes", "")
        async for bucket in self._lake.changes():
            yield bucket

    async def reach(self) -> LogReach:
        await self._go("log", "")
        return await self._lake.reach()

    async def files(self, day: str) -> dict[str, int]:
        await self._go("log files", day)
        return await self._lake.files(day)

    async def split(self, bucket: str, prefix: str = "") -> Sequence[str]:
        await self._go("split", prefix)
        return await self._lake.split(bucket, prefix)

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        await self._go("look", key)
        found = await self._lake.look(bucket, key, upload_id)
        await self._travel()
        return found

    async def scan(
        self, bucket: str, after: str = "", *, prefix: str = "", until: str = "", newest_ns: int | None = None
    ) -> AsyncGenerator[Family, None]:
        await self._go("scan", after)
        async for family in self._lake.scan(bucket, after, prefix=prefix, until=until, newest_ns=newest_ns):
            await self._travel()
            yield family

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        await self._go("delete", entry.key)
        self._race(entry)
        removal = await self._lake.delete(entry, verb)
        self._world.step(self._process.node, "expire", entry.key, verb.value)
        await self._travel()
        if self._world.fault_rng.random() < self._world.faults.lost:
            raise Unavailable("the answer was lost")
        return removal

    def _race(self, entry: ObjectEntry) -> None:
        """A client is quicker than the delete: it writes anew, or takes the tag away."""
        dice = self._world.fault_rng.random() if self._world.faults.unavailable else 1.0  # nobody races in calm
        if entry.key not in self._lake.objects.get(entry.bucket, {}) or dice > RACE:
            return
        if dice < RACE / 2 or not entry.tags:
            self._lake.write(entry.bucket, entry.key, size=1)
        else:
            self._lake.tag(entry.bucket, entry.key, {})

    async def all(self) -> Sequence[Policy]:
        await self._go("policies", "")
        found = await self._lake.all()
        await self._travel()
        return found

    async def get(self, bucket: str) -> Policy | None:
        await self._go("policy", bucket)
        found = await self._lake.get(bucket)
        await self._travel()
        return found

    async def put(self, bucket: str, text: bytes) -> None:
        await self._lake.put(bucket, text)


class DeleteChecker:
    """Looks at every removal: was it wanted by a policy in force now or a moment ago, and was it due?"""

    def __init__(self, world: World, lake: MemoryLake, calendar: Calendar = SETTINGS.calendar) -> None:
        self._world, self._lake = world, lake
        self._seen = 0
        self._policies: dict[str, list[tuple[int, tuple[Rule, ...]]]] = {}
        self._calendar = calendar
        world.invariant("lifecycle", self.complaint)

    def policy(self, rules: tuple[Rule, ...], bucket: str = BUCKET) -> None:
        self._policies.setdefault(bucket, []).append((self._world.clock.now_ns(), rules))

    def complaint(self) -> str | None:
        for at_ns, entry, _ in self._lake.removed[self._seen :]:
            self._seen += 1
            if RESERVED.holds(entry.bucket, entry.key):
                return f"{entry.key} was deleted although it is Lakebed's own"
            if not any(self._wanted(rules, entry, at_ns) for rules in self._in_force(entry.bucket, at_ns)):
                return f"{entry.key} was deleted although every policy in force kept it"
        return None

    def _in_force(self, bucket: str, at_ns: int) -> list[tuple[Rule, ...]]:
        since_ns, policies = at_ns - round(POLICY_WINDOW_S * 1e9), self._policies.get(bucket, [])
        ends = [began for began, _ in policies[1:]] + [at_ns]
        return [rules for (_, rules), end in zip(policies, ends, strict=False) if end >= since_ns]

    def _wanted(self, rules: tuple[Rule, ...], entry: ObjectEntry, at_ns: int) -> bool:
        return any(
            (due := due_at(rule, kind, entry, self._calendar)) is not None and due <= at_ns
            for rule in rules
            for kind in action_kinds(rule)
        )

    def due_and_there(self) -> list[str]:
        """What should be gone by now under the policies in force."""
        return [one for bucket in sorted(self._policies) for one in self._due_in(bucket)]

    def _due_in(self, bucket: str) -> list[str]:
        rules = stored_policy(self._lake.policies.get(bucket, b"")).rules
        now_ns, found = self._world.clock.now_ns(), []
        shown = {key: self._lake._entries(bucket, key) for key in sorted(self._lake.objects.get(bucket, {}))}
        shown |= {
            f"{key}?upload={name}": (ObjectEntry(bucket, key, made.identity, upload_id=name),)
            for name, (key, made) in sorted(self._lake.uploads.get(bucket, {}).items())
        }
        for key, entries in shown.items():
            found += [f"{bucket}/{key} {one.version_id}" for one in entries if self._wanted(rules, one, now_ns)]
        return found


def open_worker(world: World, process: Process, lake: MemoryLake, settings: LifecycleSettings) -> Enforcer:
    far = RemoteLake(world, process, lake)
    state = LifecycleState(process.context())
    return Enforcer(far, Seams(far, far, far), state, settings, node=process.node, reserved=RESERVED)


async def keep_running(
    world: World, process: Process, lake: MemoryLake, until_ns: int, settings: LifecycleSettings = SETTINGS
) -> None:
    """A worker's life until an instant: its loops run beside each other."""
    worker = open_worker(world, process, lake, settings)
    running = asyncio.create_task(worker.run())
    try:
        await process.clock.sleep(max(0.0, (until_ns - process.clock.now_ns()) / 1e9))
    finally:
        running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def clients(
    world: World, lake: MemoryLake, judge: DeleteChecker, until_ns: int, rules: tuple[Rule, ...] = RULES
) -> None:
    """Writes, overwrites, tags, deletes; the policy is edited in the first half, so that no scan hides a late miss."""
    half_ns = (world.clock.now_ns() + until_ns) // 2
    keys = [f"{letter}{number}" for letter in "ab" for number in range(4)]
    while world.clock.now_ns() < until_ns:
        await asyncio.sleep(world.rng.uniform(0.0, 4.0))
        key, dice = world.rng.choice(keys), world.rng.random()
        there = key in lake.objects.get(BUCKET, {}) and not lake.objects[BUCKET][key][0].marker
        if dice < 0.5 or not there:
            tags = {"tmp": "1"} if world.rng.random() < 0.2 else {}
            lake.write(BUCKET, key, size=world.rng.randint(1, 9), tags=tags)
        elif dice < 0.75:
            lake.tag(BUCKET, key, {"tmp": "1"} if world.rng.random() < 0.6 else {})
        elif dice < 0.85:
            lake.remove(BUCKET, key)
        elif dice < 0.9:
            lake.begin_upload(BUCKET, key)
        elif world.clock.now_ns() < half_ns:
            await edit(world, lake, judge, rules)
            if rules is VERSION_RULES:
                switch(world, lake)


async def edit(world: World, lake: MemoryLake, judge: DeleteChecker, choice: tuple[Rule, ...] = RULES) -> None:
    rules = tuple(rule for rule in choice if world.rng.random() < 0.6) or choice[:1]
    await lake.put(BUCKET, render_xml(rules))
    judge.policy(rules)
    assert action_keys(rules)


def switch(world: World, lake: MemoryLake) -> None:
    """Versions are kept, or no more from now on; never again not at all."""
    on, off = (lake.versioned, lake.suspended) if world.rng.random() < 0.5 else (lake.suspended, lake.versioned)
    on.add(BUCKET)
    off.discard(BUCKET)


async def lifecycle(world: World) -> None:
    """Two workers, mortal; then calm, one worker, and everything due must go."""
    await live(world, MemoryLake(world.clock), RULES)


async def versions(world: World) -> None:
    """The same where versions are kept, suspended and kept again; some objects are older than that."""
    await live(world, MemoryLake(world.clock), VERSION_RULES)


async def live(world: World, lake: MemoryLake, rules: tuple[Rule, ...]) -> None:
    judge = DeleteChecker(world, lake)
    for number in range(OLD):
        lake.write(BUCKET, f"a-old{number}")  # due when the first policy comes: only a scan can find them
    if rules is VERSION_RULES:
        switch(world, lake)
    lake.write(RESERVED.bucket, f"{RESERVED.folder}accepted")
    await lake.put(RESERVED.bucket, render_xml((Rule("everything", expiration_days=1),)))  # as S3 itself would let it
    await asyncio.sleep(2.1 * DAY_S)
    await edit(world, lake, judge, rules)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH)
    end_ns = world.clock.now_ns() + round(LIFE_S * 1e9)
    await asyncio.gather(
        clients(world, lake, judge, end_ns, rules),
        *(world.keep(f"w{n}", lambda process: keep_running(world, process, lake, end_ns)) for n in range(2)),
    )
    await come_to_rest(world, lake, judge)


async def come_to_rest(
    world: World, lake: MemoryLake, judge: DeleteChecker, settings: LifecycleSettings = SETTINGS
) -> None:
    """Without faults, everything due goes."""
    world.heal(CALM)
    rest_ns = world.clock.now_ns() + round(REST_DAYS * DAY_S * 1e9)
    await world.keep("last", lambda process: keep_running(world, process, lake, rest_ns, settings))
    due = set(judge.due_and_there())
    late_ns = world.clock.now_ns() + round(PATIENCE_S * 1e9)
    if due:
        await world.keep("late", lambda process: keep_running(world, process, lake, late_ns, settings))
    late = sorted(due & set(judge.due_and_there()))
    world.check(not late, f"lifecycle: {late} are due and still there after {REST_DAYS} calm days")
