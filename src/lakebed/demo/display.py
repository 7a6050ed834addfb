"""How the demo is shown: progress bars on a terminal, plain lines elsewhere, and an HTML report at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec

from lakebed.console.report import Cell, ChartLine, HtmlReport, ReportVerdict
from lakebed.demo.metrics import Observer, Reading, buckets, by, rates, total
from lakebed.demo.run import DemoResult
from lakebed.demo.scenario import DemoLog, ProgressLine, StepCount
from lakebed.store import prices

BLOCKS = " ▁▂▃▄▅▆▇█"
SPARK_POINTS = 30
LINE_MAX = 100
MARKS = {"line": "·", "fault": "⚡", "held": "✓", "broken": "✗"}


class FlowMetric(msgspec.Struct, frozen=True):
    """One data flow, counted by one metric."""

    name: str
    metric: str
    labels: dict[str, str] = {}


FLOWS = (
    FlowMetric("samples accepted", "lakebed_batches_samples_total"),
    FlowMetric("log records", "lakebed_log_records_total", {"direction": "in"}),
    FlowMetric("queue entries", "lakebed_queue_entries_total"),
    FlowMetric("tick rows in bronze", "lakebed_ticks_rows_total"),
    FlowMetric("objects expired", "lakebed_lifecycle_verdicts_total", {"outcome": "DELETED"}),
    FlowMetric("requests to the store", "lakebed_store_requests_total"),
)


def spark(values: list[float]) -> str:
    """The last values as a sparkline."""
    last = values[-SPARK_POINTS:]
    most = max(last, default=0.0)
    return "".join(BLOCKS[round(value / most * (len(BLOCKS) - 1))] if most > 0 else " " for value in last)


def plain(progress: ProgressLine) -> str:
    """The line as text. Several scenarios run at a time, so each line names its scenario."""
    if progress.kind == "begin":
        return f"{progress.scenario:<9} ▶ {progress.line}"
    if progress.kind == "end":
        return f"{progress.scenario:<9} ■"
    return f"{progress.scenario:<9} {MARKS[progress.kind]} {progress.line}"


class PlainDisplay:
    """Prints lines only."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def report(self, progress: ProgressLine) -> None:
        self._say(plain(progress))

    def say(self, line: str) -> None:
        self._say(line)


class LiveDisplay:
    """Prints lines, and below them a table with progress bars. For a terminal."""

    def __init__(self, observer: Observer, log: DemoLog) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._observer, self._log = observer, log
        self._doing: dict[str, str] = {}
        self._console = Console(stderr=True)
        self._live = RichLive(console=self._console, get_renderable=self.picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def report(self, progress: ProgressLine) -> None:
        if progress.kind == "end":
            self._doing.pop(progress.scenario, None)
        else:
            self._doing[progress.scenario] = progress.line
            self.say(plain(progress))

    def say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line))  # Text: markup in the line is inert

    def picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("", "so far", "", "per second", ""):
            table.add_column(name, justify="right" if name else "left")
        reading = self._observer.last
        for flow in FLOWS:
            so_far = total(reading, flow.metric, **flow.labels)
            per_s = [rate for _, rate in rates(self._observer.totals(flow.metric, **flow.labels)[-SPARK_POINTS - 8 :])]
            wanted = self._log.expected.get(flow.name, 0.0)
            bar: Any = ProgressBar(total=wanted, completed=min(so_far, wanted), width=24) if wanted else Text("")
            rate = f"{per_s[-1]:,.0f}" if per_s else "0"
            table.add_row(flow.name, f"{so_far:,.0f}", bar, rate, Text(spark(per_s), style="cyan"))
        held = sum(each.held for each in self._log.proven)
        head = Text(f"\n{self._observer.now_s():5.0f} s   {held} of {len(self._log.proven)} invariants held\n")
        doing = [Text(f"{name:<9} {line}"[:LINE_MAX], style="dim") for name, line in self._doing.items()]
        return Group(head, table, Text(""), *doing)


LATENCIES = (
    ("Accepting a batch", "lakebed_batches_accept_seconds"),
    ("Handling an HTTP request", "lakebed_http_seconds"),
    ("Flushing a queue batch", "lakebed_queue_flush_seconds"),
    ("Finalizing a tick", "lakebed_ticks_finalize_seconds"),
)
LAGS = {
    "lakebed_queue_oldest_age_seconds": "queue: oldest batch",
    "lakebed_ticks_lag_seconds": "ticks: oldest without silver",
    "lakebed_batches_reconciler_lag_seconds": "batches: reconciler",
    "lakebed_lifecycle_watermark_lag_seconds": "lifecycle: cursor",
}
LABELLED = ("lakebed_queue_oldest_age_seconds",)
FALLS = "It falls at a fault and recovers after it; nothing that was acknowledged is lost."
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
    ("failovers", "lakebed_queue_takeovers_total", {}),
    ("fenced", "lakebed_queue_fenced_total", {}),
    ("dead letters", "lakebed_queue_buried_total", {}),
    ("unknown outcomes", "lakebed_store_doubts_total", {}),
)


