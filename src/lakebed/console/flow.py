"""The way of data through the parts, as a picture: where each box lies, what it shows, what leads where. Pure.

There are two layouts, wide and tall: a phone gets boxes it can read, not a small copy of the wide ones.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Form = Literal["short", "age", "size"]
Health = Literal["ok", "degraded", "down", "quiet"]


class Line(msgspec.Struct, frozen=True):
    """One number in a box: a rate of this gateway (`rate.…`) or a level of the lake (`level.…`)."""

    key: str
    label: str
    form: Form = "short"


class Box(msgspec.Struct, frozen=True):
    name: str
    title: str
    href: str
    first: Line
    second: Line
    component: str = ""  # whose health it shows; empty: judged by its own levels
    bad: tuple[str, ...] = ()  # levels that make it degraded when they are not 0


class Placed(msgspec.Struct, frozen=True):
    box: Box
    x: int
    y: int
    w: int
    h: int
    health: Health


class Edge(msgspec.Struct, frozen=True):
    """A curve; `key` is the number that makes it move."""

    path: str
    key: str


class Picture(msgspec.Struct, frozen=True):
    name: str
    width: int
    height: int
    boxes: tuple[Placed, ...]
    edges: tuple[Edge, ...]


def _line(key: str, label: str, form: Form = "short") -> Line:
    return Line(key, label, form)


INGEST = (
    Box("batches", "Batches", "/batches", _line("rate.batches_samples", "samples/s"),
        _line("level.conflicts_open", "open conflicts"), "batches", ("conflicts_open",)),
    Box("log", "Log", "/log", _line("rate.log_in", "records/s in"), _line("rate.log_out", "records/s out"), "log"),
    Box("queue", "Queue", "/queue", _line("rate.queue_entries", "entries/s"),
        _line("level.queue_dead", "dead letters"), "queue", ("queue_dead",)),
    Box("ticks", "Ticks", "/ticks", _line("rate.ticks_parts", "parts/s"), _line("rate.ticks_rows", "rows/s"), "ticks"),
)  # fmt: skip
BUCKET = Box("bucket", "Bucket", "/status", _line("rate.store_requests", "requests/s"),
             _line("rate.store_in_bytes", "in/s", "size"), "store")  # fmt: skip
WORKERS = (
    Box("reconciler", "Reconciler", "/batches", _line("rate.batches_accepted", "accepted/s"),
        _line("rate.batches_duplicate", "duplicates/s")),
    Box("compactor", "Compactor", "/log", _line("level.log_uncompacted", "to compact"),
        _line("level.log_records", "records kept")),
    Box("collectors", "Collectors", "/queue", _line("level.queue_waiting", "batches wait"),
        _line("level.queue_oldest_s", "oldest", "age")),
    Box("pipeline", "Pipeline", "/ticks", _line("level.ticks_undispatched", "to silver"),
        _line("level.ticks_lag_s", "behind", "age"), bad=("ticks_dead",)),
    Box("lifecycle", "Lifecycle", "/lifecycle", _line("level.blockers", "blockers"),
        _line("level.lifecycle_behind_s", "behind", "age"), "lifecycle", ("blockers",)),
)  # fmt: skip
TABLES = Box("tables", "Tables", "/tables", _line("level.tables", "tables"), _line("level.table_rows", "rows"))


def pictures(health: dict[str, str], levels: dict[str, float | None]) -> tuple[Picture, Picture]:
    """The wide and the tall layout, each box with its health."""

    def put(box: Box, x: int, y: int, w: int, h: int) -> Placed:
        return Placed(box, x, y, w, h, judged(box, health, levels))

    return _wide(put), _tall(put)


def judged(box: Box, health: dict[str, str], levels: dict[str, float | None]) -> Health:
    told = health.get(box.component, "quiet" if box.component else "ok")
    if told in ("ok", "quiet") and any(levels.get(name) for name in box.bad):
        return "degraded"
    return told if told in ("ok", "degraded", "down") else "quiet"  # type: ignore[return-value]


def _wide(put: object) -> Picture:
    assert callable(put)
    boxes: list[Placed] = [put(box, 0, 110 * n, 200, 94) for n, box in enumerate(INGEST)]
    bucket: Placed = put(BUCKET, 300, 0, 150, 424)
    workers: list[Placed] = [put(box, 550, 87 * n, 200, 76) for n, box in enumerate(WORKERS)]
    tables: Placed = put(TABLES, 830, 87 * 3, 170, 76)
    edges = [_across(box, bucket, box.box.first.key) for box in boxes]
    edges += [_across(bucket, box, box.box.first.key) for box in workers]
    edges.append(_across(workers[3], tables, "rate.ticks_rows"))
    return Picture("wide", 1000, 424, (*boxes, bucket, *workers, tables), tuple(edges))


def _tall(put: object) -> Picture:
    assert callable(put)
    boxes: list[Placed] = [put(box, 182 * (n % 2), 100 * (n // 2), 168, 88) for n, box in enumerate(INGEST)]
    bucket: Placed = put(BUCKET, 0, 222, 350, 80)
    below = (*WORKERS, TABLES)
    workers: list[Placed] = [put(box, 182 * (n % 2), 326 + 100 * (n // 2), 168, 88) for n, box in enumerate(below)]
    edges = [Edge(f"M{x} 188 V222", key) for x, key in ((84, "rate.queue_entries"), (266, "rate.ticks_parts"))]
    edges += [Edge(f"M{x} 302 V326", key) for x, key in ((84, "rate.store_requests"), (266, "rate.store_requests"))]
    return Picture("tall", 350, 616, (*boxes, bucket, *workers), tuple(edges))


def _across(left: Placed, right: Placed, key: str) -> Edge:
    """A calm curve from one box's right side to the next one's left, level with the smaller of the two."""
    x1, x2 = left.x + left.w, right.x
    y1 = left.y + left.h // 2 if left.h <= right.h else right.y + right.h // 2
    y2 = right.y + right.h // 2 if right.h <= left.h else y1
    middle = (x1 + x2) // 2
    return Edge(f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}", key)
