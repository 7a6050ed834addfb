"""What a load test comes to: both sides' totals, compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lakebed.bench.scenarios import Scenario

BUSY = 0.8  # of a core: a generator above it may have been the bottleneck
ARTIFACTS = (
    "resolved-config.json",
    "environment.json",
    "stack.json",
    "routing-manifest.json",
    "metrics-30s.jsonl",
    "client-30s.jsonl",
    "remap-events.jsonl",
    "client-summary.json",
)


class ClientSummary(msgspec.Struct, frozen=True):
    """What clients asked for and were told."""

    acknowledged_records: int
    requests: int
    failed: int
    unknown: int
    statuses: dict[str, int]
    seconds: float
    latency_ms: dict[str, float]
    generator_cpu: float


class BrokerTotals(msgspec.Struct, frozen=True):
    """What brokers say they took and did, of their last samples. Requests are summed, what is stored is not theirs."""

    records: int
    record_bytes: int
    blobs: int
    meta_requests: int
    s3_requests: int
    s3_request_dollars: float
    s3_stored_bytes: int


class Summary(msgspec.Struct, frozen=True):
    scenario: str
    folder: str
    acknowledged_records: int
    accepted_records: int
    records_per_s: float
    latency_ms: dict[str, float]
    remaps: int
    generator_cpu: float
    warnings: list[str]
    brokers: BrokerTotals
    artifacts: dict[str, bool]


def quantiles(latencies_ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies_ms) or [0.0]
    return {
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[max(0, int(len(ordered) * 0.99) - 1)], 2),
        "max": round(ordered[-1], 2),
    }


def totals(samples: Mapping[str, Mapping[str, Any]]) -> BrokerTotals:
    """Request counts and their cost add up over processes; stored bytes are the same for all, so the largest counts."""
    each = list(samples.values())
    return BrokerTotals(
        records=int(sum(total(one, "lakebed_log_records_total", direction="in") for one in each)),
        record_bytes=int(sum(total(one, "lakebed_log_record_bytes_total", direction="in") for one in each)),
        blobs=int(sum(total(one, "lakebed_log_blobs_total") for one in each)),
        meta_requests=int(sum(total(one, "lakebed_meta_requests_total") for one in each)),
        s3_requests=int(sum(total(one, "lakebed_log_s3_requests_total") for one in each)),
        s3_request_dollars=sum(total(one, "lakebed_log_s3_request_cost_dollars") for one in each),
        s3_stored_bytes=int(max((total(one, "lakebed_log_s3_stored_bytes") for one in each), default=0)),
    )


def total(metrics: Mapping[str, Any], name: str, **labels: str) -> float:
    """The sum of a metric's series that carry these labels; one without labels is a bare number."""
    found = metrics.get(name, 0.0)
    if not isinstance(found, list):
        return float(found)
    return sum(float(one["value"]) for one in found if labels.items() <= dict(one["labels"]).items())


def warnings_of(
    scenario: Scenario,
    acknowledged: int,
    unknown: int,
    accepted: int,
    samples: Mapping[str, Any],
    cpu: float,
    artifacts: Mapping[str, bool] | None = None,
) -> list[str]:
    """Where the two sides of the run do not agree, or the run itself is not to be trusted."""
    found: list[str] = []
    doubtful = unknown * scenario.records_per_request
    if accepted < acknowledged and not scenario.kill_at_s:
        found.append(f"brokers took {accepted} records, but clients were acknowledged {acknowledged}")
    if accepted > acknowledged + doubtful:
        found.append(f"brokers took {accepted} records; clients know of {acknowledged} and {doubtful} doubtful ones")
    if len(samples) < scenario.brokers:
        found.append(f"only {len(samples)} of {scenario.brokers} brokers were ever sampled")
    if scenario.kill_at_s:
        found.append("a broker was killed: what it took after its last sample is not counted")
    if cpu > BUSY:
        found.append(f"the generator used {cpu:.2f} of a core: it may have been the bottleneck")
    if acknowledged == 0:
        found.append("nothing was acknowledged")
    found += [f"{name} is missing" for name, there in (artifacts or {}).items() if not there]
    return found
