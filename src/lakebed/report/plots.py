"""The plots, each from plain numbers to one inline SVG. Colours are classes of the page's stylesheet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lakebed.report.model import Line
from lakebed.report.scale import Scale, bins, fit, quantile, short, thin
from lakebed.report.svg import escape, label, tag

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 36.0
POINTS_MAX = 600  # of one line: more than pixels is waste
LINES_MAX = 8  # as many as there are colours that are told apart
BARS_MAX = 40
MARKS_MAX = 40
BINS = 40
NAME_MAX = 14


def lines(
    series: Sequence[Line], *, title: str, unit: str, x_unit: str, marks: Sequence[tuple[float, str]] = ()
) -> str:
    """Lines over a shared x axis, from zero (or below it). Marks are instants that a dashed line shows."""
    shown = [(line.name, finite(line.points)) for line in series[:LINES_MAX]]
    points = [point for _, each in shown for point in each]
    if not points:
        return nothing(title)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across = fit(min(xs), max(xs), LEFT, WIDTH - RIGHT, widen=False)
    up = fit(min(0.0, *ys), max(*ys, 0.0), HEIGHT - BOTTOM, TOP)
    drawn = [_path(name, number, each, across, up, unit) for number, (name, each) in enumerate(shown)]
    drawn += [_mark(across.at(x), words) for x, words in marks[:MARKS_MAX] if across.low <= x <= across.high]
    return frame(title, _grid(across, up, unit, x_unit) + "".join(drawn))


def stacked(series: Sequence[Line], *, title: str, unit: str, x_unit: str) -> str:
    """Areas on top of each other. The series share their x values; one that lacks a point counts as zero there."""
    shown = [(line.name, dict(finite(line.points))) for line in series[:LINES_MAX]]
    xs = sorted({x for _, each in shown for x in each})
    if not xs:
        return nothing(title)
    floors = [0.0] * len(xs)
    areas: list[str] = []
    tops = [sum(max(0.0, each.get(x, 0.0)) for _, each in shown) for x in xs]
    across = fit(xs[0], xs[-1], LEFT, WIDTH - RIGHT, widen=False)
    up = fit(0.0, max(tops), HEIGHT - BOTTOM, TOP)
    for number, (name, each) in enumerate(shown):
        roofs = [floor + max(0.0, each.get(x, 0.0)) for floor, x in zip(floors, xs, strict=True)]
        edge = [*zip(xs, roofs, strict=True), *reversed(list(zip(xs, floors, strict=True)))]
        areas.append(
            tag(
                "polygon",
                tag("title", escape(f"{name}: at most {short(max(each.values(), default=0.0))} {unit}")),
                points=" ".join(_place(point, across, up) for point in edge),
                class_=f"a c{number}",
            )
        )
        floors = roofs
    return frame(title, "".join(areas) + _grid(across, up, unit, x_unit))


def bars(values: Sequence[tuple[str, float]], *, title: str, unit: str) -> str:
    """One bar per name, with its number on top."""
    shown = [(name, value) for name, value in values if math.isfinite(value)][:BARS_MAX]
    if not shown:
        return nothing(title)
    amounts = [value for _, value in shown]
    up = fit(min(0.0, *amounts), max(*amounts, 0.0), HEIGHT - BOTTOM, TOP + 12)
    room = (WIDTH - LEFT - RIGHT) / len(shown)
    drawn = []
    for number, (name, value) in enumerate(shown):
        middle = LEFT + room * (number + 0.5)
        top, bottom = sorted((up.at(value), up.at(0.0)))
        drawn += [
            tag(
                "rect",
                tag("title", escape(f"{name}: {value:,g} {unit}")),
                x=middle - min(room * 0.36, 40.0),
                y=top,
                width=min(room * 0.72, 80.0),
                height=max(bottom - top, 0.5),
                class_="b c0",
            ),
            label(short(value), middle, top - 4, class_="m n"),
            label(_cut(name, room), middle, HEIGHT - BOTTOM + 16, class_="m"),
        ]
    return frame(title, _levels(up, unit) + "".join(drawn))


def histogram(values: Sequence[float], *, title: str, unit: str) -> str:
    """How often each size occurs; lines mark the median and the 99th percentile."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return nothing(title)
    counted = bins(ordered, BINS)
    across = fit(counted[0][0], counted[-1][1], LEFT, WIDTH - RIGHT, widen=False)
    up = fit(0.0, float(max(count for _, _, count in counted)), HEIGHT - BOTTOM, TOP + 12)
    drawn = [
        tag(
            "rect",
            tag("title", escape(f"{short(low)} to {short(high)} {unit}: {count}")),
            x=across.at(low) + 0.5,
            y=up.at(count),
            width=max(across.at(high) - across.at(low) - 1, 1.0) if high > low else 12.0,
            height=up.at(0.0) - up.at(count),
            class_="b c0",
        )
        for low, high, count in counted
        if count
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = across.at(quantile(ordered, share))
        words = f"{name} {short(quantile(ordered, share))} {unit}"
        drawn.append(_mark(at, words))
        end = at > WIDTH * 0.8
        drawn.append(label(words, at + (-4 if end else 4), TOP + 12, class_="e n" if end else "s n"))
    return frame(title, _grid(across, up, "", unit) + "".join(drawn))


def legend(names: Sequence[str]) -> str:
    """The names beside their colours; what did not fit into the plot is said."""
    entries = [
        tag("span", tag("i", class_=f"c{number}"), escape(name)) for number, name in enumerate(names[:LINES_MAX])
    ]
    if len(names) > LINES_MAX:
        entries.append(tag("span", f"and {len(names) - LINES_MAX} more, not drawn"))
    return tag("p", *entries, class_="legend")


def frame(title: str, drawn: str) -> str:
    size = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return tag("svg", tag("title", escape(title)), drawn, viewBox=size, role="img", aria_label=title)


def nothing(title: str) -> str:
    return frame(title, label("nothing was measured", WIDTH / 2, HEIGHT / 2, class_="m"))


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return thin([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)], POINTS_MAX)


