"""From the table of metrics to panels: one board per part with every metric of that part, and an overview.

A counter is shown as a rate, a gauge as the largest over processes, a histogram as its percentiles; labels are lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.console.dashboards.model import Board, Panel, PanelQuery
from lakebed.core.metrics import TABLE, Metric

WINDOW = "$__rate_interval"  # Grafana's name for a window that fits the zoom
SELECTED = 'instance=~"$instance"'

# The second word of a metric's name is its group; several groups may share a board.
BOARDS: dict[str, tuple[str, ...]] = {
    "store": ("store", "register"),
    "batches": ("batches",),
    "agent": ("agent",),
    "queue": ("queue",),
    "log": ("log", "meta"),
    "ticks": ("ticks",),
    "pipeline": (
        "silver",
        "gold",
        "bronze",
        "pipeline",
        "rollup",
        "rollups",
        "audit",
        "table",
        "tables",
        "spark",
        "lineage",
    ),
    "lifecycle": ("lifecycle",),
    "gateway": ("http", "worker", "build", "console", "trace"),
}
PERCENTILES = (("0.5", "p50"), ("0.95", "p95"), ("0.99", "p99"))


def board_of(metric: Metric) -> str:
    """The board that shows a metric. Raises KeyError for a group without a board: add it to BOARDS."""
    word = metric.name.split("_")[1]
    return next((board for board, words in BOARDS.items() if word in words), "") or _unknown(metric)


def _unknown(metric: Metric) -> str:
    raise KeyError(f"{metric.name} is on no dashboard: add its second word to lakebed.console.dashboards.boards.BOARDS")


def panel(metric: Metric) -> Panel:
    """The panel of one metric."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or metric.name
    grouped = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    if metric.kind == "counter":
        rate = f"sum{grouped} (rate({metric.name}{{{SELECTED}}}[{WINDOW}]))"
        queries: tuple[PanelQuery, ...] = (PanelQuery(rate, legend),)
    elif metric.kind == "gauge":
        queries = (PanelQuery(f"max{grouped} ({metric.name}{{{SELECTED}}})", legend),)
    else:
        queries = percentiles(metric.name)
    return Panel(metric.name, metric.about, queries, unit=unit_of(metric))


def percentiles(name: str) -> tuple[PanelQuery, ...]:
    buckets = f"sum by (le) (rate({name}_bucket{{{SELECTED}}}[{WINDOW}]))"
    return tuple(PanelQuery(f"histogram_quantile({share}, {buckets})", word) for share, word in PERCENTILES)


def unit_of(metric: Metric) -> str:
    if "dollars" in metric.name:
        return "currencyUSD"
    if "bytes" in metric.name:
        return "Bps" if metric.kind == "counter" else "bytes"
    if "seconds" in metric.name:
        return "s"
    return "ops" if metric.kind == "counter" else "short"


def boards(table: Sequence[Metric] = TABLE) -> list[Board]:
    """The overview, then one board per part in the order of BOARDS."""
    shown: dict[str, list[Panel]] = {name: [] for name in BOARDS}
    for metric in table:
        shown[board_of(metric)].append(panel(metric))
    parts = [
        Board(name, f"Lakebed: {name}", f"Every metric of {name}.", tuple(panels))
        for name, panels in shown.items()
        if panels
    ]
    return [overview(), *parts]


def _rate(name: str, by: str = "", where: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({name}{{{', '.join(filter(None, (where, SELECTED)))}}}[{WINDOW}]))"


def _most(name: str, by: str = "") -> str:
    return f"max{f' by ({by})' if by else ''} ({name}{{{SELECTED}}})"


def overview() -> Board:
    """Health, throughput, lag, errors and cost."""
    about = "All parts: throughput, lag, errors and requests."
    return Board("overview", "Lakebed: overview", about, (*_status(), *_flow(), *_cost()))


def _status() -> tuple[Panel, ...]:
    """What needs attention, as single numbers."""
    return (
        Panel(
            "Processes",
            "Processes that Prometheus scrapes.",
            (PanelQuery("count(lakebed_build_info)", ""),),
            kind="stat",
        ),
        Panel(
            "Blockers",
            "Lifecycle streams that wait for an operator.",
            (PanelQuery("sum(lakebed_lifecycle_blocked_streams)", ""),),
            kind="stat",
        ),
        Panel(
            "Dead letters",
            "Batches and messages in the dead letters.",
            (
                PanelQuery("sum(max by (queue) (lakebed_queue_dead_letters))", "queue"),
                PanelQuery('max(lakebed_ticks_queue_messages{state="dead"})', "ticks"),
            ),
            kind="stat",
        ),
        Panel(
            "Conflicts in 1 hour",
            "Uploads with the id of an accepted batch but different content.",
            (PanelQuery('sum(increase(lakebed_batches_uploads_total{outcome="conflict"}[1h]))', ""),),
            kind="stat",
        ),
    )


def _flow() -> tuple[Panel, ...]:
    """Throughput, lag and response times."""
    return (
        Panel(
            "Throughput",
            "Durable samples, records, entries and rows per second.",
            (
                PanelQuery(_rate("lakebed_batches_samples_total"), "samples"),
                PanelQuery(_rate("lakebed_log_records_total", where='direction="in"'), "log records"),
                PanelQuery(_rate("lakebed_queue_entries_total"), "queue entries"),
                PanelQuery(_rate("lakebed_ticks_rows_total"), "tick rows"),
            ),
            unit="ops",
        ),
        Panel(
            "Lag",
            "Age of the oldest item that waits.",
            (
                PanelQuery('max(lakebed_queue_oldest_age_seconds{state="pending"})', "queue"),
                PanelQuery(_most("lakebed_batches_reconciler_lag_seconds"), "reconciler"),
                PanelQuery(_most("lakebed_ticks_lag_seconds"), "silver"),
                PanelQuery(_most("lakebed_lifecycle_watermark_lag_seconds"), "lifecycle"),
            ),
            unit="s",
        ),
        Panel(
            "Time to accept a batch",
            "Response time of the collectors.",
            percentiles("lakebed_batches_accept_seconds"),
            unit="s",
        ),
        Panel("HTTP response time", "All routes.", percentiles("lakebed_http_seconds"), unit="s"),
        Panel(
            "HTTP responses by status",
            "All routes.",
            (PanelQuery(_rate("lakebed_http_requests_total", "status"), "{{status}}"),),
            unit="ops",
        ),
        Panel(
            "Uploads by outcome",
            "Accepted, duplicate, conflict, failed.",
            (PanelQuery(_rate("lakebed_batches_uploads_total", "outcome"), "{{outcome}}"),),
            unit="ops",
        ),
    )


def _cost() -> tuple[Panel, ...]:
    """Requests to the store, failures, cost and restarts."""
    return (
        Panel(
            "Requests to the store",
            "By verb. Requests are the cost of the store.",
            (PanelQuery(_rate("lakebed_store_requests_total", "verb"), "{{verb}}"),),
            unit="ops",
        ),
        Panel(
            "Store failures",
            "By kind. not_found, conflict and stale are expected results.",
            (PanelQuery(_rate("lakebed_store_failures_total", "kind"), "{{kind}}"),),
            unit="ops",
        ),
        Panel(
            "Cost of the log's requests",
            "Estimated from the list prices of S3.",
            (PanelQuery("sum(lakebed_log_s3_request_cost_dollars)", "requests"),),
            unit="currencyUSD",
        ),
        Panel(
            "Worker restarts",
            "Restarts after a failure.",
            (PanelQuery(_rate("lakebed_worker_restarts_total", "worker"), "{{worker}}"),),
            unit="ops",
        ),
    )
