"""Schedules compaction and retention: discovers partitions, claims one after another, and repeats.

A claim is an ephemeral entry, so it ends with its process. It only keeps compactors from doing the same work twice;
`meta/compaction` makes a compaction safe.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Fenced, LakebedError
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.core.traces import traced
from lakebed.log import paths
from lakebed.log.compactor import Compactor
from lakebed.log.model import CompactionClaim, TopicPartition, UnknownTopicPartition
from lakebed.log.records import Records
from lakebed.log.retention import Retention
from lakebed.log.settings import LogSettings
from lakebed.meta.model import ABSENT, MetaEntry
from lakebed.meta.protocol import MetaSession

ROUNDS_MAX = 16  # compactions of one partition under one claim

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
    ) -> None:
        self._records, self._compactor, self._retention = records, compactor, retention
        self._settings, self._node, self._clock, self._ids = settings, node, runtime.clock, runtime.ids
        self._known: set[TopicPartition] = set()
        self._lags: dict[TopicPartition, int] = {}
        self._session: MetaSession | None = None
        self._known_gauge = runtime.metrics.gauge("lakebed_log_known_partitions")
        self._lag_gauge = runtime.metrics.gauge("lakebed_log_compaction_lag_records")

    async def run(self) -> None:
        """Until cancelled. A failing partition is logged and tried again in the next pass."""
        try:
            while True:
                await self.pass_once()
                await self._clock.sleep(self._settings.compact_every_s)
        finally:
            if self._session is not None:
                await self._session.close()

    @traced("log compaction pass")
    async def pass_once(self) -> dict[TopicPartition, str]:
        """Every known partition once, in random order, at most `compact_workers` at a time."""
        await self._discover()
        order = sorted(self._known, key=lambda _: self._ids.uniform(0, 1))
        slots = asyncio.Semaphore(self._settings.compact_workers)
        results: dict[TopicPartition, str] = {}

        async def one(tp: TopicPartition) -> None:
            async with slots:
                results[tp] = await self._attempt(tp)

        await asyncio.gather(*map(one, order))
        return results

    async def _discover(self) -> None:
        async for tp in self._records.partitions():
            self._known.add(tp)
        self._show()

    def _show(self) -> None:
        self._known_gauge.set(len(self._known))
        self._lag_gauge.set(sum(self._lags.values()))

    async def _attempt(self, tp: TopicPartition) -> str:
        try:
            claim = await self._claim(tp)
            if claim is None:
                return "busy"
            try:
                return await self._work(tp)
            finally:
                with suppress(LakebedError):  # expiry releases it too; by then it may belong to another process
                    await self._records.meta.delete(
                        paths.claim(tp), expected=claim.version, partition_key=tp.partition_key
                    )
        except UnknownTopicPartition:
            self._known.discard(tp)  # deleted, perhaps by another process
            self._lags.pop(tp, None)
            self._show()
            return "gone"
        except LakebedError as error:
            log.warning("compaction failed", partition=str(tp), code=error.code, error=error.message)
            return error.code

    async def _work(self, tp: TopicPartition) -> str:
        await self._retention.apply_once(tp)
        done = "idle"
        for _ in range(ROUNDS_MAX):
            outcome = await self._compactor.compact_once(tp)
            if outcome == "idle" or self._session is None or not self._session.alive:
                break
            done = outcome
        self._lags[tp] = await self._compactor.lag(tp)
        self._show()
        return done

    async def _claim(self, tp: TopicPartition) -> MetaEntry | None:
        if self._session is None or not self._session.alive:
            self._session = await self._records.meta.open_session(timeout_s=self._settings.claim_s)
        claim = msgspec.json.encode(CompactionClaim(self._node, now_ms(self._clock)))
        try:
            return await self._records.meta.put(
                paths.claim(tp), claim, expected=ABSENT, session=self._session, partition_key=tp.partition_key
            )
        except AlreadyExists:
            return None
        except Fenced:
            self._session = None  # expired while we were busy: a new one next time
            return None
