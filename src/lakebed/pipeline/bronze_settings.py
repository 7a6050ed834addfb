"""How batches and topics come into bronze, and how their tables are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from lakebed.feed import Limit
from lakebed.settings import Contradiction, Section, describe


class BronzeSettings(Section, frozen=True):
    section: ClassVar[str] = "bronze"

    run_every_s: Annotated[float, describe("pause between two runs in `lakebed work`; 0: only by command")] = 0.0
    samples: Annotated[bool, describe("whether accepted batches come into bronze")] = True
    topics: Annotated[str, describe("folder of the topics' contracts, *.yaml; empty: no topic comes into bronze")] = ""
    step_objects: Annotated[int, describe("objects that one commit takes at most")] = 2_000
    step_rows: Annotated[int, describe("rows that one commit takes at most")] = 20_000_000
    step_bytes: Annotated[int, describe("stored bytes that one commit takes at most")] = 512 * 1024 * 1024
    overlap_s: Annotated[float, describe("how far before its end a run looks for batches that were indexed late")] = (
        900.0
    )
    retention_days: Annotated[int, describe("samples and records are removed after so many days; 0 keeps them")] = 0
    upkeep_every_s: Annotated[
        float, describe("pause between two rounds of compaction, retention and vacuum; 0 never")
    ] = 3600.0
    file_bytes: Annotated[int, describe("small files are joined into files of about this size")] = 64 * 1024 * 1024
    keep_versions_s: Annotated[float, describe("how long an older version of a table stays readable")] = 7 * 86_400.0

    def check(self) -> None:
        for name in ("step_objects", "step_rows", "step_bytes", "overlap_s", "file_bytes"):
            if getattr(self, name) <= 0:
                raise Contradiction(f"bronze.{name}", f"bronze.{name}", "must be above zero")
        for name in ("run_every_s", "retention_days", "upkeep_every_s"):
            if getattr(self, name) < 0:
                raise Contradiction(f"bronze.{name}", f"bronze.{name}", "cannot be below zero")

    @property
    def limit(self) -> Limit:
        return Limit(objects=self.step_objects, rows=self.step_rows, size_bytes=self.step_bytes)

    @property
    def topics_folder(self) -> Path | None:
        return Path(self.topics) if self.topics else None
