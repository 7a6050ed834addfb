"""Settings of ingest and of the reconciler: where a batch is accepted, limits, scans and garbage collection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.batches.model import FrameLimits
from lakebed.core.settings import Contradiction, Secret, Section, describe


class BatchesSettings(Section, frozen=True):
    section: ClassVar[str] = "batches"
    former: ClassVar[str] = "ingest"

    acceptance: Annotated[
        Literal["s3_manifest", "local_spool"],
        describe(
            "Chooses where a batch becomes durable: s3_manifest in the bucket, for any number of "
            "collectors; local_spool on this disk, for one collector only.",
            when="one collector must acknowledge faster than the bucket answers",
        ),
    ] = "s3_manifest"
    active_active: Annotated[
        bool,
        describe(
            "States that several collectors share this bucket; local_spool is then refused.",
            when="a second collector uses the bucket",
        ),
    ] = False
    spool_dir: Annotated[
        Path | None, describe("Folder of the local spool (local_spool only).", when="batches.acceptance is local_spool")
    ] = None
    spool_bytes_max: Annotated[
        int,
        describe(
            "Limits the size of the local spool; further uploads get 503.",
            when="the collector must survive a longer outage of the bucket, or has less disk",
        ),
    ] = 4 * 1024**3
    object_landing_interval_ms: Annotated[
        int, describe("Uploads spooled batches to the bucket at this interval (local_spool only); 0 means 1000.")
    ] = 0
    collector_id: Annotated[str, describe("Names this collector in manifests; empty means the process's own id.")] = ""
    frame_bytes_max: Annotated[int, describe("Limits the size of one frame, checked before it is read.")] = (
        4 * 1024 * 1024
    )
    body_bytes_max: Annotated[int, describe("Limits the size of a frame body after decompression.")] = 16 * 1024 * 1024
    samples_max: Annotated[int, describe("Limits the samples in one frame.")] = 250_000
    accepting_max: Annotated[
        int, describe("Limits the uploads in progress in one collector; further ones get 503.")
    ] = 256
    upload_bytes_max: Annotated[int, describe("Limits the bytes of uploads in progress; further uploads get 503.")] = (
        128 * 1024 * 1024
    )
    accept_timeout_s: Annotated[
        float, describe("Limits how long an upload waits for the store before it gets 503.")
    ] = 25.0
    retry_after_s: Annotated[float, describe("Sets the Retry-After of a 503 response.")] = 2.0
    aftermath_max: Annotated[
        int, describe("Limits the accepted batches that wait for their derived writes; the reconciler writes the rest.")
    ] = 10_000
    index_flush_s: Annotated[
        float,
        describe("Writes the index rows of accepted batches together at this interval, or sooner when many wait."),
    ] = 2.0
    pack_ms: Annotated[
        int,
        describe(
            "Packs the frames that arrive within this many milliseconds into one raw blob, 0 stores each frame as a "
            "blob of its own; an upload waits that much longer.",
            when="many agents send small batches, and requests to the bucket are the cost",
        ),
    ] = 0
    known_max: Annotated[
        int,
        describe("Limits the accepted batch ids in memory, which answer duplicates without a request to the bucket."),
    ] = 100_000
    live_bytes_max: Annotated[int, describe("Limits the memory of live state.")] = 64 * 1024 * 1024
    live_window_s: Annotated[float, describe("Keeps batches in live state until this long after their acceptance.")] = (
        3600.0
    )
    query_collector: Annotated[
        bool,
        describe(
            "Follows the batches of all other collectors, so that this collector returns complete answers; a "
            "collector without batches.active_active always does.",
            when="queries go to one collector of several",
        ),
    ] = False
    follow_interval_s: Annotated[
        float, describe("Lists the batches of other collectors at this interval (query collector only).")
    ] = 2.0
    query_batches_max: Annotated[
        int,
        describe(
            "Limits how many raw batches one query reads from the bucket.", when="queries over long ranges are cut off"
        ),
    ] = 2_000
    retention_days: Annotated[
        float,
        describe(
            "Removes accepted batches, their index rows and rollups after this many days, 0 keeps them; an identity "
            "that was removed stays a duplicate."
        ),
    ] = 0.0
    query_points_max: Annotated[int, describe("Limits how many points one query returns.")] = 100_000

    def check(self) -> None:
        if self.acceptance == "local_spool":
            if self.active_active:
                raise Contradiction(
                    "batches.acceptance",
                    "batches.active_active",
                    "local_spool supports one collector only, because each collector has its own spool",
                )
            if self.spool_dir is None:
                raise Contradiction("batches.acceptance", "batches.spool_dir", "local_spool needs a folder")
        else:
            if self.spool_dir is not None:
                raise Contradiction(
                    "batches.acceptance", "batches.spool_dir", "s3_manifest uses no spool: leave the folder empty"
                )
            if self.object_landing_interval_ms:
                raise Contradiction(
                    "batches.acceptance",
                    "batches.object_landing_interval_ms",
                    "s3_manifest uses no spool: leave the interval at 0",
                )
        if self.object_landing_interval_ms < 0:
            raise Contradiction(
                "batches.object_landing_interval_ms", "batches.object_landing_interval_ms", "must not be negative"
            )
        if self.frame_bytes_max > self.upload_bytes_max:
            raise Contradiction(
                "batches.frame_bytes_max",
                "batches.upload_bytes_max",
                "one frame must fit into the total of all uploads",
            )
        if self.frame_bytes_max > self.body_bytes_max:
            raise Contradiction(
                "batches.frame_bytes_max",
                "batches.body_bytes_max",
                "an uncompressed frame must fit into the largest body",
            )
        if not 0 < self.index_flush_s <= 5:
            raise Contradiction(
                "batches.index_flush_s",
                "batches.index_flush_s",
                "must be above 0 and at most 5 s, which is what readers of the index wait for",
            )
        if not 0 <= self.pack_ms <= 5_000:
            raise Contradiction("batches.pack_ms", "batches.pack_ms", "must be 0 to 5000 ms")
        if self.pack_ms and self.acceptance == "local_spool":
            raise Contradiction("batches.acceptance", "batches.pack_ms", "frames of a local spool are not packed")
        if self.retention_days < 0 or 0 < self.retention_days < 1:
            raise Contradiction("batches.retention_days", "batches.retention_days", "must be 0, or at least 1 day")
        for name in ("accepting_max", "aftermath_max", "known_max"):
            if getattr(self, name) < 1:
                raise Contradiction(f"ingest.{name}", f"ingest.{name}", "must be at least 1")

    @property
    def follows(self) -> bool:
        """Whether this collector is a query collector. One that is alone is its own."""
        return self.query_collector or not self.active_active

    @property
    def landing_interval_s(self) -> float:
        return (self.object_landing_interval_ms or 1000) / 1000

    def limits(self) -> FrameLimits:
        return FrameLimits(
            frame_bytes=self.frame_bytes_max,
            body_bytes=self.body_bytes_max,
            samples=self.samples_max,
        )


class ReconcilerSettings(Section, frozen=True):
    section: ClassVar[str] = "reconciler"

    interval_s: Annotated[float, describe("Checks newly accepted manifests at this interval.")] = 300.0
    overlap_s: Annotated[
        float,
        describe(
            "Looks in the index this far around the time at which a manifest was stored, because clocks of collectors "
            "and store differ."
        ),
    ] = 900.0
    audit_interval_s: Annotated[
        float,
        describe("Reads all accepted and quarantined batches again at this interval; 0 means only by command."),
    ] = 0.0
    events_queue_url: Annotated[
        str,
        describe("Receives S3 event notifications of accepted/v1/ from this SQS queue; empty means none."),
    ] = ""
    concurrency: Annotated[int, describe("Limits the batches that are checked at the same time.")] = 8
    gc_interval_s: Annotated[
        float,
        describe(
            "Deletes blobs that no batch refers to at this interval; 0 means only by command.",
            when="garbage must be deleted without a command",
        ),
    ] = 0.0
    gc_horizon_s: Annotated[
        float,
        describe(
            "Keeps every blob that is younger than this, which must exceed the longest retry of an agent.",
            when="agents may be offline for longer",
        ),
    ] = 604800.0
    gc_access_key_id: Annotated[
        Secret,
        describe(
            "Access key of the garbage collection role; empty means the store's credentials.",
            when="other roles may not delete from the bucket",
        ),
    ] = Secret("")
    gc_secret_access_key: Annotated[
        Secret,
        describe("Secret that belongs to reconciler.gc_access_key_id.", when="reconciler.gc_access_key_id is set"),
    ] = Secret("")
    gc_undecided: Annotated[
        Literal["finish", "keep"],
        describe(
            "Chooses what happens to a blob past the horizon that was neither accepted nor refused: "
            "finish accepts it, keep leaves it."
        ),
    ] = "finish"

    def check(self) -> None:
        if self.overlap_s <= 0:
            raise Contradiction(
                "reconciler.overlap_s", "reconciler.overlap_s", "must be above 0, or every manifest is read"
            )
        if bool(self.gc_access_key_id) != bool(self.gc_secret_access_key):
            raise Contradiction("reconciler.gc_access_key_id", "reconciler.gc_secret_access_key", "set both or neither")
        if self.gc_horizon_s < self.overlap_s:
            raise Contradiction(
                "reconciler.gc_horizon_s", "reconciler.overlap_s", "the horizon must not be shorter than the overlap"
            )
