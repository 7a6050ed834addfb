"""Settings of rollups: windows, interval and engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from lakebed.batches.model import LATE_NS
from lakebed.core.settings import Contradiction, Section, describe
from lakebed.rollups.aggregate import check_windows
from lakebed.rollups.sweeper import AFTER_S


class RollupSettings(Section, frozen=True):
    section: ClassVar[str] = "rollups"
    former: ClassVar[str] = "rollup"

    windows_s: Annotated[
        tuple[int, ...],
        describe(
            "Lists the window lengths of rollups in seconds, each a multiple of the smaller ones; the "
            "first run fixes them.",
            when="queries need other resolutions, before the first run",
        ),
    ] = (60, 300, 3600)
    engine: Annotated[
        Literal["spark", "local"],
        describe(
            "Chooses what computes rollups: spark, or local in this process.",
            when="one process is too slow for the samples of the lake",
        ),
    ] = "local"
    interval_s: Annotated[
        float,
        describe(
            "Computes rollups at this interval in `lakebed work`; 0 means only by command.",
            when="rollups must be fresher, or must not be computed",
        ),
    ] = 300.0
    overlap_s: Annotated[float, describe("Lists this far back in each run, for batches that were indexed late.")] = (
        900.0
    )
    batches_max: Annotated[
        int, describe("Limits the batches that are rolled up together in one generation of chunks.")
    ] = 10_000
    lease_s: Annotated[
        float, describe("Lets another worker compute rollups when the lease holder reported nothing for this long.")
    ] = 60.0
    sweep_after_s: Annotated[
        float,
        describe(
            "Deletes notes of late batches and chunks of abandoned generations at this age; a reader that "
            "was away for longer starts again."
        ),
    ] = AFTER_S

    def check(self) -> None:
        check_windows(self.windows_s)
        if self.overlap_s * 1e9 < 2 * LATE_NS:
            raise Contradiction(
                "rollups.overlap_s",
                "rollups.overlap_s",
                f"must be at least twice {LATE_NS / 1e9:g} s, when a late batch is noted",
            )
        for name in ("batches_max", "lease_s"):
            if getattr(self, name) < 1:
                raise Contradiction(f"rollup.{name}", f"rollup.{name}", "must be at least 1")
        if self.sweep_after_s < 2 * self.overlap_s:
            raise Contradiction(
                "rollups.sweep_after_s",
                "rollups.overlap_s",
                "must be at least twice the overlap, so that every reader sees each note",
            )
        if self.interval_s < 0:
            raise Contradiction("rollups.interval_s", "rollups.interval_s", "must not be negative")
