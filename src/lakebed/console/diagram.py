"""The data flow diagram of the overview: the position and content of each box, and the edges between them. Pure.

There are two layouts, wide and tall: on a phone the boxes stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from lakebed.console.states import PartState, judge
from lakebed.core.context import Health

Form = Literal["short", "age", "size"]


class BoxValue(msgspec.Struct, frozen=True):
    """One number in a box: a rate of the lake (`lake.…`), a rate of this gateway (`rate.…`) or a level (`level.…`)."""

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
    watches: tuple[str, ...] = ()  # levels that are compared with their limits, and without which it is grey


class PlacedBox(msgspec.Struct, frozen=True):
    box: Box
    x: int
    y: int
    w: int
    h: int
    state: PartState


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
    Box("batches", "Batches", "/batches", BoxValue("lake.batches_samples", "samples/s"),
        BoxValue("level.conflicts_open", "open conflicts"), "batches", ("conflicts_open",)),
    Box("log", "Log", "/log", BoxValue("lake.log_in", "records/s"),
        BoxValue("level.log_records", "records kept"), "log"),
    Box("queue", "Queue", "/queue", BoxValue("lake.queue_in", "batches/s"),
        BoxValue("level.queue_dead", "dead letters"), "queue", ("queue_dead",)),
    Box("ticks", "Ticks", "/ticks", BoxValue("lake.ticks_rows", "rows/s"),
        BoxValue("lake.ticks_committed", "ticks/s"), "ticks"),
)  # fmt: skip
BUCKET = Box("bucket", "Bucket", "/status", BoxValue("rate.store_requests", "requests/s"),
             BoxValue("rate.store_in_bytes", "in/s", "size"), "store")  # fmt: skip
WORKERS = (
    Box("reconciler", "Reconciler", "/batches", BoxValue("level.reconciler_behind_s", "behind", "age"),
        BoxValue("lake.batches_accepted", "batches/s"), watches=("reconciler_behind_s",)),
    Box("compactor", "Compactor", "/log", BoxValue("level.log_uncompacted", "to compact"),
        BoxValue("level.log_partitions", "partitions"), watches=("log_uncompacted",)),
    Box("collectors", "Collectors", "/queue", BoxValue("level.queue_waiting", "batches waiting"),
        BoxValue("level.queue_oldest_s", "oldest", "age"), watches=("queue_oldest_s",)),
    Box("pipeline", "Pipeline", "/runs", BoxValue("level.ticks_undispatched", "to silver"),
        BoxValue("level.ticks_lag_s", "lag", "age"), watches=("ticks_lag_s", "ticks_dead")),
    Box("lifecycle", "Lifecycle", "/lifecycle", BoxValue("level.blockers", "blockers"),
        BoxValue("level.lifecycle_behind_s", "lag", "age"), "lifecycle", ("blockers", "lifecycle_behind_s")),
)  # fmt: skip
TABLES = Box("tables", "Tables", "/tables", BoxValue("level.tables", "tables"),
             BoxValue("level.table_rows", "rows"), watches=("tables",))  # fmt: skip
BOXES = (*INGEST, BUCKET, *WORKERS, TABLES)


def states(health: Mapping[str, Health] | None, levels: Mapping[str, float | None]) -> dict[str, PartState]:
    """The state of each box, by its name."""
    return {box.name: judge(box.component, box.watches, health, levels) for box in BOXES}


def diagrams(found: Mapping[str, PartState]) -> tuple[Diagram, Diagram]:
    """The wide and the tall layout, each box with its state."""

    def put(box: Box, x: int, y: int, w: int, h: int) -> PlacedBox:
        return PlacedBox(box, x, y, w, h, found[box.name])

    return _wide(put), _tall(put)


def _wide(put: object) -> Diagram:
    assert callable(put)
    boxes: list[PlacedBox] = [put(box, 0, 110 * n, 200, 94) for n, box in enumerate(INGEST)]
    bucket: PlacedBox = put(BUCKET, 300, 0, 150, 424)
    workers: list[PlacedBox] = [put(box, 550, 87 * n, 200, 76) for n, box in enumerate(WORKERS)]
    tables: PlacedBox = put(TABLES, 830, 87 * 3, 170, 76)
    edges = [_across(box, bucket, box.box.first.key) for box in boxes]
    edges += [_across(bucket, box, box.box.first.key) for box in workers]
    edges.append(_across(workers[3], tables, "lake.ticks_rows"))
    return Diagram("wide", 1000, 424, (*boxes, bucket, *workers, tables), tuple(edges))


def _tall(put: object) -> Diagram:
    assert callable(put)
    boxes: list[PlacedBox] = [put(box, 182 * (n % 2), 100 * (n // 2), 168, 88) for n, box in enumerate(INGEST)]
    bucket: PlacedBox = put(BUCKET, 0, 222, 350, 80)
    below = (*WORKERS, TABLES)
    workers: list[PlacedBox] = [put(box, 182 * (n % 2), 326 + 100 * (n // 2), 168, 88) for n, box in enumerate(below)]
    edges = [Edge(f"M{x} 188 V222", key) for x, key in ((84, "lake.queue_in"), (266, "lake.ticks_rows"))]
    edges += [Edge(f"M{x} 302 V326", key) for x, key in ((84, "rate.store_requests"), (266, "rate.store_requests"))]
    return Diagram("tall", 350, 616, (*boxes, bucket, *workers), tuple(edges))


def _across(left: PlacedBox, right: PlacedBox, key: str) -> Edge:
    """A curve from the right side of one box to the left of the other, at the middle of the smaller one."""
    x1, x2 = left.x + left.w, right.x
    y1 = left.y + left.h // 2 if left.h <= right.h else right.y + right.h // 2
    y2 = right.y + right.h // 2 if right.h <= left.h else y1
    middle = (x1 + x2) // 2
    return Edge(f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}", key)
