"""What an agent reads, where it queues and whom it sends to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.agent.model import WhenFull
from lakebed.settings import Contradiction, Secret, Section, describe

MIB = 1024 * 1024
BATCH_BYTES_MAX = 480_000  # so that a batch of the shortest names still keeps within a frame's limits


class ScrapeTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One address that answers with Prometheus text; `labels` are added to each of its samples."""

    url: str
    labels: dict[str, str] = {}
    interval_s: float = 15.0
    timeout_s: float = 10.0


class TickFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One folder whose subfolders are uploaded as ticks of a project, each once it holds `_manifest.json` or `_ready`.

    `keys` are primary keys by table, "" for all others; both they and `mode` are for folders without a manifest.
    `org_id` and `api_secret` are those of `ticks` unless given, `urls` the collectors.
    """

    folder: Path
    project_id: str
    org_id: str = ""
    api_secret: Secret = Secret("")
    urls: tuple[str, ...] = ()
    keys: dict[str, tuple[str, ...]] = {}
    mode: Literal["delta", "full"] = "delta"
    keep: bool = False
    interval_s: float = 5.0


class AgentSettings(Section, frozen=True):
    section: ClassVar[str] = "agent"

    agent_id: Annotated[str, describe("who is sending; empty: the host's name")] = ""
    collectors: Annotated[tuple[str, ...], describe("addresses of collectors, http(s)://host:port")] = ()
    token: Annotated[Secret, describe("token the collectors know this agent by")] = Secret("")

    queue_dir: Annotated[Path, describe("folder of the disk queue; one agent each")] = Path(".lakebed/agent-queue")
    queue_bytes_max: Annotated[int, describe("disk the queue may take, parked batches included")] = 1024 * MIB
    queue_batches_max: Annotated[int, describe("batches that may wait; bounds the index in memory")] = 100_000
    when_full: Annotated[WhenFull, describe("block the sources, or drop_oldest batches (counted)")] = "block"

    batch_bytes: Annotated[int, describe("uncompressed bytes that close a batch")] = 256 * 1024
    batch_samples_max: Annotated[int, describe("samples that close a batch")] = 10_000
    batch_interval_s: Annotated[float, describe("longest time a sample waits in memory before the disk")] = 5.0
    ack_linger_s: Annotated[float, describe("the same for a source that waits for the disk (OTLP)")] = 0.05

    send_concurrency: Annotated[int, describe("batches under way at once")] = 4
    request_timeout_s: Annotated[float, describe("one request to a collector, whole")] = 30.0
    connect_timeout_s: Annotated[float, describe("opening a connection to a collector")] = 5.0
    hedge_after_s: Annotated[float, describe("ask a second collector after this long; 0: never")] = 2.0
    hedge_share_max: Annotated[float, describe("hedges per send over time, so hedging cannot double a slow store")] = (
        0.2
    )
    backoff_base_s: Annotated[float, describe("first wait after a failure, doubled each time, with jitter")] = 0.5
    backoff_cap_s: Annotated[float, describe("longest wait of one collector or batch after failures")] = 30.0
    retry_after_max_s: Annotated[float, describe("longest Retry-After that is obeyed")] = 300.0
    denied_retry_s: Annotated[float, describe("wait after 401, 403 or an answer no collector gives")] = 60.0

    stdin: Annotated[bool, describe("read samples as JSON lines from standard input")] = False
    stdin_acks: Annotated[bool, describe("print {durable_lines: n} to standard output after each fsync")] = False
    line_bytes_max: Annotated[int, describe("longest line of standard input")] = 64 * 1024
    scrape: Annotated[tuple[ScrapeTarget, ...], describe("Prometheus text targets")] = ()
    scrape_bytes_max: Annotated[int, describe("largest answer of a target")] = 16 * MIB
    scrape_samples_max: Annotated[int, describe("most samples of one answer")] = 100_000
    otlp_port: Annotated[int, describe("port on loopback for OTLP/HTTP metrics, /metrics and /health; -1: off")] = -1
    otlp_bytes_max: Annotated[int, describe("largest OTLP body, before and after decompression")] = 4 * MIB
    otlp_points_max: Annotated[int, describe("most data points of one OTLP request")] = 50_000
    host_interval_s: Annotated[float, describe("how often host metrics are read; 0: never")] = 0.0

    ticks: Annotated[tuple[TickFolder, ...], describe("folders whose subfolders are uploaded as ticks")] = ()
    ticks_parallel: Annotated[int, describe("parts of one tick that are sent at once")] = 4

    stop_s: Annotated[float, describe("time to finish sends under way at a stop")] = 5.0
    drain_s: Annotated[float, describe("time to send what is queued after standard input ended")] = 60.0

    def check(self) -> None:
        addresses = (*(target.url for target in self.scrape), *(url for each in self.ticks for url in each.urls))
        for url in (*self.collectors, *addresses):
            if not url.startswith(("http://", "https://")):
                raise Contradiction("agent.collectors", "agent.scrape", f"{url!r} is not an http(s) address")
        if not 1 <= self.batch_bytes <= BATCH_BYTES_MAX:
            raise Contradiction("agent.batch_bytes", "agent.batch_bytes", f"must be 1 to {BATCH_BYTES_MAX}")
        if not 1 <= self.batch_samples_max <= 100_000:
            raise Contradiction("agent.batch_samples_max", "agent.batch_samples_max", "must be 1 to 100000")
        if self.queue_bytes_max < 8 * self.batch_bytes or self.queue_batches_max < 8:
            raise Contradiction("agent.queue_bytes_max", "agent.batch_bytes", "the queue must hold at least 8 batches")
        if min(self.batch_interval_s, self.ack_linger_s, self.hedge_after_s, self.host_interval_s) < 0:
            raise Contradiction("agent.batch_interval_s", "agent.hedge_after_s", "times are not negative")
        if not 1 <= self.send_concurrency <= 64:
            raise Contradiction("agent.send_concurrency", "agent.send_concurrency", "must be 1 to 64")
        if not 1 <= self.ticks_parallel <= 64 or any(each.interval_s < 0.1 for each in self.ticks):
            raise Contradiction("agent.ticks", "agent.ticks_parallel", "intervals from 0.1 s, 1 to 64 parts at once")
        if len({each.folder for each in self.ticks}) != len(self.ticks):
            raise Contradiction("agent.ticks", "agent.ticks", "a folder is one project's")
        if any(target.interval_s < 0.1 or target.timeout_s <= 0 for target in self.scrape):
            raise Contradiction("agent.scrape", "agent.scrape", "a target's interval_s is at least 0.1")
