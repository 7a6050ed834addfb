"""Settings of the queue: batching, claims, dead letters and limits."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.core.settings import Contradiction, Section, describe
from lakebed.queue import paths

MIB = 1024 * 1024
SEED_PENDING_MAX = 50_000  # in the seed's format every append rewrites the whole list: some 8 MB at this length

SHARDS_MAX = 256  # a collector looks at every shard


class QueueSettings(Section, frozen=True):
    section: ClassVar[str] = "queue"

    data_path_prefix: Annotated[str, describe("Folder of the batches of the default queue.")] = "ingest"
    manifest_path: Annotated[str, describe("Key of the producer manifest of the default queue.")] = (
        "ingest/manifest.json"
    )
    format: Annotated[
        Literal["segments", "seed"],
        describe(
            "Chooses how long queues are kept: a short manifest over segments, or one list as in the original design."
        ),
    ] = "segments"
    segment_batches: Annotated[
        int, describe("Moves so many batches at once from the manifest into a segment; the first one fixes it.")
    ] = 64
    shards: Annotated[
        int,
        describe(
            "Spreads a queue over this many manifests; order holds for each ingestor and within a shard.",
            when="many processes write to one queue and conflict on its manifest",
        ),
    ] = 1
    flush_interval_s: Annotated[
        float,
        describe(
            "Writes a batch when its first entry is this old.",
            when="you want fewer writes to the bucket (higher), or less latency (lower)",
        ),
    ] = 0.1
    flush_size_bytes: Annotated[
        int, describe("Writes a batch when it exceeds this size; the last entries may exceed it.")
    ] = 64 * MIB
    max_unflushed_bytes: Annotated[
        int, describe("Makes ingest calls wait while more bytes than this are not durable; one call may exceed it.")
    ] = 256 * MIB
    batch_format: Annotated[
        Literal["binary", "json"], describe("Chooses how batches are written; both formats are read.")
    ] = "binary"
    compression: Annotated[
        Literal["auto", "zstd", "none"],
        describe("Chooses the compression of binary batches; auto compresses a sample first."),
    ] = "auto"
    entry_bytes_max: Annotated[
        int, describe("Limits the size of one entry, key and value together.", when="entries are larger")
    ] = 16 * MIB
    entries_max: Annotated[int, describe("Limits the entries of one ingest call.")] = 100_000
    ingest_bytes_max: Annotated[int, describe("Limits the bytes of one ingest call.")] = 64 * MIB
    uploads_max: Annotated[
        int, describe("Limits the batches that ingestors of one producer store at the same time.")
    ] = 8
    flush_timeout_s: Annotated[
        float, describe("Retries to make a batch durable for this long, then fails its watchers.")
    ] = 60.0
    pending_max: Annotated[
        int,
        describe(
            "Limits the batches that wait in one queue; further appends are refused.",
            when="collectors may be away for longer",
        ),
    ] = 20_000_000
    heartbeat_timeout_s: Annotated[
        float,
        describe(
            "Lets another collector claim a batch whose collector sent no heartbeat for this long.",
            when="failover must be faster, or collectors pause for longer",
        ),
    ] = 30.0
    done_cleanup_threshold: Annotated[int, describe("Removes finished batches once there are this many.")] = 100
    prefetch_batches: Annotated[int, describe("Limits the batches that a collector claims at once.")] = 4
    prefetch_bytes: Annotated[
        int, describe("Limits the bytes that a collector claims at once; one batch is always allowed.")
    ] = 64 * MIB
    parallel: Annotated[
        bool,
        describe(
            "Lets several collectors process batches at the same time, without order between them.",
            when="throughput matters more than order",
        ),
    ] = False
    rejections_max: Annotated[
        int,
        describe(
            "Moves a batch to the dead letters after this many rejections.",
            when="failures are temporary and need more retries",
        ),
    ] = 10
    redelivery_delay_s: Annotated[
        float,
        describe("Delivers a rejected batch again after this long; the delay doubles each time."),
    ] = 1.0
    redelivery_delay_max_s: Annotated[
        float, describe("Limits the delay before a rejected batch is delivered again.")
    ] = 300.0
    idempotency_s: Annotated[float, describe("Remembers the idempotency keys of producers for at least this long.")] = (
        3600.0
    )
    silences_max: Annotated[
        int, describe("Moves a batch to the dead letters after this many collectors stopped while they processed it.")
    ] = 20
    horizon_s: Annotated[float, describe("Sweeps a stored batch that was not enqueued for this long.")] = 3600.0
    sweep_interval_s: Annotated[float, describe("Runs the sweeper at this interval.")] = 60.0
    queues_max: Annotated[int, describe("Limits the queues that one broker serves.")] = 256
    batch_bytes_max: Annotated[int, describe("Limits the uncompressed size of a batch that is decoded.")] = 512 * MIB

    def check(self) -> None:
        positive = [
            field.name
            for field in msgspec.structs.fields(self)
            if isinstance(getattr(self, field.name), (int, float)) and not isinstance(getattr(self, field.name), bool)
        ]
        for name in positive:
            if getattr(self, name) <= 0:
                raise Contradiction(f"queue.{name}", f"queue.{name}", f"must be above 0, not {getattr(self, name)}")
        if self.shards > SHARDS_MAX:
            raise Contradiction("queue.shards", "queue.shards", f"at most {SHARDS_MAX}, not {self.shards}")
        if self.format == "seed" and self.shards > 1:
            raise Contradiction("queue.shards", "queue.format", "the original design has no shards: set one of them")
        if self.flush_size_bytes + self.ingest_bytes_max > self.batch_bytes_max:
            raise Contradiction(
                "queue.flush_size_bytes",
                "queue.batch_bytes_max",
                "a full batch plus one ingest call must not exceed the largest batch that is read",
            )

    def of_queue(self, name: str) -> QueueSettings:
        """The settings of a named queue: the same, but in a folder of its own."""
        if name == paths.DEFAULT:
            return self
        home = paths.home(name)
        return msgspec.structs.replace(self, data_path_prefix=home, manifest_path=f"{home}/{paths.MANIFEST}")

    def of_shard(self, shard: int) -> QueueSettings:
        """The settings of one shard: the same queue, with a manifest of its own."""
        return msgspec.structs.replace(self, manifest_path=paths.shard_manifest(self.manifest_path, shard))

    def location(self, generation: int, uuid: str, form: str = "") -> str:
        """Where a batch is stored."""
        return paths.batch(self.data_path_prefix, self.manifest_path, generation, uuid, form or self.batch_format)
