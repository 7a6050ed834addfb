"""Every alert on made-up series: silent just under its threshold, raised just over it, one for each subject.

A small evaluator of the PromQL that the rules use. Series are straight lines, so that a rate is the slope and an
increase is the slope times the range.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import promql_parser
import pytest
import yaml

from lakebed.console.dashboards.alerts import ALERTS
from lakebed.console.dashboards.export import rules

NOW_S = 7200.0
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
MINUTE, HOUR = 60.0, 3600.0
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq,
}  # fmt: skip
FOLD: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


class Line(NamedTuple):
    """One series: its value now, and how much it grows each second."""

    name: str
    labels: dict[str, str]
    value: float = 0.0
    slope: float = 0.0

    def at(self, ago_s: float) -> float:
        return self.value - self.slope * ago_s


def line(name: str, value: float = 0.0, slope: float = 0.0, **labels: str) -> Line:
    return Line(f"lakebed_{name}", labels, value, slope)


def grows(name: str, slope: float, **labels: str) -> Line:
    return line(name, 1e9, slope, **labels)


def times(name: str, up_to: dict[str, float], **labels: str) -> list[Line]:
    """The buckets of a histogram, each with its rate of observations up to a bound."""
    return [grows(f"{name}_bucket", slope, le=le, **labels) for le, slope in up_to.items()]


def evaluate(expr: str, series: list[Line]) -> Vector | float:
    return _value(promql_parser.parse(expr), series)


def _matches(one: Line, selector: Any) -> bool:
    if one.name != selector.name:
        return False
    for matcher in selector.matchers.matchers:
        has, how = one.labels.get(matcher.name, ""), str(matcher.op)
        regex = re.fullmatch(matcher.value, has) is not None
        assert how in ("MatchOp.Equal", "MatchOp.Re", "MatchOp.NotEqual", "MatchOp.NotRe"), how
        if not {
            "MatchOp.Equal": has == matcher.value,
            "MatchOp.NotEqual": has != matcher.value,
            "MatchOp.Re": regex,
            "MatchOp.NotRe": not regex,
        }[how]:
            return False
    return True


def _selected(selector: Any, series: list[Line]) -> dict[Labels, Line]:
    return {frozenset(one.labels.items()): one for one in series if _matches(one, selector)}


def _value(node: Any, series: list[Line]) -> Vector | float:
    kind = type(node).__name__
    if kind == "NumberLiteral":
        return float(node.val)
    if kind == "ParenExpr":
        return _value(node.expr, series)
    if kind == "VectorSelector":
        return {labels: one.value for labels, one in _selected(node, series).items()}
    if kind == "AggregateExpr":
        return _aggregated(node, series)
    if kind == "Call":
        return _called(node, series)
    assert kind == "BinaryExpr", kind
    return _combined(str(node.op), _value(node.lhs, series), _value(node.rhs, series))


def _aggregated(node: Any, series: list[Line]) -> Vector:
    by = set(node.modifier.labels) if node.modifier is not None else set()
    groups: dict[Labels, list[float]] = {}
    inner = _value(node.expr, series)
    assert isinstance(inner, dict)
    for labels, value in inner.items():
        groups.setdefault(frozenset(each for each in labels if each[0] in by), []).append(value)
    return {labels: FOLD[str(node.op)](values) for labels, values in groups.items()}


def _called(node: Any, series: list[Line]) -> Vector:
    name = node.func.name
    if name == "absent":
        return {} if _selected(node.args[0], series) else {frozenset(): 1.0}
    if name == "histogram_quantile":
        buckets = _value(node.args[1], series)
        assert isinstance(buckets, dict)
        return _quantiles(float(node.args[0].val), buckets)
    matrix = node.args[0]
    range_s = matrix.range.total_seconds()
    over: dict[str, Callable[[Line], float]] = {
        "rate": lambda one: one.slope,
        "increase": lambda one: one.slope * range_s,
        "delta": lambda one: one.slope * range_s,
        "min_over_time": lambda one: min(one.at(range_s), one.value),
        "max_over_time": lambda one: max(one.at(range_s), one.value),
    }
    return {labels: over[name](one) for labels, one in _selected(matrix.vector_selector, series).items()}


def _quantiles(share: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        rest = frozenset(each for each in labels if each[0] != "le")
        groups.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    found: Vector = {}
    for labels, bounds in groups.items():
        ordered = sorted(bounds)
        rank, below, low = share * ordered[-1][1], 0.0, 0.0
        for bound, count in ordered:
            if count >= rank:
                inside = (rank - below) / (count - below) if count > below else 0.0
                found[labels] = low if bound == float("inf") else low + (bound - low) * inside
                break
            below, low = count, bound
    return found


def _combined(op: str, left: Vector | float, right: Vector | float) -> Vector:
    if isinstance(left, float):
        assert op == "*" and isinstance(right, dict)
        return {labels: left * value for labels, value in right.items()}
    other = (lambda _: right) if isinstance(right, float) else right.get
    pairs = {labels: (value, other(labels)) for labels, value in left.items()}
    both = {labels: (a, b) for labels, (a, b) in pairs.items() if b is not None}
    if op == "and":
        return {labels: a for labels, (a, _) in both.items()}
    if op == "/":
        return {labels: a / b for labels, (a, b) in both.items() if b}
    return {labels: a for labels, (a, b) in both.items() if COMPARE[op](a, b)}


def failing(name: str, share: float, bad: dict[str, str], good: dict[str, str], total: float = 10.0) -> list[Line]:
    return [grows(name, total * share, **bad), grows(name, total * (1 - share), **good)]


def http(share: float) -> list[Line]:
    return failing("http_requests_total", share, {"route": "a", "status": "503"}, {"route": "b", "status": "404"})


def uploads(share: float) -> list[Line]:
    return failing("batches_uploads_total", share, {"outcome": "failed"}, {"outcome": "accepted"})


def rows(share: float) -> list[Line]:
    return failing("silver_rows_total", share, {"outcome": "quarantined"}, {"outcome": "inserted"})


def store(share: float) -> list[Line]:
    return [
        grows("store_failures_total", 10 * share, verb="get", kind="unavailable"),
        grows("store_failures_total", 5.0, verb="get", kind="not_found"),  # an answer, not a failure of the store
        grows("store_requests_total", 10.0, verb="get"),
    ]


def contended(times_as_many: float) -> list[Line]:
    return [
        grows("register_conflicts_total", times_as_many, register="log"),
        grows("register_writes_total", 1.0, register="log"),
        grows("register_writes_total", 1000.0, register="lease"),  # another register's writes do not hide it
    ]


def compaction(lag: float, an_hour: float) -> list[Line]:
    return [line("log_compaction_lag_records", lag, an_hour / HOUR, topic="a", partition="0")]


def spool(now: float, slope: float) -> list[Line]:
    return [line("batches_spool_batches", now, slope, instance="a")]


def queued(now: float, slope: float) -> list[Line]:
    return [line("agent_queue_batches", now, slope, instance="a")]


def pending(age_s: float, state: str = "pending") -> list[Line]:
    return [
        line("queue_oldest_age_seconds", age_s, queue="q", state=state),
        line("queue_oldest_age_seconds", 1.0, queue="r", state="pending"),
    ]


class Case(NamedTuple):
    """What keeps an alert silent, what raises it, for how long it has to last, and whether it wakes somebody."""

    silent: list[list[Line]]
    raised: list[list[Line]]
    for_: str
    severity: str


ONCE = 1 / HOUR  # one event within the last hour, as a slope

CASES: dict[str, Case] = {
    "NobodyAnswers": Case([[line("build_info", 1.0)]], [[]], "5m", "page"),
    "GatewayFailing": Case([http(0.0), http(0.049)], [http(0.051)], "5m", "page"),
    "GatewaySlow": Case(
        [
            times("http_seconds", {"5": 98.0, "10": 99.1, "30": 100.0, "+Inf": 100.0}, route="a"),
            [
                *times("http_seconds", {"5": 98.0, "10": 99.1, "30": 100.0, "+Inf": 100.0}, route="a", method="GET"),
                *times("http_seconds", {"5": 98.0, "10": 99.1, "30": 100.0, "+Inf": 100.0}, route="a", method="PUT"),
            ],
        ],
        [
            [
                *times("http_seconds", {"5": 9e4, "10": 9e4, "30": 9e4, "+Inf": 9e4}, route="fast"),
                *times("http_seconds", {"5": 98.0, "10": 98.9, "30": 100.0, "+Inf": 100.0}, route="slow"),
            ]
        ],
        "15m",
        "ticket",
    ),
    "WorkerKeepsFailing": Case(
        [
            [grows("worker_restarts_total", 5 / (15 * MINUTE), worker="a")],
            [grows("worker_restarts_total", 4 / (15 * MINUTE), worker=each) for each in "ab"],
        ],
        [[grows("worker_restarts_total", 5.1 / (15 * MINUTE), worker="a")]],
        "5m",
        "ticket",
    ),
    "StoreUnavailable": Case([store(0.019)], [store(0.021)], "5m", "page"),
    "StoreDenied": Case(
        [[grows("store_failures_total", 0.0, kind="denied")], [grows("store_failures_total", 1.0, kind="unavailable")]],
        [[grows("store_failures_total", ONCE, kind=kind)] for kind in ("denied", "unauthenticated")],
        "1m",
        "page",
    ),
    "StoreIgnoresConditions": Case(
        [[line("store_conditions_ignored", 0.0, instance="a")]],
        [[line("store_conditions_ignored", float(each == "b"), instance=each) for each in "abc"]],
        "0m",
        "page",
    ),
    "RegisterContended": Case([contended(1.99)], [contended(2.01)], "15m", "ticket"),
    "BatchesFailing": Case([uploads(0.049)], [uploads(0.051)], "5m", "page"),
    "BatchesConflict": Case(
        [
            [grows("batches_uploads_total", 0.0, outcome="conflict")],
            [grows("batches_uploads_total", 9.0, outcome="accepted")],
        ],
        [[grows("batches_uploads_total", ONCE, outcome="conflict")]],
        "0m",
        "ticket",
    ),
    "ReconcilerBehind": Case(
        [[line("batches_reconciler_lag_seconds", 3599.0)]],
        [[line("batches_reconciler_lag_seconds", value, instance=f"{value}") for value in (1.0, 3601.0)]],
        "15m",
        "ticket",
    ),
    "SpoolNotLanding": Case(
        [
            spool(0.0, 0.0),
            spool(5.0, -0.001),
            spool(1.0, 1 / (30 * MINUTE)),
        ],  # empty, shrinking, empty half an hour ago
        [spool(1.0, 0.0), spool(5.0, 0.001)],
        "15m",
        "page",
    ),
    "AgentDropping": Case(
        [[grows("agent_dropped_samples_total", 0.0, instance="a")]],
        [[grows("agent_dropped_samples_total", ONCE, instance="a")]],
        "0m",
        "page",
    ),
    "AgentParked": Case(
        [[line("agent_parked_batches", 0.0, instance="a")]],
        [[line("agent_parked_batches", float(each == "a"), instance=each) for each in "ab"]],
        "10m",
        "ticket",
    ),
    "AgentBehind": Case([queued(100.0, 0.0), queued(200.0, 0.1)], [queued(101.0, 0.0)], "15m", "ticket"),
    "QueueBehind": Case([pending(899.0), pending(5000.0, "claimed")], [pending(901.0)], "10m", "page"),
    "QueueDeadLetters": Case(
        [[line("queue_dead_letters", 0.0, queue="a")]],
        [[line("queue_dead_letters", float(each == "a"), queue=each) for each in "ab"]],
        "5m",
        "ticket",
    ),
    "QueueNotDurable": Case(
        [[grows("queue_flush_failures_total", 0.0)]], [[grows("queue_flush_failures_total", ONCE)]], "5m", "page"
    ),
    "LogRefusing": Case([[grows("log_refused_total", 0.0)]], [[grows("log_refused_total", ONCE)]], "5m", "page"),
    "LogNotCompacting": Case(
        [compaction(999_999.0, 100.0), compaction(2e6, -1.0), compaction(2e6, 0.0)],
        [compaction(1_000_001.0, 1.0)],
        "1h",
        "ticket",
    ),
    "TicksSilverBehind": Case(
        [[line("ticks_lag_seconds", 1799.0)]],
        [[line("ticks_lag_seconds", value, instance=f"{value}") for value in (0.0, 1801.0)]],
        "10m",
        "page",
    ),
    "TicksQueueDeep": Case(
        [[line("ticks_queue_messages", 1000.0, state="waiting"), line("ticks_queue_messages", 9e9, state="in_flight")]],
        [[line("ticks_queue_messages", 1001.0, state="waiting")]],
        "10m",
        "page",
    ),
    "TicksDeadLetters": Case(
        [[line("ticks_queue_messages", 0.0, state="dead"), line("ticks_queue_messages", 9.0, state="waiting")]],
        [[line("ticks_queue_messages", 1.0, state="dead")]],
        "1m",
        "ticket",
    ),
    "TicksFinalizeSlow": Case(
        [times("ticks_finalize_seconds", {"10": 90.0, "25": 95.1, "60": 100.0, "+Inf": 100.0})],
        [times("ticks_finalize_seconds", {"10": 90.0, "25": 94.9, "60": 100.0, "+Inf": 100.0})],
        "10m",
        "ticket",
    ),
    "SilverQuarantines": Case([rows(0.049)], [rows(0.051)], "30m", "ticket"),
    "ModelsFailing": Case(
        [[grows("gold_tables_total", ONCE, outcome=each) for each in ("made", "waiting")]],
        [[grows("gold_tables_total", ONCE, outcome=each)] for each in ("failed", "refused")],
        "30m",
        "ticket",
    ),
    "LifecycleBlocked": Case(
        [[line("lifecycle_blocked_streams", 0.0, stream_kind="a")]],
        [[line("lifecycle_blocked_streams", float(each == "a"), stream_kind=each) for each in "ab"]],
        "10m",
        "page",
    ),
    "LifecycleBehind": Case(
        [[line("lifecycle_watermark_lag_seconds", 3599.0, stream="a")]],
        [[line("lifecycle_watermark_lag_seconds", value, stream=f"{value}") for value in (0.0, 3601.0)]],
        "30m",
        "ticket",
    ),
    "LifecyclePolicyProblem": Case(
        [[line("lifecycle_policy_problems", 0.0, bucket="a")]],
        [[line("lifecycle_policy_problems", float(each == "a"), bucket=each) for each in "ab"]],
        "10m",
        "ticket",
    ),
    "LifecycleIsolated": Case(
        [[line("lifecycle_isolated", 0.0, bucket="a")]],
        [[line("lifecycle_isolated", float(each == "a"), bucket=each) for each in "ab"]],
        "1h",
        "ticket",
    ),
    "LifecycleLostLog": Case(
        [[grows("lifecycle_lost_log_total", 0.0)]], [[grows("lifecycle_lost_log_total", ONCE)]], "0m", "ticket"
    ),
}

WRITTEN = {
    rule["alert"].removeprefix("Lakebed"): rule
    for group in yaml.safe_load(rules())["groups"]
    for rule in group["rules"]
}  # as Prometheus reads them


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS} == set(WRITTEN)


@pytest.mark.parametrize("name", CASES)
def test_an_alert_is_silent_just_under_its_threshold(name: str) -> None:
    for series in CASES[name].silent:
        assert not evaluate(WRITTEN[name]["expr"], series), series


@pytest.mark.parametrize("name", CASES)
def test_an_alert_is_raised_just_over_its_threshold_for_the_one_subject(name: str) -> None:
    for series in CASES[name].raised:
        assert 1 == len(evaluate(WRITTEN[name]["expr"], series)), series  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_an_alert_lasts_as_long_and_wakes_as_many_as_agreed(name: str) -> None:
    assert (CASES[name].for_, CASES[name].severity) == (WRITTEN[name]["for"], WRITTEN[name]["labels"]["severity"])


def test_a_store_without_any_request_raises_nothing() -> None:
    """0 / 0 is no share: a gateway that nobody queries is not one that fails."""
    idle = [line._replace(slope=0.0) for line in (*http(0.5), *uploads(0.5), *rows(0.5), *store(0.5))]
    for name in ("GatewayFailing", "StoreUnavailable", "BatchesFailing", "SilverQuarantines"):
        assert not evaluate(WRITTEN[name]["expr"], idle)