def _path(name: str, number: int, points: Sequence[tuple[float, float]], across: Scale, up: Scale, unit: str) -> str:
    if not points:
        return ""
    about = f"{name}: {short(min(y for _, y in points))} to {short(max(y for _, y in points))} {unit}"
    places = " ".join(_place(point, across, up) for point in points)
    if len(points) == 1:
        x, y = places.split(",")
        return tag("circle", tag("title", escape(about)), cx=x, cy=y, r=4, class_=f"b c{number}")
    return tag("polyline", tag("title", escape(about)), points=places, class_=f"l c{number}")


def _mark(at: float, words: str) -> str:
    return tag("line", tag("title", escape(words)), x1=at, x2=at, y1=TOP + 6, y2=HEIGHT - BOTTOM, class_="mark")


def _place(point: tuple[float, float], across: Scale, up: Scale) -> str:
    return f"{across.at(point[0]):.1f},{up.at(point[1]):.1f}"


def _grid(across: Scale, up: Scale, unit: str, x_unit: str) -> str:
    ticks = "".join(label(short(tick), across.at(tick), HEIGHT - BOTTOM + 16, class_="m") for tick in across.ticks)
    return _levels(up, unit) + ticks + label(x_unit, WIDTH - RIGHT, HEIGHT - 4, class_="e u")


def _levels(up: Scale, unit: str) -> str:
    def level(tick: float) -> str:
        y = up.at(tick)
        return tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="g") + label(
            short(tick), LEFT - 6, y + 4, class_="e"
        )

    return "".join(map(level, up.ticks)) + label(unit, LEFT - 46, HEIGHT - 4, class_="s u")


def _cut(name: str, room: float) -> str:
    most = max(2, min(NAME_MAX * 2, int(room / 6.2)))
    return name if len(name) <= most else name[: most - 1] + "…"
