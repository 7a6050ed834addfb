"""GET /v1/audit: the last record as it is stored, and nothing before there is one. `lakebed audit` in words."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.cli.audit import _show
from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.gateway.app import build
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.pipeline.audit import paths
from lakebed.pipeline.audit.model import AuditRecord, Conservation, Last, Proof, Total
from lakebed.pipeline.audit.routes import component
from lakebed.pipeline.audit.shelf import last_register
from lakebed.settings import load
from lakebed.store.memory import MemoryStore

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
    totals=(Total("missing", "raw_blob", 1, 10, True),),
    findings=(),
    findings_left_out=1,
    proof=Proof(16, "list", 3, 0, True),
    work=(),
    work_left_out=0,
    conservation=Conservation(checked=True, stages={"sent": 5, "accepted": 5}),
)


async def test_the_last_audit_is_served_as_it_is_stored(manual_clock: ManualClock) -> None:
    """404 with a hint at first; then the record, field by field; the response is what docs/formats/audit.md says."""
    settings = load(sections(), flags={"store.url": "memory:"})
    context = Context("node", settings, MemoryStore(clock=manual_clock), manual_clock, Ids(), Metrics())
    transport = httpx2.ASGITransport(app=build(context, [component(context)]))

    async def ask() -> Any:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/v1/audit")

    before = await ask()
    await context.store.create(paths.record_key(RECORD.audit_id), msgspec.json.encode(RECORD))
    await last_register(context).change(lambda _: (Last(RECORD.audit_id, 18, False), None))
    after = await ask()

    assert (before.status_code, after.status_code) == (404, 200)
    assert RECORD == msgspec.json.decode(after.content, type=AuditRecord)


def test_people_are_told_since_when_bronze_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """What retention removed and what waits are words of their own, and nothing of it is called lost."""
    kept = Conservation(checked=True, waiting=3, expired=20, kept_since_unix_ns=1_760_000_000_000_000_000)

    _show(msgspec.structs.replace(RECORD, ok=True, totals=(), conservation=kept))

    words = capsys.readouterr().err
    assert "3 samples wait for bronze" in words
    assert "bronze is kept since 2025-10-09 08:53:20 UTC: 20 samples accepted before are not in it" in words
    assert "nothing lost, doubled or changed" in words
