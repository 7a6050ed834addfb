"""The data flow diagram of the overview: the position and content of each box, and the edges between them. Pure.

There are two layouts, wide and tall: on a phone the boxes stay readable.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Form = Literal["short", "age", "size"]
Health = Literal["ok", "degraded", "down", "quiet"]


class BoxValue(msgspec.Struct, frozen=True):
    """One number in a box: a rate of this gateway (`rate.…`) or a level of the lake (`level.…`)."""

    key: str
    label: str
    form: Form = "short"


class Box(msgspec.Struct, frozen=True):
    name: str
    title: str
    href: str
    first: BoxValue
    second: BoxValue
    component: str = ""  # the component whose health it shows; empty: from its own levels
    bad: tuple[str, ...] = ()  # levels that make it degraded when they are not 0


class PlacedBox(msgspec.Struct, frozen=True):
    box: Box
    x: int
    y: int
    w: int
    h: int
    health: Health


class Edge(msgspec.Struct, frozen=True):
    """A curve; `key` is the number that animates it."""

    path: str
    key: str


class Diagram(msgspec.Struct, frozen=True):
    name: str
    width: int
    height: int
    boxes: tuple[PlacedBox, ...]
    edges: tuple[Edge, ...]


INGEST = (
    Box("batches", "Batches", "/batches", BoxValue("rate.batches_samples", "samples/s"),
        BoxValue("level.conflicts_open", "open conflicts"), "batches", ("conflicts_open",)),
    Box("log", "Log", "/log", BoxValue("rate.log_in", "records/s in"),
        BoxValue("rate.log_out", "records/s out"), "log"),
    Box("queue", "Queue", "/queue", BoxValue("rate.queue_entries", "entries/s"),
        BoxValue("level.queue_dead", "dead letters"), "queue", ("queue_dead",)),
    Box("ticks", "Ticks", "/ticks", BoxValue("rate.ticks_parts", "parts/s"),
        BoxValue("rate.ticks_rows", "rows/s"), "ticks"),
)  # fmt: skip
BUCKET = Box("bucket", "Bucket", "/status", BoxValue("rate.store_requests", "requests/s"),
             BoxValue("rate.store_in_bytes", "in/s", "size"), "store")  # fmt: skip
WORKERS = (
    Box("reconciler", "Reconciler", "/batches", BoxValue("rate.batches_accepted", "accepted/s"),
        BoxValue("rate.batches_duplicate", "duplicates/s")),
    Box("compactor", "Compactor", "/log", BoxValue("level.log_uncompacted", "to compact"),
        BoxValue("level.log_records", "records kept")),
    Box("collectors", "Collectors", "/queue", BoxValue("level.queue_waiting", "batches waiting"),
        BoxValue("level.queue_oldest_s", "oldest", "age")),
    Box("pipeline", "Pipeline", "/ticks", BoxValue("level.ticks_undispatched", "to silver"),
        BoxValue("level.ticks_lag_s", "lag", "age"), bad=("ticks_dead",)),
    Box("lifecycle", "Lifecycle", "/lifecycle", BoxValue("level.blockers", "blockers"),
        BoxValue("level.lifecycle_behind_s", "lag", "age"), "lifecycle", ("blockers",)),
)  # fmt: skip
TABLES = Box("tables", "Tables", "/tables", BoxValue("level.tables", "tables"), BoxValue("level.table_rows", "rows"))


def diagrams(health: dict[str, str], levels: dict[str, float | None]) -> tuple[Diagram, Diagram]:
    """The wide and the tall layout, each box with its health."""

    def put(box: Box, x: int, y: int, w: int, h: int) -> PlacedBox:
        return PlacedBox(box, x, y, w, h, box_health(box, health, levels))

    return _wide(put), _tall(put)


def box_health(box: Box, health: dict[str, str], levels: dict[str, float | None]) -> Health:
    status = health.get(box.component, "quiet" if box.component else "ok")
    if status in ("ok", "quiet") and any(levels.get(name) for name in box.bad):
        return "degraded"
    return status if status in ("ok", "degraded", "down") else "quiet"  # type: ignore[return-value]


def _wide(put: object) -> Diagram:
    assert callable(put)
    boxes: list[PlacedBox] = [put(box, 0, 110 * n, 200, 94) for n, box in enumerate(INGEST)]
    bucket: PlacedBox = put(BUCKET, 300, 0, 150, 424)
    workers: list[PlacedBox] = [put(box, 550, 87 * n, 200, 76) for n, box in enumerate(WORKERS)]
    tables: PlacedBox = put(TABLES, 830, 87 * 3, 170, 76)
    edges = [_across(box, bucket, box.box.first.key) for box in boxes]
    edges += [_across(bucket, box, box.box.first.key) for box in workers]
    edges.append(_across(workers[3], tables, "rate.ticks_rows"))
    return Diagram("wide", 1000, 424, (*boxes, bucket, *workers, tables), tuple(edges))


def _tall(put: object) -> Diagram:
    assert callable(put)
    boxes: list[PlacedBox] = [put(box, 182 * (n % 2), 100 * (n // 2), 168, 88) for n, box in enumerate(INGEST)]
    bucket: PlacedBox = put(BUCKET, 0, 222, 350, 80)
    below = (*WORKERS, TABLES)
    workers: list[PlacedBox] = [put(box, 182 * (n % 2), 326 + 100 * (n // 2), 168, 88) for n, box in enumerate(below)]
    edges = [Edge(f"M{x} 188 V222", key) for x, key in ((84, "rate.queue_entries"), (266, "rate.ticks_parts"))]
    edges += [Edge(f"M{x} 302 V326", key) for x, key in ((84, "rate.store_requests"), (266, "rate.store_requests"))]
    return Diagram("tall", 350, 616, (*boxes, bucket, *workers), tuple(edges))


def _across(left: PlacedBox, right: PlacedBox, key: str) -> Edge:
    """A curve from the right side of one box to the left of the other, at the middle of the smaller one."""
    x1, x2 = left.x + left.w, right.x
    y1 = left.y + left.h // 2 if left.h <= right.h else right.y + right.h // 2
    y2 = right.y + right.h // 2 if right.h <= left.h else y1
    middle = (x1 + x2) // 2
    return Edge(f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}", key)
