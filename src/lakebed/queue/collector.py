"""The collector: claims batches in order, reads them, delivers them, and renews its claims until they are acked.

It claims several at once and reads ahead, so a batch costs a fraction of a manifest write. A batch is delivered only
under a fresh claim; after a pause that was too long, the collector reads the manifest first.
A batch that is missing or does not decode becomes a dead letter and never blocks the rest, but only when that is
certain: a read that failed or was cut short is retried. A rejected batch is given back and delivered again after a
delay; a batch of several entries that was rejected too often is split.

A collector that is dropped without `close` stops its heartbeat, because the heartbeat does not keep it alive. Use it as
a context manager to give claims back at once.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from types import TracebackType

from msgspec.structs import replace

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Corrupt, Fenced, Invalid, LakebedError, NotFound, Unavailable
from lakebed.core.logs import logger
from lakebed.queue.claiming import StaleManifest
from lakebed.queue.consumer import Consumer
from lakebed.queue.dead_letters import DeadLetters
from lakebed.queue.fetch import fetch
from lakebed.queue.model import BatchTrouble, Claimed, Closed, CollectedBatch, KeyValueEntry, PendingView, ShortRead
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.queue.sweeper import QueueSweeper
from lakebed.store.runtime import StoreRuntime

HEARTBEATS_PER_TIMEOUT = 3
MISSING_S = 60.0  # a batch must be missing or short for this long: a replica may lag, a volume server may be down
AHEAD = 64  # batches of one read of the queue, besides those that are no candidates
FRESH_SHARE = 2 / 3  # of the timeout: when we still trust a claim; the rest allows for clocks that differ

log = logger("queue")


class _Held:
    """A claim of ours: when it was last confirmed by our own clock, its data being read, delivered or not yet."""

    def __init__(self, claimed: Claimed, confirmed_s: float) -> None:
        self.claimed = claimed
        self.confirmed_s = confirmed_s
        self.reading: asyncio.Task[list[KeyValueEntry]] | None = None
        self.out = False
        self.undecodable = False  # it was read whole once and did not decode


class Collector:
    def __init__(
        self,
        settings: QueueSettings,
        runtime: StoreRuntime,
        *,
        producer: Producer | None = None,
        consumer: Consumer | None = None,
        name: str = "",
        shard: int | None = None,
        remote: dict[str, float] | None = None,
    ) -> None:
        """With `remote`, it claims for a consumer of that name elsewhere, without heartbeats. The dict remembers
        since when batches are missing.
        """
        metrics, self._shard = runtime.metrics, shard
        self._settings, self._store, self._clock = settings, runtime.store, runtime.clock
        self._producer = producer or Producer(settings, runtime)
        self._consumer = consumer or Consumer(settings, runtime)
        self._dead_letters = DeadLetters(settings, runtime, producer=self._producer, consumer=self._consumer)
        self._sweeper = QueueSweeper(
            settings, runtime, producer=self._producer, consumer=self._consumer, dead_letters=self._dead_letters
        )
        self.id = f"{name or 'collector'}-{runtime.ids.token()}" if remote is None else name
        self._beats = remote is None
        self._missing = {} if remote is None else remote  # location → since when it was not there, or not whole
        self._left_alone: frozenset[str] = frozenset()
        self._held: dict[str, _Held] = {}
        self._ahead: PendingView | None = None  # what was read and not yet exhausted
        self._turn = asyncio.Lock()
        self._heart: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._closed = False
        self._claims = metrics.counter("lakebed_queue_claims_total")
        self._takeovers = metrics.counter("lakebed_queue_takeovers_total")
        self._fenced = metrics.counter("lakebed_queue_fenced_total")
        self._acked = metrics.counter("lakebed_queue_acked_total")
        self._rejections = metrics.counter("lakebed_queue_rejections_total")
        self._waited = metrics.histogram("lakebed_queue_wait_seconds")

    async def __aenter__(self) -> Collector:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def next_batch(self) -> CollectedBatch | None:
        """The next batch in ingest order, claimed until it is acked, or None when there is none now.

        Raises Unavailable (claims are kept: retry) or Corrupt when a manifest does not decode.
        """
        async with self._turn:
            while not self._closed:
                waiting = [held for held in self._held.values() if not held.out]
                if not waiting:
                    if not await self._claim():
                        return None
                    continue
                held = min(waiting, key=lambda held: held.claimed.sequence)
                batch = await self._read(held)
                if batch is not None and await self._still_ours(held):
                    held.out, held.reading = True, None
                    age_ms = round((self._clock.monotonic_s() - held.confirmed_s) * 1000)
                    return replace(batch, confirmed_ms=now_ms(self._clock) - age_ms)
        raise Closed("the collector is closed")

    async def batches(self, *, idle_s: float = 0.1) -> AsyncIterator[CollectedBatch]:
        """Every batch, as it arrives, until the collector is closed. Ack each one."""
        while not self._closed:
            batch = await self.next_batch()
            if batch is not None:
                yield batch
                continue
            await self.idle(idle_s)

    async def idle(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    async def ack(self, batch: CollectedBatch) -> None:
        """Confirms that the batch is fully processed: it will not be delivered again. Idempotent.

        Raises Fenced when another collector has claimed it; drop it then. After Unavailable, ack again.
        """
        await self.ack_all([batch])

    async def ack_all(self, batches: list[CollectedBatch]) -> None:
        """Acks several batches in one write. Raises Fenced when one was claimed by another; the others are acked."""
        outcomes = await asyncio.gather(
            *[self._consumer.ack(batch.claimed) for batch in batches], return_exceptions=True
        )
        done = 0
        for batch, outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, int):
                done = max(done, outcome)
                self._acked.inc()
                self._forget(batch.claimed)
            elif isinstance(outcome, Fenced):
                self._fenced.inc()
                self._forget(batch.claimed)
        if done >= self._settings.done_cleanup_threshold and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(self._sweeper.sweep())
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def reject(self, batch: CollectedBatch, reason: str) -> bool:
        """Reports that the batch could not be processed. It is given back, and delivered again after a delay that
        doubles with each rejection; in an ordered queue, later batches wait for it. After too many rejections a batch
        of one entry becomes a dead letter, and the result is True; one of several entries is split, and its pieces are
        appended to the queue. Raises Fenced when another collector has claimed it. When the store cannot be reached it
        is delivered again too, but this rejection may not be counted.
        """
        also = {} if self._settings.parallel else self._undelivered_after(batch.claimed)
        try:
            trouble = await self._consumer.reject(batch.claimed, reason, also=also)
            self._rejections.inc()
            if trouble.bury:
                self._mark_dead(batch.claimed, trouble)
                dead = await self._dead_letters.set_aside(batch.claimed, trouble)
                self._forget(batch.claimed)
                return dead
            self._give_up(also)
            self._forget(batch.claimed)
        except Fenced:
            self._fenced.inc()
            self._forget(batch.claimed)
            raise
        finally:
            held = self._held.get(batch.location)
            if held is not None and held.claimed.epoch == batch.claimed.epoch:
                held.out = False
        return False

    def _undelivered_after(self, claimed: Claimed) -> dict[str, int]:
        return {
            location: held.claimed.epoch
            for location, held in self._held.items()
            if not held.out and held.claimed.sequence > claimed.sequence
        }

    def _give_up(self, epochs: dict[str, int]) -> None:
        """Forgets claims that were given back."""
        for location, epoch in epochs.items():
            held = self._held.get(location)
            if held is not None and held.claimed.epoch == epoch:
                if held.reading is not None:
                    held.reading.cancel()
                del self._held[location]

    async def heartbeat(self) -> None:
        """Refreshes every claim now. A background task does it three times per timeout."""
        at_s = self._clock.monotonic_s()
        epochs = {location: held.claimed.epoch for location, held in self._held.items()}
        lost = await self._consumer.heartbeat(epochs)
        for location, epoch in epochs.items():
            held = self._held.get(location)
            if held is None or held.claimed.epoch != epoch:
                continue
            if location in lost:
                self._fenced.inc()
                self._forget(held.claimed)
            else:
                held.confirmed_s = at_s

    @property
    def undelivered(self) -> bool:
        return any(not held.out for held in self._held.values())

    def leave_alone(self, locations: frozenset[str]) -> None:
        """Does not claim these again, though their claims have this collector's name."""
        self._left_alone = locations

    async def detach(self) -> None:
        """Leaves the delivered batches to whoever got them, and gives the others back."""
        self._held = {location: held for location, held in self._held.items() if not held.out}
        await self.close()

    async def close(self) -> None:
        """Stops the heartbeat and releases what is not acked, so that others need not wait. Idempotent."""
        self._closed = True
        for task in (self._heart, *[held.reading for held in self._held.values()]):
            if task is not None:
                task.cancel()
        if self._sweeping is not None:
            await self._sweeping
        epochs = {location: held.claimed.epoch for location, held in self._held.items()}
        self._held.clear()
        if epochs:
            await self._consumer.release(epochs)

    async def _claim(self) -> bool:
        """Claims what comes next: first from what was read before, then from a fresh read."""
        self._start_heartbeat()
        if self._ahead is not None and await self._claim_from(self._ahead):
            return True
        while True:
            passed_over = self._consumer.passed_over
            self._ahead = await self._producer.view(AHEAD + len(self._held) + passed_over)
            self._demand_one_shard(self._ahead)
            if await self._claim_from(self._ahead):
                return True
            if self._ahead.whole or self._consumer.passed_over <= passed_over:
                self._ahead = None
                return False

    async def _claim_from(self, view: PendingView) -> bool:
        if not view.pending:
            return False
        at_s, held = self._clock.monotonic_s(), self._left_alone | frozenset(self._held)
        claimed = await self._consumer.claim(view, self.id, held, batches_max=self._settings.prefetch_batches)
        if isinstance(claimed, StaleManifest):
            return False
        for one in claimed:
            self._hold(one, at_s)
        return bool(claimed)

    def _demand_one_shard(self, view: PendingView) -> None:
        if self._shard is None and view.head.shards > 1:
            raise Invalid(
                f"the queue has {view.head.shards} shards, and this collector reads the first one only",
                hint=f"set queue.shards = {view.head.shards}",
            )

    def _hold(self, claimed: Claimed, at_s: float) -> None:
        held = self._held[claimed.location] = _Held(claimed, at_s)
        held.reading = self._fetching(claimed)
        self._claims.inc()
        if claimed.takeover:
            self._takeovers.inc()
            log.warning("stale claim taken over", location=claimed.location)

    def _fetching(self, claimed: Claimed) -> asyncio.Task[list[KeyValueEntry]]:
        whole = {"size_bytes": claimed.size_bytes, "bytes_max": self._settings.batch_bytes_max}
        reading = asyncio.create_task(fetch(self._store, claimed.location, **whole))
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited
        return reading

    async def _read(self, held: _Held) -> CollectedBatch | None:
        """The batch of a claim, or None when it was buried instead, or is no longer ours."""
        claimed = held.claimed
        if claimed.trouble is not None and claimed.trouble.bury:
            await self._bury(held)
            return None
        if held.reading is None:
            held.reading = self._fetching(claimed)
        try:
            entries = await asyncio.shield(held.reading)
            self._missing.pop(claimed.location, None)
            return CollectedBatch(entries, claimed, self._shard or 0)
        except (NotFound, ShortRead, Corrupt) as error:
            held.reading = None  # the next call reads again
            if await self._is_certain(held, error):
                await self._bury(held, f"{error.code}: {error.message}")
            return None
        except LakebedError:
            held.reading = None  # the next call reads again
            raise
        except asyncio.CancelledError:
            if self._closed:
                raise Closed("the collector is closed") from None
            raise

    async def _is_certain(self, held: _Held, error: LakebedError) -> bool:
        """Whether the batch is known to be unreadable: twice whole and undecodable, or not there for a while.

        Raises Unavailable until then, so that the caller of next_batch pauses; the claim is kept.
        """
        if isinstance(error, Corrupt):
            held.undecodable, twice = True, held.undecodable
            return twice
        await self.heartbeat()
        if self._held.get(held.claimed.location) is not held:
            return False  # missing because another collector finished it
        now_s = self._clock.monotonic_s()
        if now_s - self._missing.setdefault(held.claimed.location, now_s) >= MISSING_S:
            return True
        raise Unavailable(f"{held.claimed.location!r} cannot be read now: {error.message}") from error

    async def _bury(self, held: _Held, reason: str = "") -> None:
        """The decision is stored first, so that after a crash the next collector buries it too."""
        trouble = held.claimed.trouble
        try:
            if trouble is None or not trouble.bury:
                trouble = await self._consumer.reject(held.claimed, reason, last=True)
                self._mark_dead(held.claimed, trouble)
            await self._dead_letters.set_aside(held.claimed, trouble)
        except Fenced:
            self._fenced.inc()  # another collector finished it or has claimed it
        self._forget(held.claimed)

    def _mark_dead(self, claimed: Claimed, trouble: BatchTrouble) -> None:
        """After the decision it is buried, by the next call if not by this one, and never delivered again."""
        held = self._held.get(claimed.location)
        if held is not None and held.claimed.epoch == claimed.epoch:
            held.claimed = replace(held.claimed, trouble=trouble)

    async def _still_ours(self, held: _Held) -> bool:
        """Whether the claim is fresh; reads the manifest when that is not known."""
        fresh_s = self._settings.heartbeat_timeout_s * FRESH_SHARE
        for _ in range(2):
            if self._held.get(held.claimed.location) is not held:
                return False
            if self._clock.monotonic_s() - held.confirmed_s < fresh_s:
                self._waited.observe(max(0.0, (now_ms(self._clock) - held.claimed.enqueued_ms) / 1000))
                return True
            await self.heartbeat()
        return False

    def _forget(self, claimed: Claimed) -> None:
        held = self._held.get(claimed.location)
        if held is not None and held.claimed.epoch == claimed.epoch:
            del self._held[claimed.location]

    def _start_heartbeat(self) -> None:
        if self._heart is None and self._beats:
            interval_s = self._settings.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
            self._heart = asyncio.create_task(_beat(weakref.ref(self), self._clock, interval_s))

    async def beat(self) -> None:
        """One heartbeat of the background task; a failed one is retried before the claims expire."""
        if not self._held:
            return
        try:
            await self.heartbeat()
        except LakebedError as error:
            log.warning("heartbeat failed; it is retried before the claims expire", error=error.message)


async def _beat(collector: weakref.ref[Collector], clock: Clock, interval_s: float) -> None:
    """Beats while the collector exists. It is not kept alive in between, so a dropped one loses its claims."""
    while True:
        await clock.sleep(interval_s)
        alive = collector()
        if alive is None:
            return
        await alive.beat()
        del alive
