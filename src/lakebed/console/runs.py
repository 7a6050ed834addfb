"""The runs page: what ran in the lake, from what each part records in the bucket.

A part provides a `RunsReader` in the table of parts. The page merges what they read, newest first; a part that cannot
be read is named with its error, and the others are shown.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import msgspec

from lakebed.console.page import SLOW_S, DataSource, PageRequest, PageSamples, PartPage
from lakebed.core.context import Context
from lakebed.wiring.parts import PARTS, resolve

RUNS_MAX = 100  # shown
PART_RUNS_MAX = 40  # read of one part

RunState = Literal["done", "running", "waiting", "failed"]


class RunRecord(msgspec.Struct, frozen=True):
    """One run. 0 and None stand for what is not recorded. `action` and `fields` run it again."""

    kind: str
    subject: str
    state: RunState
    ended_at_ms: int
    started_at_ms: int = 0
    rows_in: int | None = None
    rows_out: int | None = None
    reason: str = ""
    href: str = ""
    action: str = ""
    fields: dict[str, str] = {}
    spark_page: str = ""  # where Spark shows its jobs
    logged: bool = False  # the page behind `href` has what it logged

    @property
    def took_s(self) -> float | None:
        return (self.ended_at_ms - self.started_at_ms) / 1000 if self.started_at_ms and self.ended_at_ms else None


class RunsReader(Protocol):
    """Reads a part's last runs, at a bounded cost. Made with the context of the gateway."""

    right: ClassVar[str]  # that a caller needs to see them

    def __init__(self, context: Context) -> None: ...

    async def latest(self, limit: int) -> list[RunRecord]:
        """Newest first."""

    async def close(self) -> None: ...


class RunsPage(PartPage):
    name = "runs"
    path = "/runs"
    title = "Runs"
    about = "What ran: ticks, bronze, silver, gold, rollups, compactions, scans and audits, newest first."

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._readers: dict[str, RunsReader] = {part.name: resolve(part.runs)(context) for part in PARTS if part.runs}

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        samples = await request.load(**{name: self._source(name) for name in self._readers})
        kind, state = request.query.text("kind"), request.query.text("state")
        runs = merged([run for sample in samples.values() for run in sample.value or ()])
        shown = [run for run in runs if kind in ("", run.kind) and state in ("", run.state)][:RUNS_MAX]
        kinds = sorted({run.kind for run in runs})
        return samples, {"runs": shown, "kinds": kinds, "kind": kind, "state": state}

    async def stop(self) -> None:
        for reader in self._readers.values():
            await reader.close()

    def _source(self, name: str) -> DataSource:
        reader = self._readers[name]
        return DataSource(reader.right, f"runs.{name}", SLOW_S, lambda: reader.latest(PART_RUNS_MAX))


def merged(runs: list[RunRecord]) -> list[RunRecord]:
    """Pure: those that run now first, then by when they ended."""
    return sorted(runs, key=lambda run: (run.state == "running", run.ended_at_ms or run.started_at_ms), reverse=True)
