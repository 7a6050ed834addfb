"""The incremental scan: checks each accepted manifest once, and remembers that it did.

Agents are divided into hash ranges. Each range has a register with a watermark: of each boot the sequence numbers that
were checked, and the time up to which the range is checked. A pass lists only what is behind the watermark of each boot
and looks the new keys up in the index. Several processes share the ranges under leases; a holder that was overtaken is
fenced when it stores its watermark, and all repairs are idempotent.

A boot is listed less often the longer it is quiet, and no longer when it was quiet for `CLOSED_NS`: the audit on Spark
finds what an agent delivers after that, should its index row be lost too. A boot of which retention has removed all
manifests leaves the watermark, so that it has no more boots than the bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lakebed.batches import paths, seq_ranges
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.batches.seq_ranges import SeqRanges
from lakebed.core.errors import Invalid
from lakebed.core.feed import ahead
from lakebed.core.runs import ActiveRun, RunLog
from lakebed.core.traces import traced
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.model import ObjectInfo
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

RANGES = 16  # hash ranges of agents: at most so many processes share the work
GRACE_NS = 15_000_000_000  # the youngest are left to their collector, whose rows may still wait
KEYS_MAX = 100_000  # new manifests of one pass over a range; the rest waits for the next
GAPS_MAX = 32  # gaps in the numbers of a boot that are listed each time: the newest
QUIET_SHARE = 4  # a boot that was quiet for t is listed again after t / 4
QUIET_MAX_NS = 24 * paths.HOUR_NS
CLOSED_NS = 30 * 24 * paths.HOUR_NS
LEASE_S = 120.0
SCAN = "reconciler scan"  # as a run


class BootMark(msgspec.Struct, frozen=True, array_like=True):
    """What was checked of a boot, when its newest manifest was stored, and when it is listed again."""

    checked: SeqRanges = ()
    newest_ns: int = 0
    due_ns: int = 0


class RangeMarks(msgspec.Struct, frozen=True):
    """The watermark of one hash range. Everything that was stored before `through_ns` is checked."""

    through_ns: int = 0
    boots: dict[str, BootMark] = {}  # by agent and boot folder
    closed: tuple[str, ...] = ()  # hashes of boots that are no longer listed


class _TakenRange(NamedTuple):
    """A range that this process holds, with what is new in it. `marks` are those of boots that are still there;
    `cut` are boots of which something was left out."""

    number: int
    lease: Lease
    held: HeldLease
    marks: RangeMarks
    began_ns: int
    found: list[tuple[str, list[ObjectInfo]]]
    cut: frozenset[str]


class _BootsThere(NamedTuple):
    """Boots that have manifests: the listed ones, hashes of closed ones, and what is new in those that are due."""

    open: list[str]
    closed: list[str]
    new: list[tuple[str, list[ObjectInfo]]]


class IncrementalScan:
    def __init__(self, runtime: StoreRuntime, reconciler: Reconciler, *, interval_s: float, owner: str) -> None:
        self._runtime, self._store, self._clock = runtime, runtime.store, runtime.clock
        self._reconciler, self._owner = reconciler, owner
        self._interval_ns = round(interval_s * 1e9)
        self._marks = _registers(runtime)
        self._began_ns = self._oldest_ns = runtime.clock.now_ns()  # nothing is known yet: the lag grows from the start
        runtime.metrics.gauge("lakebed_batches_reconciler_lag_seconds").set_function(self.lag_s)
        self._errors = runtime.metrics.counter("lakebed_batches_reconciler_errors_total")

    def lag_s(self) -> float:
        """Now minus the time up to which everything is checked: it grows while the scan stands still."""
        return max(0.0, (self._clock.now_ns() - self._oldest_ns) / 1e9)

    @traced("batches scan")
    async def scan(self, *, force: bool = True) -> ReconcileReport:
        """One pass over all ranges that are due, less those that another process holds. `force`: all are due.

        The ranges are looked up in the index together, so that a pass reads it once.
        """
        report = ReconcileReport("steady")
        agents = await self._agents()
        through: list[int] = []
        taken: list[_TakenRange] = []
        room = KEYS_MAX
        try:
            for number in range(RANGES):
                marks = (await self._marks[number].read()).value
                if force or self._clock.now_ns() - marks.through_ns >= self._interval_ns:
                    try:
                        taken.append(await self._take(number, agents.get(number, []), marks, room))
                        room -= sum(len(infos) for _, infos in taken[-1].found)
                        continue
                    except HeldByAnother:
                        marks = (await self._marks[number].read()).value
                through.append(marks.through_ns)
            await self._reconciler.check([info for each in taken for _, some in each.found for info in some], report)
            for each in taken:
                after = _advanced(each.marks, each.found, each.began_ns, each.cut)
                await self._marks[each.number].change(lambda _, after=after: (after, None), epoch=each.held.epoch)  # type: ignore[misc]
                through.append(after.through_ns)
        finally:
            for each in taken:
                await each.lease.release(each.held)
        self._oldest_ns = min(each or self._began_ns for each in through)
        return report

    async def run(self, runs: RunLog) -> None:
        """Scans until cancelled. A failed pass is counted and tried again."""

        async def work(run: ActiveRun) -> None:
            (await self.scan(force=False)).report_to(run)

        await runs.forever(SCAN, "batches", work, every_s=self._interval_ns / 1e9, after=self._errors.inc)

    async def _agents(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for agent in await self._store.children(paths.ACCEPTED):
            number = int(hashlib.sha256(agent.encode()).hexdigest()[:8], 16) % RANGES
            found.setdefault(number, []).append(agent)
        return found

    async def _take(self, number: int, agents: Sequence[str], marks: RangeMarks, room: int) -> _TakenRange:
        """Takes the lease of a range and lists what is new in it. Raises HeldByAnother."""
        lease = Lease(self._runtime, paths.range_lease_key(number), owner=self._owner, lease_s=LEASE_S)
        held = await lease.acquire()
        try:
            if held.epoch > 1:  # another process may have moved it since it was read
                marks = (await self._marks[number].read()).value
            began_ns = self._clock.now_ns()
            found: list[tuple[str, list[ObjectInfo]]] = []
            closed, there = frozenset(marks.closed), _BootsThere([], [], [])
            left, cut = room, set[str]()
            async for some in ahead(agents, lambda agent: self._new_of(agent, marks, closed, began_ns)):
                there.open.extend(some.open)
                there.closed.extend(some.closed)
                for boot, infos in some.new:
                    taken = infos[: max(0, left)]
                    found.append((boot, taken))
                    left -= len(taken)
                    if len(taken) < len(infos) or len(infos) >= KEYS_MAX:  # its listing ends there
                        cut.add(boot)
            boots = {boot: marks.boots[boot] for boot in there.open if boot in marks.boots}
            marks = RangeMarks(marks.through_ns, boots, tuple(there.closed))
            return _TakenRange(number, lease, held, marks, began_ns, found, frozenset(cut))
        except BaseException:
            await lease.release(held)
            raise

    async def _new_of(self, agent: str, marks: RangeMarks, closed: frozenset[str], now_ns: int) -> _BootsThere:
        """The boots of an agent, with the manifests behind their watermarks; none younger than the grace."""
        there = _BootsThere([], [], [])
        for name in await self._store.children(f"{paths.ACCEPTED}{agent}/"):
            boot = f"{agent}/{name}"
            mark = marks.boots.get(boot)
            if mark is None and (digest := _digest(boot)) in closed:
                there.closed.append(digest)
                continue
            there.open.append(boot)
            if mark is None or mark.due_ns <= now_ns:
                there.new.append((boot, await self._new_in(boot, mark or BootMark(), now_ns)))
        return there

    async def _new_in(self, boot: str, mark: BootMark, now_ns: int) -> list[ObjectInfo]:
        folder = f"{paths.ACCEPTED}{boot}/"
        found: list[ObjectInfo] = []
        for start, end in seq_ranges.gaps(mark.checked)[-GAPS_MAX:]:
            async for info in self._store.list(folder, after=f"{folder}{start:0{paths.SEQ_DIGITS}d}"):
                try:
                    identity = paths.identity_of(info.key)
                except Invalid:
                    continue  # not ours; the audit reports it
                if (end is not None and identity.seq_start > end) or len(found) >= KEYS_MAX:
                    break
                if info.modified_ms * 1_000_000 <= now_ns - GRACE_NS:
                    found.append(info)
        return found


def _advanced(
    marks: RangeMarks, found: Sequence[tuple[str, list[ObjectInfo]]], began_ns: int, cut: frozenset[str]
) -> RangeMarks:
    """The watermark after these were checked. It moves in time only if nothing had to be left out; a boot of which
    something was is listed again by the next pass, however quiet it is."""
    boots, closed = dict(marks.boots), set(marks.closed)
    for boot, infos in found:
        mark = boots.get(boot, BootMark())
        numbers = [paths.identity_of(info.key) for info in infos]
        newest_ns = max([mark.newest_ns, *(info.modified_ms * 1_000_000 for info in infos)])
        quiet_ns = began_ns - newest_ns
        if newest_ns and quiet_ns > CLOSED_NS and boot not in cut:
            closed.add(_digest(boot))
            boots.pop(boot, None)
            continue
        rests = newest_ns and quiet_ns > paths.HOUR_NS and boot not in cut
        boots[boot] = BootMark(
            seq_ranges.union(mark.checked, [(each.seq_start, each.seq_end) for each in numbers]),
            newest_ns,
            began_ns + min(quiet_ns // QUIET_SHARE, QUIET_MAX_NS) if rests else 0,
        )
    through_ns = marks.through_ns if cut else began_ns - GRACE_NS
    return RangeMarks(max(through_ns, marks.through_ns), boots, tuple(sorted(closed)))


def _digest(boot: str) -> str:
    return hashlib.sha256(boot.encode()).hexdigest()[:16]


def _registers(runtime: StoreRuntime) -> list[Register[RangeMarks]]:
    return [
        Register(runtime, paths.range_key(number), RangeMarks, RangeMarks(), name="reconciler")
        for number in range(RANGES)
    ]


async def checked_through_ns(runtime: StoreRuntime) -> int:
    """The time up to which every range is checked, by any process; 0 when one never was."""
    found = await asyncio.gather(*(register.read() for register in _registers(runtime)))
    return min(each.value.through_ns for each in found)
