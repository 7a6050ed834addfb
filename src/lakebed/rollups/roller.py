"""Rolls accepted batches up, under a lease: plans a generation, has an engine make it, commits it.

1. lease        one owner, with an epoch that fences the late
2. plan         the index by time since what is settled, and what came out of order, less what is covered
3. read         the engine reads every batch; unreadable ones are recorded, and the rest continues
4. begin        the generation is stored in the state, under the epoch, before its first chunk
5. write        chunks, index chunks and the manifest: created only if absent, the same whoever makes them
6. commit       one conditional write, under the epoch: all chunks of the generation count from now on

A crash anywhere leaves either nothing, or a generation that was begun and is finished next time. Until then none of its
chunks counts. When it cannot be finished as it was begun, because a batch became readable or unreadable, its
number is abandoned and its chunks never count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from lakebed.batches.model import AcceptedByTime, write_record
from lakebed.batches.paths import parse_by_time
from lakebed.batches.reader import RawBatches
from lakebed.core.errors import AlreadyExists, Conflict, Corrupt, Invalid, NotFound, Unavailable
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.rollups import generations, paths
from lakebed.rollups.aggregate import check_windows
from lakebed.rollups.merging import ChunkMerger
from lakebed.rollups.model import (
    Generation,
    RollupInput,
    RollupInputReport,
    RollupJob,
    RollupManifest,
    RollupPlan,
    RollupState,
    StoredChunk,
    UnreadableBatch,
)
from lakebed.rollups.reader import CoverageSnapshot, RollupCoverage
from lakebed.rollups.sweeper import AFTER_S, RollupSweeper
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.model import read_record
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

GENERATIONS_MAX = 1_000  # of one run; what is left is for the next

log = logger("batches")


class UnreadableObject(msgspec.Struct, frozen=True):
    key: str
    problem: str


class RollupReport(msgspec.Struct):
    """What one run did. `late` batches came out of order, `skipped` ones were covered already; `swept` are old notes
    and chunks of abandoned generations."""

    generations: int = 0
    batches: int = 0
    samples: int = 0
    chunks: int = 0
    index_chunks: int = 0
    chunk_bytes: int = 0
    late: int = 0
    skipped: int = 0
    resumed: int = 0
    abandoned: int = 0
    swept: int = 0
    merged: int = 0
    unreadable: list[UnreadableObject] = []
    through_unix_ns: int = 0
    rows: int = 0

    def report_to(self, run: ActiveRun) -> None:
        """Reports it as the result of a run: one that left batches out has failed."""
        left, run.failed = len(self.unreadable), bool(self.unreadable)
        run.rows_in, run.rows_out, run.idle = self.samples, self.rows, not self.batches
        run.reason = f"{self.batches} batches" + (f", {left} are unreadable" if left else "")


class _Planned(msgspec.Struct, frozen=True):
    covers: tuple[str, ...]
    through_ns: int
    notes_ms: int = 0
    late: frozenset[str] = frozenset()
    done: tuple[str, ...] = ()  # what came out of order and is covered already
    unsure: tuple[RollupInputReport, ...] = ()  # unknown whether these are covered
    resumed: Generation | None = None
    more: bool = False


class Roller:
    def __init__(
        self,
        runtime: StoreRuntime,
        job: RollupJob,
        *,
        windows_s: tuple[int, ...],
        overlap_s: float,
        batches_max: int,
        lease_s: float,
        owner: str,
        sweep_after_s: float = AFTER_S,
        retain_s: float = 0.0,
    ) -> None:
        store, clock, metrics = runtime.store, runtime.clock, runtime.metrics
        self._store, self._job, self._clock, self._retain_s = store, job, clock, retain_s
        self._windows_s = check_windows(windows_s)
        self._overlap_ns, self._batches_max, self._lease_s = round(overlap_s * 1e9), batches_max, lease_s
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._coverage = RollupCoverage(store, self._raw)
        self._sweeper = RollupSweeper(runtime, after_s=sweep_after_s)
        self._merger = ChunkMerger(runtime, windows_s=self._windows_s)
        self._lease = Lease(runtime, paths.ROLLER_LEASE, owner=owner, lease_s=lease_s)
        self.state = Register(runtime, paths.ROLLER_STATE, RollupState, RollupState(), name="roller")
        self._samples = metrics.counter("lakebed_rollup_samples_total")
        self._chunks = metrics.counter("lakebed_rollup_chunks_total")
        self._unreadable = metrics.gauge("lakebed_rollup_unreadable_batches")
        self._through_ns = clock.now_ns()  # nothing is known yet: the lag grows from the start
        metrics.gauge("lakebed_rollup_lag_seconds").set_function(self.lag_s)

    def lag_s(self) -> float:
        """Now minus the time up to which acceptances are rolled up: it grows while runs fail."""
        return max(0.0, (self._clock.now_ns() - self._through_ns) / 1e9)

    async def run(self, *, cold: bool = False) -> RollupReport:
        """Rolls up everything there is. `cold` looks at all of the index by time, not only since what is settled.

        Raises HeldByAnother when another owner is at it, Fenced when one took over meanwhile: nothing is lost or
        counted twice by that. Unreadable batches are listed in the report.
        """
        try:
            held = await self._lease.acquire()
        except HeldByAnother:
            self._through_ns = (await self.state.read()).value.through_ns or self._through_ns
            raise
        work = asyncio.create_task(self._roll(held.epoch, cold))
        keeping = asyncio.create_task(self._keep(held))
        try:
            await asyncio.wait({work, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done() and not work.done():
                keeping.result()  # raises Fenced
            return await work
        finally:
            for task in (work, keeping):
                task.cancel()
            await asyncio.gather(work, keeping, return_exceptions=True)
            await self._job.close()
            try:
                await self._lease.release(held)
            except Unavailable as error:
                log.warning("roller lease was not released", error=error.message)

    async def _keep(self, held: HeldLease) -> None:
        while True:
            await self._clock.sleep(self._lease_s / 3)
            try:
                held = await self._lease.renew(held)
            except Unavailable as error:  # should the lease be lost meanwhile, the epoch keeps us from doing harm
                log.warning("roller lease was not renewed", error=error.message)

    async def _roll(self, epoch: int, cold: bool) -> RollupReport:
        report, unreadable = RollupReport(), set[str]()
        await self._change(msgspec.structs.replace, epoch)  # earlier epochs are fenced from here on
        for _ in range(GENERATIONS_MAX):
            state, abandoned = await self._now(), report.abandoned
            planned = await self._plan(state, cold, unreadable, report)
            await self._record_unreadable(planned.unsure, report)
            unreadable |= {each.manifest_id for each in planned.unsure}
            if planned.covers:
                unreadable |= await self._one(state, planned, epoch, report)
            elif planned.resumed is not None:
                await self._abandon(epoch, report)
            else:
                await self._change(lambda at, by=planned: self._advanced(at, by), epoch)  # type: ignore[misc]
            for manifest_id in planned.done:
                await self._store.delete(paths.unreadable_key(manifest_id))
            if planned.resumed is None and not planned.more and report.abandoned == abandoned:
                break
        self._unreadable.set(len(report.unreadable))
        state = (await self.state.read()).value
        await self._sweep_plans(state)
        removed_ns = await self._sweep(state, epoch, report)
        report.merged = await self._merger.merge(state, epoch, removed_ns)
        report.through_unix_ns = self._through_ns = state.through_ns
        return report

    async def _now(self) -> RollupState:
        state = (await self.state.read()).value
        if state.windows_s and self._windows_s != state.windows_s:
            raise Invalid(
                f"windows of {list(self._windows_s)} s, but the stored rollups have {list(state.windows_s)} s",
                hint="existing rollups keep their windows: restore rollups.windows_s, or compute rollups again "
                "(docs/parts/rollups.md)",
            )
        return state

    async def _plan(self, state: RollupState, cold: bool, unreadable: set[str], report: RollupReport) -> _Planned:
        if state.pending is not None:
            key = paths.plan_key(state.pending.id)
            try:
                plan = read_record(await self._store.get(key), RollupPlan)
            except (Corrupt, NotFound) as error:  # the plan is lost: the generation is abandoned
                self._report_unreadable(report, [UnreadableObject(key, error.message)])
                return _Planned((), state.through_ns, resumed=state.pending)
            return _Planned(plan.covers, state.through_ns, resumed=state.pending)
        covered = await self._coverage.covered(state)
        if cold:
            covered = await self._all_covered(covered)
        unsure: dict[str, Corrupt] = {}
        self._report_unreadable(
            report, [UnreadableObject(str(each.detail.get("key")), each.message) for each in covered.damaged]
        )
        now_ns = self._clock.now_ns()
        since_ns = 0 if cold else state.settled_ns
        # Notes first: a batch whose note is found later is looked for again by the next run.
        noted, left_out_ms = await self._coverage.late(state)
        # The overlap, which `advance` takes off, is for our clock; what was left out is known by the store's own times.
        notes_ms = (now_ns if left_out_ms is None else left_out_ms * 1_000_000 + self._overlap_ns) // 1_000_000
        tail: list[str] = []
        first_ns = since_ns or await self._raw.first_ns(now_ns)
        damaged: list[Corrupt] = []
        async for manifest_id, _ in self._raw.entries(first_ns, now_ns, damaged):
            if manifest_id in unreadable or manifest_id in unsure:
                continue  # unreadable in this run: not retried in it
            if await self._coverage.waiting(covered, [manifest_id], unsure):
                tail.append(manifest_id)
            elif manifest_id not in unsure:
                report.skipped += 1
            if len(tail) > self._batches_max:
                break
        self._report_unreadable(
            report, [UnreadableObject(str(each.detail.get("key")), each.message) for each in damaged]
        )
        more, taken = len(tail) > self._batches_max, tail[: self._batches_max]
        through_ns = parse_by_time(taken[-1])[1] if more else now_ns
        waiting = await self._coverage.waiting(covered, set(noted) - unsure.keys() - unreadable, unsure)
        late = frozenset(waiting) - unreadable - set(tail)
        done = tuple(sorted(set(noted) - set(waiting) - unsure.keys() - unreadable))
        input_reports = tuple(
            RollupInputReport(0, manifest_id, str(error.detail.get("key")), problem=f"corrupt: {error.message}")
            for manifest_id, error in unsure.items()
        )
        covers = tuple(sorted({*taken, *late}))
        return _Planned(covers, through_ns, notes_ms, late=late, done=done, unsure=input_reports, more=more)

    async def _all_covered(self, recent: CoverageSnapshot) -> CoverageSnapshot:
        """The same with what every manifest there is says; those that cannot be read are reported."""
        state, found, damaged = recent.state, set(recent.ids), list(recent.damaged)
        async for info in self._store.list(paths.MANIFESTS):
            try:
                if state.counts(paths.sequence_of(info.key)):
                    found.update(read_record(await self._store.get(info.key), RollupManifest).covers)
            except Corrupt as error:
                damaged.append(error)
            except Invalid:
                continue  # not ours
        return CoverageSnapshot(state, frozenset(found), tuple(damaged))

    async def _one(self, state: RollupState, planned: _Planned, epoch: int, report: RollupReport) -> set[str]:
        """One generation, from reading to its commit; or none in progress, when it cannot be finished as it was begun.

        Returns the unreadable batches.
        """
        windows_s = state.windows_s or self._windows_s
        entries = await self._raw.find(planned.covers)
        inputs = [_input(number, name, entries.get(name)) for number, name in enumerate(planned.covers)]
        input_reports = await self._job.read(inputs, windows_s)
        good = [each for each in input_reports if not each.problem]
        bad = [each for each in input_reports if each.problem]
        await self._record_unreadable(bad, report)
        unreadable = {each.manifest_id for each in bad}
        names = tuple(sorted(each.manifest_id for each in good))
        mine = generations.generation(state, names, windows_s) if good else None
        if planned.resumed is not None and (mine is None or mine.digest != planned.resumed.digest):
            await self._abandon(epoch, report)
        elif mine is None:
            await self._change(lambda at: self._advanced(at, planned), epoch)
        else:
            generation = planned.resumed or mine
            plan = RollupPlan("lightmetrics.rollup_plan.v1", generation, windows_s, names)
            await self._create(paths.plan_key(generation.id), write_record(plan))
            await self._change(lambda at: generations.begin(at, generation, windows_s), epoch)
            await self._make(plan, planned, good, epoch, report)
        return unreadable

    async def _make(
        self, plan: RollupPlan, planned: _Planned, good: list[RollupInputReport], epoch: int, report: RollupReport
    ) -> None:
        """Chunks, manifest and commit of a generation that was begun."""
        generation = plan.generation
        try:
            stored = await self._job.write(generation.id)
            await self._create(generation.manifest_key, write_record(_manifest(plan, stored, good)))
            await self._merger.release([each.key for each in stored], epoch)
        except Conflict:
            await self._abandon(epoch, report)
            return
        await self._change(lambda at: self._advanced(generations.commit(at, generation), planned), epoch)
        self._count(report, good, stored, planned)
        for each in good:
            if each.manifest_id in planned.late or planned.resumed is not None:
                await self._store.delete(paths.unreadable_key(each.manifest_id))

    async def _sweep(self, state: RollupState, epoch: int, report: RollupReport) -> int:
        """Removes what nobody needs; returns the end of the hours that retention removes."""
        swept = await self._sweeper.sweep(state)
        report.swept, end_ns = swept.notes + swept.chunks, 0
        if self._retain_s:
            # Not before their batches: what retention has removed is what queries report as removed.
            end_ns = min(self._clock.now_ns() - round(self._retain_s * 1e9), await self._raw.removed_ns())
            await self._merger.release_before(end_ns, epoch)
            report.swept += await self._sweeper.sweep_before(end_ns)
        if swept.noted(state) != state:
            await self._change(swept.noted, epoch)
        return end_ns

    async def _sweep_plans(self, state: RollupState) -> None:
        """Removes plans whose numbers are decided; a generation in progress has a later number."""
        async for info in self._store.list(paths.ROLLER_PLANS):
            if info.key.rsplit("/", 1)[-1] < f"{state.committed + 1:0{paths.GENERATION_DIGITS}d}":
                await self._store.delete(info.key)

    async def _record_unreadable(self, bad: Sequence[RollupInputReport], report: RollupReport) -> None:
        """Notes what could not be read, so that a repaired batch is rolled up and a query knows what is missing."""
        for each in bad:
            note = UnreadableBatch("lightmetrics.rollup_aside.v1", each.manifest_id, each.key, each.problem)
            with suppress(AlreadyExists):  # noted with another problem
                await self._store.create(paths.unreadable_key(each.manifest_id), write_record(note))
            self._report_unreadable(report, [UnreadableObject(each.key, each.problem)])

    def _report_unreadable(self, report: RollupReport, bad: list[UnreadableObject]) -> None:
        known = {each.key for each in report.unreadable}
        report.unreadable = [*report.unreadable, *({each.key: each for each in bad if each.key not in known}.values())]

    async def _abandon(self, epoch: int, report: RollupReport) -> None:
        report.abandoned += 1
        await self._change(generations.abandon, epoch)

    async def _create(self, key: str, data: bytes) -> None:
        """Creates what follows from its key. Raises Conflict when other bytes exist there."""
        try:
            await self._store.create(key, data)
        except AlreadyExists as error:
            raise Conflict(f"{key!r} exists with other bytes") from error

    async def _change(self, decide: Callable[[RollupState], RollupState], epoch: int) -> None:
        await self.state.change(lambda state: (decide(state), None), epoch=epoch)

    def _advanced(self, state: RollupState, planned: _Planned) -> RollupState:
        return generations.advance(state, planned.through_ns, planned.notes_ms, self._overlap_ns)

    def _count(
        self, report: RollupReport, good: list[RollupInputReport], stored: list[StoredChunk], planned: _Planned
    ) -> None:
        rollups = [each for each in stored if each.window_s]
        samples = sum(each.samples for each in good)
        report.generations += 1
        report.batches += len(good)
        report.samples += samples
        report.chunks += len(rollups)
        report.rows += sum(each.rows for each in rollups)
        report.index_chunks += len(stored) - len(rollups)
        report.chunk_bytes += sum(each.size for each in stored)
        report.late += sum(each.manifest_id in planned.late for each in good)
        report.resumed += planned.resumed is not None
        self._samples.inc(samples)
        self._chunks.inc(len(rollups))


def _manifest(plan: RollupPlan, stored: list[StoredChunk], good: list[RollupInputReport]) -> RollupManifest:
    in_order = sorted(stored, key=lambda each: each.key)
    return RollupManifest(
        schema="lightmetrics.rollup_manifest.v1",
        generation=plan.generation,
        windows_s=plan.windows_s,
        samples=sum(each.samples for each in good),
        covers=plan.covers,
        chunks=tuple(each for each in in_order if each.window_s),
        index=tuple(each for each in in_order if not each.window_s),
    )


def _input(number: int, name: str, entry: AcceptedByTime | None) -> RollupInput:
    if entry is None:
        return RollupInput(number, name)
    place = entry.place if entry.raw_blob_offset else ("", 0, 0)
    return RollupInput(number, name, entry.frame_sha256, *place)
