"""A self-contained HTML page with tables and charts: a builder that is filled from top to bottom, then rendered.

The page opens from disk, makes no request and follows the light or dark theme.

uPlot, `report.js` and the data are inside the page. The page's policy allows exactly these two scripts, by their hash,
and no request. Text is escaped by the template, data by `tojson`, so no input becomes markup or script.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

HERE = Path(__file__).parent
UPLOT = HERE / "vendor/uplot"
SCRIPTS = (UPLOT / "uPlot.iife.min.js", HERE / "static/report.js")
ROWS_MAX, CELL_MAX, BARS_MAX, MARKS_MAX = 500, 300, 40, 40
LINES_MAX = 8  # the number of colours in report.html
BINS = 40
DRAWN_MIN = 8  # points or measurements: fewer have no shape
SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (1.0, "max"))
BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# HTML does not allow control characters and lone surrogates: a replacement character is shown for each.
CONTROLS = dict.fromkeys({*range(32), 127, *range(0xD800, 0xE000)} - {9, 10}, "\N{REPLACEMENT CHARACTER}")

Cell = str | int | float | None
Drawn = tuple[str, list[float], list[float | None]]  # name, each x in order, y or None at each x


class ChartLine(msgspec.Struct, frozen=True):
    """A named series of (x, y). The line is interrupted where y is not finite."""

    name: str
    points: tuple[tuple[float, float], ...]


class ReportVerdict(msgspec.Struct, frozen=True):
    """A claim, whether it held, and what was observed."""

    name: str
    held: bool
    seen: str
    group: str = ""


class HtmlReport:
    """`HtmlReport("Load test").section("Throughput").lines("Records", [...]).table(...)`, then `str(report)`."""

    def __init__(self, title: str, about: str = "") -> None:
        self._title, self._about = title, about
        self._parts: list[dict[str, Any]] = []

    def section(self, title: str, about: str = "") -> HtmlReport:
        self._add("section", title=title, id=f"s{len(self._parts)}")
        return self.text(about) if about else self

    def text(self, words: str) -> HtmlReport:
        return self._add("text", words=words)

    def code(self, words: str) -> HtmlReport:
        return self._add("code", words=words)

    def facts(self, facts: Mapping[str, Cell]) -> HtmlReport:
        """A row of large numbers."""
        return self._add("facts", facts=facts)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> HtmlReport:
        """Numbers are aligned right. Rows over ROWS_MAX are counted, not shown."""
        self._add("table", headers=headers, rows=rows[:ROWS_MAX])
        return self.text(f"and {len(rows) - ROWS_MAX:,} rows more") if len(rows) > ROWS_MAX else self

    def verdicts(self, verdicts: Sequence[ReportVerdict]) -> HtmlReport:
        """The claims in order. The mark is also a word, for readers who cannot see colours."""
        return self._add("verdicts", verdicts=verdicts[:ROWS_MAX])

    def lines(
        self,
        title: str,
        series: Sequence[ChartLine],
        *,
        unit: str = "",
        x_unit: str = "s",
        marks: Sequence[tuple[float, str]] = (),
        about: str = "",
    ) -> HtmlReport:
        """Lines over x; `marks` are dashed vertical lines whose words show under the pointer. `about` says what to see.

        With fewer than DRAWN_MIN points in its longest line there is no shape to see: the numbers are one line of text.
        """
        drawn = [_drawn(line) for line in series[:LINES_MAX]]
        shown = [(x, words) for x, words in marks if isfinite(x)][:MARKS_MAX]
        if 0 < max((len(xs) for _, xs, _ in drawn), default=0) < DRAWN_MIN:
            known = [(name, [y for y in ys if y is not None]) for name, _, ys in drawn]
            ranges = [f"{name} {short(min(ys))} to {short(max(ys))} {unit}".rstrip() for name, ys in known if ys]
            return self.text(f"{title}: {', '.join(ranges) or 'nothing was measured'}.")
        options = {"unit": unit, "x_unit": x_unit, "marks": shown}
        return self._chart("lines", title, drawn, _not_drawn(series), about, **options)

    def stacked(
        self, title: str, series: Sequence[ChartLine], *, unit: str = "", x_unit: str = "s", about: str = ""
    ) -> HtmlReport:
        """Areas on top of each other. A series without a point at an x counts as zero there."""
        known = [(name, dict(zip(xs, ys, strict=True))) for name, xs, ys in map(_drawn, series[:LINES_MAX])]
        xs = sorted({x for _, at in known for x, y in at.items() if y is not None})
        drawn: list[Drawn] = [(name, xs, [max(0.0, at.get(x) or 0.0) for x in xs]) for name, at in known]
        options = {"unit": unit, "x_unit": x_unit, "marks": ()}
        return self._chart("stacked", title, drawn, _not_drawn(series), about, **options)

    def histogram(self, title: str, values: Sequence[float], *, unit: str = "", about: str = "") -> HtmlReport:
        """The distribution with its median and 99th percentile marked, and its percentiles beneath."""
        ordered = sorted(filter(isfinite, values))
        at = {name: quantile(ordered, share) for share, name in SHARES if ordered}
        note = " · ".join(f"{name} {short(value)}" for name, value in at.items())
        marks = [(at[name], f"{name} {short(at[name])} {unit}") for name in ("p50", "p99") if ordered]
        drawn: list[Drawn] = [("count", *bins(ordered))] if ordered else []
        note = f"{len(ordered):,} measured · {note} {unit}" if ordered else ""
        if 0 < len(ordered) < DRAWN_MIN:
            return self.text(f"{title}: {note}.")
        return self._chart("histogram", title, drawn, note, about, unit="", x_unit=unit, marks=marks)

    def bars(self, title: str, values: Mapping[str, float], *, unit: str = "") -> HtmlReport:
        """One bar for each name, with its number. Bars are a table: they need no script."""
        left = len(values) - BARS_MAX
        note = f"{left} more are not drawn" if left > 0 else unit
        shown = [(name, value) for name, value in values.items() if isfinite(value)][:BARS_MAX]
        most = max((abs(value) for _, value in shown), default=0.0) or 1.0
        rows = [(name, short(value), round(abs(value) / most * 100, 1)) for name, value in shown]
        return self._add("bars", title=title, rows=rows, note=note, about="")

    def buckets(self, title: str, counted: Sequence[tuple[float, float]], *, unit: str = "s") -> HtmlReport:
        """A metric's histogram: (upper bound, count of that bucket). Empty ends are cut off."""
        filled = [at for at, (_, count) in enumerate(counted) if count]
        shown = counted[filled[0] : filled[-1] + 1] if filled else ()
        values = {_bound(bound, unit) if isfinite(bound) else "more": count for bound, count in shown}
        measured = sum(count for _, count in shown)
        if shown and (len(shown) < 3 or measured < DRAWN_MIN):
            counts = ", ".join(f"{count:,.0f} {name}" for name, count in values.items())
            return self.text(f"{title}: {counts}.")
        return self.bars(title, values, unit=f"{sum(count for _, count in shown):,.0f} measured" if shown else "")

    def machine(self) -> HtmlReport:
        """Where the numbers were measured: they do not hold elsewhere."""
        cores = os.cpu_count() or 0
        load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
        return self.text(
            f"Measured on {platform.system()} {platform.machine()} with {cores} cores, Python"
            f" {platform.python_version()}; load average at the end {load}. Other work on the machine lowers the rates."
        )

    def __str__(self) -> str:
        scripts = [Markup(file.read_text()) for file in SCRIPTS]
        hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
        return TEMPLATES.get_template("report.html").render(
            policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:",
            uplot_css=Markup((UPLOT / "uPlot.min.css").read_text()),
            scripts=scripts,
            title=self._title,
            about=self._about,
            parts=self._parts,
        )

    def _chart(
        self, kind: str, title: str, drawn: Sequence[Drawn], note: str = "", about: str = "", **options: Any
    ) -> HtmlReport:
        """A chart, and the range of each line as a table for readers without script."""
        known = [(name, [y for y in ys if y is not None]) for name, _, ys in drawn]
        rows = [(name, len(ys), min(ys), max(ys), ys[-1]) for name, ys in known if ys]
        chart = {"kind": kind, "lines": drawn, **options}
        return self._add("chart", title=title, chart=chart, rows=rows, note=note, about=about)

    def _add(self, kind: str, **part: Any) -> HtmlReport:
        self._parts.append({"kind": kind, **part})
        return self


