"""From the table of metrics to panels: a board per part shows every metric of that part, an overview shows the flow.

A counter is shown as a rate, a gauge as the largest over processes, a histogram as its percentiles; labels are lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.dashboards.model import Board, Panel, Query
from lakebed.metrics import TABLE, Metric

WINDOW = "$__rate_interval"  # Grafana's name for a window that fits the zoom
SELECTED = 'instance=~"$instance"'

# The second word of a metric's name says whose it is; several may share a board.
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
    """The board a metric is shown on. Raises KeyError for a word that no board has: give it one in BOARDS."""
    word = metric.name.split("_")[1]
    return next((board for board, words in BOARDS.items() if word in words), "") or _unknown(metric)


def _unknown(metric: Metric) -> str:
    raise KeyError(f"{metric.name} is on no dashboard: name its second word in lakebed.dashboards.boards.BOARDS")


def panel(metric: Metric) -> Panel:
    """The plain panel of one metric."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or metric.name
    grouped = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    if metric.kind == "counter":
        queries: tuple[Query, ...] = (Query(f"sum{grouped} (rate({metric.name}{{{SELECTED}}}[{WINDOW}]))", legend),)
    elif metric.kind == "gauge":
        queries = (Query(f"max{grouped} ({metric.name}{{{SELECTED}}})", legend),)
    else:
        queries = percentiles(metric.name)
    return Panel(metric.name, metric.about, queries, unit=unit_of(metric))


def percentiles(name: str) -> tuple[Query, ...]:
    buckets = f"sum by (le) (rate({name}_bucket{{{SELECTED}}}[{WINDOW}]))"
    return tuple(Query(f"histogram_quantile({share}, {buckets})", word) for share, word in PERCENTILES)


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
    """Is it well, how much flows, what waits, what goes wrong, what does it cost."""
    return Board(
        "overview",
        "Lakebed: overview",
        "The flow through every part: rates, lag, trouble and requests.",
        (
            Panel("Processes", "Processes that answer.", (Query("count(lakebed_build_info)", ""),), kind="stat"),
            Panel(
                "Blockers",
                "Lifecycle streams that wait for an operator.",
                (Query("sum(lakebed_lifecycle_blocked_streams)", ""),),
                kind="stat",
            ),
            Panel(
                "Dead letters",
                "Batches and messages set aside.",
                (
                    Query("sum(max by (queue) (lakebed_queue_dead_letters))", "queue"),
                    Query('max(lakebed_ticks_queue_messages{state="dead"})', "ticks"),
                ),
                kind="stat",
            ),
            Panel(
                "Conflicts in an hour",
                "Other bytes under an accepted identity.",
                (Query('sum(increase(lakebed_batches_uploads_total{outcome="conflict"}[1h]))', ""),),
                kind="stat",
            ),
            Panel(
                "Flow",
                "What becomes durable, per second.",
                (
                    Query(_rate("lakebed_batches_samples_total"), "samples"),
                    Query(_rate("lakebed_log_records_total", where='direction="in"'), "log records"),
                    Query(_rate("lakebed_queue_entries_total"), "queue entries"),
                    Query(_rate("lakebed_ticks_rows_total"), "tick rows"),
                ),
                unit="ops",
            ),
            Panel(
                "Lag",
                "Age of the oldest thing that waits.",
                (
                    Query('max(lakebed_queue_oldest_age_seconds{state="pending"})', "queue"),
                    Query(_most("lakebed_batches_reconciler_lag_seconds"), "reconciler"),
                    Query(_most("lakebed_ticks_lag_seconds"), "silver"),
                    Query(_most("lakebed_lifecycle_watermark_lag_seconds"), "lifecycle"),
                ),
                unit="s",
            ),
            Panel(
                "Time to accept a batch",
                "The collectors' answer.",
                percentiles("lakebed_batches_accept_seconds"),
                unit="s",
            ),
            Panel("Time to answer", "Every HTTP route.", percentiles("lakebed_http_seconds"), unit="s"),
            Panel(
                "Answers by status",
                "HTTP.",
                (Query(_rate("lakebed_http_requests_total", "status"), "{{status}}"),),
                unit="ops",
            ),
            Panel(
                "Uploads by outcome",
                "Accepted, duplicate, conflict, failed.",
                (Query(_rate("lakebed_batches_uploads_total", "outcome"), "{{outcome}}"),),
                unit="ops",
            ),
            Panel(
                "Requests to the store",
                "By verb: these are what it costs.",
                (Query(_rate("lakebed_store_requests_total", "verb"), "{{verb}}"),),
                unit="ops",
            ),
            Panel(
                "Failures of the store",
                "By kind; not_found, conflict and stale are answers, not trouble.",
                (Query(_rate("lakebed_store_failures_total", "kind"), "{{kind}}"),),
                unit="ops",
            ),
            Panel(
                "Price of the log's requests",
                "Estimated at S3's list prices.",
                (Query("sum(lakebed_log_s3_request_cost_dollars)", "requests"),),
                unit="currencyUSD",
            ),
            Panel(
                "Workers started again",
                "After a failure.",
                (Query(_rate("lakebed_worker_restarts_total", "worker"), "{{worker}}"),),
                unit="ops",
            ),
        ),
    )
