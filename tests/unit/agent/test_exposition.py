from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.agent.sources.scrape import ScrapeResult, parse
from lakebed.batches.model import Kind

NOW_NS = 1_760_000_000_000_000_000


def read(text: str, *, samples_max: int = 1000, **labels: str) -> ScrapeResult:
    return parse(text, now_ns=NOW_NS, labels=labels, samples_max=samples_max)


def test_a_whole_page_is_read_with_types_labels_escapes_and_times() -> None:
    """The format's own features, each once."""
    text = (
        "# HELP http_requests_total Requests \\\\ answered.\n"
        "# TYPE http_requests_total counter\n"
        'http_requests_total{method="post",path="C:\\\\DIR\\n\\"x\\"}"} 1027 1395066363000\n'
        "http_requests_total 3\n"
        "# just a comment\n"
        "\n"
        "# TYPE t gauge\n"
        '  t{ a = "1" , b="2", } -1.5e-3  \n'
        "# TYPE lat histogram\n"
        'lat_bucket{le="+Inf"} 7\n'
        "lat_sum 1.5\n"
        "lat_count 7\n"
        "# TYPE q summary\n"
        'q{quantile="0.5"} 4\n'
        "q_count 9\n"
        "other NaN\n"
        "big +Inf\r\n"
        "small -Inf"
    )

    found = read(text)

    assert found.problems == ()
    assert [(sample.metric, sample.kind) for sample in found.samples] == [
        ("http_requests_total", Kind.COUNTER),
        ("http_requests_total", Kind.COUNTER),
        ("t", Kind.GAUGE),
        ("lat_bucket", Kind.COUNTER),
        ("lat_sum", Kind.COUNTER),
        ("lat_count", Kind.COUNTER),
        ("q", Kind.GAUGE),
        ("q_count", Kind.COUNTER),
        ("other", Kind.UNTYPED),
        ("big", Kind.UNTYPED),
        ("small", Kind.UNTYPED),
    ]
    first = found.samples[0]
    assert first.labels == {"method": "post", "path": 'C:\\DIR\n"x"}'}
    assert (first.value, first.time_ns) == (1027.0, 1395066363000 * 1_000_000)
    assert found.samples[1].time_ns == NOW_NS
    assert (found.samples[2].labels, found.samples[2].value) == ({"a": "1", "b": "2"}, -0.0015)
    assert math.isnan(found.samples[8].value)
    assert (math.inf, -math.inf) == (found.samples[9].value, found.samples[10].value)


@pytest.mark.parametrize(
    "line",
    [
        "m",
        "m ",
        "1m 2",
        "m two",
        "m 1_000",
        "m 0x1p3",
        "m ١",
        "m 1 2 3",
        "m 1 1.5",
        "m{ 1",
        "m} 1",
        'm{a="1" b="2"} 1',
        'm{a="1",,} 1',
        'm{,a="1"} 1',
        'm{a="1",a="2"} 1',
        'm{a="\\x"} 1',
        'm{a="1} 1',
        "m{a=1} 1",
        'm{1a="1"} 1',
        'm{a="1"} 1 } 2',
        "# TYPE m sort_of",
        "# TYPE m",
        "m 1 99999999999999999",
        "m" * 300 + " 1",
    ],
)
def test_a_bad_line_is_reported_with_its_number_and_the_others_count(line: str) -> None:
    """Strict means that nothing is guessed, and one bad line costs only itself."""
    found = read(f"before 1\n{line}\nafter 2\n")

    assert [sample.metric for sample in found.samples] == ["before", "after"]
    assert [number for number, _ in found.problems] == [2]


def test_labels_of_the_target_win() -> None:
    """A target cannot pretend to be another one."""
    found = read('m{instance="liar",x="1"} 1', instance="host:9")

    assert found.samples[0].labels == {"instance": "host:9", "x": "1"}


def test_more_samples_than_allowed_are_left_out_and_said_to_be() -> None:
    """A huge target is bounded, not silently cut."""
    found = read("m 1\nm 2\nm 3\n", samples_max=2)

    assert len(found.samples) == 2
    assert "more than 2 samples" in found.problems[0][1]


@pytest.mark.parametrize(
    "line", ["m" + " " * 60_000, "m{" + "}" * 60_000, 'm{a="' + "\\" * 60_000, "m " + "1 " * 30_000]
)
def test_hostile_lines_cost_no_more_than_their_length(line: str) -> None:
    """No line makes the parser work for its length squared."""
    began_s = time.process_time()

    assert read("\n".join([line] * 20)).samples == ()
    assert time.process_time() - began_s < 5.0  # milliseconds by the length, minutes by its square


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    """Whatever a target reports, there are samples and complaints, never an error."""
    found = read(text)

    assert len(found.samples) + len(found.problems) <= text.count("\n") + 1


@given(
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.text(max_size=30), max_size=4),
    st.floats(allow_nan=False),
)
def test_what_is_written_by_the_rules_is_read_back(labels: dict[str, str], value: float) -> None:
    """Escaping as the format prescribes survives the round trip."""
    labels = {name: text.replace("\r", "") for name, text in labels.items()}
    escaped = {
        name: text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, text in labels.items()
    }
    line = "m{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + f"}} {value!r}"

    found = read(line)

    assert found.problems == ()
    assert (value, {k: v for k, v in labels.items() if v}) == (found.samples[0].value, found.samples[0].labels)
