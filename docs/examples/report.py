"""Writes an HTML page with charts, in one file: python docs/examples/report.py > page.html"""

from __future__ import annotations

from lakebed.console.report import ChartLine, HtmlReport

waits_ms = [5.0 + (n * 7919 % 97) / 4 for n in range(500)]
page = (
    HtmlReport("An example", "Generated sample data")
    .section("Throughput")
    .lines("Records", [ChartLine("in", tuple((float(t), 100.0 + 10 * (t % 5)) for t in range(60)))], unit="per second")
    .section("Latency")
    .histogram("Response time", waits_ms, unit="ms")
    .table(["what", "count"], [["responses", len(waits_ms)]])
)
print(page)
