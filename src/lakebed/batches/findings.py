"""Repairs what an audit found: the audit's files name the manifests to repair and the blobs that may be garbage.

The audit runs in the pipeline, over a listing of the whole bucket (docs/formats/audit.md); this module reads only its
files. Findings are hints: a named manifest is repaired like any other, a candidate is judged like any other blob. When
all work of an audit is done, everything accepted and quarantined before it is repaired: garbage collection requires
that, and the reconciler's register records it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, TypeVar

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import AuditWorkFile, GarbageProof, LatestAudit
from lakebed.batches.reconciler import GROUP, AuditProgress, Reconciler, ReconcileReport
from lakebed.core.errors import Corrupt, NotFound
from lakebed.store.model import read_record
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

DONE = "reconciler/v1/findings.json"
WORK_LINES_MAX = 100_000  # of one file: the audit writes 5 000

T = TypeVar("T")


class AuditWork(msgspec.Struct, frozen=True):
    """An audit's record, as far as its work goes."""

    schema: Literal["lakebed.audit.v1"]
    audit_id: str
    work: tuple[AuditWorkFile, ...]
    proof: GarbageProof


class AuditWorkLine(msgspec.Struct, frozen=True):
    do: str
    key: str


class RepairedAudit(msgspec.Struct, frozen=True):
    """The last audit whose work is done."""

    audit_id: str = ""


class AuditFiles:
    """What the last audit left for the reconciler and for garbage collection."""

    def __init__(self, runtime: StoreRuntime) -> None:
        self._store = runtime.store
        self._last = Register(
            runtime,
            paths.LAST_AUDIT,
            LatestAudit,
            LatestAudit(),
            name="last_audit",
        )

    async def latest_id(self) -> str:
        """The last audit; empty when there was none."""
        return (await self._last.read()).value.audit_id

    async def work(self) -> AuditWork | None:
        """The last audit's record; None when there was none. Raises Corrupt for one that does not decode."""
        audit_id = await self.latest_id()
        return await self.record(audit_id) if audit_id else None

    async def keys(self, audit: AuditWork, do: str) -> AsyncIterator[str]:
        """The keys of this kind of work."""
        for file in audit.work:
            if file.do != do:
                continue
            lines = (await self._store.get(file.key)).data.splitlines()
            if len(lines) != file.lines or len(lines) > WORK_LINES_MAX:
                raise Corrupt(f"{file.key!r} has {len(lines)} lines, not {file.lines}", key=file.key)
            for line in lines:
                yield _decode(line, file.key, AuditWorkLine).key

    async def record(self, audit_id: str) -> AuditWork:
        key = paths.audit_record_key(audit_id)
        try:
            return read_record(await self._store.get(key), AuditWork)
        except NotFound as error:
            raise Corrupt(f"{paths.LAST_AUDIT!r} names an audit that does not exist", key=key) from error


class FindingsRepairer:
    """Does the work of the last audit, once. Idempotent: one that dies half-way is begun again."""

    def __init__(self, runtime: StoreRuntime, reconciler: Reconciler) -> None:
        self._reconciler, self._clock, self._files = reconciler, runtime.clock, AuditFiles(runtime)
        self._done = Register(
            runtime,
            DONE,
            RepairedAudit,
            RepairedAudit(),
            name="findings",
        )

    async def repair(self) -> ReconcileReport | None:
        """Repairs what the last audit found; None when that is done already."""
        audit_id = await self._files.latest_id()
        if not audit_id or (await self._done.read()).value.audit_id >= audit_id:
            return None
        audit = await self._files.record(audit_id)
        report = ReconcileReport("audit")
        group: list[str] = []
        async for key in self._files.keys(audit, "mend"):
            group.append(key)
            if len(group) == GROUP:
                await self._reconciler.repair_all(group, report)
                group = []
        if group:
            await self._reconciler.repair_all(group, report)
        async for key in self._files.keys(audit, "mend_quarantine"):
            await self._reconciler.repair_conflict(key, report)
        if audit.proof.whole:
            await self._reconciler.audits.change(lambda at: (proven(at, audit.proof, self._clock.now_ns()), None))
        await self._done.change(lambda at: (RepairedAudit(audit_id) if at.audit_id < audit_id else at, None))
        return report


def proven(at: AuditProgress, proof: GarbageProof, now_ns: int) -> AuditProgress:
    """The register after an audit whose work is done; an audit that reaches less far proves nothing new."""
    if at.audited_through_ns >= proof.through_ns:
        return at
    return msgspec.structs.replace(
        at,
        audited_through_ns=proof.through_ns,
        completed_at_ns=now_ns,
        accepted=proof.accepted,
        quarantined=proof.quarantined,
    )


def _decode(data: bytes, key: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key!r} does not decode: {error}", hint="lakebed audit", key=key) from error