def short(value: float) -> str:
    """A number in few characters: 1.5k, 0.25, 3M."""
    size, letter = next(((size, letter) for size, letter in BIG if abs(value) >= size), (1.0, ""))
    return f"{value / size:.3g}{letter}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def bins(ordered: Sequence[float]) -> tuple[list[float], list[float | None]]:
    """The lower edges of BINS bins of equal width, and the count of each; the last bin includes its upper edge."""
    low, high = ordered[0], ordered[-1]
    width = (high - low) / BINS or abs(low) / BINS or 1.0
    counts = Counter(min(BINS - 1, int((value - low) / width)) for value in ordered)
    return [low + n * width for n in range(BINS)], [counts[n] for n in range(BINS)]


def _drawn(line: ChartLine) -> Drawn:
    points = sorted((point for point in line.points if isfinite(point[0])), key=lambda point: point[0])
    return line.name, [x for x, _ in points], [y if isfinite(y) else None for _, y in points]


def _not_drawn(series: Sequence[ChartLine]) -> str:
    return f"and {len(series) - LINES_MAX} more, not drawn" if len(series) > LINES_MAX else ""


def _bound(bound: float, unit: str) -> str:
    return f"≤{bound * 1000:g} ms" if unit == "s" and bound < 1 else f"≤{short(bound)} {unit}"


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value if len(value) <= CELL_MAX else value[: CELL_MAX - 1] + "…"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _clean(value: object) -> object:
    return value.translate(CONTROLS) if type(value) is str else value


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_clean,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["cell"] = _cell
