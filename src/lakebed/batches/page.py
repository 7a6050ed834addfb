"""The batches page: agents, accepted batches, and conflicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lakebed.batches import view
from lakebed.batches.conflicts import ConflictReview
from lakebed.batches.plot import MetricPlots
from lakebed.console.page import (
    FAST_S,
    SCAN_S,
    SLOW_S,
    Action,
    Counted,
    DataSource,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    SearchSource,
    by_field,
    deferred,
    limited_list,
)
from lakebed.core.context import Context

PLOT_S = 30.0  # longest read for a plot


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
    manual = "parts/batches.md"
    path = "/batches"
    title = "Batches"
    about = "Agents, accepted batches, and conflicts."
    helpers = {"named": view.named}
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
        self._plots = MetricPlots(context, self._recent)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        metric, match, span = query.text("metric"), query.text("match"), query.text("span") or "1h"
        agent, batch = query.text("agent"), query.text("batch")
        samples = await request.load(
            agents=self.agents(), conflicts=self.conflicts(), recent=self.recent(), metrics=self.metrics()
        )
        if metric:
            samples |= await request.load(plot=self.plot(metric, match, span))
        if batch:
            samples |= await request.load(batch=self.batch(agent, batch))
        return samples, {"metric": metric, "match": match, "span": span, "agent": agent, "batch": batch}

    def searched(self) -> SearchSource:
        return SearchSource("agent", self.agents(), "agent_id")

    def overview(self) -> dict[str, DataSource]:
        return {"conflicts": self.conflicts(), "reconciler": self.reconciler(), "heard": self.heard()}

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        batches, samples = await self._recent.accepted_between(from_ms * 10**6, to_ms * 10**6)
        return Counted(added={"batches_accepted": batches, "batches_samples": samples})

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        conflicts = latest("batches.conflicts")
        return {
            "conflicts_open": None if conflicts is None else sum(each.resolution is None for each in conflicts),
            "reconciler_behind_s": latest("batches.reconciler"),
            "agents": latest("batches.heard"),
        }

    def agents(self) -> DataSource:
        return limited_list(
            "batches:read", "batches.agents", SLOW_S, lambda shows: self._recent.agents(shows=shows), "agent_id"
        )

    def metrics(self) -> DataSource:
        return DataSource("batches:read", "batches.metrics", SCAN_S, self._plots.names, patience_s=3.0)

    def plot(self, metric: str, match: str, span: str) -> DataSource:
        make = deferred(lambda: self._plots.plot(metric, match.split(","), span))
        return DataSource("batches:read", f"batches.plot:{metric}:{match}:{span}", SLOW_S, make, PLOT_S, PLOT_S)

    def batch(self, agent: str, which: str) -> DataSource:
        """A list of one, so that a tenant sees it where the agent is its own."""

        async def load() -> list[view.BatchDetail]:
            return [await self._recent.detail(view.identity_named(agent, which))]

        return DataSource("batches:read", f"batches.batch:{agent}:{which}", SLOW_S, load, owned=by_field("agent_id"))

    def recent(self) -> DataSource:
        return DataSource(
            "batches:read", "batches.recent", SLOW_S, lambda: self._recent.newest(50), owned=by_field("agent_id")
        )

    def reconciler(self) -> DataSource:
        return DataSource("batches:read", "batches.reconciler", SLOW_S, lambda: view.reconciler_behind_s(self.context))

    def heard(self) -> DataSource:
        return DataSource("batches:read", "batches.heard", SLOW_S, lambda: view.agents_heard(self.context))

    def conflicts(self) -> DataSource:
        return DataSource("batches:admin", "batches.conflicts", FAST_S, lambda: view.conflicts_shown(self.context))
