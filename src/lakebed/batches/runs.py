"""Runs of the reconciler and of rollups, from their registers."""

from __future__ import annotations

from lakebed.batches import paths
from lakebed.batches.incremental import checked_through_ns
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import AuditProgress
from lakebed.console.runs import RunRecord
from lakebed.core.context import Context
from lakebed.rollups.model import RollupManifest
from lakebed.rollups.reader import RollupCoverage
from lakebed.store.register import Register


class BatchesRuns:
    right = "batches:read"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._coverage = RollupCoverage(context.store, RawBatches(context.store, cache_bytes_max=0))

    async def latest(self, limit: int) -> list[RunRecord]:
        """A request for each range of the reconciler, two more, and one for each of the last generations of rollups."""
        return [*await self._reconciler(), *await self._rollups(limit)]

    async def close(self) -> None:
        return None

    async def _reconciler(self) -> list[RunRecord]:
        audit = Register(self._context, paths.AUDIT, AuditProgress, AuditProgress(), name="audit")
        found: list[RunRecord] = []
        through_ns = await checked_through_ns(self._context)
        if through_ns:
            found.append(RunRecord("reconciler scan", "batches", "done", through_ns // 10**6, href="/batches"))
        at = (await audit.read()).value
        if at.running_since_ns:
            found.append(RunRecord("reconciler audit", "batches", "running", 0, at.running_since_ns // 10**6))
        if at.completed_at_ns:
            began, ended = at.audited_through_ns // 10**6, at.completed_at_ns // 10**6
            found.append(
                RunRecord("reconciler audit", "batches", "done", ended, began, reason=f"{at.accepted} manifests")
            )
        return found

    async def _rollups(self, limit: int) -> list[RunRecord]:
        state = (await self._coverage.snapshot()).state
        found = [
            _generation(await self._coverage.manifest(one), one.last_at_ns // 10**6, one.id)
            for one in reversed(state.recent[-limit:])
        ]
        if state.pending is not None:
            found.insert(0, RunRecord("rollups", state.pending.id, "running", 0, state.pending.last_at_ns // 10**6))
        return found


def _generation(manifest: RollupManifest, at_ms: int, name: str) -> RunRecord:
    rows = sum(chunk.rows for chunk in manifest.chunks)
    reason = f"{len(manifest.covers)} batches"
    return RunRecord("rollups", name, "done", at_ms, rows_in=manifest.samples, rows_out=rows, reason=reason)
