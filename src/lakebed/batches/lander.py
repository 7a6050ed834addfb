"""Lands spooled batches in the bucket: blob, then manifest, as the spool accepted them. Idempotent and resumable.

The manifest carries the spool's own time and attempt, so landing again after a lost answer meets its own bytes.
"""

from __future__ import annotations

import asyncio
from functools import partial

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import store_conflict, write_blob
from lakebed.batches.aftermath import Aftermath
from lakebed.batches.model import Accepted, read_record, write_record
from lakebed.batches.raw import verified
from lakebed.batches.spool import Spool, Spooled
from lakebed.clock import Clock
from lakebed.errors import AlreadyExists, Corrupt, LakebedError, Unavailable
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store

LANDINGS_MAX = 8  # batches being landed at once

log = logger("batches")


class DamagedRecord(Unavailable):
    """A spooled batch cannot be read back: its segment is kept."""


class Lander:
    def __init__(
        self,
        spool: Spool,
        store: Store,
        aftermath: Aftermath,
        *,
        interval_s: float,
        collector_id: str,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._spool, self._store, self._aftermath = spool, store, aftermath
        self._interval_s, self._collector_id, self._clock = interval_s, collector_id, clock
        self._outcomes = metrics.counter("lakebed_batches_landed_total")

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            try:
                await self.land()
            except LakebedError as error:
                log.warning("spooled batches could not be landed yet", cause=error.message)

    async def land(self) -> int:
        """Lands everything the spool holds; returns how many. Raises Unavailable, keeping what is not landed.

        A batch that cannot be read back from the disk is reported after the others have landed; an error of the bucket
        ends the run at once, because it would meet them all.
        """
        waiting = self._spool.waiting()
        damaged: DamagedRecord | None = None
        for at in range(0, len(waiting), LANDINGS_MAX):
            group = waiting[at : at + LANDINGS_MAX]
            results = await asyncio.gather(*(self._one(spooled) for spooled in group), return_exceptions=True)
            for result in results:
                if isinstance(result, DamagedRecord):
                    damaged = result
                elif isinstance(result, BaseException):
                    raise result
        await self._spool.sweep()
        if damaged is not None:
            raise damaged
        return len(waiting)

    async def _one(self, spooled: Spooled) -> None:
        try:
            frame = await self._spool.frame(spooled)
            submitted = acceptance.submission(frame, verified(frame, spooled.accepted.frame_sha256))
        except (OSError, Corrupt) as error:
            self._outcomes.labels(outcome="damaged").inc()
            raise DamagedRecord(f"a spooled batch cannot be read back: {error}") from error
        await write_blob(self._store, submitted)
        standing = await self._create(spooled.accepted)
        verdict = acceptance.judge(spooled.accepted, standing)
        if verdict == "conflict":
            record = acceptance.conflict(
                standing, submitted.sha256, at_ns=self._clock.now_ns(), collector_id=self._collector_id
            )
            await store_conflict(self._store, record)
            log.error("a spooled batch met another one in the bucket", quarantined=record.submitted_raw_blob_key)
        else:
            self._aftermath.put(
                partial(acceptance.derived, standing, acceptance.span_of(submitted.batch), self._clock.now_ns)
            )
        self._outcomes.labels(outcome=verdict).inc()
        self._spool.landed(spooled.accepted.identity)

    async def _create(self, accepted: Accepted) -> Accepted:
        try:
            await self._store.create(paths.accepted_key(accepted.identity), write_record(accepted))
        except AlreadyExists as error:
            return read_record(error.current, Accepted)
        return accepted
