"""The log page: topics, partitions, segments, records and consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lakebed.console.page import (
    FAST_S,
    SCAN_S,
    SLOW_S,
    Action,
    Counted,
    DataSource,
    FieldInput,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    SearchSource,
    by_field,
    deferred,
    first,
    whole,
)
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import AlreadyExists, Invalid, LakebedError
from lakebed.log import view
from lakebed.log.broker import Broker
from lakebed.log.lines import records_of
from lakebed.log.model import TopicConfig, check_topic, topic_partition
from lakebed.log.producers import RecordChunk
from lakebed.log.view import LogView, SegmentOverview, TopicRow
from lakebed.log.writer import PartitionAppend

REPORT_S = 30.0  # longest scan for the report on cost
WIDTH = 1000.0
LEAST = 2.0  # so that every segment is visible
VALUE_CHARS_MAX = 16_000  # of a record that is typed in
CREATED_MAX = 1000  # partitions of a topic that is created here


def opened_first(rows: Sequence[TopicRow]) -> str:
    """The topic that is shown when none is chosen: the first one with records."""
    found = next((row for row in rows if row.records), rows[0] if rows else None)
    return found.topic if found is not None else ""


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


async def _produce(page: LogPage, fields: Fields, who: str, reason: str) -> str:
    tp = topic_partition(fields["topic"], whole(fields, "partition"))
    if not await page.log.admin.partitions(tp.topic):
        raise Invalid(f"topic {tp.topic} does not exist", hint="create it first")
    broker = Broker(page.context, page.log.meta)
    try:
        records = records_of([fields["value"].encode()], fields["key"], [], now_ms(page.context.clock))
        chunk = RecordChunk(records)
        ((outcome,),) = await broker.writer.append_shared([PartitionAppend(tp, (chunk,))])
    finally:
        await broker.writer.drain()
    if isinstance(outcome, LakebedError):
        raise outcome
    return f"one record appended to {tp}"


async def _seek(page: LogPage, fields: Fields, who: str, reason: str) -> str:
    tp = topic_partition(fields["topic"], whole(fields, "partition"))
    now = await page.log.groups.commit(fields["group"], tp, whole(fields, "offset"), seek=True)
    return f"group {fields['group']} continues at offset {now.offset} of {tp}"


async def _create(page: LogPage, fields: Fields, who: str, reason: str) -> str:
    topic, count = check_topic(fields["topic"]), whole(fields, "partitions")
    if not 1 <= count <= CREATED_MAX:
        raise Invalid(f"{count} partitions", hint=f"from 1 to {CREATED_MAX}")
    if await page.log.admin.partitions(topic):
        raise AlreadyExists(f"topic {topic} exists", hint="choose another name")
    writer = Broker(page.context, page.log.meta).writer
    for number in range(count):
        await writer.ensure(topic_partition(topic, number))
    return f"{topic} has {count} partitions"


async def _configure(page: LogPage, fields: Fields, who: str, reason: str) -> str:
    if not await page.log.admin.partitions(fields["topic"]):
        raise Invalid(f"topic {fields['topic']} does not exist", hint="create it first")
    config = TopicConfig(float(whole(fields, "retention_s")), whole(fields, "retention_bytes"))
    await page.log.admin.configure(fields["topic"], config)
    return f"records are kept for {config.retention_s:g} s and up to {config.retention_bytes} bytes; 0 is no limit"


class LogPage(PartPage):
    name = "log"
    manual = "parts/log.md"
    path = "/log"
    title = "Log"
    about = "Topics, partitions, segments, records and consumer groups."
    helpers = {"bars": bars}
    actions = {
        "log.produce": Action(
            "Append a record",
            "Append",
            ("topic", "partition", "key", "value"),
            lambda f: f"log:produce:{f['topic']}",
            lambda f: "Appends one record at the end of the partition. It cannot be changed afterwards.",
            _produce,
            needs_reason=False,
            inputs={
                "partition": FieldInput("Partition", numeric=True),
                "key": FieldInput("Key (optional)", optional=True),
                "value": FieldInput("Value, as text or JSON", rows=5, chars_max=VALUE_CHARS_MAX),
            },
        ),
        "log.seek": Action(
            "Move a consumer group",
            "Move",
            ("topic", "group", "partition", "offset"),
            lambda f: f"log:consume:{f['topic']}",
            lambda f: "The group continues at this offset. A member that reads now is fenced: its commits are refused.",
            _seek,
            inputs={"offset": FieldInput("Next offset", numeric=True)},
            also=lambda f: f"log:group:{f['group']}",
        ),
        "log.create": Action(
            "Create a topic",
            "Create",
            ("topic", "partitions"),
            lambda f: f"log:admin:{f['topic']}",
            lambda f: "Creates empty partitions. The first record of a topic that does not exist creates one too.",
            _create,
            needs_reason=False,
            inputs={"topic": FieldInput("Topic"), "partitions": FieldInput("Partitions", numeric=True)},
        ),
        "log.configure": Action(
            "Set the retention of a topic",
            "Set",
            ("topic", "retention_s", "retention_bytes"),
            lambda f: f"log:admin:{f['topic']}",
            lambda f: "Records beyond these limits are deleted permanently. 0 keeps everything.",
            _configure,
            danger=True,
            inputs={
                "retention_s": FieldInput("Keep records for, seconds", numeric=True),
                "retention_bytes": FieldInput("Keep of each partition, bytes", numeric=True),
            },
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._log: LogView | None = None

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        offset, text, at_ms = query.whole("offset"), query.text("search"), query.time_ms("time")
        samples = await request.load(topics=self.topics(), report=self.report())
        topic = query.text("topic") or opened_first(samples["topics"].value or ())
        if not topic:
            return samples, {"topic": ""}
        samples |= await request.load(partitions=self.partitions(topic))
        if samples["partitions"].error is not None:
            return samples, {"topic": topic}
        samples |= await request.load(groups=self.groups(topic), config=self.config(topic))
        partition = query.whole("partition")
        if partition is None:
            partition = first(samples["partitions"], "partition") or 0
        samples |= await request.load(segments=self.segments(topic, partition))
        if at_ms is not None:
            samples |= await request.load(sought=self.sought(topic, partition, at_ms))
            offset = samples["sought"].value if samples["sought"].error is None else offset
        if text:
            samples |= await request.load(records=self.matching(topic, partition, offset, text))
        else:
            samples |= await request.load(records=self.records(topic, partition, offset))
        more = {"search": text, "time": query.text("time")}
        return samples, {"topic": topic, "partition": partition, "offset": offset, **more}

    def searched(self) -> SearchSource:
        return SearchSource("topic", self.topics(), "topic")

    def overview(self) -> dict[str, DataSource]:
        return {"topics": self.topics()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        topics = latest("log.topics")
        return {
            "log_records": None if topics is None else sum(row.records for row in topics),
            "log_uncompacted": None if topics is None else sum(row.uncompacted for row in topics),
            "log_partitions": None if topics is None else sum(row.partitions for row in topics),
        }

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        return Counted({"log_in": await view.appended(self.log.records)})

    async def stop(self) -> None:
        if self._log is not None:
            await self._log.close()

    @property
    def log(self) -> LogView:
        if self._log is None:
            self._log = LogView(self.context)
        return self._log

    def topics(self) -> DataSource:
        return DataSource(
            "log:read", "log.topics", FAST_S, lambda: view.topics(self.log.admin), owned=by_field("topic")
        )

    def partitions(self, topic: str) -> DataSource:
        make = deferred(lambda: view.partitions(self.log.admin, topic))
        return DataSource(f"log:read:{topic}", f"log.partitions:{topic}", FAST_S, make)

    def groups(self, topic: str) -> DataSource:
        make = deferred(lambda: self.log.groups.progress(topic))
        return DataSource(f"log:read:{topic}", f"log.groups:{topic}", FAST_S, make, owned=by_field("group"))

    def segments(self, topic: str, partition: int) -> DataSource:
        make = deferred(lambda: self.log.segments(topic, partition))
        return DataSource(f"log:read:{topic}", f"log.segments:{topic}:{partition}", FAST_S, make)

    def records(self, topic: str, partition: int, offset: int | None) -> DataSource:
        make = deferred(lambda: self.log.page(topic, partition, offset))
        return DataSource(f"log:consume:{topic}", f"log.records:{topic}:{partition}:{offset}", FAST_S, make)

    def config(self, topic: str) -> DataSource:
        make = deferred(lambda: self.log.admin.config(topic))
        return DataSource(f"log:read:{topic}", f"log.config:{topic}", SLOW_S, make)

    def sought(self, topic: str, partition: int, at_ms: int) -> DataSource:
        """The first offset that was appended at that time or later."""
        make = deferred(lambda: self.log.admin.offsets.at(topic_partition(topic, partition), at_ms))
        return DataSource(f"log:read:{topic}", f"log.sought:{topic}:{partition}:{at_ms}", SLOW_S, make)

    def matching(self, topic: str, partition: int, offset: int | None, text: str) -> DataSource:
        make = deferred(lambda: self.log.search(topic, partition, offset, text))
        return DataSource(
            f"log:consume:{topic}", f"log.search:{topic}:{partition}:{offset}:{text}", SLOW_S, make, REPORT_S, REPORT_S
        )

    def report(self) -> DataSource:
        return DataSource("log:read", "log.report", SCAN_S, lambda: self.log.report(), REPORT_S, patience_s=1.0)
