"""The agent's pure rules at their limits: who is asked, what an answer means, which settings and samples are taken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.agent import run
from lakebed.agent.alerts import KINDS, Alerts, read_alerts
from lakebed.agent.batcher import REPORTED_MAX, TIME_NS_MAX, BadSampleReporter, checked
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.model import QueuedBatch
from lakebed.agent.settings import BATCH_BYTES_MAX, AgentSettings
from lakebed.agent.sources import host
from lakebed.agent.sources.scrape import LINE_CHARS_MAX, PROBLEMS_MAX, number_of, parse
from lakebed.agent.sources.stdin import sample_of
from lakebed.agent.verdict import FINAL, MESSAGE_CHARS_MAX, CollectorResponse, SendOutcome, judge
from lakebed.batches.model import LIMITS, Kind, Sample
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from support.runtimes import runtime_of

ORDER = SendLimits(concurrency=2, base_s=0.5, cap_s=30.0, retry_after_max_s=300.0, denied_s=60.0, hedge_share_max=0.2)


class FixedIds(Ids):
    """Uniform draws take the given share of their range; jitter is the whole backoff."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self._share = share

    def uniform(self, low: float, high: float) -> float:
        return low + self._share * (high - low)

    def jitter_s(self, attempt: int, *, base_s: float, cap_s: float) -> float:
        return min(cap_s, base_s * 2.0**attempt)


def order_of(*names: str, share: float = 0.0) -> SendOrder:
    return SendOrder([f"http://{name}/" for name in names], ORDER, FixedIds(share))


def entry(number: int) -> QueuedBatch:
    return QueuedBatch(1, "boot", number, number, "0" * 64, 1)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, ["a", "b", "c"]), (0.4, ["b", "c", "a"]), (0.99, ["c", "a", "b"]), (1.0, ["a", "b", "c"])],
)
def test_a_fleet_begins_at_different_collectors(share: float, expected: list[str]) -> None:
    """All are queried in the order of the list, from a place that chance gives; a slash at the end is dropped."""
    assert [f"http://{name}" for name in expected] == [
        collector.url for collector in order_of("a", "b", "c", share=share).collectors
    ]


def test_without_collectors_nobody_is_asked() -> None:
    """Batches are only queued."""
    order = order_of()

    assert ([], None, None) == (order.collectors, order.collector(1.0), order.next_s(1.0))


def test_a_collector_takes_as_many_at_once_as_allowed_and_the_next_one_the_rest() -> None:
    """A request that ended makes room again."""
    order = order_of("a", "b")
    first, second = order.collectors
    for _ in range(2):
        order.started(first)

    assert second is order.collector(0.0)
    order.ended(first)
    assert first is order.collector(0.0)


def test_pauses_of_a_collector_double_up_to_the_cap_and_begin_anew_after_a_success() -> None:
    """0.5 s, 1 s, 2 s … 30 s; a rest is over at its end."""
    order = order_of("a")
    (collector,) = order.collectors
    pauses, now_s = [], 0.0
    for _ in range(8):
        order.failed(collector, now_s)
        pauses.append(collector.paused_until_s - now_s)
        now_s = collector.paused_until_s
    assert collector is order.collector(now_s) and order.collector(now_s - 0.01) is None
    order.succeeded(collector, pauses=collector.pauses)
    order.failed(collector, now_s)

    assert [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] == pauses
    assert now_s + 0.5 == collector.paused_until_s


def test_an_asked_pause_is_never_shortened_and_comes_with_jitter() -> None:
    """From zero to one base later than queried; also for a collector that rests already."""
    order = order_of("a", share=1.0)
    (collector,) = order.collectors
    order.failed(collector, 100.0, retry_after_s=40.0)
    requested = collector.paused_until_s
    order.failed(collector, 101.0, retry_after_s=60.0)

    assert (140.5, 161.5) == (requested, collector.paused_until_s)


