"""How rows flow from bronze to gold."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from lakebed.pipeline.drift import Drift
from lakebed.settings import Contradiction, Secret, Section, describe

EXAMPLES = "examples"


class LineageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where events of jobs go, in OpenLineage's form. Without a url the standard OPENLINEAGE_* variables count."""

    url: str = ""
    endpoint: str = "api/v1/lineage"
    api_key: Secret = Secret("")
    namespace: str = "lakebed"

    @property
    def address(self) -> str:
        return f"{self.url.rstrip('/')}/{self.endpoint.lstrip('/')}"

    def or_environment(self, env: Mapping[str, str]) -> LineageSettings:
        if self.url or env.get("OPENLINEAGE_DISABLED", "").lower() == "true":
            return self
        return LineageSettings(
            env.get("OPENLINEAGE_URL", ""),
            env.get("OPENLINEAGE_ENDPOINT", self.endpoint),
            Secret(env["OPENLINEAGE_API_KEY"]) if "OPENLINEAGE_API_KEY" in env else self.api_key,
            env.get("OPENLINEAGE_NAMESPACE", self.namespace),
        )


class FlowSettings(Section, frozen=True):
    section: ClassVar[str] = "pipeline"

    contracts: Annotated[str, describe("folder of silver's contracts, *.yaml; 'examples': those of Lakebed")] = ""
    gold: Annotated[str, describe("folder of gold's models, *.sql; 'examples': those that Lakebed ships")] = ""
    warm: Annotated[bool, describe("start Spark with a gateway, and with workers that have contracts")] = True
    bronze_drift: Annotated[Drift, describe("what happens to columns that a bronze table does not have")] = "evolve"
    bronze_retention_days: Annotated[int, describe("rows of bronze are removed after so many days")] = 365
    retention_interval_s: Annotated[float, describe("pause between two rounds of removing old bronze rows")] = 86_400.0

    lineage: Annotated[LineageSettings, describe("OpenLineage receiver: url, endpoint, api_key, namespace")] = (
        LineageSettings()
    )

    def check(self) -> None:
        if self.lineage.url and not self.lineage.url.startswith(("http://", "https://")):
            raise Contradiction("pipeline.lineage", "pipeline.lineage", f"{self.lineage.url!r} is not an http address")
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
