"""The end of the way: everything in the bucket is joined against one listing, and every sample is accounted for."""

from __future__ import annotations

from typing import Any

from lakebed.batches.settings import ReconcilerSettings
from lakebed.context import Context
from lakebed.demo.stage import Stage

GRACE_S = 1.0  # nobody sends any more


def prove_conserved(stage: Stage, context: Context, spark: Any) -> None:
    """Audits the bucket, as `lakebed audit` does: what agents numbered is accepted, in bronze, and in rollups."""
    from lakebed.pipeline.audit.job import Auditor

    horizon_s = context.settings.of(ReconcilerSettings).gc_horizon_s
    record = Auditor(spark, context).run(horizon_s=horizon_s, verify=True, grace_s=GRACE_S)
    kept = record.conservation
    if not kept.stages.get("accepted"):
        return
    way = " → ".join(f"{name} {count}" for name, count in kept.stages.items())
    stage.check("no sample is lost, doubled or changed from agents to tables", not kept.wrong, way)
    wrong = {f"{total.finding} {total.kind}": total.objects for total in record.totals if total.wrong}
    stage.check(
        "the audit finds nothing missing, corrupt or unindexed", not wrong, f"{record.objects} objects, {wrong}"
    )
