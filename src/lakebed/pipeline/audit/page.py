"""The audit page: the last audit, and operator actions."""

from __future__ import annotations

from typing import Any

from lakebed.console.page import SLOW_S, DataSource, PageRequest, PageSamples, PartPage
from lakebed.pipeline.audit import stored


class AuditPage(PartPage):
    name = "audit"
    path = "/audit"
    title = "Audit"
    about = "Samples at every stage from agent to gold, and operator actions."

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        return await request.load(audit=self.audit(), deeds=request.operator_actions), {}

    def audit(self) -> DataSource:
        return DataSource("audit:read", "audit.last", SLOW_S, lambda: stored.last(self.context))
