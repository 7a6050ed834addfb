"""How rows flow from bronze to gold."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar

from lakebed.pipeline.drift import Drift
from lakebed.settings import Contradiction, Section, describe

EXAMPLES = "examples"


class FlowSettings(Section, frozen=True):
    section: ClassVar[str] = "pipeline"

    contracts: Annotated[str, describe("folder of silver's contracts, *.yaml; 'examples': those of Lakebed")] = ""
    gold: Annotated[str, describe("folder of gold's models, *.sql; 'examples': those that Lakebed ships")] = ""
    warm: Annotated[bool, describe("start Spark in the background of a gateway or worker, not with a job")] = True
    bronze_drift: Annotated[Drift, describe("what happens to columns that a bronze table does not have")] = "evolve"
    bronze_retention_days: Annotated[int, describe("rows of bronze are removed after so many days")] = 365
    retention_interval_s: Annotated[float, describe("pause between two rounds of removing old bronze rows")] = 86_400.0

    def check(self) -> None:
        for name in ("bronze_retention_days", "retention_interval_s"):
            if getattr(self, name) <= 0:
                raise Contradiction(f"pipeline.{name}", f"pipeline.{name}", "must be above zero")
        if self.gold and not self.contracts:
            raise Contradiction("pipeline.gold", "pipeline.contracts", "gold is made from silver")

    @property
    def contracts_folder(self) -> Path | None:
        return _folder(self.contracts, "contracts")

    @property
    def gold_folder(self) -> Path | None:
        return _folder(self.gold, "gold")


def _folder(told: str, kind: str) -> Path | None:
    if told == EXAMPLES:
        return Path(str(files("lakebed.pipeline") / "examples" / kind))
    return Path(told) if told else None
