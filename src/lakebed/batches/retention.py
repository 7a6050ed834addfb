"""Removes accepted batches that are older than `batches.retention_days`: manifests, blobs and index rows.

Hour by hour of acceptance, oldest first, under a lease:

1. settle    the sequence numbers of the hour go into the settled records of their boots
2. wait      until every collector has read them
3. remove    manifests, then blobs, then the segments and single objects of the index

A crash anywhere repeats a step. The index goes last, so what is left of an hour is found again; a blob whose manifest
is gone is covered by a settled record, so garbage collection deletes it and does not complete its acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lakebed.batches import paths, seq_ranges
from lakebed.batches.codec.index import manifest_id_of, single_objects
from lakebed.batches.index import AcceptedIndex
from lakebed.batches.model import AcceptedByTime, BatchIdentity, RetentionState, SettledBoot, write_record
from lakebed.batches.packer import accepted_at, read_table
from lakebed.batches.settled import WAIT_S, settled_register, state_register
from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.core.traces import traced
from lakebed.rollups.paths import ROLLUP_WORK, work_key
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.runtime import StoreRuntime

DAY_NS = 24 * paths.HOUR_NS
HOURS_MAX = 100  # hours of one pass; the rest waits for the next
LEASE_S = 600.0
BOOTS_AT_ONCE = 64
DELETES_AT_ONCE = 512  # batches, each of two deletes: at 20 ms a delete, 12,000 a second

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


class _Beside(NamedTuple):
    """What there is beside the manifests and blobs of an hour: manifest ids with single objects and with notes of late
    batches, and keys of repair records. Most batches have none of it."""

    singles: frozenset[str]
    notes: frozenset[str]
    marks: frozenset[str]


Boot = tuple[str, str]


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
        """One pass. Raises HeldByAnother when another process is at it. A dry run changes nothing, and counts all that
        is old enough, whether its records are written or not."""
        now_ns = self._clock.now_ns()
        before_ns = (now_ns - round(self._days * DAY_NS)) // paths.HOUR_NS * paths.HOUR_NS
        report = RetentionReport(dry_run=dry_run, before_unix_ns=before_ns, at_unix_ns=now_ns)
        if self._days <= 0:
            return report
        if dry_run:
            await self._rehearse(report)
            return report
        held = await self._lease.acquire()
        try:
            held = await self._pass(report, held)
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

    async def _rehearse(self, report: RetentionReport) -> None:
        pending = (await self.state.read()).value.pending
        for hour in await self._index.hours_before(report.before_unix_ns):
            batches = size_bytes = 0
            try:
                async for rows in self._index.rows_of_hour(hour):
                    batches, size_bytes = batches + len(rows), size_bytes + sum(row.frame_bytes for row in rows)
            except Corrupt:
                report.damaged_hours += 1
                continue
            report.removed_hours += 1
            report.removed_batches += batches
            report.removed_bytes += size_bytes
            report.settled_hours += hour not in pending
            report.waiting_hours += hour in pending and self._waits(pending[hour])

    async def _pass(self, report: RetentionReport, held: HeldLease) -> HeldLease:
        state = (await self.state.read()).value
        hours = await self._index.hours_before(report.before_unix_ns)
        for number, hour in enumerate(hours):
            if number - report.damaged_hours >= HOURS_MAX:
                break
            try:
                held = await self._one(hour, state.pending.get(hour), report, held)
            except Corrupt as error:  # nothing of an hour is removed while a part of it is unknown
                report.damaged_hours += 1
                log.error("an hour is not removed: its index is damaged", hour=hour, error=error.message)
        if not hours and 0 < state.removed_ns < report.before_unix_ns:  # nothing came in the hours since
            await self._forget(None, report.before_unix_ns, held.epoch)
        return held

    async def _one(self, hour: str, settled_ns: int | None, report: RetentionReport, held: HeldLease) -> HeldLease:
        if settled_ns is None:
            report.settled_hours += 1
            await self._settle(hour, held.epoch)
        elif self._waits(settled_ns):
            report.waiting_hours += 1
        elif (known := await self._all_settled(hour)) is None:
            await self._settle(hour, held.epoch)  # rows came since: their collectors must hear of it first
            report.waiting_hours += 1
        else:
            return await self._remove(hour, known, report, held)
        return held

    def _waits(self, settled_ns: int) -> bool:
        return self._clock.now_ns() - settled_ns < WAIT_S * 1e9

    async def _settle(self, hour: str, epoch: int) -> None:
        """Adds the numbers of an hour to the records of their boots. Idempotent."""
        boots: dict[Boot, seq_ranges.SeqRanges] = {}
        through_ns = 0
        async for rows in self._index.rows_of_hour(hour):
            numbers: dict[Boot, list[tuple[int, int]]] = {}
            for row in rows:
                identity = paths.identity_of(row.accepted_manifest_key)
                numbers.setdefault(_boot(identity), []).append((identity.seq_start, identity.seq_end))
                through_ns = max(through_ns, row.accepted_at_unix_ns)
            for boot, some in numbers.items():
                boots[boot] = seq_ranges.union(boots.get(boot, ()), some)

        async def one(boot: Boot) -> None:
            def add(at: SettledBoot) -> tuple[SettledBoot, None]:
                ranges = seq_ranges.union(at.ranges, boots[boot])
                return SettledBoot(ranges, max(at.through_ns, through_ns)), None

            await settled_register(self._runtime, *boot).change(add)

        async for _ in ahead(list(boots), one, BOOTS_AT_ONCE):
            pass
        now_ns = self._clock.now_ns()

        def note(at: RetentionState) -> tuple[RetentionState, None]:
            return msgspec.structs.replace(at, pending=at.pending | {hour: now_ns}), None

        await self.state.change(note, epoch=epoch)

    async def _all_settled(self, hour: str) -> dict[Boot, SettledBoot] | None:
        """The records of the boots of an hour; None when a row of it is in none."""
        known: dict[Boot, SettledBoot] = {}

        async def read(boot: Boot) -> None:
            known[boot] = (await settled_register(self._runtime, *boot).read()).value

        async for rows in self._index.rows_of_hour(hour):
            boots = {_boot(paths.identity_of(row.accepted_manifest_key)) for row in rows}
            async for _ in ahead(sorted(boots - known.keys()), read, BOOTS_AT_ONCE):
                pass
            if not _covered(rows, known):
                return None
        return known

    async def _remove(
        self, hour: str, known: dict[Boot, SettledBoot], report: RetentionReport, held: HeldLease
    ) -> HeldLease:
        end_ns = paths.hour_ns(hour) + paths.HOUR_NS
        await self._forget(None, end_ns, held.epoch)  # readers hear of it before anything is gone
        beside = await self._beside(hour)
        segments: dict[str, int] = {}
        packs: set[str] = set()
        async for rows in self._index.rows_of_hour(hour, segments):
            if not _covered(rows, known):
                return held  # rows came this moment: the next pass settles them
            held = await self._kept(held)
            async for _ in ahead(rows, lambda row: self._delete(row, beside), DELETES_AT_ONCE):
                pass
            packs |= {row.raw_blob_key for row in rows if row.raw_blob_offset}
            report.removed_batches += len(rows)
            report.removed_bytes += sum(row.frame_bytes for row in rows)
            self._removed.inc(len(rows))
        async for _ in ahead(sorted(packs), self._delete_pack):
            pass
        async for _ in ahead(sorted(segments), self._store.delete, DELETES_AT_ONCE):  # not what came since
            pass
        report.removed_hours += 1
        await self._forget(hour, end_ns, held.epoch)
        return held

    async def _kept(self, held: HeldLease) -> HeldLease:
        """The lease, renewed in time: an hour of a large fleet takes longer. Raises Fenced."""
        left_s = held.expires_at_ms / 1000 - self._clock.now_ns() / 1e9
        return held if left_s > LEASE_S * 2 / 3 else await self._lease.renew(held)

    async def _beside(self, hour: str) -> _Beside:
        notes = [info.key async for info in self._store.list(f"{ROLLUP_WORK}{hour}/")]
        marks = [info.key async for info in self._store.list(paths.REPAIRS)]
        names = frozenset(key.rsplit("/", 1)[-1].removesuffix(".json") for key in notes)
        return _Beside(await self._index.singles_of_hour(hour), names, frozenset(marks))

    async def _delete(self, row: AcceptedByTime, beside: _Beside) -> None:
        identity = paths.identity_of(row.accepted_manifest_key)
        await self._store.delete(row.accepted_manifest_key)
        if not row.raw_blob_offset:
            await self._store.delete(row.raw_blob_key)
        name, mark = manifest_id_of(row), paths.repair_key(identity)
        more = [mark] if mark in beside.marks else []
        if name in beside.notes:
            more.append(work_key(identity, row.accepted_at_unix_ns))
        if name in beside.singles:  # by time last: it shows that there are others
            more += reversed([key for key, _ in single_objects(row)])
        for key in more:
            await self._store.delete(key)

    async def _delete_pack(self, pack: str) -> None:
        """Deletes a pack that no manifest refers to and none can: each of its batches is accepted from other bytes, or
        removed. What remains goes with the last hour that needs it, or with garbage collection."""
        try:
            for frame in await read_table(self._store, pack):
                accepted = await accepted_at(self._store, frame)
                if accepted is not None and accepted.raw_blob_key == pack:
                    return
                if accepted is None:
                    record = await settled_register(self._runtime, *_boot(frame.identity)).read()
                    if not seq_ranges.covers(record.value.ranges, frame.identity.seq_start, frame.identity.seq_end):
                        return
        except NotFound:
            return
        except Corrupt as error:
            log.error("a pack is kept: its table or a manifest cannot be read", key=pack, error=error.message)
            return
        await self._store.delete(pack)

    async def _forget(self, hour: str | None, end_ns: int, epoch: int) -> None:
        def remove(at: RetentionState) -> tuple[RetentionState, None]:
            pending = {name: since_ns for name, since_ns in at.pending.items() if name != hour}
            return RetentionState(max(at.removed_ns, end_ns), pending), None

        await self.state.change(remove, epoch=epoch)


def _boot(identity: BatchIdentity) -> Boot:
    return identity.agent_id, identity.boot_id


def _covered(rows: Sequence[AcceptedByTime], known: dict[Boot, SettledBoot]) -> bool:
    """Whether these records have all of the rows."""
    for row in rows:
        identity = paths.identity_of(row.accepted_manifest_key)
        record = known.get(_boot(identity), SettledBoot())
        if not seq_ranges.covers(record.ranges, identity.seq_start, identity.seq_end):
            return False
    return True
