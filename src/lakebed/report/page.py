"""The page itself: a builder that is filled from top to bottom and then is a string.

Nothing in it is executed: there is no script, the page's own policy forbids any, and every word is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isfinite

from lakebed.report import plots
from lakebed.report.model import Line, Verdict
from lakebed.report.scale import quantile, short
from lakebed.report.svg import escape, tag

ROWS_MAX = 500
CELL_MAX = 300
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (1.0, "max"))

Cell = str | int | float | None


class Report:
    """`Report("Load test").section("Throughput").lines("Records", [...]).table(...)`, then `str(report)`."""

    def __init__(self, title: str, about: str = "") -> None:
        self._title, self._about = title, about
        self._parts: list[str] = []
        self._sections: list[str] = []

    def section(self, title: str, about: str = "") -> Report:
        self._sections.append(title)
        self._parts.append(tag("h2", escape(title), id=f"s{len(self._sections)}"))
        return self.text(about) if about else self

    def text(self, words: str) -> Report:
        self._parts.append(tag("p", escape(words)))
        return self

    def code(self, words: str) -> Report:
        self._parts.append(tag("pre", escape(words)))
        return self

    def facts(self, facts: Mapping[str, Cell]) -> Report:
        """A row of large numbers."""
        tiles = [tag("div", tag("b", _cell(value)), tag("span", escape(name))) for name, value in facts.items()]
        self._parts.append(tag("div", *tiles, class_="facts"))
        return self

    def lines(
        self,
        title: str,
        series: Sequence[Line],
        *,
        unit: str = "",
        x_unit: str = "s",
        marks: Sequence[tuple[float, str]] = (),
    ) -> Report:
        """Lines over x; `marks` are instants worth a dashed line, with words that show when pointed at."""
        drawn = plots.lines(series, title=title, unit=unit, x_unit=x_unit, marks=marks)
        return self._plot(title, drawn, _names(series))

    def stacked(self, title: str, series: Sequence[Line], *, unit: str = "", x_unit: str = "s") -> Report:
        return self._plot(title, plots.stacked(series, title=title, unit=unit, x_unit=x_unit), _names(series))

    def bars(self, title: str, values: Mapping[str, float], *, unit: str = "") -> Report:
        left = len(values) - plots.BARS_MAX
        note = f"{left} more are not drawn" if left > 0 else unit
        return self._plot(title, plots.bars(list(values.items()), title=title, unit=unit), (), note)

    def histogram(self, title: str, values: Sequence[float], *, unit: str = "") -> Report:
        """The distribution as a picture, and its percentiles beneath."""
        ordered = sorted(filter(isfinite, values))
        note = " · ".join(f"{name} {short(quantile(ordered, share))}" for share, name in SHARES) if ordered else ""
        note = f"{len(ordered):,} measured · {note} {unit}" if ordered else ""
        return self._plot(title, plots.histogram(ordered, title=title, unit=unit), (), note)

    def buckets(self, title: str, counted: Sequence[tuple[float, float]], *, unit: str = "s") -> Report:
        """A metric's histogram: (upper bound, how many fell into that bucket). Empty ends are cut off."""
        filled = [at for at, (_, count) in enumerate(counted) if count]
        shown = counted[filled[0] : filled[-1] + 1] if filled else ()
        values = {_bound(bound, unit) if isfinite(bound) else "more": count for bound, count in shown}
        all_of_them = sum(count for _, count in shown)
        note = f"{all_of_them:,.0f} measured" if shown else ""
        return self._plot(title, plots.bars(list(values.items()), title=title, unit=""), (), note)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Report:
        """Numbers are set to the right. Rows over ROWS_MAX are counted, not shown."""
        numbers = {at for row in rows[:1] for at, value in enumerate(row) if isinstance(value, int | float)}
        heads = [tag("th", escape(name), class_="r" if at in numbers else None) for at, name in enumerate(headers)]
        head = tag("tr", *heads)
        body = [tag("tr", *map(_td, row)) for row in rows[:ROWS_MAX]]
        self._parts.append(tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide"))
        if len(rows) > ROWS_MAX:
            self.text(f"and {len(rows) - ROWS_MAX:,} rows more")
        return self

    def verdicts(self, verdicts: Sequence[Verdict]) -> Report:
        """What was claimed, in order, with a mark that is also a word for who cannot see colours."""
        rows = [
            tag(
                "tr",
                tag("td", "✓ held" if each.held else "✗ broken", class_="held" if each.held else "broken"),
                tag("td", escape(each.group), class_="group"),
                tag("td", escape(each.name)),
                tag("td", escape(each.seen[:CELL_MAX])),
            )
            for each in verdicts[:ROWS_MAX]
        ]
        head = tag("tr", *(tag("th", word) for word in ("", "part", "invariant", "seen")))
        self._parts.append(tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="wide"))
        return self

    def __str__(self) -> str:
        style = files("lakebed.report").joinpath("page.css").read_text()
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
            f"<title>{escape(self._title)}</title><style>{style}</style>"
        )
        links = [tag("a", escape(title), href=f"#s{n}") for n, title in enumerate(self._sections, 1)]
        about = tag("p", escape(self._about)) if self._about else ""
        top = tag("header", tag("h1", escape(self._title)), about, tag("nav", *links))
        body = tag("body", top, tag("main", *self._parts))
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'

    def _plot(self, title: str, drawn: str, names: Sequence[str] = (), note: str = "") -> Report:
        below = (plots.legend(names) if names else "") + (tag("p", escape(note), class_="note") if note else "")
        self._parts.append(tag("figure", tag("figcaption", escape(title)), drawn, below))
        return self


def _bound(bound: float, unit: str) -> str:
    """Short enough for fifteen bars beside each other."""
    return f"≤{bound * 1000:g} ms" if unit == "s" and bound < 1 else f"≤{short(bound)} {unit}"


def _names(series: Sequence[Line]) -> list[str]:
    return [line.name for line in series]


def _td(value: Cell) -> str:
    return tag("td", _cell(value), class_="r" if isinstance(value, int | float) else None)


def _cell(value: Cell) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return escape(value if len(value) <= CELL_MAX else value[: CELL_MAX - 1] + "…")
    return escape(f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")
