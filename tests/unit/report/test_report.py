"""A report is one page that any browser shows and that nothing can make execute anything."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from lakebed.report import Line, Report, Verdict
from lakebed.report import scale as scales
from lakebed.report.page import ROWS_MAX
from lakebed.report.plots import LINES_MAX, POINTS_MAX

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


def full(word: str = "word") -> Report:
    line = Line(word, ((0.0, 1.0), (1.0, 3.0), (2.0, 2.0)))
    return (
        Report(word, word)
        .section(word, word)
        .facts({word: word, "n": 3})
        .lines(word, [line, line], unit=word, x_unit=word)
        .stacked(word, [line, line], unit=word)
        .bars(word, {word: 3.0, "other": 1.0}, unit=word)
        .histogram(word, [1.0, 2.0, 2.0, 9.0], unit=word)
        .table([word, "n"], [[word, 1], [None, 2.5]])
        .verdicts([Verdict(word, True, word, word), Verdict(word, False, word)])
        .code(word)
    )


def test_a_page_is_whole_and_asks_nobody_for_anything() -> None:
    """Every tag is closed, and no attribute refers to another place."""
    seen = Seen(str(full()))

    assert ["html"] == [tag for tag in seen.tags if tag == "html"]
    assert [] == seen.open
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(seen.tags)
    assert all((value or "").startswith("#") for name, value in seen.attributes if name in ("src", "href"))


def test_hostile_words_stay_words_wherever_they_are_put() -> None:
    """Text that looks like markup adds no tag and no attribute to the page."""
    calm, hostile = Seen(str(full())), Seen(str(full(HOSTILE)))

    assert calm.tags == hostile.tags
    assert [name for name, _ in calm.attributes] == [name for name, _ in hostile.attributes]
    assert any("<script>alert(1)</script>" in word for word in hostile.words)
    assert "\x00" not in str(full(HOSTILE))
    assert "\x1b" not in str(full(HOSTILE))


def test_every_plot_is_well_formed_xml_with_a_name() -> None:
    """A picture can be lifted out of the page, and a screen reader can say what it shows."""
    page = str(full("a & b < c"))

    drawings = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]

    assert 4 == len(drawings)
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert "a & b < c" == root.get("aria-label")
        assert "a & b < c" == root.findtext("title")


def test_a_plot_of_nothing_and_of_what_is_not_a_number_says_so() -> None:
    """Neither an empty series nor infinities break the page or draw a wrong line."""
    odd = Line("odd", ((0.0, math.nan), (1.0, math.inf)))
    page = str(Report("empty").lines("a", []).lines("b", [odd]).stacked("c", [odd]).bars("d", {}).histogram("e", []))

    assert 5 == page.count("nothing was measured")
    assert "nan" not in page


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0], [-3.0, 4.0], [1e-9, 2e-9], [1e15, 3e15]])
def test_any_size_of_number_can_be_drawn(values: list[float]) -> None:
    """One point, equal points, negative, tiny and huge ones all fit into the frame."""
    points = tuple((float(n), value) for n, value in enumerate(values))
    page = str(Report("r").lines("l", [Line("x", points)]).histogram("h", values).bars("b", {"x": values[0]}))

    for part in page.split('points="')[1:]:
        for place in part.split('"')[0].split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= 720
            assert 0 <= y <= 260


def test_long_input_is_bounded_and_what_is_left_out_is_said() -> None:
    """Rows, lines and points over their limits are counted, and a peak is never thinned away."""
    many = tuple((float(n), 1000.0 if n == 5_001 else 1.0) for n in range(20_000))
    page = str(
        Report("long")
        .table(["n"], [[n] for n in range(ROWS_MAX + 7)])
        .lines("many", [Line(f"l{n}", many[:3]) for n in range(LINES_MAX + 2)])
    )

    assert "and 7 rows more" in page
    assert "and 2 more, not drawn" in page
    thinned = scales.thin(many, POINTS_MAX)
    assert len(thinned) <= POINTS_MAX
    assert (5_001.0, 1000.0) in thinned
    assert sorted(thinned) == thinned


def test_a_histogram_names_its_percentiles() -> None:
    """The percentiles beneath are those of the values given."""
    page = str(Report("h").histogram("latency", [float(n) for n in range(1, 1001)], unit="ms"))

    assert "1,000 measured · p50 500 · p90 900 · p99 990 · p99.9 999 · max 1k ms" in page


def test_ticks_are_round_and_inside() -> None:
    """An axis carries few, round numbers that span the values."""
    scale = scales.fit(0.0, 8_731.0, 100.0, 0.0)

    assert (0.0, 2000.0, 4000.0, 6000.0, 8000.0, 10000.0) == scale.ticks
    assert 100.0 == scale.at(0.0)
    assert 0.0 == scale.at(10_000.0)
    assert ["1.5k", "0.25", "3M", "–"] == [scales.short(value) for value in (1500, 0.25, 3e6, math.inf)]


def test_bins_hold_every_value() -> None:
    """What goes into a histogram is all there."""
    values = [0.1, 0.2, 0.2, 5.0, 9.9, 10.0]

    assert len(values) == sum(count for _, _, count in scales.bins(values, 7))


def test_buckets_are_named_by_their_upper_bound() -> None:
    """Empty ends are cut off, small bounds are in milliseconds, and the last bucket has no bound."""
    page = str(Report("b").buckets("latency", [(0.001, 0), (0.0025, 3), (0.005, 0), (2.5, 4), (math.inf, 1), (9e9, 0)]))

    assert ["≤2.5 ms", "≤5 ms", "≤2.5 s", "more"] == [
        words for words in ("≤1 ms", "≤2.5 ms", "≤5 ms", "≤2.5 s", "more") if f">{words}<" in page
    ]
    assert "8 measured" in page
