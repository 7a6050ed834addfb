"""How the log batches, caches, compacts and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.settings import Contradiction, Section, describe


class LogSettings(Section, frozen=True):
    section: ClassVar[str] = "log"

    roles: Annotated[Literal["both", "write", "read"], describe("what this broker answers")] = "both"
    batch_max_bytes: Annotated[int, describe("a blob is written before it would grow larger")] = 4 * 1024 * 1024
    batch_max_delay_ms: Annotated[float, describe("or when its first record has waited this long")] = 5.0
    flights_max: Annotated[int, describe("blobs on their way to the bucket at once")] = 6
    buffer_max_bytes: Annotated[int, describe("records waiting in one broker before produce is refused")] = (
        64 * 1024 * 1024
    )
    record_max_bytes: Annotated[int, describe("largest record")] = 8 * 1024 * 1024
    request_max_partitions: Annotated[int, describe("topic-partitions in one request")] = 1000
    cache_bytes: Annotated[int, describe("recently written records kept for consumers")] = 128 * 1024 * 1024
    bodies_bytes: Annotated[int, describe("batches read from the bucket kept for the next reader")] = 64 * 1024 * 1024
    tail_cache_dir: Annotated[Path | None, describe("folder of a tail cache shared by brokers of one host")] = None
    max_wait_ms: Annotated[int, describe("longest long poll")] = 30_000
    max_bytes: Annotated[int, describe("largest answer to one consume")] = 32 * 1024 * 1024
    poll_s: Annotated[float, describe("how old, at most, what a consumer is told of other brokers' changes may be")] = (
        0.25
    )
    producer_memory_s: Annotated[float, describe("how long an idempotent producer is known after its last batch")] = (
        24 * 3600.0
    )
    compact_every_s: Annotated[float, describe("pause between two passes of the compactor")] = 5.0
    compact_workers: Annotated[int, describe("partitions compacted at once")] = 2
    compact_min_entries: Annotated[int, describe("appends worth compacting")] = 8
    compact_max_entries: Annotated[int, describe("appends in one compaction")] = 512
    compact_max_bytes: Annotated[int, describe("bytes in one compacted blob")] = 8 * 1024 * 1024
    claim_s: Annotated[float, describe("silence after which a compactor's claims are free")] = 15.0
    retention_s: Annotated[float, describe("records older than this are trimmed; 0 keeps them")] = 0.0
    retention_bytes: Annotated[int, describe("bytes kept of a partition; 0 keeps all")] = 0
    vacuum_every_s: Annotated[float, describe("pause between two passes of the vacuum; 0 never")] = 3600.0
    vacuum_horizon_s: Annotated[float, describe("age below which no blob is deleted")] = 6 * 3600.0
    scenario: Annotated[str, describe("the load test this broker runs in, shown in its metrics")] = ""
    billing_every_s: Annotated[float, describe("pause between two scans of what is stored; 0 never")] = 0.0

    def check(self) -> None:
        if self.poll_s <= 0 or self.producer_memory_s <= 0:
            raise Contradiction("log.poll_s", "log.producer_memory_s", "both are times of more than 0 seconds")
        if self.record_max_bytes > self.buffer_max_bytes:
            raise Contradiction("log.record_max_bytes", "log.buffer_max_bytes", "the largest record would never fit")
        if self.batch_max_bytes > self.buffer_max_bytes:
            raise Contradiction("log.batch_max_bytes", "log.buffer_max_bytes", "no batch would ever be full")
        if self.flights_max < 1 or self.compact_workers < 1:
            raise Contradiction("log.flights_max", "log.compact_workers", "at least one of each is needed")
        if self.compact_min_entries > self.compact_max_entries:
            raise Contradiction("log.compact_min_entries", "log.compact_max_entries", "nothing would be compacted")
