"""Removes accepted batches that are older than `batches.retention_days`: manifests, blobs and index rows.

Hour by hour of acceptance, oldest first, under a lease:

1. settle    the sequence numbers of the hour go into the settled records of their boots
2. wait      until every collector has read them
3. remove    manifests, then blobs, then the segments and single objects of the index

A crash anywhere repeats a step. The index goes last, so what is left of an hour is found again; a blob whose manifest
is gone is covered by a settled record, so garbage collection deletes it and does not complete its acceptance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.batches import paths, seq_ranges
from lakebed.batches.codec.index import manifest_id_of, single_objects
from lakebed.batches.index import AcceptedIndex
from lakebed.batches.model import AcceptedByTime, RetentionState, SettledBoot, write_record
from lakebed.batches.packer import accepted_at, read_table
from lakebed.batches.settled import WAIT_S, settled_register, state_register
from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.core.traces import traced
from lakebed.rollups.paths import work_key
from lakebed.store.lease import HeldByAnother, Lease
from lakebed.store.runtime import StoreRuntime

DAY_NS = 24 * paths.HOUR_NS
HOURS_MAX = 100  # hours of one pass; the rest waits for the next
LEASE_S = 600.0
BOOTS_AT_ONCE = 16

log = logger("batches")


class RetentionReport(msgspec.Struct):
    """What one pass did, or would do."""

    schema: str = "lightmetrics.retention_report.v1"
    dry_run: bool = False
    before_unix_ns: int = 0
    at_unix_ns: int = 0
    settled_hours: int = 0
    waiting_hours: int = 0
    damaged_hours: int = 0
    removed_hours: int = 0
    removed_batches: int = 0
    removed_bytes: int = 0


class BatchRetention:
    def __init__(self, runtime: StoreRuntime, *, retention_days: float, owner: str) -> None:
        self._runtime, self._store, self._clock, self._ids = runtime, runtime.store, runtime.clock, runtime.ids
        self._days = retention_days
        self._index = AcceptedIndex(runtime.store, cache_bytes_max=0)
        self._lease = Lease(runtime, paths.RETENTION_LEASE, owner=owner, lease_s=LEASE_S)
        self.state = state_register(runtime)
        self._removed = runtime.metrics.counter("lakebed_batches_retention_removed_total")

    @traced("batches retention")
    async def run(self, *, dry_run: bool = False) -> RetentionReport:
        """One pass. Raises HeldByAnother when another process is at it. A dry run changes nothing."""
        now_ns = self._clock.now_ns()
        before_ns = (now_ns - round(self._days * DAY_NS)) // paths.HOUR_NS * paths.HOUR_NS
        report = RetentionReport(dry_run=dry_run, before_unix_ns=before_ns, at_unix_ns=now_ns)
        if self._days <= 0:
            return report
        if dry_run:
            await self._pass(report, None)
            return report
        held = await self._lease.acquire()
        try:
            await self._pass(report, held.epoch)
        finally:
            await self._lease.release(held)
        if report.removed_batches:
            key = f"{paths.RETENTION_REPORTS}{now_ns:020d}-{self._ids.token()}.json"
            await self._store.create(key, write_record(report))
        return report

    async def work(self, run: ActiveRun) -> None:
        """One pass, reported. Raises HeldByAnother, which is no failure."""
        run.answers = (HeldByAnother,)
        report = await self.run()
        run.rows_out, run.idle = report.removed_batches, not report.removed_batches
        if report.removed_batches:
            log.info("removed old batches", batches=report.removed_batches, hours=report.removed_hours)

    async def _pass(self, report: RetentionReport, epoch: int | None) -> None:
        state = (await self.state.read()).value
        for hour in (await self._index.hours_before(report.before_unix_ns))[:HOURS_MAX]:
            try:
                await self._one(hour, state.pending.get(hour), report, epoch)
            except Corrupt as error:  # nothing of an hour is removed while a part of it is unknown
                report.damaged_hours += 1
                log.error("an hour is not removed: its index is damaged", hour=hour, error=error.message)

    async def _one(self, hour: str, settled_ns: int | None, report: RetentionReport, epoch: int | None) -> None:
        if settled_ns is None:
            report.settled_hours += 1
            if epoch is not None:
                await self._settle(await self._index.rows_of_hour(hour))
                await self._note(hour, epoch)
        elif self._clock.now_ns() - settled_ns < WAIT_S * 1e9:
            report.waiting_hours += 1
        else:
            await self._remove(hour, report, epoch)

    async def _settle(self, rows: Sequence[AcceptedByTime]) -> None:
        """Adds the rows' numbers to the records of their boots. Idempotent."""
        boots: dict[tuple[str, str], list[tuple[int, int]]] = {}
        through_ns = max((row.accepted_at_unix_ns for row in rows), default=0)
        for row in rows:
            identity = paths.identity_of(row.accepted_manifest_key)
            boots.setdefault((identity.agent_id, identity.boot_id), []).append((identity.seq_start, identity.seq_end))

        async def one(item: tuple[tuple[str, str], list[tuple[int, int]]]) -> None:
            (agent_id, boot_id), numbers = item

            def add(at: SettledBoot) -> tuple[SettledBoot, None]:
                ranges = seq_ranges.union(at.ranges, numbers)
                return SettledBoot(ranges, max(at.through_ns, through_ns)), None

            await settled_register(self._runtime, agent_id, boot_id).change(add)

        async for _ in ahead(list(boots.items()), one, BOOTS_AT_ONCE):
            pass

    async def _note(self, hour: str, epoch: int) -> None:
        now_ns = self._clock.now_ns()

        def add(at: RetentionState) -> tuple[RetentionState, None]:
            return msgspec.structs.replace(at, pending=at.pending | {hour: now_ns}), None

        await self.state.change(add, epoch=epoch)

    async def _remove(self, hour: str, report: RetentionReport, epoch: int | None) -> None:
        rows = await self._index.rows_of_hour(hour)
        if epoch is not None and not await self._all_settled(rows):
            await self._settle(rows)  # rows came since: their collectors must hear of it first
            await self._note(hour, epoch)
            report.waiting_hours += 1
            return
        report.removed_hours += 1
        report.removed_batches += len(rows)
        report.removed_bytes += sum(row.frame_bytes for row in rows)
        if epoch is None:
            return
        end_ns = paths.hour_ns(hour) + paths.HOUR_NS
        await self._forget(None, end_ns, epoch)  # readers hear of it before anything is gone
        async for _ in ahead(rows, self._delete):
            pass
        packs = sorted({row.raw_blob_key for row in rows if row.raw_blob_offset})
        async for _ in ahead(packs, self._delete_pack):
            pass
        await self._index.delete_hour(hour)
        self._removed.inc(len(rows))
        await self._forget(hour, end_ns, epoch)

    async def _all_settled(self, rows: Sequence[AcceptedByTime]) -> bool:
        known: dict[tuple[str, str], SettledBoot] = {}
        for row in rows:
            identity = paths.identity_of(row.accepted_manifest_key)
            boot = (identity.agent_id, identity.boot_id)
            if boot not in known:
                known[boot] = (await settled_register(self._runtime, *boot).read()).value
            if not seq_ranges.covers(known[boot].ranges, identity.seq_start, identity.seq_end):
                return False
        return True

    async def _delete(self, row: AcceptedByTime) -> None:
        identity = paths.identity_of(row.accepted_manifest_key)
        await self._store.delete(row.accepted_manifest_key)
        if not row.raw_blob_offset:
            await self._store.delete(row.raw_blob_key)
        note = work_key(identity, row.accepted_at_unix_ns)
        mark = paths.repair_key(identity)
        (_, _), (by_blob, _), (seen, _) = single_objects(row)
        single = [paths.by_time_of(manifest_id_of(row)), by_blob, seen]
        await asyncio.gather(*(self._store.delete(key) for key in (*single, note, mark)))

    async def _delete_pack(self, pack: str) -> None:
        """Deletes a pack that no manifest refers to and none can: each of its batches is accepted from other bytes, or
        removed. What remains goes with the last hour that needs it, or with garbage collection."""
        try:
            table = await read_table(self._store, pack)
        except NotFound:
            return
        except Corrupt as error:
            log.error("a pack is kept: its table cannot be read", key=pack, error=error.message)
            return
        for frame in table:
            accepted = await accepted_at(self._store, frame)
            if accepted is not None and accepted.raw_blob_key == pack:
                return
            if accepted is None:
                record = await settled_register(self._runtime, frame.identity.agent_id, frame.identity.boot_id).read()
                if not seq_ranges.covers(record.value.ranges, frame.identity.seq_start, frame.identity.seq_end):
                    return
        await self._store.delete(pack)

    async def _forget(self, hour: str | None, end_ns: int, epoch: int) -> None:
        def remove(at: RetentionState) -> tuple[RetentionState, None]:
            pending = {name: since_ns for name, since_ns in at.pending.items() if name != hour}
            return RetentionState(max(at.removed_ns, end_ns), pending), None

        await self.state.change(remove, epoch=epoch)
