"""The sources themselves: Spark's Python Data Source API over the parts' feeds.

A source is made on the driver's machine, where the settings are read; it travels to executors whole, as pickled bytes,
never as text. Spark calls `partitions` in one process and `read` in many, none of which has an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StringType, StructField, StructType

from lakebed.core.errors import Invalid
from lakebed.core.feed import Feed, FeedFilter, FeedSlice, Limit, Offset
from lakebed.core.settings import Settings
from lakebed.spark.feeds import KEY, PROBLEM, batches, open_feed
from lakebed.spark.options import ReadOptions, read_options
from lakebed.spark.pruning import capped, shared_out, wanted_by


class SourceTask(InputPartition):  # type: ignore[misc]
    """What one task reads."""

    def __init__(self, pieces: Sequence[FeedSlice]) -> None:
        super().__init__(None)
        self.pieces = list(pieces)

    def __repr__(self) -> str:
        return f"Task({len(self.pieces)} pieces)"


class Source(DataSource):  # type: ignore[misc]
    """Options are checked when a read is defined, before anything runs."""

    own: tuple[str, ...] = ()
    batch_defaults: dict[str, str] = {}
    settings: Settings | None = None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.read_options: ReadOptions = read_options(options, self.own)
        if self.settings is None or self.read_options.flags or self.read_options.config or self.read_options.dir:
            self.settings = settings_of(self.read_options)

    def schema(self) -> StructType:
        whole = cast(StructType, from_arrow_schema(self.feed().schema()))
        known = {field.name: field for field in whole.fields}
        for name in self.read_options.columns:
            if name not in known:
                raise Invalid(f"{self.name()} has no column {name!r}", hint=f"columns: {', '.join(known)}")
        chosen = [known[name] for name in self.read_options.columns] or list(whole.fields)
        if self.read_options.unreadable == "keep":
            chosen += [StructField(KEY, StringType()), StructField(PROBLEM, StringType())]
        return StructType(chosen)

    def reader(self, schema: StructType) -> SourceReader:
        return SourceReader(self, self._checked(schema))

    def streamReader(self, schema: StructType) -> SourceStreamReader:
        return SourceStreamReader(self, self._checked(schema))

    def feed(self, *, streaming: bool = False) -> Feed:
        """The part's feed, opened in this process."""
        own = self.read_options.own if streaming else {**self.batch_defaults, **self.read_options.own}
        assert self.settings is not None
        return open_feed(self.name(), self.settings, own)

    def _checked(self, schema: StructType) -> StructType:
        """The schema a user gave: any of the columns, with their own types."""
        known = {field.name: field.dataType for field in from_arrow_schema(self.feed().schema()).fields}
        known |= {KEY: StringType(), PROBLEM: StringType()} if self.read_options.unreadable == "keep" else {}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                have = known[field.name].simpleString() if field.name in known else "missing"
                raise Invalid(f"{self.name()}: column {field.name!r} is {have}, not {field.dataType.simpleString()}")
        return schema


class BatchesSource(Source):
    own = ("start", "end", "settle_s")
    batch_defaults = {"settle_s": "-1"}

    @classmethod
    def name(cls) -> str:
        return "lakebed.batches"


class TopicSource(Source):
    own = ("topic", "start", "end")

    @classmethod
    def name(cls) -> str:
        return "lakebed.topic"


class QueueSource(Source):
    own = ("queue", "start", "end")

    @classmethod
    def name(cls) -> str:
        return "lakebed.queue"


SOURCES: tuple[type[Source], ...] = (BatchesSource, TopicSource, QueueSource)


class SourceReader(DataSourceReader):  # type: ignore[misc]
    """One read of everything between two offsets."""

    def __init__(self, source: Source, schema: StructType) -> None:
        self._source, self._schema = source, schema
        self._wanted = FeedFilter()

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Filters only leave out objects; Spark applies every one of them to the rows."""
        self._wanted = wanted_by(filters)
        return filters

    def partitions(self) -> list[InputPartition]:
        feed, options = self._source.feed(), self._source.read_options

        async def plan() -> list[FeedSlice]:
            start = await feed.begin()
            return await feed.slices(start, await feed.reach(start, options.limit), self._wanted)

        pieces = asyncio.run(plan())
        return [SourceTask(group) for group in shared_out(pieces, options.tasks)] or [SourceTask([])]

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self._source, self._schema, partition, self._wanted)


class SourceStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Micro-batches between offsets. With Trigger.AvailableNow it ends at what was there when the query began."""

    def __init__(self, source: Source, schema: StructType) -> None:
        self._source, self._schema = source, schema
        self._target: Offset | None = None
        self._opened: Feed | None = None

    @property
    def _feed(self) -> Feed:
        """Kept from one micro-batch to the next in the planning process; never sent to executors."""
        if self._opened is None:
            self._opened = self._source.feed(streaming=True)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def initialOffset(self) -> Offset:
        return asyncio.run(self._feed.begin())

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._source.read_options.limit
        if most.rows:
            return ReadMaxRows(most.rows)
        if most.size_bytes:
            return ReadMaxBytes(most.size_bytes)
        return ReadMaxFiles(most.objects) if most.objects else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        most = Limit() if isinstance(limit, ReadAllAvailable) else self._source.read_options.limit
        reached = asyncio.run(self._feed.reach(start, most))
        return reached if self._target is None else capped(start, reached, self._target)

    def prepareForTriggerAvailableNow(self) -> None:
        async def newest() -> Offset:
            return await self._feed.reach(await self._feed.begin(), Limit())

        self._target = asyncio.run(newest())

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if start == end:
            return []
        pieces = asyncio.run(self._feed.slices(start, end, FeedFilter()))
        return [SourceTask(group) for group in shared_out(pieces, self._source.read_options.tasks)]

    def read(self, partition: Any) -> Iterator[Any]:
        return _read(self._source, self._schema, partition, FeedFilter(), streaming=True)


def _read(
    source: Source, schema: StructType, partition: Any, wanted: FeedFilter, *, streaming: bool = False
) -> Iterator[Any]:
    if not isinstance(partition, SourceTask) or not partition.pieces:
        return iter(())
    feed, arrow = source.feed(streaming=streaming), to_arrow_schema(schema, timezone="UTC")
    return batches(feed, partition.pieces, arrow, wanted, source.read_options.unreadable)


def settings_of(given: ReadOptions) -> Settings:
    """The settings that a Lakebed command would use here."""
    from lakebed.cli.where import Where

    return Where(dir=given.dir, config=given.config).settings(given.flags)


def bound(source: type[DataSource], settings: Settings) -> type[DataSource]:
    """The source on these settings, which travel inside its pickled class."""
    return cast(type[DataSource], type(source.__name__, (source,), {"settings": settings}))
