"""The log page: topics, partitions, segments, records and consumer groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lakebed.console.page import FAST_S, SCAN_S, DataSource, PageRequest, PageSamples, PartPage, deferred, first
from lakebed.core.context import Context
from lakebed.log import view
from lakebed.log.view import LogView, SegmentOverview

REPORT_S = 30.0  # longest scan for the report on cost
WIDTH = 1000.0
LEAST = 2.0  # so that every segment is visible


class Bar(msgspec.Struct, frozen=True):
    x: float
    w: float
    kind: str
    title: str
    offset: int


def bars(found: SegmentOverview) -> list[Bar]:
    """The position of each segment between the log's start and end; segments not drawn leave a gap."""
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


class LogPage(PartPage):
    name = "log"
    path = "/log"
    title = "Log"
    about = "Topics, partitions, segments, records and consumer groups."
    helpers = {"bars": bars}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._log: LogView | None = None

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        samples = await request.load(topics=self.topics(), report=self.report())
        topic = query.text("topic") or first(samples["topics"], "topic")
        if not topic:
            return samples, {"topic": ""}
        samples |= await request.load(partitions=self.partitions(topic), groups=self.groups(topic))
        partition = query.whole("partition")
        if partition is None:
            partition = first(samples["partitions"], "partition") or 0
        offset = query.whole("offset")
        samples |= await request.load(
            segments=self.segments(topic, partition), records=self.records(topic, partition, offset)
        )
        return samples, {"topic": topic, "partition": partition, "offset": offset}

    def overview(self) -> dict[str, DataSource]:
        return {"topics": self.topics()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        topics = latest("log.topics")
        return {
            "log_records": None if topics is None else sum(row.records for row in topics),
            "log_uncompacted": None if topics is None else sum(row.uncompacted for row in topics),
        }

    async def stop(self) -> None:
        if self._log is not None:
            await self._log.close()

    @property
    def log(self) -> LogView:
        if self._log is None:
            self._log = LogView(self.context)
        return self._log

    def topics(self) -> DataSource:
        return DataSource("log:read", "log.topics", FAST_S, lambda: view.topics(self.log.admin))

    def partitions(self, topic: str) -> DataSource:
        make = deferred(lambda: view.partitions(self.log.admin, topic))
        return DataSource(f"log:read:{topic}", f"log.partitions:{topic}", FAST_S, make)

    def groups(self, topic: str) -> DataSource:
        make = deferred(lambda: self.log.groups.progress(topic))
        return DataSource(f"log:read:{topic}", f"log.groups:{topic}", FAST_S, make)

    def segments(self, topic: str, partition: int) -> DataSource:
        make = deferred(lambda: self.log.segments(topic, partition))
        return DataSource(f"log:read:{topic}", f"log.segments:{topic}:{partition}", FAST_S, make)

    def records(self, topic: str, partition: int, offset: int | None) -> DataSource:
        make = deferred(lambda: self.log.page(topic, partition, offset))
        return DataSource(f"log:consume:{topic}", f"log.records:{topic}:{partition}:{offset}", FAST_S, make)

    def report(self) -> DataSource:
        return DataSource("log:read", "log.report", SCAN_S, lambda: self.log.report(), REPORT_S, patience_s=1.0)
