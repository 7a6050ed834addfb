"""The blocking form of the API: each call runs on one event loop in a thread of its own.

Safe in scripts, threads and notebooks, whose own event loop it does not touch.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lakebed.batches.model import Sample
from lakebed.lake.batches import AsyncBatches, SampleResponse
from lakebed.lake.connect import AsyncLake, open_lake
from lakebed.lake.queues import AsyncQueue, Entry, LakeBatch
from lakebed.lake.ticks import AsyncTicks
from lakebed.lake.topics import AsyncTopic, LakeRecord, Payload
from lakebed.ticks.model import DEFAULT_PROJECT

if TYPE_CHECKING:
    from lakebed.lake.tables import LakeTables
    from lakebed.ticks.model import FinalizeResult

R = TypeVar("R")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lakebed", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Waits for the result. Ctrl-C cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def each(self, items: AsyncIterator[R]) -> Iterator[R]:
        """The items one by one; the asynchronous iterator is closed when the caller stops early."""
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if isinstance(items, AsyncGenerator) and self.runs:
                self.run(items.aclose())

    def stop(self) -> None:
        """Cancels what is under way and ends the thread; at the end of the program otherwise."""
        atexit.unregister(self.stop)
        if self.runs:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()


async def _next(items: AsyncIterator[R]) -> R:
    return await anext(items)


class Record(msgspec.Struct, frozen=True, eq=False):
    """One record of a topic."""

    read: LakeRecord
    loop: LoopThread

    @property
    def topic(self) -> str:
        return self.read.topic

    @property
    def partition(self) -> int:
        return self.read.partition

    @property
    def offset(self) -> int:
        return self.read.offset

    @property
    def value(self) -> bytes:
        return self.read.value

    @property
    def key(self) -> bytes | None:
        return self.read.key

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        return self.read.headers

    @property
    def timestamp_ms(self) -> int | None:
        """The record's own timestamp, where its producer gave one."""
        return self.read.timestamp_ms

    @property
    def text(self) -> str:
        return self.read.text

    def json(self) -> Any:
        return self.read.json()

    def commit(self) -> None:
        """Marks this record, and everything before it in its partition, as processed by the group."""
        self.loop.run(self.read.commit())

    def __repr__(self) -> str:
        return repr(self.read).removeprefix("Lake")


class Topic:
    """A topic of the log; it exists from its first record on."""

    def __init__(self, topic: AsyncTopic, loop: LoopThread) -> None:
        self._topic, self._loop = topic, loop

    def produce(self, records: Payload, *, partition: int = 0) -> range:
        """Appends a record (text, bytes, or anything JSON can express) or a list of them, in order; returns offsets."""
        return self._loop.run(self._topic.produce(records, partition=partition))

    def consume(
        self,
        *,
        group: str = "",
        partitions: Sequence[int] | None = None,
        offset: int | None = None,
        follow: bool = False,
    ) -> Iterator[Record]:
        """Records in order; with a group, those behind its commits. `follow` waits for more."""
        found = self._topic.consume(group=group, partitions=partitions, offset=offset, follow=follow)
        return (Record(record, self._loop) for record in self._loop.each(found))

    def describe(self) -> Any:
        """The topic's partitions with their offsets. Raises NotFound."""
        return self._loop.run(self._topic.describe())

    def groups(self) -> Any:
        """Committed offsets and lag of each group."""
        return self._loop.run(self._topic.groups())

    def seek(self, group: str, offset: int, *, partition: int = 0) -> None:
        """Moves a group to an offset, back or forward; its current member is fenced."""
        self._loop.run(self._topic.seek(group, offset, partition=partition))

    def __repr__(self) -> str:
        return f"Topic({self._topic.name})"


class QueueBatch:
    """A claimed batch of a queue. `ack` it when it is processed; one that is not is delivered again."""

    def __init__(self, batch: LakeBatch, loop: LoopThread) -> None:
        self._batch, self._loop = batch, loop
        self.entries, self.values = batch.entries, batch.values
        self.shard, self.sequence = batch.shard, batch.sequence

    def ack(self) -> None:
        """The batch is processed. Idempotent; raises Fenced when another consumer has it by now."""
        self._loop.run(self._batch.ack())

    def reject(self, reason: str = "") -> None:
        """The batch is delivered again later, and after too many rejections becomes a dead letter."""
        self._loop.run(self._batch.reject(reason))

    def __repr__(self) -> str:
        return repr(self._batch).replace("LakeBatch", "QueueBatch", 1)


