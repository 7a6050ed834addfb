"""Schedules compaction and retention: discovers partitions, claims and plans them, compacts what is due, and repeats.

As soon as one partition is due, those that are half as far join it: they share its blob, and each source is read once.

A claim is an ephemeral entry, so it ends with its process. It only keeps compactors from doing the same work twice;
`meta/compaction` makes a compaction safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Fenced, LakebedError, NotFound, Stale
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun, RunLog
from lakebed.core.runtime import Runtime
from lakebed.core.traces import traced
from lakebed.log import paths
from lakebed.log.compaction import CompactionPlan, CompactionRun, pack
from lakebed.log.compactor import Compactor
from lakebed.log.model import CompactionClaim, TopicPartition, UnknownTopicPartition
from lakebed.log.records import Records
from lakebed.log.retention import Retention
from lakebed.log.settings import LogSettings
from lakebed.meta.model import ABSENT, MetaEntry
from lakebed.meta.protocol import MetaSession

COMPACTION = "log compaction"  # as a run
FINE = frozenset({"compacted", "recovered", "abandoned", "idle", "busy", "gone"})  # everything else is an error's code
LOOKS_MAX = 16  # partitions that are looked at concurrently: a look is a few reads of meta

log = logger("log")


class CompactionScheduler:
    """One per process. `node` is stored in its claims."""

    def __init__(
        self,
        runtime: Runtime,
        records: Records,
        compactor: Compactor,
        retention: Retention,
        settings: LogSettings,
        *,
        node: str,
        runs: RunLog,
    ) -> None:
        self._records, self._compactor, self._retention, self._runs = records, compactor, retention, runs
        self._settings, self._node, self._clock, self._ids = settings, node, runtime.clock, runtime.ids
        self._known: set[TopicPartition] = set()
        self._lags: dict[TopicPartition, int] = {}
        self._session: MetaSession | None = None
        self._compacted: list[CompactionRun] = []  # by the last pass
        self._known_gauge = runtime.metrics.gauge("lakebed_log_known_partitions")
        self._lag_gauge = runtime.metrics.gauge("lakebed_log_compaction_lag_records")
        self._candidates = runtime.metrics.gauge("lakebed_log_compaction_candidates")
        self._pending = runtime.metrics.gauge("lakebed_log_compaction_pending")
        self._seconds = runtime.metrics.histogram("lakebed_log_compaction_seconds")

    async def run(self) -> None:
        """Until cancelled. A failing partition is logged and tried again in the next pass."""
        try:
            while True:
                async with self._runs.record(COMPACTION) as run:
                    await self.work(run)
                await self._clock.sleep(self._settings.compact_every_s)
        finally:
            await self.close()

    async def work(self, run: ActiveRun) -> None:
        """One pass, reported: the partitions that were compacted, and those that failed."""
        results = await self.pass_once()
        done = sorted(tp for tp, result in results.items() if result in ("compacted", "recovered"))
        failed = {tp: result for tp, result in results.items() if result not in FINE}
        run.subject = _subject(done or sorted(failed))
        run.rows_in = run.rows_out = sum(span.entry.msg_count for one in self._compacted for span in one.spans)
        entries = sum(len(one.spans) for one in self._compacted)
        run.reason, run.idle = f"{len(done)} partitions, {entries} entries into {len(self._compacted)}", not done
        if failed:
            run.fail(", ".join(f"{tp}: {result}" for tp, result in sorted(failed.items())))

    async def close(self) -> None:
        """Ends the claims of this process: at once, or by expiry where meta cannot be reached."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(LakebedError):
                await session.close()

    @traced("log compaction pass")
    async def pass_once(self) -> dict[TopicPartition, str]:
        """Looks at every known partition once, in random order, and compacts what is due into few blobs."""
        with self._seconds.labels(stage="discover").time():
            await self._discover()
        self._compacted = []
        plans: dict[TopicPartition, CompactionPlan] = {}
        results: dict[TopicPartition, str] = {}

        async def look(tp: TopicPartition) -> None:
            results[tp] = await self._look(tp, plans)

        await self._at_most(look, sorted(self._known, key=lambda _: self._ids.uniform(0, 1)))
        if any(plan.due for plan in plans.values()):
            await self._claim_and_compact(plans, results)
        self._show()
        return results

    async def _at_most(self, work: Callable[[TopicPartition], Awaitable[None]], tps: Sequence[TopicPartition]) -> None:
        slots = asyncio.Semaphore(LOOKS_MAX)

        async def one(tp: TopicPartition) -> None:
            async with slots:
                await work(tp)

        await asyncio.gather(*map(one, tps))

    async def _claim_and_compact(
        self, plans: dict[TopicPartition, CompactionPlan], results: dict[TopicPartition, str]
    ) -> None:
        """Claims every partition that has something to compact, and compacts those that it got."""
        claims: dict[TopicPartition, MetaEntry] = {}
        doubtful: list[TopicPartition] = []  # claims that may have been made, or may not be released
        if self._session is None or not self._session.alive:
            self._session = await self._records.meta.open_session(timeout_s=self._settings.claim_s)
        session = self._session

        async def claim(tp: TopicPartition) -> None:
            try:
                claims[tp] = await self._claim(tp, session)
            except AlreadyExists:
                results[tp] = "busy"
            except Fenced:
                self._session = None  # expired while we were busy: a new one next time
                results[tp] = "busy"
            except LakebedError as error:
                doubtful.append(tp)
                results[tp] = _failed(tp, error)

        async def release(tp: TopicPartition) -> None:
            try:
                await self._records.meta.delete(
                    paths.claim(tp), expected=claims[tp].version, partition_key=tp.partition_key
                )
            except Stale:
                return  # it expired, and another process holds the partition by now
            except LakebedError:
                doubtful.append(tp)

        try:
            await self._at_most(claim, list(plans))
            await self._compact([run for tp in plans if tp in claims for run in plans[tp].runs], results)
        finally:
            await self._at_most(release, list(claims))
            if doubtful:  # claims that may be left would stay as long as this session lives
                await self.close()

    async def _discover(self) -> None:
        registry = self._records.registry
        if await registry.complete() or not registry.needed:
            self._known.update([tp async for tp in self._records.partitions()])
        else:  # the first pass on a lake of an older version
            async for tp in self._records.scan():
                await registry.add(tp)
                self._known.add(tp)
            await registry.mark_complete()
        self._show()

    def _show(self) -> None:
        self._known_gauge.set(len(self._known))
        self._lag_gauge.set(sum(self._lags.values()))

    async def _look(self, tp: TopicPartition, plans: dict[TopicPartition, CompactionPlan]) -> str:
        """Applies retention and plans. A partition with nothing to do costs reads of meta alone."""
        try:
            if await self._is_claimed(tp):
                return "busy"
            await self._retention.apply_once(tp)
            recovered, plan = await self._compactor.plan(tp)
            if recovered is not None:
                plan = (await self._compactor.plan(tp))[1]
            self._lags[tp] = plan.lag
            if plan.runs:
                plans[tp] = plan
            return recovered or "idle"
        except UnknownTopicPartition:
            self._known.discard(tp)  # deleted, perhaps by another process
            self._lags.pop(tp, None)
            return "gone"
        except LakebedError as error:
            return _failed(tp, error)

    async def _compact(self, runs: Sequence[CompactionRun], results: dict[TopicPartition, str]) -> None:
        """A few blobs at a time. Runs of one partition that are in several blobs commit in any order."""
        slots = asyncio.Semaphore(self._settings.compact_workers)
        self._candidates.set(sum(len(run.spans) for run in runs))
        self._pending.set(len(runs))

        async def one(blob: Sequence[CompactionRun]) -> None:
            async with slots:
                tps = {run.tp for run in blob}
                try:
                    if self._session is None or not self._session.alive:
                        return  # the claims ended: another process may be at work by now
                    found = {
                        tp: _failed(tp, done) if isinstance(done, LakebedError) else done
                        for tp, done in (await self._compactor.compact(blob)).items()
                    }
                    results.update(found)
                    self._compacted += [run for run in blob if found[run.tp] == "compacted"]
                    for tp in tps:
                        self._lags[tp] = await self._compactor.lag(tp)
                except LakebedError as error:
                    results.update({tp: _failed(tp, error) for tp in tps})
                finally:
                    self._pending.dec(len(blob))

        await asyncio.gather(*map(one, pack(runs, self._settings.compact_blob_bytes)))

    async def _is_claimed(self, tp: TopicPartition) -> bool:
        try:
            await self._records.meta.get(paths.claim(tp), partition_key=tp.partition_key)
        except NotFound:
            return False
        return True

    async def _claim(self, tp: TopicPartition, session: MetaSession) -> MetaEntry:
        claim = msgspec.json.encode(CompactionClaim(self._node, now_ms(self._clock)))
        return await self._records.meta.put(
            paths.claim(tp), claim, expected=ABSENT, session=session, partition_key=tp.partition_key
        )


def _subject(tps: Sequence[TopicPartition]) -> str:
    more = f" and {len(tps) - 1} more" if len(tps) > 1 else ""
    return f"{tps[0]}{more}" if tps else ""


def _failed(tp: TopicPartition, error: LakebedError) -> str:
    log.warning("compaction failed", partition=str(tp), code=error.code, error=error.message)
    return error.code
