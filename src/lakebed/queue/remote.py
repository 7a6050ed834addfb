"""Claims for consumers that speak HTTP: claim, ack, extend, reject, at any gateway.

A gateway keeps nothing between requests. A claim is in the consumer manifest, under the consumer's name and an epoch;
its token names shard, epoch and batch, so any gateway can ack it, also after the one that made it has died. Nobody
sends heartbeats for it: the consumer extends it, or it goes stale after `queue.heartbeat_timeout_s`.

A claim whose response was lost is not lost: the same consumer gets the batch again, under a new epoch, unless it names
the claim in `held`.
"""

from __future__ import annotations

import re

import google_crc32c
import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Fenced, Invalid, LakebedError
from lakebed.queue import claiming
from lakebed.queue.collector import Collector
from lakebed.queue.model import Claimed, CollectedBatch, ConsumerManifest
from lakebed.queue.roles import Queue, QueueShard
from lakebed.store.runtime import StoreRuntime

BATCHES_MAX = 100  # of one claim
WAIT_MAX_S = 30.0
POLL_S = 0.2
MISSING_MAX = 1000  # batches that could not be read lately
TOKEN = re.compile(r"([0-9]{1,3})-([0-9]{1,18})-([0-9a-f]{8})\Z")
CONSUMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")


class ClaimToken(msgspec.Struct, frozen=True):
    """A claim, as its consumer names it. `digest` is of the location: epochs begin again if a manifest is reset."""

    shard: int
    epoch: int
    digest: str

    @classmethod
    def of(cls, batch: CollectedBatch) -> ClaimToken:
        return cls(batch.shard, batch.claimed.epoch, _digest(batch.location))

    @classmethod
    def parse(cls, text: str) -> ClaimToken:
        found = TOKEN.match(text)
        if not found:
            raise Invalid(f"{text[:80]!r} is no claim", hint="send the claim as it was received")
        return cls(int(found[1]), int(found[2]), found[3])

    def __str__(self) -> str:
        return f"{self.shard}-{self.epoch}-{self.digest}"


class QueueClaims:
    """The claims of remote consumers on one queue."""

    def __init__(self, queue: Queue, runtime: StoreRuntime) -> None:
        self._queue, self._runtime, self._clock = queue, runtime, runtime.clock
        self._turn = 0
        self._missing: dict[str, float] = {}

    async def claim(self, consumer: str, *, count: int, wait_s: float, held: list[str]) -> list[CollectedBatch]:
        """The next batches, claimed for this consumer; none when nothing arrives within `wait_s`.

        Raises Invalid, or Unavailable when the store cannot be read: nothing is claimed then, or it is claimed again.
        """
        if consumer and not CONSUMER.match(consumer):
            raise Invalid(f"consumer {consumer[:80]!r} is invalid", hint="use 1-63 letters, digits, '.', '-' and '_'")
        if not 1 <= count <= BATCHES_MAX or not 0 <= wait_s <= WAIT_MAX_S:
            raise Invalid(f"max is 1 to {BATCHES_MAX}, wait_s 0 to {WAIT_MAX_S:.0f}")
        tokens = [ClaimToken.parse(text) for text in held]
        name = f"http-{consumer or self._runtime.ids.token()}"
        until_s = self._clock.monotonic_s() + wait_s
        while True:
            found = await self._claim(name, count, tokens)
            if found or self._clock.monotonic_s() >= until_s:
                return found
            await self._clock.sleep(min(POLL_S, max(0.01, until_s - self._clock.monotonic_s())))

    async def _claim(self, name: str, count: int, tokens: list[ClaimToken]) -> list[CollectedBatch]:
        shards = await self._queue.shards()
        found: list[CollectedBatch] = []
        self._turn += 1
        for step in range(len(shards)):
            shard = shards[(self._turn + step) % len(shards)]
            collector = self._collector(shard, name, count - len(found))
            collector.leave_alone(await self._held(shard, tokens))
            try:
                while (batch := await collector.next_batch()) is not None:
                    found.append(batch)
                    if not collector.undelivered:
                        break
            except LakebedError:
                if not found:
                    raise
            finally:
                await collector.detach()
            if len(found) >= count:
                break
        return found

    def _collector(self, shard: QueueShard, name: str, count: int) -> Collector:
        if len(self._missing) > MISSING_MAX:
            self._missing.clear()
        return Collector(
            msgspec.structs.replace(shard.settings, prefetch_batches=count),
            self._runtime,
            producer=shard.producer,
            consumer=shard.consumer,
            name=name,
            shard=shard.number,
            remote=self._missing,
        )

    async def _held(self, shard: QueueShard, tokens: list[ClaimToken]) -> frozenset[str]:
        mine = [token for token in tokens if token.shard == shard.number]
        if not mine:
            return frozenset()
        manifest = await shard.consumer.read()
        return frozenset(place for token in mine if (place := _location(manifest, token)) is not None)

    async def ack(self, text: str) -> None:
        """Marks the batch of a claim as done. Idempotent; raises Fenced when the claim was lost."""
        token, shard = self._parsed(text)
        manifest = await shard.consumer.read()
        location = _location(manifest, token)
        if location is None:
            if not claiming.is_settled(manifest, token.epoch):
                raise _lost(text)
            return
        done = await shard.consumer.ack(Claimed(location, 0, token.epoch, 0, 0))
        self._runtime.metrics.counter("lakebed_queue_acked_total").inc()
        if done >= shard.settings.done_cleanup_threshold:
            await shard.sweeper.sweep()  # a failure is logged: the batch is done all the same

    async def extend(self, text: str) -> int:
        """Refreshes a claim for another timeout; returns when it goes stale (ms). Raises Fenced when it was lost."""
        token, shard = self._parsed(text)
        asked_ms = now_ms(self._clock)
        location = _location(await shard.consumer.read(), token)
        if location is None or await shard.consumer.heartbeat({location: token.epoch}):
            raise _lost(text)
        return self.expires_ms(asked_ms)

    async def reject(self, text: str, reason: str) -> bool:
        """Gives the batch back, to be delivered again after a delay; True when it became a dead letter instead."""
        token, shard = self._parsed(text)
        manifest = await shard.consumer.read()
        location = _location(manifest, token)
        if location is None or location not in manifest.claims:
            raise _lost(text)
        claim = manifest.claims[location]
        claimed = Claimed(location, claim.sequence, claim.epoch, claim.size_bytes, claim.enqueued_ms)
        collector = self._collector(shard, claim.collector, 1)
        return await collector.reject(CollectedBatch([], claimed, shard.number), reason)

    def _parsed(self, text: str) -> tuple[ClaimToken, QueueShard]:
        token = ClaimToken.parse(text)
        return token, self._queue.shard(token.shard)

    def expires_ms(self, confirmed_ms: int) -> int:
        """When a claim goes stale that was made or extended at this time."""
        return confirmed_ms + round(self._queue.settings.heartbeat_timeout_s * 1000)


def _location(manifest: ConsumerManifest, token: ClaimToken) -> str | None:
    """The batch of a claim that is held, or finished and not cleaned up yet."""
    places = [(place, claim.epoch) for place, claim in manifest.claims.items()]
    places += [(place, done.epoch) for place, done in manifest.finished.items()]
    return next((place for place, epoch in places if epoch == token.epoch and _digest(place) == token.digest), None)


def _lost(text: str) -> Fenced:
    return Fenced(f"claim {text} was lost", hint="another consumer has the batch, or it is done: drop it")


def _digest(location: str) -> str:
    return f"{google_crc32c.value(location.encode()):08x}"
