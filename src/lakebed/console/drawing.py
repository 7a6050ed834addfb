"""Numbers to shapes: where a segment of the log is drawn, how far apart a tick's stages were. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.views.log import Segments
from lakebed.views.tables import TableRow
from lakebed.views.ticks import Stage

WIDTH = 1000.0
LEAST = 2.0  # a bar that cannot be seen would be a lie


class Bar(msgspec.Struct, frozen=True):
    x: float
    w: float
    kind: str
    title: str
    offset: int


LAYERS = ("bronze", "silver", "gold", "quarantine")  # as data flows; others behind them


class Step(msgspec.Struct, frozen=True):
    stage: Stage
    after_ms: int | None  # since the stage before, where both are known


def bars(found: Segments) -> list[Bar]:
    """Each segment's place between the log's start and its end; what is not drawn leaves a gap."""
    begin, end = found.log_start_offset, max(found.high_watermark, found.log_start_offset) + 1
    scale = WIDTH / max(1, end - begin)
    drawn: list[Bar] = []
    for segment in found.segments:
        start = max(segment.start_offset, begin)
        x = round(min((start - begin) * scale, WIDTH - LEAST), 2)
        w = round(min(max(LEAST, (segment.end_offset + 1 - start) * scale), WIDTH - x), 2)
        kind = "compacted" if segment.type == "COMPACTED" else "wal"
        title = f"{kind} {segment.start_offset}–{segment.end_offset}: {segment.records} records, {segment.data_key}"
        drawn.append(Bar(x, w, kind, title, segment.start_offset))
    return drawn


def layers(rows: Sequence[TableRow]) -> list[tuple[str, list[TableRow]]]:
    """Tables by layer, the layers in the order data flows through them."""
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(row.layer, []).append(row)
    rank = {name: number for number, name in enumerate(LAYERS)}
    return sorted(found.items(), key=lambda pair: (rank.get(pair[0], len(LAYERS)), pair[0]))


def steps(stages: Sequence[Stage]) -> list[Step]:
    """Each stage with the time that passed since the one before."""
    found: list[Step] = []
    before_ms = 0
    for stage in stages:
        end_ms = stage.end_ms or stage.at_ms
        found.append(Step(stage, end_ms - before_ms if before_ms and end_ms else None))
        before_ms = end_ms or before_ms
    return found
