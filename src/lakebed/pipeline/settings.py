"""Settings of the pipeline (bronze to gold), of loads into bronze and of the audit."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar

from lakebed.core.feed import Limit
from lakebed.core.settings import Contradiction, Section, describe
from lakebed.pipeline.bronze.drift import Drift

EXAMPLES = "examples"


class PipelineSettings(Section, frozen=True):
    section: ClassVar[str] = "pipeline"

    contracts: Annotated[
        str,
        describe(
            "Folder of silver contracts, *.yaml; 'examples' means those that Lakebed ships.",
            when="silver tables must be built from ticks",
        ),
    ] = ""
    gold: Annotated[
        str,
        describe(
            "Folder of models, *.sql and *.py; 'examples' means those that Lakebed ships.",
            when="gold tables must be built from silver and bronze",
        ),
    ] = ""
    warm: Annotated[
        bool,
        describe(
            "Starts Spark with a gateway, and with workers that have contracts.",
            when="memory matters more than the time of the first job",
        ),
    ] = True
    models_every_s: Annotated[
        float, describe("Looks for models that are due at this interval, in `lakebed work`; 0 means never.")
    ] = 15.0
    bronze_drift: Annotated[
        Drift,
        describe(
            "Chooses what happens to columns that a bronze table does not have.",
            when="new columns must not be added automatically",
        ),
    ] = "evolve"
    retention_interval_s: Annotated[float, describe("Deletes old bronze rows at this interval.")] = 86_400.0

    def check(self) -> None:
        if self.retention_interval_s <= 0:
            raise Contradiction("pipeline.retention_interval_s", "pipeline.retention_interval_s", "must be above 0")
        if self.models_every_s < 0:
            raise Contradiction("pipeline.models_every_s", "pipeline.models_every_s", "must not be negative")

    @property
    def contracts_folder(self) -> Path | None:
        return _folder(self.contracts, "contracts")

    @property
    def gold_folder(self) -> Path | None:
        return _folder(self.gold, "gold")


def _folder(named: str, kind: str) -> Path | None:
    if named == EXAMPLES:
        return Path(str(files("lakebed.pipeline") / "examples" / kind))
    return Path(named) if named else None


class BronzeSettings(Section, frozen=True):
    section: ClassVar[str] = "bronze"

    run_every_s: Annotated[
        float,
        describe(
            "Loads batches and topics into bronze at this interval in `lakebed work`; 0 means only by command.",
            when="bronze must be updated without a command",
        ),
    ] = 0.0
    samples: Annotated[
        bool, describe("Loads accepted batches into bronze.", when="samples are not needed as a table")
    ] = True
    topics: Annotated[
        str,
        describe(
            "Folder of topic contracts, *.yaml; empty means that no topic is loaded into bronze.",
            when="topics must be loaded into bronze",
        ),
    ] = ""
    step_objects: Annotated[int, describe("Limits the objects that one commit reads.")] = 20_000
    step_rows: Annotated[int, describe("Limits the rows that one commit writes.")] = 20_000_000
    step_bytes: Annotated[int, describe("Limits the stored bytes that one commit reads.")] = 512 * 1024 * 1024
    overlap_s: Annotated[
        float, describe("Lists this far back before the end of the last run, for batches that were indexed late.")
    ] = 900.0
    retention_days: Annotated[
        int,
        describe(
            "Deletes rows from bronze after this many days: those of ticks, samples, topics and queues; 0 keeps them.",
            when="bronze must be kept for a longer or shorter time",
        ),
    ] = 365
    upkeep_every_s: Annotated[
        float,
        describe(
            "Runs compaction, retention and vacuum of tables at this interval; 0 means never.",
            when="small files collect faster than they are compacted, or another engine maintains the tables",
        ),
    ] = 3600.0
    file_bytes: Annotated[int, describe("Compacts small files into files of about this size.")] = 64 * 1024 * 1024
    keep_versions_s: Annotated[
        float,
        describe(
            "Keeps older versions of a table readable for this long.",
            when="queries read older versions, or storage must be freed sooner",
        ),
    ] = 7 * 86_400.0

    def check(self) -> None:
        for name in ("step_objects", "step_rows", "step_bytes", "overlap_s", "file_bytes"):
            if getattr(self, name) <= 0:
                raise Contradiction(f"bronze.{name}", f"bronze.{name}", "must be above 0")
        for name in ("run_every_s", "retention_days", "upkeep_every_s"):
            if getattr(self, name) < 0:
                raise Contradiction(f"bronze.{name}", f"bronze.{name}", "must not be negative")

    @property
    def limit(self) -> Limit:
        return Limit(objects=self.step_objects, rows=self.step_rows, size_bytes=self.step_bytes)

    @property
    def topics_folder(self) -> Path | None:
        return Path(self.topics) if self.topics else None


class AuditSettings(Section, frozen=True):
    section: ClassVar[str] = "audit"

    grace_s: Annotated[
        float,
        describe(
            "Ignores objects that are newer than this when the audit lists the bucket, because their "
            "write may not be finished."
        ),
    ] = 60.0

    def check(self) -> None:
        if self.grace_s < 0:
            raise Contradiction("audit.grace_s", "audit.grace_s", "must not be negative")