@pytest.mark.parametrize(("share", "pause_s"), [(0.0, 48.0), (0.5, 60.0), (1.0, 72.0)])
def test_a_refusing_collector_rests_about_as_long_as_set(share: float, pause_s: float) -> None:
    """Within a fifth, counted as one more failure and fall each time."""
    order = order_of("a", share=share)
    (collector,) = order.collectors
    order.refused(collector, 10.0)
    order.refused(collector, 10.0)

    assert math.isclose(10.0 + pause_s, collector.paused_until_s)
    assert (2, 2) == (collector.failures, collector.pauses)


def test_a_healthy_collector_is_preferred_to_one_that_failed_before() -> None:
    """And one that lost a hedge comes after both."""
    order = order_of("a", "b", "c")
    failed, healthy, slow = order.collectors
    order.failed(failed, 0.0)
    order.lost_hedge(slow, 1.0)

    assert healthy is order.collector(1.0)
    assert failed is order.collector(1.0, other_than=healthy)


def test_the_next_rest_that_ends_is_the_earliest_of_all() -> None:
    """Of collectors and batches alike; one that ends now is over."""
    order = order_of("a", "b")
    first, second = order.collectors
    order.failed(first, 0.0, retry_after_s=5.0)
    order.failed(second, 0.0, retry_after_s=9.0)
    order.set_back(entry(0), 0.0)

    assert [0.5, 5.0, 9.0, None] == [order.next_s(at_s) for at_s in (0.0, 0.5, 5.0, 9.0)]


def test_a_batch_rests_longer_each_time_and_on_its_own() -> None:
    """It waits until its rest is over; forgotten, it begins anew."""
    order = order_of("a")
    pauses = []
    for _ in range(3):
        order.set_back(entry(1), 100.0)
        pauses.append((order.next_s(100.0) or 0) - 100.0)
    waits = [order.waits(entry(1), at_s) for at_s in (101.9, 102.0)]
    order.forget(entry(1))
    order.set_back(entry(1), 100.0)

    assert ([0.5, 1.0, 2.0], [True, False]) == (pauses, waits)
    assert (100.5, False, False) == (order.next_s(100.0), order.waits(entry(2), 100.0), order.failed_before(entry(2)))


def test_a_hedge_costs_one_and_a_success_gives_its_share_back() -> None:
    """Less than one is none."""
    order = order_of("a")
    (collector,) = order.collectors
    while order.may_hedge():
        pass
    for _ in range(4):
        order.succeeded(collector, pauses=0)
    early = order.may_hedge()
    for _ in range(2):
        order.succeeded(collector, pauses=0)

    assert (False, True, False) == (early, order.may_hedge(), order.may_hedge())


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (100, SendOutcome.MISROUTED), (204, SendOutcome.MISROUTED), (399, SendOutcome.MISROUTED),
        (402, SendOutcome.MISROUTED), (405, SendOutcome.MISROUTED), (410, SendOutcome.MISROUTED),
        (425, SendOutcome.BUSY), (426, SendOutcome.MISROUTED), (499, SendOutcome.MISROUTED),
        (502, SendOutcome.BUSY), (504, SendOutcome.BUSY), (599, SendOutcome.BUSY),
        (600, SendOutcome.MISROUTED),
    ],
)  # fmt: skip
def test_a_status_at_the_edge_of_its_row_has_its_meaning(status: int, outcome: SendOutcome) -> None:
    """Too early and every 5xx are tried again, all others are no collector's."""
    assert outcome == judge(CollectorResponse(status, {}, b"{}"), frame_sha256="a", now_s=0.0).outcome


def test_only_an_answer_that_no_other_collector_changes_is_final() -> None:
    """Accepted, duplicate and the three that are parked."""
    final = {
        SendOutcome.ACCEPTED,
        SendOutcome.DUPLICATE,
        SendOutcome.CONFLICT,
        SendOutcome.QUARANTINED,
        SendOutcome.REJECTED,
    }

    assert final == {outcome for outcome in SendOutcome if outcome.final} == set(FINAL)


