"""The ingestor: accepts entries, gathers them into batches, stores each batch and appends its location to the queue.

Batches are stored several at a time and appended strictly in the order their entries came. Entries are durable when
their batch is stored *and* its location is in the producer manifest; only then does a watcher report it. An ingestor
that dies loses only entries that no watcher has reported as durable.

A call may carry an idempotency key. The manifest refuses a batch with a key that is enqueued already, also by another
process; the ingestor then leaves that call's entries out and stores the rest again.
"""

from __future__ import annotations

import asyncio
import hashlib
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace

from lakebed.core.errors import OutcomeUnknown, Overloaded, TooLarge, Unavailable, Unprocessable
from lakebed.core.logs import logger
from lakebed.queue import codec
from lakebed.queue.model import Append, Closed, Durable, GenerationExpired, KeysEnqueued, KeyValueEntry
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.runtime import StoreRuntime


class WriteWatcher:
    """Watches the batch of its entries. Any number of callers may wait; a cancelled one does not affect the others."""

    def __init__(self, outcome: asyncio.Future[Durable]) -> None:
        self._outcome = outcome

    def result(self) -> Durable | BaseException | None:
        """None while it is open; the location once the entries are durable; the error when they are not."""
        if not self._outcome.done():
            return None
        return self._outcome.exception() or self._outcome.result()

    async def await_durable(self) -> Durable:
        """Waits until the batch is stored and its location is in the producer manifest. Raises what prevented it.

        After OutcomeUnknown the entries may or may not be in the queue; after any other error they are not.
        """
        return await asyncio.shield(self._outcome)


RETRY_BASE_S = 0.05
RETRY_CAP_S = 2.0
STORED_AGAIN_MAX = 5  # times that a batch is stored again because its generation was over
RETRIED = (Unavailable, Overloaded)

log = logger("queue")


class _Call:
    """One call with an idempotency key, which has an outcome of its own."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.outcome: asyncio.Future[Durable] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(_retrieve)


class _Batch:
    """Entries of one batch: gathering, then sealed, stored, appended with a counter, and finally durable or failed."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.parts: list[tuple[str, list[KeyValueEntry]]] = []  # each call: its key, or none, and its entries
        self.keyed: dict[str, _Call] = {}
        self.size_bytes = 0
        self.due = False
        self.timer: asyncio.Task[None] | None = None
        self.counter = 0
        self.deadline_s = 0.0
        self.doubtful = False  # the outcome of an append of it is unknown
        self.stored: asyncio.Future[Append] = loop.create_future()
        self.outcome: asyncio.Future[Durable] = loop.create_future()
        self.outcome.add_done_callback(_retrieve)

    @property
    def entries(self) -> list[KeyValueEntry]:
        return list(chain.from_iterable(part for _, part in self.parts))

    @property
    def count(self) -> int:
        return sum(len(part) for _, part in self.parts)


