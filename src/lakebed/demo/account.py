"""The demo as a page: what was proven, what was broken on purpose, and how the numbers moved meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.demo.live import FLOWS
from lakebed.demo.numbers import Observer, Reading, buckets, by, rates, total
from lakebed.demo.run import Outcome
from lakebed.demo.stage import Counted
from lakebed.report import Line, Report, Verdict
from lakebed.report.page import Cell
from lakebed.store import prices

LATENCIES = (
    ("Accepting a batch", "lakebed_batches_accept_seconds"),
    ("Answering an HTTP request", "lakebed_http_seconds"),
    ("Making a queue's batch durable", "lakebed_queue_flush_seconds"),
    ("Finalizing a tick", "lakebed_ticks_finalize_seconds"),
)
LAGS = {
    "lakebed_queue_oldest_age_seconds": "queue: oldest batch",
    "lakebed_ticks_lag_seconds": "ticks: oldest without silver",
    "lakebed_batches_reconciler_lag_seconds": "batches: reconciler",
    "lakebed_lifecycle_watermark_lag_seconds": "lifecycle: cursor",
}
LABELLED = ("lakebed_queue_oldest_age_seconds",)
BACKLOGS = {
    "lakebed_batches_aftermath_waiting": "derived writes waiting",
    "lakebed_queue_length": "queue batches waiting",
    "lakebed_log_compaction_lag_records": "log records not compacted",
    "lakebed_ticks_undispatched": "ticks without silver",
    "lakebed_lifecycle_pending_size": "lifecycle exceptions waiting",
}
TROUBLES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("accepted", "lakebed_batches_uploads_total", {"outcome": "accepted"}),
    ("duplicates", "lakebed_batches_uploads_total", {"outcome": "duplicate"}),
    ("conflicts", "lakebed_batches_uploads_total", {"outcome": "conflict"}),
    ("hedged", "lakebed_agent_hedges_total", {}),
    ("lost swaps", "lakebed_log_lost_swaps_total", {}),
    ("races lost", "lakebed_register_conflicts_total", {}),
    ("takeovers", "lakebed_queue_takeovers_total", {}),
    ("fenced", "lakebed_queue_fenced_total", {}),
    ("buried", "lakebed_queue_buried_total", {}),
    ("doubts", "lakebed_store_doubts_total", {}),
)


def account(outcome: Outcome, observer: Observer, *, scale: float, seed: int) -> Report:
    held = sum(each.held for each in outcome.proven)
    last = observer.last
    requests = by(last, "lakebed_store_requests_total", "verb")
    page = Report("Lakebed demo", f"seed {seed}, scale {scale:g}, {outcome.total_s:.0f} s on this machine")
    page.section("Totals", "How many of each thing there were after each step, read back from the bucket.").facts(
        {
            "invariants held": f"{held} of {len(outcome.proven)}",
            "faults injected": len(outcome.faults),
            "requests to the store": int(sum(requests.values())),
            "what S3 would charge": f"${prices.dollars(requests):.4f}",
        }
    )
    page.table(["thing", "step", "count"], [[each.thing, each.step, each.count] for each in by_thing(outcome.counted)])
    page.section("What was broken on purpose").table(
        ["at", "part", "fault"], [[f"{each.at_s:.1f} s", each.scenario, each.what] for each in outcome.faults]
    )
    _throughput(page, outcome, observer)
    _latency(page, last)
    page.section("Duplicates and conflicts", "What retries, races and take-overs left behind: counted, never applied.")
    page.bars("How often", {name: total(last, metric, **labels) for name, metric, labels in TROUBLES})
    _lag(page, observer)
    _requests(page, observer, requests)
    page.section("How long it took").bars("Scenarios", outcome.seconds, unit="s")
    page.section("Every invariant").verdicts(
        [
            Verdict(each.name, each.held, each.seen, each.scenario)
            for each in sorted(outcome.proven, key=lambda each: each.held)
        ]
    )
    return page.section("What to type next").code("\n".join(outcome.next))


def by_thing(counted: Sequence[Counted]) -> list[Counted]:
    """The steps of one thing beside each other, things in the order in which they were first seen."""
    first = {each.thing: at for at, each in reversed(list(enumerate(counted)))}
    return sorted(counted, key=lambda each: first[each.thing])


def _throughput(page: Report, outcome: Outcome, observer: Observer) -> None:
    marks = [(fault.at_s, fault.what) for fault in outcome.faults]
    page.section(
        "Throughput", "Each dashed line is a fault. What a killed process counted in its last half second is not here."
    )
    for flow in FLOWS[:3]:
        moved = rates(observer.totals(flow.metric, **flow.labels))
        page.lines(flow.name, [Line(flow.name, tuple(moved))], unit="per second", marks=marks)


def _latency(page: Report, last: Reading) -> None:
    page.section("Latency", "How many answers took how long, over all processes; each bar is a bucket of the metric.")
    for title, name in LATENCIES:
        page.buckets(title, buckets(last, name))


def _lag(page: Report, observer: Observer) -> None:
    page.section("Lag", "What was accepted and not derived yet.")
    for title, names, unit in (("Age", LAGS, "s"), ("Backlog", BACKLOGS, "waiting")):
        waiting = {"state": "pending"}  # of the queue's ages; the others have no such label
        peaks = {name: observer.peaks(name, **(waiting if name in LABELLED else {})) for name in names}
        lines = [Line(about, tuple(peaks[name])) for name, about in names.items()]
        page.lines(title, [line for line in lines if any(y for _, y in line.points)], unit=unit)


def _requests(page: Report, observer: Observer, requests: dict[str, float]) -> None:
    page.section(
        "Requests and their price",
        "Every request of the gateways, the workers and the scenarios' processes to the bucket, "
        "at the prices of S3 Standard.",
    )
    verbs = [verb for verb in prices.DOLLARS if requests.get(verb)]
    series = [Line(verb, tuple(rates(observer.totals("lakebed_store_requests_total", verb=verb)))) for verb in verbs]
    page.stacked("Requests", series, unit="per second")
    rows: list[list[Cell]] = [[verb, int(requests[verb]), prices.DOLLARS[verb] * requests[verb]] for verb in verbs]
    page.table(["verb", "requests", "dollars"], [*rows, ["all", int(sum(requests.values())), prices.dollars(requests)]])
