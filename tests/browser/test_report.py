"""A report opened from disk draws its charts with what is inside the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from lakebed.console import report as report_module
from lakebed.console.report import ChartLine, HtmlReport, ReportVerdict

HOSTILE = "</script><script>document.title='broken out'</script><img src=x onerror=\"document.title='broken out'\">"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
SIZES = ([5.0], [5.0, 5.0], [0.0], [-3.0, 4.0], [1e-9, 2e-9], [1e15, 3e15])
# The number of different colours on each canvas: one on a blank canvas.
COLORS = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels).size;
})"""
# Whether a canvas has a pixel of the colour of the first line, at most 3 away in each channel.
FIRST_COLOR = """() => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--c0").trim();
  const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return [...document.querySelectorAll("canvas")].map((canvas) => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let at = 0; at < data.length; at += 4) {
      if (data[at + 3] > 200 && wanted.every((channel, n) => Math.abs(data[at + n] - channel) <= 3)) return true;
    }
    return false;
  });
}"""


def wave(name: str, factor: int) -> ChartLine:
    return ChartLine(name, tuple((at / 2, float(at * factor * 7919 % 97)) for at in range(120)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of part that the demo and the load test use, hostile words, and numbers of unusual size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report_module, "DRAWN_MIN", 0)  # charts of a few points too
        return _made(tmp_path_factory)


def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = (
        HtmlReport("Lakebed demo", HOSTILE)
        .section("Throughput", HOSTILE)
        .facts({HOSTILE: 3})
        .lines("Records", [wave("in", 1), wave(HOSTILE, 2)], unit=HOSTILE, marks=[(12.0, HOSTILE), (50.0, "killed")])
        .lines(
            "Interrupted", [ChartLine("gap", ((0.0, 1.0), (1.0, math.nan), (2.0, 3.0), (3.0, 1.0))), wave("other", 3)]
        )
        .stacked("Requests", [wave("get", 1), wave("put", 2), wave("list", 3)], unit="per second")
        .histogram("Latency", [5.0 + (n * 7919 % 97) / 4 for n in range(500)], unit="ms")
        .bars("Duplicates", {"accepted": 1234.0, HOSTILE: 3.0})
        .buckets("Accepting", [(0.0025, 3.0), (2.5, 4.0), (math.inf, 1.0)])
        .verdicts([ReportVerdict("none is lost", True, HOSTILE, "agents")])
    )
    for values in SIZES:
        page.lines("Size", [ChartLine("x", tuple((float(at), value) for at, value in enumerate(values)))])
        page.histogram("Size", values)
    file = tmp_path_factory.mktemp("report") / "page.html"
    file.write_text(str(page))
    return file


class Opened:
    """A page opened from disk, with the requests it made and the errors it reported."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page, self.url = page, file.as_uri()
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(self.url)


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Opened]:
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1000, "height": 900})
    yield Opened(context.new_page(), report)
    context.close()


def test_a_report_from_disk_draws_every_chart_and_makes_no_request(opened: Opened) -> None:
    """Each chart has a canvas with its line on it, in light and dark; there is no error and no request."""
    charts = 4 + 2 * len(SIZES)

    assert charts == opened.page.locator(".chart").count() == opened.page.locator(".chart canvas").count()
    assert all(colors > 2 for colors in opened.page.evaluate(COLORS))
    assert [True] * charts == opened.page.evaluate(FIRST_COLOR)
    assert 0 == opened.page.locator("#without-script").count()
    assert [opened.url] == opened.requests
    assert [] == opened.errors


def test_hostile_words_in_a_report_are_shown_and_not_run(opened: Opened) -> None:
    """Names, units and marks appear as they were given; none becomes an element or a script."""
    page = opened.page

    assert "Lakebed demo" == page.title()
    assert 0 == page.locator("img").count()
    assert HOSTILE in page.locator(".u-label").all_inner_texts()
    assert [HOSTILE, "killed"] == [
        mark.get_attribute("title") for mark in page.locator(".chart").first.locator(".mark").all()
    ]


def test_a_report_follows_a_change_of_the_colour_scheme_and_of_the_width(opened: Opened) -> None:
    """Charts are drawn again in the colours of the new scheme, and are as wide as the page."""
    page = opened.page
    body = page.locator("body")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == LIGHT

    page.emulate_media(color_scheme="dark" if light else "light")
    expect(body).to_have_css("background-color", DARK if light else LIGHT)
    page.set_viewport_size({"width": 390, "height": 800})
    for plot in page.locator(".u-wrap").all():
        expect(plot).to_have_css("width", "358px")

    assert all(page.evaluate(FIRST_COLOR))
    assert 390 == page.evaluate("document.documentElement.scrollWidth")
    assert [] == opened.errors


def test_without_script_the_numbers_can_be_read(browser: Browser, report: Path) -> None:
    """The note gives the reason no chart is drawn; bars and the range of each line are there."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())

    assert page.get_by_text("Charts are drawn by the script inside this page").is_visible()
    assert page.get_by_text("accepted").first.is_visible()
    page.locator("summary").first.click()
    assert page.locator("details").first.get_by_text("lowest").is_visible()
    context.close()
