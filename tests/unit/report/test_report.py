"""A report is one page that opens anywhere and runs no script but its own two."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from lakebed.console import report as report_module
from lakebed.console.report import (
    BARS_MAX,
    BINS,
    LINES_MAX,
    ROWS_MAX,
    ChartLine,
    HtmlReport,
    ReportVerdict,
    bins,
    short,
)

HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x00\x1b[31m"


class Seen(HTMLParser):
    """The tags, attributes and words of a page, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(autouse=True)
def everything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts of a few points, so that their numbers can be read in a test."""
    monkeypatch.setattr(report_module, "DRAWN_MIN", 0)


def full(word: str = "word") -> HtmlReport:
    line = ChartLine(word, ((0.0, 1.0), (1.0, 3.0), (2.0, 2.0)))
    return (
        HtmlReport(word, word)
        .section(word, word)
        .facts({word: word, "n": 3})
        .lines(word, [line, line], unit=word, x_unit=word, marks=[(1.0, word)])
        .stacked(word, [line, line], unit=word)
        .bars(word, {word: 3.0, "other": 1.0}, unit=word)
        .histogram(word, [1.0, 2.0, 2.0, 9.0], unit=word)
        .table([word, "n"], [[word, 1], [None, 2.5]])
        .verdicts([ReportVerdict(word, True, word, word), ReportVerdict(word, False, word)])
        .code(word)
    )


def charts(page: str) -> list[Any]:
    """The data of each chart, as the page's script parses it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    blocks = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return [json.loads(block, parse_constant=refuse) for block in blocks]


def test_a_page_is_whole_and_asks_nobody_for_anything() -> None:
    """Every tag is closed, and no attribute refers to another place."""
    seen = Seen(str(full()))

    assert ["html"] == [tag for tag in seen.tags if tag == "html"]
    assert [] == seen.open
    assert not {"link", "img", "iframe", "object", "embed"} & set(seen.tags)
    assert all((value or "").startswith("#") for name, value in seen.attributes if name in ("src", "href"))


def test_the_policy_allows_the_two_scripts_of_the_page_and_no_other() -> None:
    """The hashes in the policy are those of uPlot and report.js as they are in the page; requests are forbidden."""
    page = str(full(HOSTILE))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)

    expected = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]

    assert 2 == len(scripts)
    assert expected == re.findall(r"sha256-([^']+)'", unescape(policy))
    assert unescape(policy).startswith("default-src 'none'; script-src 'sha256-")


def test_hostile_words_stay_words_wherever_they_are_put() -> None:
    """Text that looks like markup adds no tag and no attribute to the page."""
    calm, hostile = Seen(str(full())), Seen(str(full(HOSTILE)))

    assert calm.tags == hostile.tags
    assert [name for name, _ in calm.attributes] == [name for name, _ in hostile.attributes]
    assert any("<script>alert(1)</script>" in word for word in hostile.words)
    assert "\x00" not in str(full(HOSTILE))
    assert "\x1b" not in str(full(HOSTILE))


def test_every_chart_has_a_name_and_its_data() -> None:
    """A screen reader can report what a chart shows, and the script gets names, columns, units and marks as given."""
    page = str(full("a & </script> < c"))
    seen = Seen(page)

    lines, stacked, histogram = charts(page)

    assert ["a & </script> < c"] * 3 == [value for name, value in seen.attributes if name == "aria-label"]
    assert [["a & </script> < c", [0.0, 1.0, 2.0], [1.0, 3.0, 2.0]]] * 2 == lines["lines"] == stacked["lines"]
    assert ["lines", "stacked", "histogram"] == [each["kind"] for each in (lines, stacked, histogram)]
    assert ("a & </script> < c", [[1.0, "a & </script> < c"]]) == (lines["unit"], lines["marks"])
    assert ["p50 2 a & </script> < c", "p99 9 a & </script> < c"] == [words for _, words in histogram["marks"]]


def test_a_chart_of_nothing_and_of_what_is_not_a_number_says_so() -> None:
    """Neither an empty series nor infinities break the page or draw a wrong line."""
    odd = ChartLine("odd", ((0.0, math.nan), (1.0, math.inf)))
    page = str(
        HtmlReport("empty").lines("a", []).lines("b", [odd]).stacked("c", [odd]).bars("d", {}).histogram("e", [])
    )

    assert 5 == page.count("nothing was measured")
    assert [] == charts(page)


def test_a_line_is_interrupted_where_its_value_is_not_a_number() -> None:
    """Points are ordered by x; a y that is not finite is null, a point without an x is left out."""
    odd = ChartLine("odd", ((2.0, math.nan), (math.nan, 9.0), (0.0, 1.0), (3.0, 4.0)))

    (chart,) = charts(str(HtmlReport("r").lines("l", [odd], marks=[(math.nan, "never")])))

    assert [["odd", [0.0, 2.0, 3.0], [1.0, None, 4.0]]] == chart["lines"]
    assert [] == chart["marks"]


