"""Settings of the log: batching, caches, compaction and retention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.core.settings import Contradiction, Section, describe

DELAY_MS, DELAY_BILLED_MS = 5.0, 250.0  # defaults of log.batch_max_delay_ms


class LogSettings(Section, frozen=True):
    section: ClassVar[str] = "log"

    roles: Annotated[
        Literal["both", "write", "read"],
        describe(
            "Chooses which requests this broker serves: both, write or read.",
            when="producers and consumers use separate brokers",
        ),
    ] = "both"
    kafka_port: Annotated[
        int | None,
        describe("Port for Kafka clients; 0 chooses a free one, none disables it.", when="Kafka clients use the log"),
    ] = None
    kafka_advertised: Annotated[
        str, describe("Address that Kafka clients connect to, HOST or HOST:PORT; empty means gateway.host.")
    ] = ""
    batch_max_bytes: Annotated[int, describe("Writes a blob before it grows larger than this.")] = 4 * 1024 * 1024
    batch_max_delay_ms: Annotated[
        float | None,
        describe(
            "Limits how long a record waits for more of them while other blobs are under way; unset means 5 on a store "
            "of your own and 250 where requests are billed (at most 4 flights a second, 53 dollars a month per broker, "
            "105 with meta.backend = bucket).",
            when="you want fewer writes to the bucket (higher), or less latency (lower)",
        ),
    ] = None
    flights_max: Annotated[int, describe("Limits the blobs that are uploaded at the same time.")] = 6
    buffer_max_bytes: Annotated[
        int,
        describe(
            "Limits the records that wait in one broker; further produce requests are refused.",
            when="producers get 503 during peaks and the broker has memory to spare",
        ),
    ] = 64 * 1024 * 1024
    record_max_bytes: Annotated[int, describe("Limits the size of one record.", when="records are larger")] = (
        8 * 1024 * 1024
    )
    cache_bytes: Annotated[
        int, describe("Limits the memory for recently written records, which consumers read first.")
    ] = 128 * 1024 * 1024
    bodies_bytes: Annotated[
        int, describe("Limits the memory for batches read from the bucket: of one request, and of all that are kept.")
    ] = 64 * 1024 * 1024
    tail_cache_dir: Annotated[
        Path | None,
        describe(
            "Folder of a cache of recent records that the brokers of one host share.",
            when="several brokers run on one host",
        ),
    ] = None
    max_wait_ms: Annotated[int, describe("Limits the wait of one long poll.")] = 30_000
    max_bytes: Annotated[int, describe("Limits the size of one consume response.")] = 32 * 1024 * 1024
    poll_s: Annotated[float, describe("Limits how long a consumer may not see changes of other brokers.")] = 0.25
    broker_url: Annotated[
        str,
        describe("URL at which other brokers reach this one; empty means the gateway's own address."),
    ] = ""
    zone: Annotated[str, describe("Names the zone of this broker, for clients that prefer their own.")] = ""
    producer_memory_s: Annotated[
        float, describe("Remembers an idempotent producer for this long after its last batch.")
    ] = 24 * 3600.0
    compact_every_s: Annotated[float, describe("Runs the compactor at this interval.")] = 5.0
    compact_workers: Annotated[int, describe("Limits the compacted blobs that are written at the same time.")] = 2
    compact_min_entries: Annotated[int, describe("Compacts a partition once it has this many appends.")] = 256
    compact_min_bytes: Annotated[int, describe("Compacts a partition once its appends have this many bytes.")] = (
        4 * 1024 * 1024
    )
    compact_after_s: Annotated[float, describe("Compacts a partition once its oldest append is this old.")] = 300.0
    compact_max_entries: Annotated[int, describe("Limits the appends in one compaction.")] = 1024
    compact_max_bytes: Annotated[
        int, describe("Limits the bytes of one partition that are compacted into one index entry.")
    ] = 8 * 1024 * 1024
    compact_fan_in: Annotated[
        int, describe("Compacts the compacted entries of a partition again once it has this many small ones.")
    ] = 8
    compact_blob_bytes: Annotated[
        int, describe("Limits the bytes of one compacted blob, of one partition or of several that share it.")
    ] = 64 * 1024 * 1024
    claim_s: Annotated[
        float,
        describe("Releases the claims of a compactor that reported nothing for this long; Oxia takes 2 s or more."),
    ] = 15.0
    retention_s: Annotated[
        float, describe("Deletes records older than this; 0 keeps them.", when="topics must not grow forever")
    ] = 0.0
    retention_bytes: Annotated[
        int,
        describe("Limits the bytes kept of each partition; 0 keeps all.", when="storage per partition must be bounded"),
    ] = 0
    vacuum_every_s: Annotated[
        float,
        describe(
            "Deletes blobs that nothing refers to at this interval; 0 means never.",
            when="storage must be freed sooner, or the sweep runs in another process",
        ),
    ] = 3600.0
    vacuum_horizon_s: Annotated[float, describe("Keeps every blob that is younger than this.")] = 6 * 3600.0
    group_retention_s: Annotated[
        float,
        describe(
            "Deletes a Kafka consumer group and its offsets after this long without members and commits; 0 keeps it."
        ),
    ] = 30 * 24 * 3600.0
    scenario: Annotated[str, describe("Names the load test of this broker in its metrics.")] = ""
    billing_every_s: Annotated[
        float,
        describe(
            "Measures the stored bytes at this interval, in one process of the lake; 0 means never.",
            when="the lake has so many objects that listing them this often costs too much",
        ),
    ] = 3600.0

    def delay_ms(self, *, billed: bool) -> float:
        """`batch_max_delay_ms`, or what suits the store."""
        if self.batch_max_delay_ms is not None:
            return self.batch_max_delay_ms
        return DELAY_BILLED_MS if billed else DELAY_MS

    def check(self) -> None:
        if self.poll_s <= 0 or self.producer_memory_s <= 0:
            raise Contradiction("log.poll_s", "log.producer_memory_s", "both must be above 0 seconds")
        if self.record_max_bytes > self.buffer_max_bytes:
            raise Contradiction(
                "log.record_max_bytes", "log.buffer_max_bytes", "a record of the largest size must fit into the buffer"
            )
        if self.batch_max_bytes > self.buffer_max_bytes:
            raise Contradiction("log.batch_max_bytes", "log.buffer_max_bytes", "a full batch must fit into the buffer")
        if self.flights_max < 1 or self.compact_workers < 1:
            raise Contradiction("log.flights_max", "log.compact_workers", "both must be at least 1")
        if self.compact_min_entries > self.compact_max_entries:
            raise Contradiction(
                "log.compact_min_entries", "log.compact_max_entries", "the minimum must not exceed the maximum"
            )
        if self.compact_max_bytes > self.compact_blob_bytes:
            raise Contradiction("log.compact_max_bytes", "log.compact_blob_bytes", "an entry must fit into its blob")
        if self.compact_fan_in < 2 or self.compact_after_s <= 0:
            raise Contradiction(
                "log.compact_fan_in", "log.compact_after_s", "at least 2 entries and more than 0 seconds"
            )
