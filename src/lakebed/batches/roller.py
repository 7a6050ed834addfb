"""Rolls accepted batches up, as the only one who does: plans a generation, has an engine make it, commits it.

1. lease        one owner, with an epoch that fences the late
2. plan         the index by time since what is settled, and what came out of order, less what is covered
3. read         the engine reads every batch; what is unreadable is set aside, and the rest goes on
4. begin        the generation stands in the state, under the epoch, before its first chunk
5. write        chunks, index chunks and the manifest: created only if absent, the same from whoever makes them
6. commit       one conditional write, under the epoch: all chunks of the generation count from now on

A crash anywhere leaves either nothing, or a generation that was begun and is finished next time. Until then none of its
chunks counts. When it cannot be finished as it was begun, because a batch changed its mind about being readable, its
number is abandoned and its chunks never count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from lakebed.batches import generations, paths
from lakebed.batches.coverage import Coverage, Covered
from lakebed.batches.generations import Aside, Generation, Plan, RollupManifest, RollupState
from lakebed.batches.model import read_record, write_record
from lakebed.batches.raw import RawBatches
from lakebed.batches.rollup_sweeper import AFTER_S, RollupSweeper
from lakebed.clock import Clock
from lakebed.errors import AlreadyExists, Conflict, Corrupt, Invalid, LakebedError, NotFound, Unavailable
from lakebed.frame.rolling import check_windows
from lakebed.frame.work import Input, Job, StoredChunk, Told
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.lease import Held, HeldByAnother, Lease
from lakebed.store.protocol import Store
from lakebed.store.register import Register

GENERATIONS_MAX = 1_000  # of one run; what is left is for the next

log = logger("batches")


class Unreadable(msgspec.Struct, frozen=True):
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
    unreadable: list[Unreadable] = []
    through_unix_ns: int = 0


class _Planned(msgspec.Struct, frozen=True):
    covers: tuple[str, ...]
    through_ns: int
    notes_ms: int = 0
    late: frozenset[str] = frozenset()
    done: tuple[str, ...] = ()  # what came out of order and is covered already
    unsure: tuple[Told, ...] = ()  # nobody can tell whether these are covered
    resumed: Generation | None = None
    more: bool = False


class Roller:
    def __init__(
        self,
        store: Store,
        job: Job,
        *,
        windows_s: tuple[int, ...],
        overlap_s: float,
        batches_max: int,
        lease_s: float,
        owner: str,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        sweep_after_s: float = AFTER_S,
    ) -> None:
        self._store, self._job, self._clock = store, job, clock
        self._windows_s = check_windows(windows_s)
        self._overlap_ns, self._batches_max, self._lease_s = round(overlap_s * 1e9), batches_max, lease_s
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._coverage = Coverage(store, self._raw)
        self._sweeper = RollupSweeper(store, after_s=sweep_after_s, clock=clock, metrics=metrics)
        self._lease = Lease(
            store, paths.ROLLER_LEASE, owner=owner, lease_s=lease_s, clock=clock, ids=ids, metrics=metrics
        )
        self.state = Register(
            store,
            paths.ROLLER_STATE,
            RollupState,
            RollupState(),
            clock=clock,
            ids=ids,
            metrics=metrics,
            name="roller",
        )
        self._samples = metrics.counter("lakebed_rollup_samples_total")
        self._chunks = metrics.counter("lakebed_rollup_chunks_total")
        self._aside = metrics.gauge("lakebed_rollup_unreadable_batches")
        self._lag = metrics.gauge("lakebed_rollup_lag_seconds")

    async def run(self, *, cold: bool = False) -> RollupReport:
        """Rolls up everything there is. `cold` looks at all of the index by time, not only since what is settled.

        Raises HeldByAnother when another owner is at it, Fenced when one took over meanwhile: nothing is lost or
        counted twice by that. Unreadable batches are told in the report.
        """
        held = await self._lease.acquire()
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
                log.warning("the roller's lease was not given back", cause=error.message)

    async def forever(self, interval_s: float) -> None:
        """Runs again and again until cancelled; another owner is waited for."""
        while True:
            try:
                report = await self.run()
                if report.batches or report.unreadable:
                    log.info("rolled up", batches=report.batches, samples=report.samples, chunks=report.chunks)
                for each in report.unreadable:
                    log.error("an accepted batch is in no rollup", key=each.key, problem=each.problem)
            except HeldByAnother:
                pass
            except LakebedError as error:
                log.warning("rolling up was cut short", cause=error.message)
            await self._clock.sleep(interval_s)

    async def _keep(self, held: Held) -> None:
        while True:
            await self._clock.sleep(self._lease_s / 3)
            try:
                held = await self._lease.renew(held)
            except Unavailable as error:  # should the lease be lost meanwhile, the epoch keeps us from doing harm
                log.warning("the roller's lease was not renewed", cause=error.message)

    async def _roll(self, epoch: int, cold: bool) -> RollupReport:
        report, aside = RollupReport(), set[str]()
        await self._change(msgspec.structs.replace, epoch)  # whoever came before this epoch is fenced from here on
        for _ in range(GENERATIONS_MAX):
            state, abandoned = await self._now(), report.abandoned
            planned = await self._plan(state, cold, aside, report)
            await self._set_aside(planned.unsure, report)
            aside |= {each.manifest_id for each in planned.unsure}
            if planned.covers:
                aside |= await self._one(state, planned, epoch, report)
            elif planned.resumed is not None:
                await self._abandon(epoch, report)
            else:
                await self._change(lambda at, by=planned: self._advanced(at, by), epoch)  # type: ignore[misc]
            for manifest_id in planned.done:
                await self._store.delete(paths.aside_key(manifest_id))
            if planned.resumed is None and not planned.more and report.abandoned == abandoned:
                break
        self._aside.set(len(report.unreadable))
        state = (await self.state.read()).value
        await self._sweep_plans(state)
        await self._sweep(state, epoch, report)
        report.through_unix_ns = state.through_ns
        self._lag.set(max(0.0, (self._clock.now_ns() - report.through_unix_ns) / 1e9))
        return report

    async def _now(self) -> RollupState:
        state = (await self.state.read()).value
        if state.windows_s and self._windows_s != state.windows_s:
            raise Invalid(
                f"windows of {list(self._windows_s)} s, but rollups were begun with {list(state.windows_s)} s",
                hint="older rollups do not have other windows: set rollup.windows_s back, or make rollups anew "
                "(docs/parts/rollups.md)",
            )
        return state

    async def _plan(self, state: RollupState, cold: bool, aside: set[str], report: RollupReport) -> _Planned:
        if state.pending is not None:
            key = paths.plan_key(state.pending.id)
            try:
                plan = read_record(await self._store.get(key), Plan)
            except (Corrupt, NotFound) as error:  # nobody knows what was begun: it is abandoned
                self._tell(report, [Unreadable(key, error.message)])
                return _Planned((), state.through_ns, resumed=state.pending)
            return _Planned(plan.covers, state.through_ns, resumed=state.pending)
        covered = await self._coverage.covered(state)
        if cold:
            covered = await self._all_covered(covered)
        unsure: dict[str, Corrupt] = {}
        self._tell(report, [Unreadable(str(each.detail.get("key")), each.message) for each in covered.damaged])
        now_ns = self._clock.now_ns()
        since_ns = 0 if cold else state.settled_ns
        # Notes first: a batch whose note is found later is looked for again by the next run.
        noted, whole = await self._coverage.late(state)
        notes_ms = now_ns // 1_000_000 if whole else 0
        tail: list[str] = []
        async for _, manifest_id in self._raw.entries(since_ns or await self._raw.first_ns(now_ns), now_ns):
            if manifest_id in aside or manifest_id in unsure:
                continue  # what was set aside in this run is not tried again in it
            if await self._coverage.waiting(covered, [manifest_id], unsure):
                tail.append(manifest_id)
            elif manifest_id not in unsure:
                report.skipped += 1
            if len(tail) > self._batches_max:
                break
        more, taken = len(tail) > self._batches_max, tail[: self._batches_max]
        through_ns = paths.parse_by_time(taken[-1])[1] if more else now_ns
        waiting = await self._coverage.waiting(covered, set(noted) - unsure.keys() - aside, unsure)
        late = frozenset(waiting) - aside - set(tail)
        done = tuple(sorted(set(noted) - set(waiting) - unsure.keys() - aside))
        told = tuple(
            Told(0, manifest_id, str(error.detail.get("key")), problem=f"corrupt: {error.message}")
            for manifest_id, error in unsure.items()
        )
        covers = tuple(sorted({*taken, *late}))
        return _Planned(covers, through_ns, notes_ms, late=late, done=done, unsure=told, more=more)

    async def _all_covered(self, recent: Covered) -> Covered:
        """The same with what every manifest there is says; those that cannot be read are told."""
        state, found, damaged = recent.state, set(recent.ids), list(recent.damaged)
        async for info in self._store.list(paths.MANIFESTS):
            try:
                if state.counts(paths.sequence_of(info.key)):
                    found.update(read_record(await self._store.get(info.key), RollupManifest).covers)
            except Corrupt as error:
                damaged.append(error)
            except Invalid:
                continue  # not ours
        return Covered(state, frozenset(found), tuple(damaged))

    async def _one(self, state: RollupState, planned: _Planned, epoch: int, report: RollupReport) -> set[str]:
        """One generation, from reading to its commit; or none under way, when it cannot be finished as it was begun.

        Gives the batches that were set aside.
        """
        windows_s = state.windows_s or self._windows_s
        inputs = [Input(number, name) for number, name in enumerate(planned.covers)]
        told = await self._job.read(inputs, windows_s)
        good = [each for each in told if not each.problem]
        bad = [each for each in told if each.problem]
        await self._set_aside(bad, report)
        aside = {each.manifest_id for each in bad}
        names = tuple(sorted(each.manifest_id for each in good))
        mine = generations.generation(state, names, windows_s) if good else None
        if planned.resumed is not None and (mine is None or mine.digest != planned.resumed.digest):
            await self._abandon(epoch, report)
        elif mine is None:
            await self._change(lambda at: self._advanced(at, planned), epoch)
        else:
            generation = planned.resumed or mine
            plan = Plan("lightmetrics.rollup_plan.v1", generation, windows_s, names)
            await self._create(paths.plan_key(generation.id), write_record(plan))
            await self._change(lambda at: generations.begin(at, generation, windows_s), epoch)
            await self._make(plan, planned, good, epoch, report)
        return aside

    async def _make(self, plan: Plan, planned: _Planned, good: list[Told], epoch: int, report: RollupReport) -> None:
        """Chunks, manifest and commit of a generation that was begun."""
        generation = plan.generation
        try:
            stored = await self._job.write(generation.id)
            await self._create(generation.manifest_key, write_record(_manifest(plan, stored, good)))
        except Conflict:
            await self._abandon(epoch, report)
            return
        await self._change(lambda at: self._advanced(generations.commit(at, generation), planned), epoch)
        self._count(report, good, stored, planned)
        for each in good:
            if each.manifest_id in planned.late or planned.resumed is not None:
                await self._store.delete(paths.aside_key(each.manifest_id))

    async def _sweep(self, state: RollupState, epoch: int, report: RollupReport) -> None:
        swept = await self._sweeper.sweep(state)
        report.swept = swept.notes + swept.chunks
        if swept.noted(state) != state:
            await self._change(swept.noted, epoch)

    async def _sweep_plans(self, state: RollupState) -> None:
        """Removes plans whose numbers are decided; what is under way, whoever began it, has a later number."""
        async for info in self._store.list(paths.ROLLER_PLANS):
            if info.key.rsplit("/", 1)[-1] < f"{state.committed + 1:0{paths.GENERATION_DIGITS}d}":
                await self._store.delete(info.key)

    async def _set_aside(self, bad: Sequence[Told], report: RollupReport) -> None:
        """Notes what could not be read, so that a mended batch is rolled up and a query knows what is missing."""
        for each in bad:
            note = Aside("lightmetrics.rollup_aside.v1", each.manifest_id, each.key, each.problem)
            with suppress(AlreadyExists):  # noted with another problem
                await self._store.create(paths.aside_key(each.manifest_id), write_record(note))
            self._tell(report, [Unreadable(each.key, each.problem)])

    def _tell(self, report: RollupReport, bad: list[Unreadable]) -> None:
        known = {each.key for each in report.unreadable}
        report.unreadable = [*report.unreadable, *({each.key: each for each in bad if each.key not in known}.values())]

    async def _abandon(self, epoch: int, report: RollupReport) -> None:
        report.abandoned += 1
        await self._change(generations.abandon, epoch)

    async def _create(self, key: str, data: bytes) -> None:
        """Creates what follows from its key. Raises Conflict when other bytes stand there."""
        try:
            await self._store.create(key, data)
        except AlreadyExists as error:
            raise Conflict(f"{key!r} stands with other bytes") from error

    async def _change(self, decide: Callable[[RollupState], RollupState], epoch: int) -> None:
        await self.state.change(lambda state: (decide(state), None), epoch=epoch)

    def _advanced(self, state: RollupState, planned: _Planned) -> RollupState:
        return generations.advance(state, planned.through_ns, planned.notes_ms, self._overlap_ns)

    def _count(self, report: RollupReport, good: list[Told], stored: list[StoredChunk], planned: _Planned) -> None:
        rollups = [each for each in stored if each.window_s]
        samples = sum(each.samples for each in good)
        report.generations += 1
        report.batches += len(good)
        report.samples += samples
        report.chunks += len(rollups)
        report.index_chunks += len(stored) - len(rollups)
        report.chunk_bytes += sum(each.size for each in stored)
        report.late += sum(each.manifest_id in planned.late for each in good)
        report.resumed += planned.resumed is not None
        self._samples.inc(samples)
        self._chunks.inc(len(rollups))


def _manifest(plan: Plan, stored: list[StoredChunk], good: list[Told]) -> RollupManifest:
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
