"""Deletes raw blobs that can never be accepted, under the credentials of the garbage collection role, and stores a
report of what was deleted and why. `judge` is pure: evidence in, verdict out.

Why a delete can never hit an accepted batch: a frame carries its identity, so only one key can ever refer to a blob,
the accepted manifest of that identity. It is created if absent and never changes. A blob is deleted only when that
manifest exists **for other bytes**: no writer, however long it stalled between blob and manifest, can then make it
accepted, and a delayed delete does no harm. A blob whose identity is undecided is never deleted, because a stalled
writer may still accept it; past the horizon its acceptance is completed instead, or it is kept. The four conditions
apply on top.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.findings import FindingsRepairer
from lakebed.batches.model import AcceptedBatch, Batch, read_record, write_record
from lakebed.batches.reader import verified
from lakebed.batches.reconciler import Reconciler
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

Verdict = Literal["delete", "finish", "keep"]


class Evidence(msgspec.Struct, frozen=True):
    """What was found out about one blob."""

    sha256: str
    modified_ns: int
    now_ns: int
    horizon_ns: int
    audited_through_ns: int
    accepted_references: int
    quarantine_references: int
    problem: str = ""  # why its frame cannot be read
    existing_sha256: str = ""  # hash in the manifest at its identity; empty: undecided
    boot_held: bool = False


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    reason: str


def judge(found: Evidence, undecided: Literal["finish", "keep"]) -> Judgement:
    """The four conditions in their order, then the one that makes them safe."""
    ripe_ns = found.modified_ns + found.horizon_ns
    if found.now_ns < ripe_ns:
        left_s = (ripe_ns - found.now_ns) // 1_000_000_000
        return Judgement("keep", f"younger than the retry horizon, for another {left_s} s")
    if found.accepted_references:
        return Judgement("keep", "an accepted manifest refers to it")
    if found.quarantine_references:
        return Judgement("keep", "a quarantine manifest refers to it")
    if found.audited_through_ns < ripe_ns:
        return Judgement("keep", "no audit of accepted and quarantined batches has started since it passed the horizon")
    if found.problem:
        return Judgement("keep", f"its frame cannot be read, so its identity is unknown: {found.problem}")
    if found.existing_sha256 == found.sha256:
        return Judgement("keep", "its manifest is accepted; the reverse reference is missing")
    if found.existing_sha256:
        return Judgement("delete", f"its identity was accepted with other bytes, {found.existing_sha256}")
    if found.boot_held:
        return Judgement("keep", "its boot is held for investigation")
    if undecided == "finish":
        return Judgement("finish", "neither accepted nor rejected within the horizon: its acceptance is completed")
    return Judgement("keep", "undecided: a writer could still accept it")


ROWS_MAX = 10_000  # judgements one report lists; the counts go on

log = logger("batches")


class BlobRow(msgspec.Struct, frozen=True):
    key: str
    bytes: int
    age_s: int
    verdict: str
    reason: str


class GcReport(msgspec.Struct, frozen=True):
    """What one run found. In a dry run the verdicts were not applied."""

    schema: str
    dry_run: bool
    source: str
    at_unix_ns: int
    audited_through_unix_ns: int
    counts: dict[str, int]
    rows: list[BlobRow]


class BlobSweeper:
    def __init__(
        self,
        runtime: StoreRuntime,
        reconciler: Reconciler,
        *,
        horizon_s: float,
        undecided: Literal["finish", "keep"],
        name: str,
    ) -> None:
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._store, self._reconciler = store, reconciler
        self._horizon_ns, self._undecided, self._name = round(horizon_s * 1e9), undecided, name
        self._clock, self._ids = clock, ids
        self._findings = FindingsRepairer(runtime, reconciler)
        self._blobs = metrics.counter("lakebed_batches_gc_blobs_total")

    @traced("batches gc")
    async def sweep(self, *, dry_run: bool, source: Literal["all", "by_time", "audit"] = "all") -> GcReport:
        """Judges blobs and deletes or finishes those it may. Audits first unless a dry run: absence needs the proof.

        From `audit` come the candidates of the last audit over a listing, and the proof with them, once its work is
        done. They are only looked at sooner: each is judged like any other.
        """
        if not dry_run and source == "audit":
            await self._findings.repair()
        elif not dry_run:
            await self._reconciler.audit()
        audited_ns = (await self._reconciler.audits.read()).value.audited_through_ns
        now_ns = self._clock.now_ns()
        counts: dict[str, int] = {}
        rows: list[BlobRow] = []
        blobs = {
            "all": lambda: self._store.list(paths.RAW_BLOBS),
            "by_time": lambda: self._by_time(now_ns, dry_run),
            "audit": self._candidates,
        }[source]()
        async for info in blobs:
            judgement = await self._one(info, now_ns, audited_ns, dry_run)
            counts[judgement.verdict] = counts.get(judgement.verdict, 0) + 1
            self._blobs.labels(verdict=judgement.verdict).inc()
            if len(rows) < ROWS_MAX:
                age_s = max(0, now_ns // 1_000_000 - info.modified_ms) // 1000
                rows.append(BlobRow(info.key, info.size, age_s, judgement.verdict, judgement.reason))
        report = GcReport("lightmetrics.gc_report.v1", dry_run, source, now_ns, audited_ns, counts, rows)
        if counts.get("delete") or counts.get("finish"):
            await self._keep(report)
        return report

    async def _one(self, info: ObjectInfo, now_ns: int, audited_ns: int, dry_run: bool) -> Judgement:
        try:
            sha256 = paths.sha256_of_blob(info.key)
        except Invalid:
            return Judgement("keep", "not a blob's key")
        evidence, batch, size = await self._evidence(sha256, info, now_ns, audited_ns)
        judgement = judge(evidence, self._undecided)
        if dry_run or judgement.verdict == "keep":
            return judgement
        if judgement.verdict == "finish" and batch is not None:
            return await self._finish(batch, sha256, size)
        await self._store.delete(info.key)
        await self._store.delete(paths.blob_by_time_key(sha256, evidence.modified_ns))
        log.info("deleted a raw blob", key=info.key, reason=judgement.reason)
        return judgement

    async def _evidence(
        self, sha256: str, info: ObjectInfo, now_ns: int, audited_ns: int
    ) -> tuple[Evidence, Batch | None, int]:
        modified_ns = info.modified_ms * 1_000_000
        found = Evidence(sha256, modified_ns, now_ns, self._horizon_ns, audited_ns, 0, 0)
        if now_ns < modified_ns + self._horizon_ns:
            return found, None, 0  # too young: no further requests to the store
        found = msgspec.structs.replace(
            found,
            accepted_references=await self._any(paths.accepted_by_blob(sha256)),
            quarantine_references=await self._any(paths.quarantine_by_blob(sha256)),
        )
        if found.accepted_references or found.quarantine_references or audited_ns < modified_ns + self._horizon_ns:
            return found, None, 0
        try:
            frame = (await self._store.get(info.key)).data
            batch = verified(frame, sha256)
        except (Corrupt, NotFound) as error:
            return msgspec.structs.replace(found, problem=error.message), None, 0
        held = await self._exists(paths.held_boot_key(batch.identity.agent_id, batch.identity.boot_id))
        existing = await self._standing(batch)
        return msgspec.structs.replace(found, existing_sha256=existing, boot_held=held), batch, len(frame)

    async def _finish(self, batch: Batch, sha256: str, size: int) -> Judgement:
        """Creates the manifest that a collector began with: the agent's retry, should it come, is a duplicate."""
        identity = batch.identity
        accepted = acceptance.manifest_of(
            identity,
            sha256,
            size,
            at_ns=self._clock.now_ns(),
            collector_id=self._name,
            attempt_id=self._ids.token(),
        )
        try:
            await self._store.create(paths.accepted_key(identity), write_record(accepted))
        except AlreadyExists:
            return Judgement("keep", "another process decided it in the meantime")
        for write in acceptance.derived(accepted, acceptance.span_of(batch)):
            await self._store.create(write.key, write.data)
        return Judgement("finish", "acceptance of a raw blob was completed")

    async def _standing(self, batch: Batch) -> str:
        try:
            stored = await self._store.get(paths.accepted_key(batch.identity))
        except NotFound:
            return ""
        return read_record(stored, AcceptedBatch).frame_sha256

    async def _by_time(self, now_ns: int, dry_run: bool) -> AsyncIterator[ObjectInfo]:
        """Blobs of the hours that have passed the horizon, from the index: cheap, and blind to what was not indexed."""
        for day in await self._store.children(paths.RAW_BLOBS_BY_TIME):
            if paths.day_ns(day) > now_ns - self._horizon_ns:
                continue
            async for entry in self._store.list(f"{paths.RAW_BLOBS_BY_TIME}{day}/"):
                sha256 = entry.key.rsplit("sha256=", 1)[-1].removesuffix(".json")
                try:
                    yield await self._store.head(paths.blob_key(sha256))
                except NotFound:
                    if not dry_run:
                        await self._store.delete(entry.key)  # the blob is gone: the entry is obsolete

    async def _candidates(self) -> AsyncIterator[ObjectInfo]:
        """What the last audit found that nothing refers to."""
        audit = await self._findings.work()
        if audit is None:
            return
        async for key in self._findings.keys(audit, "judge"):
            try:
                yield await self._store.head(key)
            except NotFound:
                continue  # swept already

    async def _any(self, prefix: str) -> int:
        async for _ in self._store.list(prefix):
            return 1
        return 0

    async def _exists(self, key: str) -> bool:
        try:
            await self._store.head(key)
        except NotFound:
            return False
        return True

    async def _keep(self, report: GcReport) -> None:
        if report.dry_run:
            return
        await self._store.create(
            f"{paths.GC_REPORTS}{report.at_unix_ns:020d}-{self._ids.token()}.json", write_record(report)
        )
