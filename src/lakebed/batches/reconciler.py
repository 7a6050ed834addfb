"""Repairs everything derived from accepted manifests. Idempotent: any number may run, crash and begin again.

For each manifest: its blob exists and has its hash; the index has it; live state has it; rollup work is requested when
it was indexed late; damage is recorded for an operator.

- hot: `check` for the object events of accepted/v1/ (see `events.py`)
- steady: the incremental scan, which checks each manifest once (see `incremental.py`)
- cold: `audit` over all of accepted/v1/ and quarantine/v1/, resumable, by command; the audit on Spark does it at scale
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Write
from lakebed.batches.codec.index import single_objects
from lakebed.batches.index import write_rows
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, Batch, ConflictRecord, Repair, write_record
from lakebed.batches.reader import RawBatches, read_frame, verified
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.core.traces import traced
from lakebed.store.model import ObjectInfo, read_record
from lakebed.store.protocol import exists
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

GROUP = 64  # manifests that are looked up in the index together
SAVE_EVERY = 500  # manifests between two notes of an audit's progress
AT_NS_MAX = 2**62  # a later acceptance has no hour folder

log = logger("batches")


class AuditProgress(msgspec.Struct, frozen=True):
    """The last completed audit, and how far the one in progress has come."""

    audited_through_ns: int = 0  # the start of the last audit that saw everything
    completed_at_ns: int = 0
    accepted: int = 0
    quarantined: int = 0
    running_since_ns: int = 0
    cursor: str = ""  # last accepted key that the running audit has repaired


class ReconcileReport(msgspec.Struct):
    """What one pass did. `checked` manifests; those of them that were `read`, because the index did not show them."""

    path: str
    checked: int = 0
    read: int = 0
    repaired: dict[str, int] = {}

    def add(self, repair: str, count: int = 1) -> None:
        if count:
            self.repaired = self.repaired | {repair: self.repaired.get(repair, 0) + count}

    def report_to(self, run: ActiveRun) -> None:
        """Reports it as the result of a run."""
        run.rows_in, run.rows_out = self.checked, sum(self.repaired.values())
        run.reason = ", ".join(f"{count} {repair.replace('_', ' ')}" for repair, count in self.repaired.items())
        run.idle = not self.checked and not self.repaired


Refresh = Callable[[AcceptedBatch, Batch], object]


class Reconciler:
    def __init__(
        self,
        runtime: StoreRuntime,
        *,
        overlap_s: float,
        concurrency: int,
        refresh: Refresh | None = None,
        name: str = "reconciler",
    ) -> None:
        store, clock, metrics = runtime.store, runtime.clock, runtime.metrics
        self._store, self._clock, self._refresh, self._name = store, clock, refresh, name
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._overlap_ns, self._concurrency = round(overlap_s * 1e9), concurrency
        self._checked = metrics.counter("lakebed_batches_reconciled_total")
        self._repairs = metrics.counter("lakebed_batches_repairs_total")
        self.audits = Register(
            runtime,
            paths.AUDIT,
            AuditProgress,
            AuditProgress(),
            name="audit",
        )

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
        damaged = await self._raw.index.damaged_segments()
        await self._repair_each(self._accepted_after(cursor), report, started_ns)
        accepted = report.checked
        await self._repair_quarantine(report)
        if damaged and not cursor:  # everything was looked up in the other segments
            for key in set(damaged) & set(await self._raw.index.damaged_segments()):
                await self._store.delete(key)
                self._count(report, "removed_segment")

        def complete(audit: AuditProgress) -> tuple[AuditProgress, None]:
            if audit.audited_through_ns >= started_ns:
                return audit, None
            done = AuditProgress(started_ns, self._clock.now_ns(), accepted, report.checked - accepted)
            return done, None

        await self.audits.change(complete)
        return report

    async def derive_single_objects(self) -> ReconcileReport:
        """Writes the single objects of every row of the index, for readers that know that layout only."""
        report = ReconcileReport("single")
        now_ns = self._clock.now_ns()
        async for each in self._raw.entries(await self._raw.first_ns(now_ns), now_ns):
            report.checked += 1
            for key, data in single_objects(each.entry) if each.entry is not None else ():
                await self._ensure(Write(key, data), "single_object", report)
        return report

    async def check(self, listed: Sequence[ObjectInfo], report: ReconcileReport) -> None:
        """Repairs those of these accepted manifests that are in no segment of about their time.

        A row is written only after blob and manifest were stored, so a manifest whose row exists needs no read.
        """
        if not listed:
            return
        missing = {paths.digest_of(info.key): info.key for info in listed}
        wanted = len(missing)
        for from_ns, to_ns in _spans([info.modified_ms * 1_000_000 for info in listed], self._overlap_ns):
            async for each in self._raw.entries(from_ns, to_ns):
                missing.pop(each.manifest_id.partition("-")[2], None)
        report.checked += wanted - len(missing)
        self._checked.labels(path=report.path).inc(wanted - len(missing))
        keys = sorted(missing.values())
        for at in range(0, len(keys), GROUP):
            await self.repair_all(keys[at : at + GROUP], report)

    async def repair(self, key: str, report: ReconcileReport) -> None:
        await self.repair_all([key], report)

    async def repair_all(self, keys: Sequence[str], report: ReconcileReport) -> None:
        """Repairs everything derived from these accepted manifests. Raises Unavailable; then nothing is lost."""
        report.checked += len(keys)
        report.read += len(keys)
        self._checked.labels(path=report.path).inc(len(keys))
        found: list[tuple[AcceptedBatch, AcceptedByTime]] = []
        async for each in ahead(keys, lambda key: self._read(key, report), self._concurrency):
            if each is not None:
                found.append(each)
        ids = {paths.manifest_id(one.identity, one.accepted_at_unix_ns): (one, entry) for one, entry in found}
        rows = await self._raw.index.find(ids, singles=False)
        missing = {name: each for name, each in ids.items() if rows.get(name) != each[1]}
        singles = await self._raw.find(missing)
        # Work first: a row that came late without it would never be rolled up. What has a good single object was not
        # late: it only gets the row.
        late = [each[0] for name, each in missing.items() if singles.get(name) != each[1]]
        work = [acceptance.rollup_work(accepted) for accepted in late]
        async for _ in ahead(work, lambda write: self._ensure(write, "rollup_work", report)):
            pass
        if missing:
            await write_rows(self._store, [entry for _, entry in missing.values()], writer=self._name)
            self._count(report, "indexed", len(missing))

    async def _read(self, key: str, report: ReconcileReport) -> tuple[AcceptedBatch, AcceptedByTime] | None:
        """A manifest and what the index must say of it; None when it is damaged, or its blob is."""
        try:
            accepted = self._manifest(key, read_record(await self._store.get(key), AcceptedBatch))
        except NotFound:
            return None  # an event or a finding of something that is not there: nothing to derive
        except Corrupt as error:
            await self._set_aside(key, error, report)
            return None
        batch = await self._blob(key, accepted, report)
        if batch is None:
            return None
        if self._refresh is not None:
            self._refresh(accepted, batch)
        return accepted, acceptance.entry_of(accepted, acceptance.span_of(batch))

    def _manifest(self, key: str, accepted: AcceptedBatch) -> AcceptedBatch:
        """The manifest, if every field can be true. Raises Corrupt."""
        try:
            if paths.accepted_key(accepted.identity) != key:
                raise Invalid("it names another batch than its key")
            if accepted.raw_blob_offset and not paths.is_pack(accepted.raw_blob_key):
                raise Invalid(f"{accepted.raw_blob_key[:200]!r} is not the key of a pack")
            if not accepted.raw_blob_offset and paths.sha256_of_blob(accepted.raw_blob_key) != accepted.frame_sha256:
                raise Invalid(f"{accepted.raw_blob_key[:200]!r} is not the key of its blob")
            if not 0 < accepted.accepted_at_unix_ns < AT_NS_MAX:
                raise Invalid(f"accepted_at_unix_ns {accepted.accepted_at_unix_ns} is not a time")
        except Invalid as error:
            raise Corrupt(f"{key!r} is malformed: {error.message}", key=key) from error
        return accepted

    async def _set_aside(self, key: str, error: Corrupt, report: ReconcileReport) -> None:
        """Records a manifest that cannot be used, by its key, so that the pass goes on."""
        log.error("an accepted manifest cannot be read", key=key, error=error.message)
        self._count(report, "damaged_manifest")
        try:
            mark = paths.repair_key(paths.identity_of(key))
        except Invalid:
            return  # not ours; the audit reports it
        record = Repair("lightmetrics.raw_blob_repair.v1", key, "", f"manifest: {error.message}", self._clock.now_ns())
        if not await exists(self._store, mark):
            await self._ensure(Write(mark, write_record(record)), "set_aside", report)

    async def _blob(self, key: str, accepted: AcceptedBatch, report: ReconcileReport) -> Batch | None:
        """The batch of a manifest; None, with a repair record, when it is missing or not what was accepted."""
        mark = paths.repair_key(accepted.identity)
        try:
            batch = verified(await read_frame(self._store, accepted.place), accepted.frame_sha256)
            if batch.identity != accepted.identity:
                raise Corrupt("the blob carries another identity than its manifest")
        except (NotFound, Corrupt) as error:
            if isinstance(error, NotFound) and not await exists(self._store, key):
                return None  # retention has removed both since the manifest was read
            problem = "missing" if isinstance(error, NotFound) else f"corrupt: {error.message}"
            log.error("raw blob of an accepted batch is missing or corrupt", key=key, error=problem)
            record = Repair(
                "lightmetrics.raw_blob_repair.v1", key, accepted.raw_blob_key, problem, self._clock.now_ns()
            )
            await self._ensure(Write(mark, write_record(record)), "marked_blob", report)
            return None
        if report.path in ("cold", "audit") and await exists(self._store, mark):
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

    async def _repair_each(self, keys: AsyncIterator[str], report: ReconcileReport, audit_ns: int) -> None:
        """Repairs the keys, several at a time, in order; the audit's cursor moves only behind completed repairs."""
        group: list[str] = []
        since_save = 0
        async for key in keys:
            group.append(key)
            if len(group) < min(GROUP, SAVE_EVERY):
                continue
            await self.repair_all(group, report)
            since_save += len(group)
            if since_save >= SAVE_EVERY:
                await self._save(audit_ns, group[-1])
                since_save = 0
            group = []
        if group:
            await self.repair_all(group, report)

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
        if await exists(self._store, write.key):
            return False
        try:
            await self._store.create(write.key, write.data)
        except AlreadyExists:
            return False
        self._count(report, repair)
        return True

    def _count(self, report: ReconcileReport, repair: str, count: int = 1) -> None:
        report.add(repair, count)
        self._repairs.labels(repair=repair).inc(count)


def _spans(times_ns: Sequence[int], slack_ns: int) -> list[tuple[int, int]]:
    """The times with slack on both sides, as spans that do not overlap."""
    found: list[tuple[int, int]] = []
    for at_ns in sorted(times_ns):
        if found and at_ns - slack_ns <= found[-1][1]:
            found[-1] = (found[-1][0], at_ns + slack_ns)
        else:
            found.append((max(0, at_ns - slack_ns), at_ns + slack_ns))
    return found


def _order(key: str) -> tuple[str, ...]:
    return tuple(key.removeprefix(paths.ACCEPTED).split("/")) if key else ()