def html_report(outcome: DemoResult, observer: Observer, *, scale: float, seed: int) -> HtmlReport:
    held = sum(each.held for each in outcome.proven)
    last = observer.last
    requests = by(last, "lakebed_store_requests_total", "verb")
    page = HtmlReport("Lakebed demo", f"seed {seed}, scale {scale:g}, {outcome.total_s:.0f} s on this machine")
    page.section("Totals", "The number of items after each step, read back from the bucket.").facts(
        {
            "invariants held": f"{held} of {len(outcome.proven)}",
            "faults injected": len(outcome.faults),
            "requests to the store": int(sum(requests.values())),
            "cost at S3 list prices": f"${prices.dollars(requests):.4f}",
        }
    )
    page.machine()
    page.table(["thing", "step", "count"], [[each.thing, each.step, each.count] for each in by_thing(outcome.counted)])
    page.section("Injected faults").table(
        ["at", "part", "fault"], [[f"{each.at_s:.1f} s", each.scenario, each.what] for each in outcome.faults]
    )
    _throughput(page, outcome, observer)
    _latency(page, last)
    page.section("Duplicates and conflicts", "Effects of retries, races and failovers: counted, never applied.")
    page.bars("Count", {name: total(last, metric, **labels) for name, metric, labels in TROUBLES})
    _lag(page, observer)
    _requests(page, observer, requests)
    page.section("Durations", "How long each scenario took; several run at a time.").bars(
        "Scenarios", outcome.seconds, unit="s"
    )
    page.section("Checks").verdicts(
        [
            ReportVerdict(each.name, each.held, each.seen, each.scenario)
            for each in sorted(outcome.proven, key=lambda each: each.held)
        ]
    )
    return page.section("Next commands").code("\n".join(("lakebed up --detach", *outcome.next)))


def by_thing(counted: Sequence[StepCount]) -> list[StepCount]:
    """The steps of one thing together, things in the order in which they were first counted."""
    first = {each.thing: at for at, each in reversed(list(enumerate(counted)))}
    return sorted(counted, key=lambda each: first[each.thing])


def _throughput(page: HtmlReport, outcome: DemoResult, observer: Observer) -> None:
    marks = [(fault.at_s, fault.what) for fault in outcome.faults]
    page.section("Throughput", "Each dashed line is a fault. The last half second of a killed process is not counted.")
    for flow in FLOWS[:3]:
        moved = rates(observer.totals(flow.metric, **flow.labels))
        page.lines(flow.name, [ChartLine(flow.name, tuple(moved))], unit="per second", marks=marks, about=FALLS)


def _latency(page: HtmlReport, last: Reading) -> None:
    page.section("Latency", "Distribution of response times over all processes; each bar is a bucket of the metric.")
    for title, name in LATENCIES:
        page.buckets(title, buckets(last, name))


def _lag(page: HtmlReport, observer: Observer) -> None:
    page.section("Lag", "Data that is accepted and not yet processed further.")
    for title, names, unit in (("Age", LAGS, "s"), ("Backlog", BACKLOGS, "waiting")):
        waiting = {"state": "pending"}  # of the queue's ages; the others have no such label
        peaks = {name: observer.peaks(name, **(waiting if name in LABELLED else {})) for name in names}
        lines = [ChartLine(about, tuple(peaks[name])) for name, about in names.items()]
        shown = [line for line in lines if any(y for _, y in line.points)]
        page.lines(title, shown, unit=unit, about="Lines that return to zero: what waited was processed.")


def _requests(page: HtmlReport, observer: Observer, requests: dict[str, float]) -> None:
    page.section(
        "Requests and their cost",
        "Every request of the gateways, the workers and the scenarios' processes to the bucket, "
        "at the list prices of S3 Standard.",
    )
    verbs = [verb for verb in prices.DOLLARS if requests.get(verb)]
    series = [
        ChartLine(verb, tuple(rates(observer.totals("lakebed_store_requests_total", verb=verb)))) for verb in verbs
    ]
    page.stacked("Requests", series, unit="per second", about="Each band is a verb; the top is all of them.")
    rows: list[list[Cell]] = [[verb, int(requests[verb]), prices.DOLLARS[verb] * requests[verb]] for verb in verbs]
    page.table(["verb", "requests", "dollars"], [*rows, ["all", int(sum(requests.values())), prices.dollars(requests)]])
