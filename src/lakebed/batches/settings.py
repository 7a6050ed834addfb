"""Settings of ingest: where a batch becomes accepted, and the limits of everything around it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.batches.acceptance import LATE_NS
from lakebed.batches.rollup_sweeper import AFTER_S
from lakebed.frame.model import Limits
from lakebed.frame.rolling import check_windows
from lakebed.settings import Contradiction, Secret, Section, describe


class IngestSettings(Section, frozen=True):
    section: ClassVar[str] = "ingest"

    acceptance: Annotated[
        Literal["s3_manifest", "local_spool"],
        describe("s3_manifest: accepted in the bucket, any number of collectors; local_spool: on this disk, one only"),
    ] = "s3_manifest"
    active_active: Annotated[bool, describe("several collectors share this bucket; refuses local_spool")] = False
    spool_dir: Annotated[Path | None, describe("folder of the local spool (local_spool only)")] = None
    spool_bytes_max: Annotated[int, describe("largest local spool before uploads are refused")] = 4 * 1024**3
    object_landing_interval_ms: Annotated[
        int, describe("how often spooled batches are landed in the bucket (local_spool only); 0: 1000")
    ] = 0
    collector_id: Annotated[str, describe("name of this collector in manifests; empty: the process's own")] = ""
    frame_bytes_max: Annotated[int, describe("largest frame, checked before it is read")] = 4 * 1024 * 1024
    body_bytes_max: Annotated[int, describe("largest frame body after decompression")] = 16 * 1024 * 1024
    samples_max: Annotated[int, describe("most samples in one frame")] = 250_000
    series_max: Annotated[int, describe("most series in one frame")] = 50_000
    accepting_max: Annotated[int, describe("uploads under way in one collector before others get 503")] = 256
    upload_bytes_max: Annotated[int, describe("bytes of uploads under way before others get 503")] = 128 * 1024 * 1024
    accept_timeout_s: Annotated[float, describe("longest an upload waits for the store before it gets 503")] = 25.0
    retry_after_s: Annotated[float, describe("what a 503 tells the agent to wait")] = 2.0
    aftermath_max: Annotated[
        int, describe("acceptances whose derived writes wait; more are left to the reconciler")
    ] = 10_000
    aftermath_writers: Annotated[int, describe("derived writes under way at once")] = 4
    known_max: Annotated[int, describe("accepted identities remembered to answer duplicates at once")] = 100_000
    live_bytes_max: Annotated[int, describe("memory of live state")] = 64 * 1024 * 1024
    live_window_s: Annotated[float, describe("age of acceptance up to which batches stay in live state")] = 3600.0
    query_collector: Annotated[bool, describe("this collector follows all others and answers completely")] = False
    follow_interval_s: Annotated[float, describe("how often the query collector looks for others' batches")] = 2.0
    follow_overlap_s: Annotated[float, describe("how far back each look reaches again")] = 120.0
    query_batches_max: Annotated[int, describe("raw batches one query may read from the bucket")] = 2_000
    query_points_max: Annotated[int, describe("points one query may answer")] = 100_000

    def check(self) -> None:
        if self.acceptance == "local_spool":
            if self.active_active:
                raise Contradiction(
                    "ingest.acceptance",
                    "ingest.active_active",
                    "each collector has its own spool, so it cannot be the acceptance point of several",
                )
            if self.spool_dir is None:
                raise Contradiction("ingest.acceptance", "ingest.spool_dir", "local_spool needs a folder to spool in")
        else:
            if self.spool_dir is not None:
                raise Contradiction(
                    "ingest.acceptance", "ingest.spool_dir", "s3_manifest acknowledges only what is in the bucket"
                )
            if self.object_landing_interval_ms:
                raise Contradiction(
                    "ingest.acceptance", "ingest.object_landing_interval_ms", "s3_manifest has nothing to land"
                )
        if self.object_landing_interval_ms < 0:
            raise Contradiction(
                "ingest.object_landing_interval_ms", "ingest.object_landing_interval_ms", "time does not run backwards"
            )
        if self.frame_bytes_max > self.upload_bytes_max:
            raise Contradiction(
                "ingest.frame_bytes_max", "ingest.upload_bytes_max", "the largest frame could never be taken"
            )
        if self.frame_bytes_max > self.body_bytes_max:
            raise Contradiction(
                "ingest.frame_bytes_max", "ingest.body_bytes_max", "an uncompressed frame could be sent but not read"
            )
        for name in ("accepting_max", "aftermath_max", "aftermath_writers", "known_max"):
            if getattr(self, name) < 1:
                raise Contradiction(f"ingest.{name}", f"ingest.{name}", "must be at least 1")

    @property
    def landing_interval_s(self) -> float:
        return (self.object_landing_interval_ms or 1000) / 1000

    def limits(self) -> Limits:
        return Limits(
            frame_bytes=self.frame_bytes_max,
            body_bytes=self.body_bytes_max,
            samples=self.samples_max,
            series=self.series_max,
        )


class ReconcilerSettings(Section, frozen=True):
    section: ClassVar[str] = "reconciler"

    interval_s: Annotated[float, describe("how often the steady scan runs over accepted-by-time")] = 30.0
    overlap_s: Annotated[
        float, describe("how far before its checkpoint the scan begins: lost events, clock skew, retries, crashes")
    ] = 900.0
    audit_interval_s: Annotated[float, describe("how often all of accepted and quarantine is audited")] = 3600.0
    concurrency: Annotated[int, describe("batches being checked at once")] = 8
    gc_interval_s: Annotated[float, describe("how often garbage is collected; 0: only by command")] = 0.0
    gc_horizon_s: Annotated[float, describe("age a blob must have before it may be garbage: the longest retry")] = (
        604800.0
    )
    gc_access_key_id: Annotated[Secret, describe("credentials of the garbage collection role; empty: the store's")] = (
        Secret("")
    )
    gc_secret_access_key: Annotated[Secret, describe("goes with reconciler.gc_access_key_id")] = Secret("")
    gc_undecided: Annotated[
        Literal["finish", "keep"],
        describe("a blob past the horizon that nobody accepted nor refused: accept it, or leave it"),
    ] = "finish"

    def check(self) -> None:
        if self.overlap_s <= 0:
            raise Contradiction("reconciler.overlap_s", "reconciler.overlap_s", "without overlap a late entry is lost")
        if bool(self.gc_access_key_id) != bool(self.gc_secret_access_key):
            raise Contradiction(
                "reconciler.gc_access_key_id", "reconciler.gc_secret_access_key", "one is set and the other is empty"
            )
        if self.gc_horizon_s < self.overlap_s:
            raise Contradiction(
                "reconciler.gc_horizon_s", "reconciler.overlap_s", "garbage would be judged before it is reconciled"
            )


class RollupSettings(Section, frozen=True):
    section: ClassVar[str] = "rollup"

    windows_s: Annotated[
        tuple[int, ...], describe("windows of rollups, each made of whole smaller ones; fixed by the first run")
    ] = (60, 300, 3600)
    engine: Annotated[
        Literal["spark", "local"], describe("who reads and adds up: Spark, or this process on a small machine")
    ] = "spark"
    interval_s: Annotated[float, describe("pause between two runs in `lakebed work`; 0: only by command")] = 0.0
    overlap_s: Annotated[float, describe("how far back each run looks again for batches that were indexed late")] = (
        900.0
    )
    batches_max: Annotated[int, describe("batches rolled up together, in one generation of chunks")] = 10_000
    lease_s: Annotated[float, describe("how long the one who rolls up may be silent before another takes over")] = 60.0
    sweep_after_s: Annotated[
        float,
        describe(
            "age at which notes of late batches and chunks of abandoned generations go; readers that were away for"
            " longer begin anew"
        ),
    ] = AFTER_S

    def check(self) -> None:
        check_windows(self.windows_s)
        if self.overlap_s * 1e9 < 2 * LATE_NS:
            raise Contradiction(
                "rollup.overlap_s",
                "rollup.overlap_s",
                f"a late batch is noted only {LATE_NS / 1e9:g} s after acceptance",
            )
        for name in ("batches_max", "lease_s"):
            if getattr(self, name) < 1:
                raise Contradiction(f"rollup.{name}", f"rollup.{name}", "must be at least 1")
        if self.sweep_after_s < 2 * self.overlap_s:
            raise Contradiction(
                "rollup.sweep_after_s", "rollup.overlap_s", "notes would go before everybody has looked at them"
            )
        if self.interval_s < 0:
            raise Contradiction("rollup.interval_s", "rollup.interval_s", "cannot be below zero")
