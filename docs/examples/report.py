"""A page with plots and no script: python docs/examples/report.py > page.html"""

from __future__ import annotations

from lakebed.report import Line, Report

waits_ms = [5.0 + (n * 7919 % 97) / 4 for n in range(500)]
page = (
    Report("An example", "Nothing here is real")
    .section("Throughput")
    .lines("Records", [Line("in", tuple((float(t), 100.0 + 10 * (t % 5)) for t in range(60)))], unit="per second")
    .section("Latency")
    .histogram("Time to answer", waits_ms, unit="ms")
    .table(["what", "how many"], [["answers", len(waits_ms)]])
)
print(page)