@pytest.mark.parametrize("status", [200, 401, 404, 409, 429, 503])
def test_a_pause_is_heard_from_every_answer_that_is_retried(status: int) -> None:
    """With its status and message."""
    found = judge(CollectorResponse(status, {"retry-after": "9"}, b'{"message":"no"}'), frame_sha256="a", now_s=0.0)

    assert (9.0, status) == (found.retry_after_s, found.status)
    assert found.message.endswith("no")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"message":"m","title":"t"}', "m"),
        (b'{"title":"t","detail":"d"}', "t"),
        (b'{"detail":"d"}', "d"),
        (b"plain words", "plain words"),
        (b'{"message":"' + b"x" * 600 + b'"}', "x" * MESSAGE_CHARS_MAX),
        (b"y" * 300, "y" * 200),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_a_collector_says_is_kept_within_a_limit(body: bytes, message: str) -> None:
    """From a problem's fields, or the first of the body."""
    assert message == judge(CollectorResponse(422, {}, body), frame_sha256="a", now_s=0.0).message


def settings(**values: Any) -> AgentSettings:
    return AgentSettings.of(values)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_bytes": 1, "queue_bytes_max": 8},
        {"batch_bytes": BATCH_BYTES_MAX},
        {"batch_samples_max": 1},
        {"batch_samples_max": 100_000},
        {"batch_bytes": 1000, "queue_bytes_max": 8000},
        {"queue_batches_max": 8},
        {"batch_interval_s": 0, "hedge_after_s": 0, "host_interval_s": 0},
        {"send_concurrency": 1},
        {"send_concurrency": 64},
        {"ticks_parallel": 1},
        {"ticks_parallel": 64},
        {"scrape": [{"url": "https://t", "interval_s": 0.1, "timeout_s": 0.1}]},
        {"scrape": [{"url": "http://t", "labels": {"l" * LIMITS.name_bytes: "x" * LIMITS.label_value_bytes}}]},
        {"scrape": [{"url": "http://t", "labels": {f"l{n}": "x" for n in range(LIMITS.labels_per_series - 1)}}]},
        {"scrape": [{"url": "http://t", "labels": {f"l{n}": "" for n in range(LIMITS.labels_per_series)}}]},
        {"ticks": [{"folder": "a", "project_id": "p", "interval_s": 0.1}, {"folder": "b", "project_id": "p"}]},
        {"ticks": [{"folder": "a", "project_id": "p", "urls": ["http://u"]}]},
    ],
)
def test_settings_at_their_limits_are_taken(values: dict[str, Any]) -> None:
    """The limit itself is allowed."""
    settings(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_bytes": BATCH_BYTES_MAX + 1},
        {"batch_samples_max": 100_001},
        {"batch_bytes": 1000, "queue_bytes_max": 7999},
        {"queue_batches_max": 7},
        {"hedge_after_s": -0.1},
        {"host_interval_s": -0.1},
        {"send_concurrency": 65},
        {"ticks_parallel": 0},
        {"ticks_parallel": 65},
        {"scrape": [{"url": "http://t", "interval_s": 0.09}]},
        {"scrape": [{"url": "http://t", "timeout_s": 0}]},
        {"scrape": [{"url": "http://t"}, {"url": "t"}]},
        {"scrape": [{"url": "http://t", "labels": {"": "x"}}]},
        {"scrape": [{"url": "http://t", "labels": {"é" * (LIMITS.name_bytes // 2 + 1): "x"}}]},
        {"scrape": [{"url": "http://t", "labels": {"l": "é" * (LIMITS.label_value_bytes // 2 + 1)}}]},
        {"scrape": [{"url": "http://t", "labels": {f"l{n}": "x" for n in range(LIMITS.labels_per_series)}}]},
        {"ticks": [{"folder": "a", "project_id": "p", "interval_s": 0.09}]},
        {"ticks": [{"folder": "a", "project_id": "p"}, {"folder": "a", "project_id": "q"}]},
        {"ticks": [{"folder": "a", "project_id": "p", "urls": ["ftp://u"]}]},
        {"collectors": ["http://a", "b:80"]},
    ],
)
def test_settings_over_their_limits_are_refused(values: dict[str, Any]) -> None:
    """The first value beyond it is not."""
    with pytest.raises(Invalid):
        settings(**values)


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Numbers that people rely on without setting them."""
    made, mib = settings(), 1024 * 1024
    names = {
        "queue_bytes_max": 1024 * mib, "queue_batches_max": 100_000, "when_full": "block", "batch_bytes": 256 * 1024,
        "batch_samples_max": 10_000, "batch_interval_s": 5.0, "send_concurrency": 4,
        "request_timeout_s": 30.0, "connect_timeout_s": 5.0, "hedge_after_s": 2.0, "hedge_share_max": 0.2,
        "retry_after_max_s": 300.0, "denied_retry_s": 60.0,
        "stdin": False, "stdin_acks": False, "line_bytes_max": 65_536, "scrape_bytes_max": 16 * mib,
        "scrape_samples_max": 100_000, "otlp_port": -1, "otlp_bytes_max": 4 * mib, "otlp_points_max": 50_000,
        "host_interval_s": 0.0, "ticks_parallel": 4, "stop_s": 5.0, "drain_s": 60.0,
    }  # fmt: skip

    assert names == {name: getattr(made, name) for name in names}
    assert (0.05, 0.5, 30.0) == (run.ACK_LINGER_S, run.BACKOFF_BASE_S, run.BACKOFF_CAP_S)


@pytest.mark.parametrize(
    ("metric", "time_ns", "labels"),
    [
        ("m", 0, {}),
        ("m", TIME_NS_MAX, {}),
        ("m" * LIMITS.name_bytes, 1, {}),
        ("m", 1, {"l" * LIMITS.name_bytes: "x"}),
        ("m", 1, {"l": "x" * LIMITS.label_value_bytes}),
        ("m", 1, {"l": "é" * (LIMITS.label_value_bytes // 2)}),
        ("m", 1, {f"l{n}": "x" for n in range(LIMITS.labels_per_series)}),
        ("m", 1, {"full": "x", **{f"l{n}": "" for n in range(LIMITS.labels_per_series)}}),
    ],
)
def test_a_sample_at_a_limit_is_taken(metric: str, time_ns: int, labels: dict[str, str]) -> None:
    """Empty labels do not count."""
    taken = checked(metric, time_ns, 1.0, Kind.GAUGE, labels)

    assert (metric, time_ns, {name: text for name, text in labels.items() if text}) == (
        taken.metric, taken.time_ns, taken.labels,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "labels"),
    [
        ("", {}),
        ("m" * (LIMITS.name_bytes + 1), {}),
        ("é" * (LIMITS.name_bytes // 2 + 1), {}),
        ("m", {"": "x"}),
        ("m", {"l" * (LIMITS.name_bytes + 1): "x"}),
        ("m", {"é" * (LIMITS.name_bytes // 2 + 1): "x"}),
        ("m", {"l": "x" * (LIMITS.label_value_bytes + 1)}),
        ("m", {"l": "é" * (LIMITS.label_value_bytes // 2 + 1)}),
        ("m", {"l": "\ud800"}),
        ("m", {f"l{n}": "x" for n in range(LIMITS.labels_per_series + 1)}),
    ],
)
def test_a_sample_over_a_limit_is_refused_before_it_spoils_a_batch(metric: str, labels: dict[str, str]) -> None:
    """Names and values are measured in the bytes of a frame, not in characters: no collector takes a longer one."""
    with pytest.raises(Invalid):
        checked(metric, 1, 1.0, Kind.GAUGE, labels)


@pytest.mark.parametrize("time_ns", [-1, TIME_NS_MAX + 1])
def test_a_time_that_no_frame_can_carry_is_refused(time_ns: int) -> None:
    """Before 1970 and after 2262."""
    with pytest.raises(Invalid, match="1970 and 2262"):
        checked("m", time_ns, 1.0, Kind.GAUGE, {})


def test_bad_items_are_counted_whole_and_told_in_part(metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    """The number is of all, the source is its label; none is no report."""
    problems = BadSampleReporter("stdin", metrics)

    counts = (problems.report([]), problems.report([(n, f"why {n}") for n in range(REPORTED_MAX + 3)]))

    assert (0, REPORTED_MAX + 3) == counts
    assert REPORTED_MAX + 3 == metrics.value("lakebed_agent_bad_samples_total", source="stdin")


@pytest.mark.parametrize(
    ("output", "kind"),
    [("gauge", Kind.GAUGE), ("counter", Kind.COUNTER), ("delta", Kind.DELTA), ("untyped", Kind.UNTYPED)],
)
def test_a_line_has_the_kind_it_says(output: str, kind: Kind) -> None:
    """And a time of zero is a time."""
    line = msgspec.json.encode({"metric": "m", "value": 1, "kind": output, "time_ms": 0})

    assert Sample("m", 0, 1.0, kind, {}) == sample_of(line, now_ns=5)


def test_prometheus_types_decide_the_kind() -> None:
    """A histogram's and a summary's growing series are counters, a summary's quantiles gauges."""
    text = (
        "# HELP c about\n# TYPE c counter\nc 1\n# TYPE g gauge\ng 1\n# TYPE h histogram\nh_bucket 1\nh_sum 1\n"
        "h_count 1\nh 1\n# TYPE s summary\ns 1\ns_sum 1\ns_count 1\ns_bucket 1\nu 1\nu_sum 1\n"
    )

    found = parse(text, now_ns=9, labels={}, samples_max=100)

    counter, gauge, untyped = Kind.COUNTER, Kind.GAUGE, Kind.UNTYPED
    assert {
        "c": counter, "g": gauge, "h_bucket": counter, "h_sum": counter, "h_count": counter, "h": untyped, "s": gauge,
        "s_sum": counter, "s_count": counter, "s_bucket": untyped, "u": untyped, "u_sum": untyped,
    } == {sample.metric: sample.kind for sample in found.samples}  # fmt: skip
    assert () == found.problems


def test_a_prometheus_line_has_its_own_time_in_milliseconds() -> None:
    """Without one it is now; a line as long as the limit is read, a longer one reported with its number."""
    long = "m " + "1".rjust(LINE_CHARS_MAX - 2)
    found = parse(f"a 1 1500\nb 1\n{long}\n {long}\n", now_ns=9, labels={}, samples_max=3)

    assert [1_500_000_000, 9, 9] == [sample.time_ns for sample in found.samples]
    assert [4] == [number for number, _ in found.problems]


@pytest.mark.parametrize("text", ["1_000", "0x10", "", "1e", "--1", "１", "in", "1,5", "infinit"])
def test_what_python_reads_and_prometheus_does_not_is_no_number(text: str) -> None:
    """Underscores, other digits, hexadecimal."""
    with pytest.raises(Invalid):
        number_of(text)


def test_host_files_as_the_kernel_writes_them() -> None:
    """Every core and mode, memory in bytes, the right columns of disks and networks, nothing of loop devices."""
    stat = "cpu 1 1\ncpu0 100 200 300 400 500 600 700 800 900\ncpu1 50\n"
    cpus = [(value, labels["cpu"], labels["mode"]) for _, value, _, labels in host.cpu(stat)]
    line = " 8 0 sda 1 2 3 4 5 6 7 8 9 10 11\n 7 0 ram0 1 2 3 4 5 6 7 8 9 10 11\n 7 0 zram0 1 2 3 4 5 6 7 8 9 10 11\n"
    net = "h\nh\nlo: 1 2 3 4 5 6 7 8 9 10 11 12\n eth1:100 2 3 4 5 6 7 8 9 10 11 12\n"

    assert [(n / 1.0, "0", mode) for n, mode in enumerate(host.CPU_MODES, start=1)] == cpus[:8]
    assert [(0.5, "1", "user")] == cpus[8:]
    assert [("1", 0.1), ("5", 0.2), ("15", 0.3)] == [
        (labels["minutes"], value) for _, value, _, labels in host.load("0.1 0.2 0.3 1/1 9")
    ]
    assert [("MemFree", 3072.0), ("SwapFree", 1024.0)] == [
        (labels["state"], value) for _, value, _, labels in host.memory("SwapFree: 1 kB\nMemFree: 3 kB\nOther: 9 kB\n")
    ]
    assert [1.0, 3 * 512.0, 5.0, 7 * 512.0, 0.01] == [value for _, value, _, _ in host.disks(line)]
    assert {"sda"} == {labels["device"] for _, _, _, labels in host.disks(line)}
    named = [
        (name.removeprefix("host_network_"), value, labels["device"]) for name, value, _, labels in host.network(net)
    ]
    assert [
        ("received_bytes_total", 1.0, "lo"), ("received_packets_total", 2.0, "lo"), ("receive_errors_total", 3.0, "lo"),
        ("sent_bytes_total", 9.0, "lo"), ("sent_packets_total", 10.0, "lo"), ("send_errors_total", 11.0, "lo"),
    ] == named[:6]  # fmt: skip
    assert "eth1" == named[6][2]
    assert [("total", "/"), ("free", "/"), ("available", "/")] == [
        (labels["state"], labels["mount"]) for _, _, _, labels in host.space()
    ]
    total, free, available = (value for _, value, _, _ in host.space())
    assert total >= free >= available > 0


def test_alerts_are_read_oldest_first_and_damaged_files_are_left_out(tmp_path: Path, metrics: Metrics) -> None:
    """Each has its count, first and last time and detail; the counter counts every time, the gauge what lasts."""
    times = iter([30, 20, 10, 40])
    alerts = Alerts(tmp_path, metrics=metrics, now_ms=lambda: next(times))
    alerts.on("queue_full", "a")
    alerts.on("denied", "b", url="http://c")
    alerts.on("corrupt", "c")
    alerts.on("queue_full", "again", part=1)
    (tmp_path / "broken.json").write_bytes(b"{")
    (tmp_path / "other.txt").write_bytes(b"{}")

    found = read_alerts(tmp_path)

    assert [("corrupt", 1, 10, 10), ("denied", 1, 20, 20), ("queue_full", 2, 30, 40)] == [
        (alert.kind, alert.count, alert.first_at_ms, alert.last_at_ms) for alert in found
    ]
    assert ({"url": "http://c"}, {"part": 1}, "again") == (found[1].detail, found[2].detail, found[2].message)
    assert (2.0, 1.0, 0.0) == (
        metrics.value("lakebed_agent_alerts_total", kind="queue_full"),
        metrics.value("lakebed_agent_alert_on", kind="queue_full"),
        metrics.value("lakebed_agent_alert_on", kind="misrouted"),
    )
    assert {"denied", "misrouted", "queue_full", "disk_trouble", "tick_refused", "ticks_stuck"} <= set(KINDS)


def test_ending_an_alert_ends_no_other(tmp_path: Path, metrics: Metrics) -> None:
    """One that is not on is not ended again."""
    alerts = Alerts(tmp_path, metrics=metrics, now_ms=lambda: 1)
    alerts.on("denied", "a")
    alerts.on("corrupt", "b")
    alerts.off("denied")
    alerts.off("misrouted")

    assert ["corrupt"] == [alert.kind for alert in read_alerts(tmp_path)]


def test_a_text_of_nonsense_is_not_complained_of_without_end() -> None:
    """After so many bad lines the rest of the text is left."""
    found = parse("?\n" * (PROBLEMS_MAX + 5) + "m 1\n", now_ns=9, labels={}, samples_max=9)

    assert (PROBLEMS_MAX, ()) == (len(found.problems), found.samples)


@pytest.mark.parametrize("text", [" 8 0 sda 1 2\n", " 8 0 sda 1 x 3 4 5 6 7 8 9 10\n", " 8\n"])
def test_a_strange_kernel_file_is_counted_and_costs_only_itself(tmp_path: Path, metrics: Metrics, text: str) -> None:
    """Short or odd lines of one file leave the others whole."""
    (tmp_path / "diskstats").write_text(text)
    (tmp_path / "loadavg").write_text("1 2 3 1/1 1\n")
    unused: Any = None
    source = host.HostSource(runtime_of(ManualClock(), metrics=metrics), unused, interval_s=1.0, proc=tmp_path)

    assert {"host_load", "host_filesystem_bytes"} <= {sample.metric for sample in source.read()}
    assert metrics.value("lakebed_agent_bad_samples_total", source="host") >= 3
