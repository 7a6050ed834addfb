"""A stored audit."""

from __future__ import annotations

from lakebed.batches.model import GarbageProof
from lakebed.pipeline.audit import paths
from lakebed.pipeline.audit.model import AuditRecord, Conservation, FindingTotal

RECORD = AuditRecord(
    schema="lakebed.audit.v1",
    audit_id=paths.audit_id(17, "0" * 16),
    began_at_unix_ns=17,
    completed_at_unix_ns=18,
    source="list",
    verified=True,
    ok=False,
    objects=3,
    size_bytes=30,
    prefixes={"accepted": 3},
    totals=(FindingTotal("missing", "raw_blob", 1, 10, True),),
    findings=(),
    findings_left_out=1,
    proof=GarbageProof(16, "list", 3, 0, True),
    work=(),
    work_left_out=0,
    conservation=Conservation(checked=True, stages={"sent": 5, "accepted": 5}),
)
