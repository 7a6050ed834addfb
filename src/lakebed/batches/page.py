"""The batches page: agents, accepted batches, and conflicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lakebed.batches import view
from lakebed.batches.conflicts import ConflictReview
from lakebed.console.page import FAST_S, SLOW_S, Action, DataSource, Fields, PageRequest, PageSamples, PartPage
from lakebed.core.context import Context


async def _resolve(page: BatchesPage, fields: Fields, who: str, reason: str, action: Any) -> str:
    desk = ConflictReview(page.context)
    view = await desk.resolve(fields["conflict_id"], action, reason, who)
    return f"resolved as {view.resolution.action if view.resolution else action}"


async def _accept_existing(page: BatchesPage, fields: Fields, who: str, reason: str) -> str:
    return await _resolve(page, fields, who, reason, "accept_existing")


async def _quarantine_boot(page: BatchesPage, fields: Fields, who: str, reason: str) -> str:
    return await _resolve(page, fields, who, reason, "quarantine_boot")


class BatchesPage(PartPage):
    name = "batches"
    path = "/batches"
    title = "Batches"
    about = "Agents, accepted batches, and conflicts."
    actions = {
        "batches.accept-existing": Action(
            "Keep the accepted batch",
            "Keep",
            ("conflict_id",),
            lambda f: "batches:admin",
            lambda f: "The accepted batch stays; the agent may drop the other one. This is permanent.",
            _accept_existing,
        ),
        "batches.quarantine-boot": Action(
            "Quarantine this boot",
            "Quarantine",
            ("conflict_id",),
            lambda f: "batches:admin",
            lambda f: "Rejects all further batches of this boot; its agent keeps them. This is permanent.",
            _quarantine_boot,
            danger=True,
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._recent = view.RecentBatches(context)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        return await request.load(agents=self.agents(), conflicts=self.conflicts(), recent=self.recent()), {}

    def overview(self) -> dict[str, DataSource]:
        return {"conflicts": self.conflicts()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        conflicts = latest("batches.conflicts")
        return {"conflicts_open": None if conflicts is None else sum(each.resolution is None for each in conflicts)}

    def agents(self) -> DataSource:
        return DataSource("batches:read", "batches.agents", SLOW_S, self._recent.agents)

    def recent(self) -> DataSource:
        return DataSource("batches:read", "batches.recent", SLOW_S, lambda: self._recent.newest(50))

    def conflicts(self) -> DataSource:
        return DataSource("batches:admin", "batches.conflicts", FAST_S, lambda: view.conflicts(self.context))
