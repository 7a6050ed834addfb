"""The queue's settings. The names and defaults the seed gives are kept; the rest are limits with a name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.queue import paths
from lakebed.settings import Contradiction, Section, describe

MIB = 1024 * 1024


class QueueSettings(Section, frozen=True):
    section: ClassVar[str] = "queue"

    data_path_prefix: Annotated[str, describe("folder of the batches of the default queue")] = "ingest"
    manifest_path: Annotated[str, describe("producer manifest of the default queue")] = "ingest/manifest.json"
    flush_interval_s: Annotated[float, describe("a batch is flushed when its first entry is this old")] = 0.1
    flush_size_bytes: Annotated[int, describe("a batch is flushed when it exceeds this size (loose)")] = 64 * MIB
    max_unflushed_bytes: Annotated[int, describe("ingest waits while more than this is not durable (loose)")] = (
        256 * MIB
    )
    batch_format: Annotated[Literal["binary", "json"], describe("how batches are written; both are read")] = "binary"
    compression: Annotated[Literal["auto", "zstd", "none"], describe("of binary batches; auto tries a sample")] = "auto"
    entry_bytes_max: Annotated[int, describe("key and value of one entry together")] = 16 * MIB
    entries_max: Annotated[int, describe("entries of one ingest call")] = 100_000
    ingest_bytes_max: Annotated[int, describe("bytes of one ingest call")] = 64 * MIB
    uploads_max: Annotated[int, describe("batches being stored at once by the ingestors that share a producer")] = 8
    flush_timeout_s: Annotated[float, describe("trying to make a batch durable, then its watchers fail")] = 60.0
    pending_max: Annotated[int, describe("batches waiting in one queue before appends are refused")] = 50_000
    heartbeat_timeout_s: Annotated[float, describe("a claim that is silent for longer may be taken over")] = 30.0
    done_cleanup_threshold: Annotated[int, describe("done batches that trigger a clean-up")] = 100
    prefetch_batches: Annotated[int, describe("batches a collector claims at once")] = 4
    prefetch_bytes: Annotated[int, describe("bytes a collector claims at once (loose: one batch always fits)")] = (
        64 * MIB
    )
    parallel: Annotated[bool, describe("collectors share the batches at once, giving up order between them")] = False
    rejections_max: Annotated[int, describe("rejections after which a batch becomes a dead letter")] = 5
    silences_max: Annotated[int, describe("collectors that go silent with a batch until it is a dead letter")] = 20
    horizon_s: Annotated[float, describe("a stored batch that is not enqueued for longer may be swept")] = 3600.0
    sweep_interval_s: Annotated[float, describe("pause between two rounds of the sweeper")] = 60.0
    queues_max: Annotated[int, describe("queues that one broker serves at once")] = 256
    batch_bytes_max: Annotated[int, describe("largest batch that is decoded, uncompressed")] = 512 * MIB

    def check(self) -> None:
        positive = [
            field.name
            for field in msgspec.structs.fields(self)
            if isinstance(getattr(self, field.name), (int, float)) and not isinstance(getattr(self, field.name), bool)
        ]
        for name in positive:
            if getattr(self, name) <= 0:
                raise Contradiction(f"queue.{name}", f"queue.{name}", f"{getattr(self, name)} is not above zero")
        if self.flush_size_bytes + self.ingest_bytes_max > self.batch_bytes_max:
            raise Contradiction(
                "queue.flush_size_bytes", "queue.batch_bytes_max", "a batch could grow larger than what is read back"
            )

    def of_queue(self, name: str) -> QueueSettings:
        """The settings of a named queue: the same, but in a folder of its own."""
        if name == paths.DEFAULT:
            return self
        home = paths.home(name)
        return msgspec.structs.replace(self, data_path_prefix=home, manifest_path=f"{home}/{paths.MANIFEST}")