class Ingestor:
    """`producer` is shared by the ingestors of one process, so that their appends are grouped; alone it has its own."""

    def __init__(
        self, settings: QueueSettings, runtime: StoreRuntime, *, producer: Producer | None = None, shard: int = 0
    ) -> None:
        metrics = runtime.metrics
        self._shard, settings = shard, settings.of_shard(shard)
        self._settings, self._store, self._clock, self._ids = settings, runtime.store, runtime.clock, runtime.ids
        self._producer = producer or Producer(settings, runtime)
        self.id = self._ids.token()
        self._gathering: _Batch | None = None
        self._line: deque[_Batch] = deque()  # sealed batches, oldest first, until durable or failed
        self._unstored = 0  # sealed batches that are not stored yet
        self._counter = 0
        self._keyed: dict[str, asyncio.Future[Durable]] = {}  # calls with a key that are not durable yet
        self._unflushed_bytes = 0
        self._moved = asyncio.Event()
        self._closed = False
        self._appender: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._entries_total = metrics.counter("lakebed_queue_entries_total")
        self._bytes_total = metrics.counter("lakebed_queue_bytes_total")
        self._batches_total = metrics.counter("lakebed_queue_batches_total")
        self._failures_total = metrics.counter("lakebed_queue_flush_failures_total")
        self._seconds = metrics.histogram("lakebed_queue_flush_seconds")

    @property
    def unflushed_bytes(self) -> int:
        return self._unflushed_bytes

    async def ingest(self, entries: Sequence[KeyValueEntry], *, key: str = "") -> WriteWatcher:
        """Accepts entries; they stay in order. Waits while more than `max_unflushed_bytes` is not durable.

        With an idempotency `key`, a repeated call enqueues nothing and reports the first one's sequence; the key alone
        decides. Raises Invalid (TooLarge, Closed) for input that is never accepted; none of it is accepted then.
        """
        size_bytes = self._check(entries)
        hashed = key_hash(key) if key else ""
        if hashed in self._keyed:
            return WriteWatcher(self._keyed[hashed])
        if self._unstored:  # a caller without a pause must not keep sealed batches from being stored
            await self._clock.sleep(0)
        while self._unflushed_bytes > self._settings.max_unflushed_bytes:
            self._seal()
            self._moved.clear()
            await self._moved.wait()
        if self._closed:
            raise Closed("the ingestor is closed")
        if hashed in self._keyed:  # another call had it while this one waited
            return WriteWatcher(self._keyed[hashed])
        batch = self._gathering
        if batch is None:
            batch = self._gathering = _Batch()
            batch.timer = self._spawn(self._flush_when_due(batch))
        batch.parts.append((hashed, list(entries)))
        batch.size_bytes += size_bytes
        self._unflushed_bytes += size_bytes
        outcome = batch.outcome
        if hashed:
            batch.keyed[hashed] = _Call(size_bytes)
            outcome = self._keyed[hashed] = batch.keyed[hashed].outcome
        if batch.size_bytes > self._settings.flush_size_bytes:
            self._seal()
        return WriteWatcher(outcome)

    async def flush(self) -> None:
        """Flushes what is gathered and waits until everything accepted is durable or has failed."""
        self._seal()
        while self._line and self._appender is not None:
            await asyncio.shield(self._appender)

    async def close(self) -> None:
        """Flushes and terminates. Idempotent."""
        self._closed = True
        self._moved.set()
        await self.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self, entries: Sequence[KeyValueEntry]) -> int:
        if self._closed:
            raise Closed("the ingestor is closed")
        if not entries:
            raise Unprocessable("no entries were given", hint="send at least one entry")
        if len(entries) > self._settings.entries_max:
            raise TooLarge(f"{len(entries)} entries in one call, the limit is {self._settings.entries_max}")
        sizes = [len(entry.key) + len(entry.value) for entry in entries]
        if (largest := max(sizes)) > self._settings.entry_bytes_max:
            raise TooLarge(f"an entry of {largest} bytes, the limit is {self._settings.entry_bytes_max}")
        size_bytes = sum(sizes) + codec.ENTRY_OVERHEAD_BYTES * len(sizes)
        if size_bytes > self._settings.ingest_bytes_max:
            raise TooLarge(f"{size_bytes} bytes in one call, the limit is {self._settings.ingest_bytes_max}")
        return size_bytes

    async def _flush_when_due(self, batch: _Batch) -> None:
        await self._clock.sleep(self._settings.flush_interval_s)
        batch.due = True
        self._seal_if_due()

    def _seal_if_due(self) -> None:
        """A due batch goes on gathering while enough others wait to be stored: a slow store gets larger batches."""
        if self._gathering is not None and self._gathering.due and self._unstored < self._settings.uploads_max:
            self._seal()

    def _seal(self) -> None:
        batch, self._gathering = self._gathering, None
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        batch.deadline_s = self._clock.monotonic_s() + self._settings.flush_timeout_s
        self._line.append(batch)
        self._unstored += 1
        self._spawn(self._upload(batch))
        if self._appender is None or self._appender.done():
            self._appender = asyncio.create_task(self._append_in_order())

    async def _upload(self, batch: _Batch) -> None:
        try:
            async with self._producer.slots:
                batch.stored.set_result(await self._store_batch(batch))
        except Exception as error:
            batch.stored.set_exception(error)
        self._unstored -= 1
        self._seal_if_due()

    async def _store_batch(self, batch: _Batch) -> Append:
        """Stores the batch under a fresh name in the current generation. Safe to repeat: the name is its own."""
        encode = partial(
            codec.encode, batch.entries, form=self._settings.batch_format, compression=self._settings.compression
        )
        data = await asyncio.to_thread(encode) if batch.size_bytes > codec.APART_BYTES else encode()
        uuid, attempt = self._ids.uuid(), 0
        while True:
            try:
                generation = await self._producer.generation()
                location = self._settings.location(generation, uuid)
                await self._store.create(location, data)
                keys = tuple(batch.keyed)
                return Append(self.id, 0, generation, location, len(data), batch.count, keys)
            except RETRIED as error:
                attempt += 1
                await self._pause(batch, attempt, error)

    async def _append_in_order(self) -> None:
        while self._line:
            head = self._line[0]
            await asyncio.wait([head.stored])
            if error := head.stored.exception():
                self._finish([head], error)
                continue
            ready = [head]
            for batch in list(self._line)[1:]:
                if not batch.stored.done() or batch.stored.exception():
                    break
                ready.append(batch)
            await self._append(ready)

    async def _append(self, ready: list[_Batch]) -> None:
        try:
            self._finish(ready, await self._append_until_known(ready))
        except Exception as error:
            if ready[0].doubtful and not isinstance(error, OutcomeUnknown):
                error = OutcomeUnknown(f"the batch may or may not be enqueued; the last attempt failed: {error}")
            self._finish(ready, error)

    async def _append_until_known(self, ready: list[_Batch]) -> list[Durable]:
        """Appends with retries: batches are recognised by their counters, so they are enqueued once."""
        attempt = again = 0
        self._number(ready)
        while ready:
            try:
                appends = [replace(batch.stored.result(), counter=batch.counter) for batch in ready]
                return [replace(durable, shard=self._shard) for durable in await self._producer.append(appends)]
            except KeysEnqueued as error:  # nothing was appended, by no attempt: the counters decide first
                await self._leave_out(ready, error.sequences)
            except GenerationExpired:
                again += 1
                if ready[0].doubtful or again > STORED_AGAIN_MAX:
                    raise
                log.warning("batches are stored again: their generation is over", batches=len(ready))
                await self._store_again(ready)
            except RETRIED as error:
                for batch in ready:
                    batch.doubtful |= isinstance(error, OutcomeUnknown)
                attempt += 1
                await self._pause(ready[0], attempt, error)
        return []

    def _number(self, ready: list[_Batch]) -> None:
        """Numbers the batches of one append: consecutive, and above all that were appended before."""
        first = ready[0].counter or self._counter + 1
        for position, batch in enumerate(ready):
            batch.counter = first + position
        self._counter = ready[-1].counter

    async def _leave_out(self, ready: list[_Batch], sequences: dict[str, int]) -> None:
        """Takes calls that were enqueued before out of their batches and stores those again; empty ones are dropped."""
        first = ready[0].counter
        for batch in ready:
            repeated = {key: call for key, call in batch.keyed.items() if key in sequences}
            if not repeated:
                continue
            batch.parts = [(key, part) for key, part in batch.parts if key not in repeated]
            for key, call in repeated.items():
                del batch.keyed[key]
                batch.size_bytes -= call.size_bytes
                self._unflushed_bytes -= call.size_bytes
                self._settle(key, call, Durable("", sequences[key], True, self._shard))
            if batch.parts:
                await self._store_again([batch])
        for batch in [batch for batch in ready if not batch.parts]:
            ready.remove(batch)
            self._line.remove(batch)
            batch.outcome.cancel()  # no call waits for it: each had a key
        self._moved.set()
        if ready:
            ready[0].counter = first
            self._number(ready)

    def _settle(self, key: str, call: _Call, outcome: Durable | BaseException) -> None:
        self._keyed.pop(key, None)
        if isinstance(outcome, BaseException):
            call.outcome.set_exception(outcome)
        else:
            call.outcome.set_result(outcome)

    async def _store_again(self, ready: list[_Batch]) -> None:
        await self._producer.read()
        for batch in ready:
            again = await self._store_batch(batch)
            batch.stored = asyncio.get_running_loop().create_future()
            batch.stored.set_result(again)

    async def _pause(self, batch: _Batch, attempt: int, error: Unavailable | Overloaded) -> None:
        """Waits before another attempt, or raises the error after the batch's deadline."""
        if self._clock.monotonic_s() >= batch.deadline_s:
            raise error
        await self._clock.sleep(self._ids.jitter_s(attempt, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S))

    def _finish(self, batches: list[_Batch], outcome: list[Durable] | BaseException) -> None:
        """Forgets the batches: a counter that failed is never appended again."""
        for index, batch in enumerate(batches):
            assert self._line.popleft() is batch
            self._unflushed_bytes -= batch.size_bytes
            if isinstance(outcome, BaseException):
                self._failures_total.inc()
                log.error("batch could not be made durable", entries=batch.count, error=str(outcome))
                batch.outcome.set_exception(outcome)
            else:
                batch.outcome.set_result(outcome[index])
            for key, call in batch.keyed.items():
                self._settle(key, call, outcome if isinstance(outcome, BaseException) else outcome[index])
            if not isinstance(outcome, BaseException):
                self._batches_total.inc()
                self._entries_total.inc(batch.count)
                self._bytes_total.inc(batch.size_bytes)
                self._seconds.observe(self._clock.monotonic_s() - batch.deadline_s + self._settings.flush_timeout_s)
        self._moved.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _retrieve(outcome: asyncio.Future[Durable]) -> None:
    """A failed batch that no caller awaits is logged by us, not reported by the loop."""
    if not outcome.cancelled():
        outcome.exception()


def key_hash(key: str) -> str:
    """An idempotency key as it is stored: 16 characters of its SHA-256."""
    return urlsafe_b64encode(hashlib.sha256(key.encode()).digest()[:12]).decode()