def test_a_stack_counts_a_missing_point_as_zero() -> None:
    """The areas share their x values, so that they lie on each other."""
    series = [ChartLine("a", ((0.0, 1.0), (2.0, 3.0))), ChartLine("b", ((1.0, 5.0), (2.0, math.nan)))]

    (chart,) = charts(str(HtmlReport("r").stacked("s", series)))

    assert [["a", [0.0, 1.0, 2.0], [1.0, 0.0, 3.0]], ["b", [0.0, 1.0, 2.0], [0.0, 5.0, 0.0]]] == chart["lines"]


def test_without_script_the_numbers_are_in_tables() -> None:
    """Bars are tables, a line's range and a chart's marks are tables, and a note reports what is missing."""
    line = ChartLine("rate", ((0.0, 4.0), (1.0, 31.0), (2.0, 7.0)))
    page = str(HtmlReport("r").lines("l", [line], marks=[(1.0, "killed")]).bars("b", {"x": 8.0, "y": -4.0}))
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]

    assert ["rate", "3", "4", "31", "7"] in rows
    assert ["1", "killed"] in rows
    assert ["x", "8", '<i style="width: 100.0%"></i>'] in rows
    assert ["y", "-4", '<i style="width: 50.0%"></i>'] in rows
    assert "Charts are drawn by the script inside this page, which did not run." in page


def test_long_input_is_bounded_and_what_is_left_out_is_said() -> None:
    """Rows, lines and bars over their limits are counted."""
    page = str(
        HtmlReport("long")
        .table(["n"], [[n] for n in range(ROWS_MAX + 7)])
        .lines("many", [ChartLine(f"l{n}", ((0.0, 1.0),)) for n in range(LINES_MAX + 2)])
        .bars("bars", {str(n): 1.0 for n in range(BARS_MAX + 3)})
    )

    assert "and 7 rows more" in page
    assert "and 2 more, not drawn" in page
    assert "3 more are not drawn" in page
    assert LINES_MAX == len(charts(page)[0]["lines"])


def test_a_histogram_names_its_percentiles() -> None:
    """The percentiles beneath are those of the values given."""
    page = str(HtmlReport("h").histogram("latency", [float(n) for n in range(1, 1001)], unit="ms"))

    assert "1,000 measured · p50 500 · p90 900 · p99 990 · p99.9 999 · max 1k ms" in page


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.2, 5.0, 9.9, 10.0], [5.0], [0.0, 0.0], [-3.0, 4.0], [1e-9, 2e-9]])
def test_bins_hold_every_value(values: list[float]) -> None:
    """Every value is counted once, in bins whose edges increase from the smallest value."""
    edges, counts = bins(values)

    assert len(values) == sum(count or 0 for count in counts)
    assert BINS == len(counts) == len(set(edges))
    assert edges == sorted(edges)
    assert values[0] == edges[0]


def test_short_numbers() -> None:
    """A number takes few characters, whatever its size."""
    assert ["1.5k", "0.25", "3M", "-2G"] == [short(value) for value in (1500, 0.25, 3e6, -2e9)]


def test_buckets_are_named_by_their_upper_bound() -> None:
    """Empty ends are cut off, small bounds are in milliseconds, and the last bucket has no bound."""
    page = str(
        HtmlReport("b").buckets("latency", [(0.001, 0), (0.0025, 3), (0.005, 0), (2.5, 4), (math.inf, 1), (9e9, 0)])
    )

    assert ["≤2.5 ms", "≤5 ms", "≤2.5 s", "more"] == [
        words for words in ("≤1 ms", "≤2.5 ms", "≤5 ms", "≤2.5 s", "more") if f">{words}<" in page
    ]
    assert "8 measured" in page


def test_what_has_no_shape_is_a_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two measurements are two numbers, not a chart; none at all is said as before."""
    monkeypatch.undo()
    few = HtmlReport("x").histogram("Finalize", [1.0, 2.0], unit="s").buckets("Flush", [(0.1, 0.0), (1.0, 2.0)])
    few.lines("Rate", [ChartLine("a", ((0.0, 1.0), (1.0, 4.0)))], unit="records/s")

    page = str(few)

    assert 'class="chart"' not in page and 'class="bars"' not in page
    assert "Finalize: 2 measured" in page and "Flush: 2 ≤1 s." in page and "Rate: a 1 to 4 records/s." in page


def test_a_chart_says_what_to_see_and_a_page_where_it_was_measured() -> None:
    line = ChartLine("a", tuple((float(n), float(n)) for n in range(20)))
    page = str(HtmlReport("x").machine().lines("Rate", [line], unit="records/s", about="It rises."))

    assert '<p class="note">It rises.</p>' in page
    assert "cores, Python" in page
