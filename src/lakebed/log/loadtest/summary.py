"""The result of a load test: totals of clients and brokers, compared, and the report page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from lakebed.console.report import ChartLine, HtmlReport
from lakebed.log.loadtest.plan import LoadTestScenario, RoutingManifest

ANOMALIES_MAX = 100  # in a summary: where one record is wrong, all that follow may be
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

Rows = Sequence[Mapping[str, Any]]


class ClientSummary(msgspec.Struct, frozen=True):
    """Requests of the clients and their outcomes."""

    acknowledged_records: int
    requests: int
    failed: int
    unknown: int
    statuses: dict[str, int]
    seconds: float
    latency_ms: dict[str, float]
    generator_cpu: float


class BrokerTotals(msgspec.Struct, frozen=True):
    """Totals of the last samples of brokers and compactors. Requests are summed; stored bytes are not: all see the same
    bucket."""

    records: int
    record_bytes: int
    blobs: int
    compacted_blobs: int
    compacted_bytes: int
    meta_requests: int
    s3_requests: int
    s3_request_dollars: float
    s3_stored_bytes: int


class OtherLoad(msgspec.Struct, frozen=True):
    """What Kafka clients were acknowledged and read, and what consumers read of the HTTP clients' partitions.

    `kafka_anomalies` are those of the history of the Kafka clients, the first `ANOMALIES_MAX`.
    """

    kafka_records: int = 0
    consumed_records: int = 0
    gaps: int = 0
    kafka_consumed: int = 0
    kafka_anomalies: Sequence[str] = ()


class LoadTestSummary(msgspec.Struct, frozen=True):
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
    others: OtherLoad = OtherLoad()


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
        compacted_blobs=int(sum(total(one, "lakebed_log_compacted_blobs_total") for one in each)),
        compacted_bytes=int(sum(total(one, "lakebed_log_compacted_bytes_total") for one in each)),
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
    scenario: LoadTestScenario,
    acknowledged: int,
    unknown: int,
    accepted: int,
    samples: Mapping[str, Any],
    cpu: float,
    artifacts: Mapping[str, bool] | None = None,
    others: OtherLoad = OtherLoad(),
) -> list[str]:
    """Where clients and brokers disagree, or the run itself is not reliable."""
    found: list[str] = []
    if others.gaps:
        found.append(f"consumers found {others.gaps} gaps between offsets")
    if scenario.consumers and others.consumed_records < acknowledged:
        found.append(f"consumers read {others.consumed_records} of {acknowledged} acknowledged records")
    if scenario.kafka_clients and not others.kafka_records:
        found.append("no Kafka client was acknowledged anything: is confluent-kafka installed?")
    if others.kafka_anomalies:
        found.append(f"the history of the Kafka clients has anomalies: {'; '.join(others.kafka_anomalies[:3])}")
    if scenario.kafka_consumers and others.kafka_consumed < others.kafka_records:
        found.append(f"Kafka consumers read {others.kafka_consumed} of {others.kafka_records} acknowledged records")
    acknowledged += others.kafka_records
    doubtful = unknown * scenario.records_per_request
    if accepted < acknowledged and not scenario.kill_at_s:
        found.append(f"brokers accepted {accepted} records, but clients saw {acknowledged} acknowledged")
    if accepted > acknowledged + doubtful:
        found.append(
            f"brokers accepted {accepted} records; clients saw {acknowledged} acknowledged and {doubtful} doubtful"
        )
    if len(samples) < scenario.brokers + scenario.compactors:
        found.append(f"only {len(samples)} of {scenario.brokers + scenario.compactors} processes were sampled")
    if scenario.kill_at_s:
        found.append("a broker was killed: records that it accepted after its last sample are not counted")
    if cpu > BUSY:
        found.append(f"the generator used {cpu:.2f} of a core: it may have been the bottleneck")
    if acknowledged == 0:
        found.append("nothing was acknowledged")
    found += [f"{name} is missing" for name, there in (artifacts or {}).items() if not there]
    return found


def page(
    scenario: LoadTestScenario,
    summary: LoadTestSummary,
    manifest: RoutingManifest,
    *,
    client: Rows,
    brokers: Rows,
    latencies_ms: Sequence[float],
    events: Rows,
    note: str = "",
) -> str:
    report = HtmlReport(
        f"Load test: {scenario.name}", "Brokers as processes, a routing manifest, clients over raw sockets."
    )
    report.facts(
        {
            "records/s acknowledged": round(summary.records_per_s),
            "records acknowledged": summary.acknowledged_records,
            "records accepted by brokers": summary.accepted_records,
            "p50, ms": summary.latency_ms["p50"],
            "p99, ms": summary.latency_ms["p99"],
            "records acknowledged to Kafka clients": summary.others.kafka_records,
            "records consumed by Kafka clients": summary.others.kafka_consumed,
            "records consumed": summary.others.consumed_records,
            "remaps": summary.remaps,
            "generator's CPU, of a core": summary.generator_cpu,
        }
    )
    report.text(
        f"{round(summary.records_per_s):,} records/s were acknowledged, half of the produces within"
        f" {summary.latency_ms['p50']:g} ms and 99 of 100 within {summary.latency_ms['p99']:g} ms;"
        f" {'no warning' if not summary.warnings else f'{len(summary.warnings)} warnings'}."
    )
    report.machine()
    if note:
        report.text(note)
    report.section("Warnings")
    for warning in summary.warnings or ["None: clients and brokers agree."]:
        report.text(warning)
    _over_time(report, manifest, client, brokers, events)
    report.section("Latency").histogram(
        "Every produce", latencies_ms, unit="ms", about="A long tail to the right is what p99 measures."
    )
    owned = {name: sum(name in route.owners for route in manifest.routes) for name in manifest.brokers}
    report.section("Routing").text(
        "Partitions of each broker: " + ", ".join(f"{n} {c}" for n, c in owned.items()) + "."
    )
    report.section("Broker totals")
    report.table(("metric", "total"), [*msgspec.structs.asdict(summary.brokers).items()])
    report.section("The scenario").table(
        ("setting", "value"), [(name, str(value)) for name, value in msgspec.structs.asdict(scenario).items()]
    )
    return str(report)


def _over_time(report: HtmlReport, manifest: RoutingManifest, client: Rows, brokers: Rows, events: Rows) -> None:
    marks = [(event["at_s"], f"{event['killed']} killed") for event in events if "killed" in event]
    names = sorted({row["broker"] for row in brokers})
    report.section("Over time")
    report.lines(
        "Records acknowledged", [_rate("client", client, "acknowledged")], unit="records/s", marks=marks,
        about="A level line is steady; after a dashed line, a killed broker, it drops and recovers.",
    )  # fmt: skip
    taken = [_rate(name, _of(brokers, name), "records") for name in manifest.brokers]
    report.lines(
        "Records accepted, by broker", taken, unit="records/s", marks=marks,
        about="Lines near each other share the load; the line of a killed broker ends.",
    )  # fmt: skip
    spread = [
        ChartLine(name, tuple((row["at_s"], row["latency_ms"][name]) for row in client)) for name in ("p50", "p99")
    ]
    report.lines(
        "Latency of a produce", spread, unit="ms", marks=marks,
        about="The 99th percentile shows pauses that the median hides.",
    )  # fmt: skip
    busy = [_rate(name, _of(brokers, name), "cpu_s") for name in names]
    report.lines(
        "CPU", [*busy, _rate("generator", client, "cpu_s")], unit="of a core", marks=marks,
        about="A line near 1 is a process that is the bottleneck; near it for the generator, the test is.",
    )  # fmt: skip


def _of(brokers: Rows, name: str) -> list[dict[str, Any]]:
    return [{**row, "cpu_s": row["process"]["cpu_s"]} for row in brokers if row["broker"] == name]


def _rate(name: str, rows: Rows, field: str) -> ChartLine:
    """A counter as what was added per second between two samples."""
    points = [
        (after["at_s"], (after[field] - before[field]) / (after["at_s"] - before["at_s"]))
        for before, after in pairwise(rows)
        if after["at_s"] > before["at_s"]
    ]
    return ChartLine(name, tuple(points))
