"""Repairs everything derived from accepted manifests. Idempotent: any number may run, crash and begin again.

For each manifest: its blob exists and has its hash; it is in accepted-by-time, accepted-by-blob and raw-blobs-by-time;
live state has it; rollup work is requested when it was indexed late; damage is recorded for an operator.

- hot: `repair` for each object event of accepted/v1/ (see `events.py`)
- steady: `scan` over accepted-by-time, from a durable checkpoint less an overlap
- cold: `audit` over all of accepted/v1/ and quarantine/v1/, resumable; garbage collection requires it
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Write
from lakebed.batches.model import (
    AcceptedBatch,
    AcceptedByTime,
    Batch,
    ConflictRecord,
    Repair,
    read_record,
    write_record,
)
from lakebed.batches.reader import RawBatches, verified
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, LakebedError, NotFound, Stale
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.store.model import StoredObject
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

VERIFIED_MAX = 100_000  # manifests remembered as sound, so that the overlap costs nothing twice
GRACE_NS = 10_000_000_000  # twice the patience of derived writes
SAVE_EVERY = 500  # manifests between two notes of an audit's progress

log = logger("batches")


class ScanCheckpoint(msgspec.Struct, frozen=True):
    """Acceptances up to here were reconciled by the steady scan."""

    through_ns: int = 0


class AuditProgress(msgspec.Struct, frozen=True):
    """The last completed audit, and how far the one in progress has come."""

    audited_through_ns: int = 0  # the start of the last audit that saw everything
    completed_at_ns: int = 0
    accepted: int = 0
    quarantined: int = 0
    running_since_ns: int = 0
    cursor: str = ""  # last accepted key that the running audit has repaired


class ReconcileReport(msgspec.Struct):
    """What one pass did."""

    path: str
    checked: int = 0
    repaired: dict[str, int] = {}

    def add(self, repair: str) -> None:
        self.repaired = self.repaired | {repair: self.repaired.get(repair, 0) + 1}


Refresh = Callable[[AcceptedBatch, Batch], object]


class Reconciler:
    def __init__(
        self, runtime: StoreRuntime, *, overlap_s: float, concurrency: int, refresh: Refresh | None = None
    ) -> None:
        store, clock, metrics = runtime.store, runtime.clock, runtime.metrics
        self._store, self._clock, self._refresh = store, clock, refresh
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._overlap_ns, self._concurrency = round(overlap_s * 1e9), concurrency
        self._verified: OrderedDict[str, None] = OrderedDict()
        self._checked = metrics.counter("lakebed_batches_reconciled_total")
        self._repairs = metrics.counter("lakebed_batches_repairs_total")
        self._lag = metrics.gauge("lakebed_batches_reconciler_lag_seconds")
        self.checkpoint = Register(
            runtime,
            paths.CHECKPOINT,
            ScanCheckpoint,
            ScanCheckpoint(),
            name="reconciler",
        )
        self.audits = Register(
            runtime,
            paths.AUDIT,
            AuditProgress,
            AuditProgress(),
            name="audit",
        )

    @traced("batches scan")
    async def scan(self) -> ReconcileReport:
        """Steady path: repairs what was accepted since the checkpoint, less the overlap, then moves the checkpoint."""
        report = ReconcileReport("steady")
        now_ns = self._clock.now_ns()
        since_ns = (await self.checkpoint.read()).value.through_ns - self._overlap_ns
        first_ns = since_ns if since_ns > 0 else await self._raw.first_ns(now_ns)

        async def due() -> AsyncIterator[str]:
            # The youngest are left to their collector, whose derived writes may still be in progress.
            async for key, manifest_id in self._raw.entries(max(0, first_ns), now_ns - GRACE_NS):
                entry = None if manifest_id in self._verified else await self._raw.entry(key)
                if entry is not None:
                    yield entry.accepted_manifest_key

        await self._repair_all(due(), report)
        await self.checkpoint.change(lambda at: (ScanCheckpoint(now_ns) if at.through_ns < now_ns else at, None))
        self._lag.set((self._clock.now_ns() - now_ns) / 1e9)
        return report

    @traced("batches audit")
    async def audit(self) -> ReconcileReport:
        """Cold path: repairs every accepted and quarantine manifest, from the cursor of an interrupted audit."""
        report = ReconcileReport("cold")
        now_ns = self._clock.now_ns()

        def begin(audit: AuditProgress) -> tuple[AuditProgress, tuple[int, str]]:
            if audit.running_since_ns:
                return audit, (audit.running_since_ns, audit.cursor)
            return msgspec.structs.replace(audit, running_since_ns=now_ns, cursor=""), (now_ns, "")

        started_ns, cursor = await self.audits.change(begin)
        await self._repair_all(self._accepted_after(cursor), report, started_ns)
        accepted = report.checked
        await self._repair_quarantine(report)

        def complete(audit: AuditProgress) -> tuple[AuditProgress, None]:
            if audit.audited_through_ns >= started_ns:
                return audit, None
            done = AuditProgress(started_ns, self._clock.now_ns(), accepted, report.checked - accepted)
            return done, None

        await self.audits.change(complete)
        return report

    async def repair(self, key: str, report: ReconcileReport) -> None:
        """Repairs everything derived from one accepted manifest. Raises Unavailable; then nothing is lost."""
        report.checked += 1
        self._checked.labels(path=report.path).inc()
        try:
            accepted = read_record(await self._store.get(key), AcceptedBatch)
            if paths.accepted_key(accepted.identity) != key:
                raise Corrupt(f"{key!r} does not match its content: it names another batch")
        except NotFound:
            return  # an event or index entry of something that is not there: nothing to derive
        except Corrupt as error:
            log.error("an accepted manifest cannot be read", key=key, error=error.message)
            self._count(report, "damaged_manifest")
            return
        batch = await self._blob(key, accepted, report)
        if batch is not None:
            await self._repair_entry(accepted, batch, report)
        await self._ensure(acceptance.by_blob(accepted), "by_blob", report)
        seen = acceptance.blob_seen(accepted.frame_sha256, accepted.accepted_at_unix_ns)
        await self._ensure(seen, "blob_by_time", report)
        if batch is not None:
            if self._refresh is not None:
                self._refresh(accepted, batch)
            self._remember(paths.manifest_id(accepted.identity, accepted.accepted_at_unix_ns))

    async def _repair_entry(self, accepted: AcceptedBatch, batch: Batch, report: ReconcileReport) -> None:
        """Writes the by-time entry if it is missing or does not match the batch."""
        entry = acceptance.by_time(accepted, acceptance.span_of(batch))
        try:
            stored = await self._store.get(entry.key)
        except NotFound:
            stored = None
        if stored is not None and (is_same_entry(stored, entry) or has_later_schema(stored)):
            return
        # Work first: an entry that came late without it would never be rolled up.
        await self._ensure(acceptance.rollup_work(accepted), "rollup_work", report)
        if stored is None:
            await self._ensure(entry, "by_time", report)
            return
        log.error("damaged by-time entry is rewritten", key=entry.key)
        with suppress(Stale):  # another process has repaired it
            await self._store.replace(entry.key, entry.data, stored.etag)
            self._count(report, "rebuilt_by_time")

    async def _blob(self, key: str, accepted: AcceptedBatch, report: ReconcileReport) -> Batch | None:
        """The batch of a manifest; None, with a repair record, when it is missing or not what was accepted."""
        mark = paths.repair_key(accepted.identity)
        try:
            batch = verified((await self._store.get(accepted.raw_blob_key)).data, accepted.frame_sha256)
            if batch.identity != accepted.identity:
                raise Corrupt("the blob carries another identity than its manifest")
        except (NotFound, Corrupt) as error:
            problem = "missing" if isinstance(error, NotFound) else f"corrupt: {error.message}"
            log.error("raw blob of an accepted batch is missing or corrupt", key=key, problem=problem)
            record = Repair(
                "lightmetrics.raw_blob_repair.v1", key, accepted.raw_blob_key, problem, self._clock.now_ns()
            )
            await self._ensure(Write(mark, write_record(record)), "marked_blob", report)
            return None
        if report.path in ("cold", "audit") and await self._exists(mark):
            await self._store.delete(mark)  # the blob is good again: the mark is derived, and no longer true
            self._count(report, "unmarked_blob")
        return batch

    async def repair_conflict(self, key: str, report: ReconcileReport) -> None:
        """Repairs everything derived from one quarantine manifest.

        The key alone names the blob: a manifest that cannot be read still keeps its blob from garbage collection.
        """
        report.checked += 1
        try:
            read_record(await self._store.get(key), ConflictRecord)
        except NotFound:
            return  # a finding about something that is not there: nothing to derive
        except Corrupt as error:
            log.error("a quarantine manifest cannot be read", key=key, error=error.message)
            self._count(report, "damaged_manifest")
        try:
            reference = acceptance.quarantine_by_blob(*paths.quarantined_of(key))
        except Invalid:
            return  # not ours
        await self._ensure(reference, "quarantine_by_blob", report)

    async def _repair_quarantine(self, report: ReconcileReport) -> None:
        async for info in self._store.list(paths.QUARANTINE):
            await self.repair_conflict(info.key, report)

    async def _repair_all(self, keys: AsyncIterator[str], report: ReconcileReport, audit_ns: int = 0) -> None:
        """Repairs the keys, several at a time, in order; the audit's cursor moves only behind completed repairs."""
        group: list[str] = []
        since_save = 0
        async for key in keys:
            group.append(key)
            if len(group) < self._concurrency:
                continue
            await asyncio.gather(*(self.repair(key, report) for key in group))
            since_save += len(group)
            if audit_ns and since_save >= SAVE_EVERY:
                await self._save(audit_ns, group[-1])
                since_save = 0
            group = []
        await asyncio.gather(*(self.repair(key, report) for key in group))

    async def _save(self, started_ns: int, cursor: str) -> None:
        def move(audit: AuditProgress) -> tuple[AuditProgress, None]:
            if audit.running_since_ns != started_ns or _order(audit.cursor) >= _order(cursor):
                return audit, None  # another has finished it, or is ahead of us
            return msgspec.structs.replace(audit, cursor=cursor), None

        await self.audits.change(move)

    async def _accepted_after(self, cursor: str) -> AsyncIterator[str]:
        """Every accepted key behind the cursor, by agent, boot and sequence."""
        last = _order(cursor)
        for agent in await self._store.children(paths.ACCEPTED):
            for boot in await self._store.children(f"{paths.ACCEPTED}{agent}/"):
                folder = f"{paths.ACCEPTED}{agent}/{boot}/"
                if last and (agent, boot) < last[:2]:
                    continue
                here = bool(last) and (agent, boot) == last[:2]
                async for info in self._store.list(folder, after=cursor if here else ""):
                    yield info.key

    async def _ensure(self, write: Write, repair: str, report: ReconcileReport) -> bool:
        """Writes what is missing; True when it was."""
        if await self._exists(write.key):
            return False
        try:
            await self._store.create(write.key, write.data)
        except AlreadyExists:
            return False
        self._count(report, repair)
        return True

    async def _exists(self, key: str) -> bool:
        try:
            await self._store.head(key)
        except NotFound:
            return False
        return True

    def _count(self, report: ReconcileReport, repair: str) -> None:
        report.add(repair)
        self._repairs.labels(repair=repair).inc()

    def _remember(self, manifest_id: str) -> None:
        self._verified[manifest_id] = None
        if len(self._verified) > VERIFIED_MAX:
            self._verified.popitem(last=False)

    async def run(self, *, interval_s: float, audit_interval_s: float) -> None:
        """Scans and audits until cancelled. The first audit comes at once: it is the recovery after a bad end."""
        next_audit_s = self._clock.monotonic_s()
        while True:
            try:
                await self.scan()
                if self._clock.monotonic_s() >= next_audit_s:
                    await self.audit()
                    next_audit_s = self._clock.monotonic_s() + audit_interval_s
            except LakebedError as error:
                log.warning("reconciliation failed and is retried", error=error.message)
            await self._clock.sleep(interval_s)


class _Named(msgspec.Struct, frozen=True):
    schema: str


def is_same_entry(stored: StoredObject, entry: Write) -> bool:
    """Whether a stored by-time entry equals this one."""
    try:
        return read_record(stored, AcceptedByTime) == msgspec.json.decode(entry.data, type=AcceptedByTime)
    except Corrupt:
        return False


def has_later_schema(stored: StoredObject) -> bool:
    """Whether it has a later schema than this version supports: such an entry is not overwritten."""
    try:
        named = msgspec.json.decode(stored.data, type=_Named).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    family, _, version = named.rpartition(".v")
    return family == "lightmetrics.accepted_by_time" and version.isdigit() and int(version) > 1


def _order(key: str) -> tuple[str, ...]:
    return tuple(key.removeprefix(paths.ACCEPTED).split("/")) if key else ()
