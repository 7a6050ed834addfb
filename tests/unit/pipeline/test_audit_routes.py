"""GET /v1/audit: the last record as it is stored, and nothing before there is one. `lakebed audit` in words."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.batches.model import LatestAudit
from lakebed.batches.paths import audit_record_key
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.pipeline.audit.commands import _show
from lakebed.pipeline.audit.model import AuditRecord, Conservation, TableFlow
from lakebed.pipeline.audit.routes import component
from lakebed.pipeline.audit.stored import last_register
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.audit_record import RECORD
from support.console_site import site


async def test_the_last_audit_is_served_as_it_is_stored(manual_clock: ManualClock) -> None:
    """404 with a hint at first; then the record, field by field; the response is what docs/formats/audit.md reports."""
    settings = load(sections(), flags={"store.url": "memory:"})
    context = Context(
        node="node",
        settings=settings,
        store=MemoryStore(clock=manual_clock),
        clock=manual_clock,
        ids=Ids(),
        metrics=Metrics(),
    )
    transport = httpx2.ASGITransport(app=build(context, [component(context)]))

    async def ask() -> Any:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/v1/audit")

    before = await ask()
    await context.store.create(audit_record_key(RECORD.audit_id), msgspec.json.encode(RECORD))
    await last_register(context).change(lambda _: (LatestAudit(RECORD.audit_id, 18, False), None))
    after = await ask()

    assert (before.status_code, after.status_code) == (404, 200)
    assert RECORD == msgspec.json.decode(after.content, type=AuditRecord)


def test_people_are_told_since_when_bronze_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """What retention removed and what waits are words of their own, and nothing of it is called lost."""
    kept = Conservation(checked=True, waiting=3, expired=20, kept_since_unix_ns=1_760_000_000_000_000_000)

    _show(msgspec.structs.replace(RECORD, ok=True, totals=(), conservation=kept))

    words = capsys.readouterr().err
    assert "3 samples are not in bronze yet" in words
    assert "bronze is kept since 2025-10-09 08:53:20 UTC: 20 samples accepted before are not in it" in words
    assert "nothing lost, doubled or changed" in words


def test_people_are_shown_every_source_from_bronze_to_gold(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each silver table and each gold table; a lost row makes the whole wrong."""
    flow = TableFlow("lake", "main", "loads", "batches.samples", 30, 27, 2, 1, 0)
    kept = Conservation(checked=True, flows=(flow,), gold={"lake/main/activity": 4})

    _show(msgspec.structs.replace(RECORD, ok=False, totals=(), conservation=kept))

    words = capsys.readouterr().err
    assert "lake/main batches.samples → loads: bronze 30 → silver 27, quarantined 2, lost 1" in words
    assert "gold lake/main/activity: 4 rows" in words
    assert "nothing lost" not in words
    assert (True, False) == (kept.wrong, msgspec.structs.replace(kept, flows=()).wrong)


async def test_the_page_shows_every_source_from_bronze_to_gold() -> None:
    """The stored record's flows are a table of the audit page, lost rows marked."""
    flow = TableFlow("lake", "main", "loads", "batches.samples", 30, 27, 2, 1, 4)
    kept = Conservation(checked=True, flows=(flow,), gold={"lake/main/activity": 4})
    record = msgspec.structs.replace(RECORD, conservation=kept)
    async with site() as here:
        await here.context.store.create(audit_record_key(record.audit_id), msgspec.json.encode(record))
        await last_register(here.context).change(lambda _: (LatestAudit(record.audit_id, 18, False), None))

        page = await here.browser.open("/audit")

    assert "batches.samples → lake/main/loads" in page.text
    assert "4 versions behind" in page.text and "lake/main/activity 4 rows" in page.text