class LakeQueue:
    """A queue; it exists from its first entry on."""

    def __init__(self, queue: AsyncQueue, loop: LoopThread) -> None:
        self._queue, self._loop = queue, loop

    def put(self, entries: Entry | list[Entry]) -> int:
        """Enqueues a value, a (key, value) pair or a list of them; returns their number when they are durable."""
        return self._loop.run(self._queue.put(entries))

    def collect(self, *, consumer: str = "", follow: bool = False) -> Iterator[QueueBatch]:
        """Batches in order, claimed for this consumer; ack or reject each. `follow` waits for more."""
        found = self._queue.collect(consumer=consumer, follow=follow)
        return (QueueBatch(batch, self._loop) for batch in self._loop.each(found))

    def status(self) -> Any:
        """Pending, claimed and dead batches. Raises NotFound."""
        return self._loop.run(self._queue.status())

    def __repr__(self) -> str:
        return f"LakeQueue({self._queue.name})"


class LakeBatches:
    """Samples: sent as batches that are accepted once, and queried."""

    def __init__(self, batches: AsyncBatches, loop: LoopThread) -> None:
        self._batches, self._loop = batches, loop

    def send(self, samples: Iterable[Sample | Mapping[str, Any]]) -> int:
        """Sends samples as one batch; returns their number when the batch is accepted."""
        return self._loop.run(self._batches.send(samples))

    def query(
        self,
        metric: str,
        *,
        match: Mapping[str, str] | None = None,
        last: str = "1h",
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> SampleResponse:
        """Points of a metric's series: of the last `1h` (`30s`, `15m`, `7d`), or between two times."""
        return self._loop.run(self._batches.query(metric, match=match, last=last, start=start, end=end))

    def latest(self, metric: str, *, match: Mapping[str, str] | None = None) -> SampleResponse:
        """The newest value of each series."""
        return self._loop.run(self._batches.latest(metric, match=match))


class LakeTicks:
    """Files uploaded as one unit and committed into tables."""

    def __init__(self, ticks: AsyncTicks, loop: LoopThread) -> None:
        self._ticks, self._loop = ticks, loop

    def push(
        self,
        *files: str | Path,
        project: str = DEFAULT_PROJECT,
        key: str | Sequence[str] = (),
        mode: str = "",
        org: str = "",
        secret: str = "",
        progress: bool = False,
    ) -> FinalizeResult:
        """Uploads Parquet, CSV, JSON or JSON Lines files as one tick; returns when it is committed to bronze.

        `progress` shows a bar, in a terminal or a notebook.
        """
        given = {"project": project, "key": key, "mode": mode, "org": org, "secret": secret, "progress": progress}
        return self._loop.run(self._ticks.push(*files, **given))  # type: ignore[arg-type]


class Lake:
    """A lake. Use it as a context manager, or `close` it."""

    def __init__(self, lake: AsyncLake, loop: LoopThread) -> None:
        self._lake, self._loop = lake, loop
        self.batches = LakeBatches(lake.batches, loop)
        self.ticks = LakeTicks(lake.ticks, loop)

    @property
    def url(self) -> str:
        return self._lake.url

    def topic(self, name: str) -> Topic:
        return Topic(self._lake.topic(name), self._loop)

    def queue(self, name: str = "default") -> LakeQueue:
        return LakeQueue(self._lake.queue(name), self._loop)

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._loop.run(self._lake.topics())

    def health(self) -> Any:
        """Every component's state, as the gateway reports it."""
        return self._loop.run(self._lake.health())

    @property
    def tables(self) -> LakeTables:
        """`lake.tables["gold/shop/by_customer"]`; iterate for the names. From the bucket, or through the gateway."""
        from lakebed.lake.tables import LakeTables

        def made(path: str) -> Any:
            return self._lake.open_table(path, lambda asked, params: self._loop.run(self._lake.ask(asked, params)))

        return LakeTables(made, lambda: self._loop.run(self._lake.table_rows()))

    def sql(self, text: str) -> Any:
        """The result of a query over the tables it names, as an Arrow table: `select … from gold.shop.by_customer`."""
        return self._loop.run(self._lake.sql(text))

    def spark(self) -> Any:
        """A Spark session with Lakebed's sources registered, on the settings' master.

        Its `sql` knows tables by their names: `lake.spark().sql("select … from silver.shop.orders")`.
        """
        return self._lake.spark()

    def close(self) -> None:
        """Finishes what is under way and ends the connections."""
        if self._loop.runs:
            self._loop.run(self._lake.close())
            self._loop.stop()

    def __enter__(self) -> Lake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Lake({self.url or 'in process'})"


def connect(
    url: str = "",
    *,
    key: str = "",
    dir: str | Path | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
) -> Lake:
    """As `open_lake`, for programs without an event loop."""
    loop = LoopThread()
    try:
        opened = open_lake(url, key=key, dir=dir, config=config, settings=settings, timeout_s=timeout_s)
        return Lake(loop.run(opened), loop)
    except BaseException:
        loop.stop()
        raise
