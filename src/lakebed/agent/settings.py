"""Settings of the agent: sources, disk queue and collectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.agent.model import WhenFull
from lakebed.batches.model import LIMITS
from lakebed.core.settings import Contradiction, Secret, Section, describe

MIB = 1024 * 1024
BATCH_BYTES_MAX = 480_000  # a batch of the shortest names still fits into a frame's limits


class ScrapeTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One endpoint that serves Prometheus text; `labels` are added to each of its samples."""

    url: str
    labels: dict[str, str] = {}
    interval_s: float = 15.0
    timeout_s: float = 10.0

    @property
    def labels_fit(self) -> bool:
        """Whether a frame can carry them, with the `instance` that each sample gets too. Empty ones are left out."""
        given = {"instance": self.url} | self.labels
        return sum(map(bool, given.values())) <= LIMITS.labels_per_series and all(
            1 <= len(name.encode()) <= LIMITS.name_bytes and len(text.encode()) <= LIMITS.label_value_bytes
            for name, text in self.labels.items()
        )


class TickFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One folder whose subfolders are uploaded as ticks of a project, each once it holds `_manifest.json` or `_ready`.

    `keys` are primary keys by table, "" for all others; `keys` and `mode` apply to folders without a manifest.
    `org_id` and `api_secret` default to those of `ticks`, `urls` to the collectors.
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

    agent_id: Annotated[
        str, describe("Names this agent in every batch; empty means the host name.", when="two agents run on one host")
    ] = ""
    collectors: Annotated[
        tuple[str, ...],
        describe(
            "Lists the addresses of the collectors, http(s)://host:port.",
            when="the agent sends to a collector that is not on this machine, or to several",
        ),
    ] = ()
    token: Annotated[Secret, describe("Authenticates this agent at the collectors.", when="the gateway has keys")] = (
        Secret("")
    )

    config_url: Annotated[
        str,
        describe(
            "Address of the configuration snapshot, whose datalake_url replaces agent.collectors and the urls of "
            "agent.ticks; empty means no snapshot."
        ),
    ] = ""
    config_refresh_s: Annotated[float, describe("Fetches the configuration snapshot at this interval.")] = 60.0
    tls_ca: Annotated[
        Path | None,
        describe("PEM file of the authorities that collectors are verified with, instead of the system's."),
    ] = None
    tls_cert: Annotated[
        Path | None, describe("PEM file of a client certificate that authenticates this agent instead of a token.")
    ] = None
    tls_key: Annotated[Path | None, describe("PEM file of the key of agent.tls_cert.")] = None

    queue_dir: Annotated[
        Path,
        describe(
            "Folder of the disk queue; each agent needs its own.",
            when="the queue belongs on another disk, or several agents run on one host",
        ),
    ] = Path(".lakebed/agent-queue")
    queue_bytes_max: Annotated[
        int,
        describe(
            "Limits the disk space of the queue, parked batches included.",
            when="the agent must survive a longer outage of the collectors, or has less disk",
        ),
    ] = 1024 * MIB
    queue_batches_max: Annotated[
        int, describe("Limits how many batches may wait in the queue, which bounds the index in memory.")
    ] = 100_000
    when_full: Annotated[
        WhenFull,
        describe(
            "Chooses what happens when the queue is full: block stops the sources, drop_oldest deletes "
            "the oldest batches and counts them.",
            when="new samples matter more than old ones",
        ),
    ] = "block"

    batch_bytes: Annotated[int, describe("Closes a batch at this many uncompressed bytes.")] = 256 * 1024
    batch_samples_max: Annotated[int, describe("Closes a batch at this many samples.")] = 10_000
    batch_interval_s: Annotated[
        float,
        describe(
            "Limits how long a sample waits in memory before it is written to disk.",
            when="you want fewer and larger batches (higher), or less delay (lower)",
        ),
    ] = 5.0

    send_concurrency: Annotated[int, describe("Limits how many batches are sent at the same time.")] = 4
    request_timeout_s: Annotated[float, describe("Limits the total time of one request to a collector.")] = 30.0
    connect_timeout_s: Annotated[float, describe("Limits the time to open a connection to a collector.")] = 5.0
    hedge_after_s: Annotated[
        float, describe("Sends a batch to a second collector after this time without an answer; 0 turns it off.")
    ] = 2.0
    hedge_share_max: Annotated[
        float,
        describe("Limits the share of sends that are hedged, so that hedging cannot double the load of a slow store."),
    ] = 0.2
    retry_after_max_s: Annotated[float, describe("Limits the Retry-After value that the agent follows.")] = 300.0
    denied_retry_s: Annotated[
        float, describe("Waits this long after 401, 403 or a response that no collector returns.")
    ] = 60.0

    stdin: Annotated[
        bool,
        describe("Reads samples as JSON lines from standard input.", when="another program pipes samples to the agent"),
    ] = False
    stdin_acks: Annotated[bool, describe("Prints {durable_lines: n} to standard output after each fsync.")] = False
    line_bytes_max: Annotated[int, describe("Limits the length of one line of standard input.")] = 64 * 1024
    scrape: Annotated[
        tuple[ScrapeTarget, ...],
        describe("Lists Prometheus text endpoints to scrape.", when="the agent collects metrics from exporters"),
    ] = ()
    scrape_bytes_max: Annotated[int, describe("Limits the size of one scrape response.")] = 16 * MIB
    scrape_samples_max: Annotated[int, describe("Limits the number of samples in one scrape response.")] = 100_000
    otlp_port: Annotated[
        int,
        describe(
            "Port on loopback for OTLP/HTTP metrics, /metrics and /health; -1 turns it off.",
            when="applications on this host send OTLP",
        ),
    ] = -1
    otlp_bytes_max: Annotated[int, describe("Limits the size of one OTLP body, before and after decompression.")] = (
        4 * MIB
    )
    otlp_points_max: Annotated[int, describe("Limits the number of data points in one OTLP request.")] = 50_000
    host_interval_s: Annotated[
        float,
        describe(
            "Reads CPU, memory, disk and network metrics of this host at this interval; 0 turns it off.",
            when="you want metrics of the host itself",
        ),
    ] = 0.0

    ticks: Annotated[
        tuple[TickFolder, ...],
        describe(
            "Lists folders whose subfolders are uploaded as ticks.", when="files on this host are uploaded as tables"
        ),
    ] = ()
    ticks_parallel: Annotated[int, describe("Limits how many parts of one tick are uploaded at the same time.")] = 4

    stop_s: Annotated[float, describe("Limits how long the agent waits for running sends when it stops.")] = 5.0
    drain_s: Annotated[
        float, describe("Limits how long the agent sends queued batches after standard input has ended.")
    ] = 60.0

    def check(self) -> None:
        if self.config_url and not self.config_url.startswith(("http://", "https://")):
            raise Contradiction("agent.config_url", "agent.config_url", "is not an http(s) address")
        if self.config_refresh_s < 1:
            raise Contradiction("agent.config_refresh_s", "agent.config_refresh_s", "must be at least 1")
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
        if min(self.batch_interval_s, self.hedge_after_s, self.host_interval_s) < 0:
            raise Contradiction("agent.batch_interval_s", "agent.hedge_after_s", "times must not be negative")
        if not 1 <= self.send_concurrency <= 64:
            raise Contradiction("agent.send_concurrency", "agent.send_concurrency", "must be 1 to 64")
        if not 1 <= self.ticks_parallel <= 64 or any(each.interval_s < 0.1 for each in self.ticks):
            raise Contradiction(
                "agent.ticks", "agent.ticks_parallel", "interval_s must be at least 0.1, ticks_parallel 1 to 64"
            )
        if len({each.folder for each in self.ticks}) != len(self.ticks):
            raise Contradiction("agent.ticks", "agent.ticks", "a folder must belong to one project only")
        if any(target.interval_s < 0.1 or target.timeout_s <= 0 for target in self.scrape):
            raise Contradiction("agent.scrape", "agent.scrape", "interval_s must be at least 0.1, timeout_s above 0")
        if not all(target.labels_fit for target in self.scrape):
            raise Contradiction(
                "agent.scrape",
                "agent.scrape",
                f"a target has at most {LIMITS.labels_per_series - 1} labels, with names of 1 to {LIMITS.name_bytes} "
                f"bytes and values of at most {LIMITS.label_value_bytes} bytes",
            )
