"""A load test as a page: what was asked, what came of it, how it went over time, and what does not add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from lakebed.bench.loadtest_summary import Summary
from lakebed.bench.routing import Manifest
from lakebed.bench.scenarios import Scenario
from lakebed.report.model import Line
from lakebed.report.page import Report

Rows = Sequence[Mapping[str, Any]]


def page(
    scenario: Scenario,
    summary: Summary,
    manifest: Manifest,
    *,
    client: Rows,
    brokers: Rows,
    latencies_ms: Sequence[float],
    events: Rows,
) -> str:
    report = Report(
        f"Load test: {scenario.name}", "Brokers as processes, a routing manifest, a hammer over raw sockets."
    )
    report.facts(
        {
            "records/s acknowledged": round(summary.records_per_s),
            "records acknowledged": summary.acknowledged_records,
            "records taken by brokers": summary.accepted_records,
            "p50, ms": summary.latency_ms["p50"],
            "p99, ms": summary.latency_ms["p99"],
            "remaps": summary.remaps,
            "generator's CPU, of a core": summary.generator_cpu,
        }
    )
    report.section("What does not add up")
    for warning in summary.warnings or ["Nothing: both sides agree."]:
        report.text(warning)
    marks = [(event["at_s"], f"{event['killed']} killed") for event in events if "killed" in event]
    names = sorted({row["broker"] for row in brokers})
    report.section("Over time")
    report.lines("Records acknowledged", [_rate("client", client, "acknowledged")], unit="records/s", marks=marks)
    taken = [_rate(name, _of(brokers, name), "records") for name in names]
    report.stacked("Records taken, by broker", taken, unit="records/s")
    spread = [Line(name, tuple((row["at_s"], row["latency_ms"][name]) for row in client)) for name in ("p50", "p99")]
    report.lines("Latency of a produce", spread, unit="ms", marks=marks)
    busy = [_rate(name, _of(brokers, name), "cpu_s") for name in names]
    report.lines("CPU", [*busy, _rate("generator", client, "cpu_s")], unit="of a core", marks=marks)
    report.section("Latency").histogram("Every produce", latencies_ms, unit="ms")
    report.section("Routing", "How many partitions each broker is an owner of.")
    report.bars(
        "Partitions", {name: float(sum(name in r.owners for r in manifest.routes)) for name in manifest.brokers}
    )
    report.section("The brokers' totals")
    report.table(("what", "how many"), [*msgspec.structs.asdict(summary.brokers).items()])
    report.section("The scenario").table(
        ("setting", "value"), [(name, str(value)) for name, value in msgspec.structs.asdict(scenario).items()]
    )
    return str(report)


def _of(brokers: Rows, name: str) -> list[dict[str, Any]]:
    return [{**row, "cpu_s": row["process"]["cpu_s"]} for row in brokers if row["broker"] == name]


def _rate(name: str, rows: Rows, field: str) -> Line:
    """A counter as what was added per second between two samples."""
    points = [
        (after["at_s"], (after[field] - before[field]) / (after["at_s"] - before["at_s"]))
        for before, after in pairwise(rows)
        if after["at_s"] > before["at_s"]
    ]
    return Line(name, tuple(points))
