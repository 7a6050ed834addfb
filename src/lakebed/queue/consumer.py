"""The queue's consuming side: one consumer manifest, changed by compare-and-swap. Claims, heartbeats and acks of one
process that are asked for at the same time go into one write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lakebed.clock import Clock, now_ms
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.queue import claiming, paths
from lakebed.queue.claiming import Outdated, Rules
from lakebed.queue.model import Claimed, ConsumerManifest, ProducerManifest, Trouble
from lakebed.queue.settings import QueueSettings
from lakebed.store.protocol import Store
from lakebed.store.register import Register

REGISTER = "queue_consumer"


class Consumer:
    def __init__(self, settings: QueueSettings, store: Store, clock: Clock, *, ids: Ids, metrics: Metrics) -> None:
        self._settings, self._clock = settings, clock
        self._register = Register(
            store,
            paths.consumer_manifest(settings.manifest_path),
            ConsumerManifest,
            ConsumerManifest(),
            clock=clock,
            ids=ids,
            metrics=metrics,
            name=REGISTER,
        )

    async def read(self) -> ConsumerManifest:
        return (await self._register.read()).value

    async def claim(
        self, producer: ProducerManifest, collector: str, held: Collection[str]
    ) -> list[Claimed] | Outdated:
        """Claims the next batches of `producer`, in order; none when there is nothing to have."""
        rules = Rules(
            collector,
            round(self._settings.heartbeat_timeout_s * 1000),
            self._settings.prefetch_batches,
            self._settings.prefetch_bytes,
            self._settings.parallel,
            self._settings.silences_max,
        )
        return await self._register.change(
            lambda manifest: claiming.claim(manifest, producer, rules, held=held, now_ms=now_ms(self._clock))
        )

    async def heartbeat(self, held: Mapping[str, int]) -> frozenset[str]:
        """Refreshes claims (location → epoch); answers those that are lost."""
        return await self._register.change(
            lambda manifest: claiming.heartbeat(manifest, held, now_ms=now_ms(self._clock))
        )

    async def ack(self, claimed: Claimed) -> int:
        """Marks a batch as done; answers how many done ones wait for clean-up. Idempotent; raises Fenced."""
        return await self._register.change(lambda manifest: claiming.ack(manifest, claimed, now_ms=now_ms(self._clock)))

    async def bury(self, claimed: Claimed) -> None:
        """Marks a batch as done and dead. Idempotent; raises Fenced."""
        await self._register.change(lambda manifest: claiming.bury(manifest, claimed, now_ms=now_ms(self._clock)))

    async def reject(self, claimed: Claimed, reason: str, *, last: bool = False) -> Trouble:
        """Counts a rejection; with `last`, or when there were enough, the batch is to be buried. Raises Fenced."""
        rejections_max = 1 if last else self._settings.rejections_max
        return await self._register.change(
            lambda manifest: claiming.reject(
                manifest, claimed, reason, now_ms=now_ms(self._clock), rejections_max=rejections_max
            )
        )

    async def close_abandoned(self, locations: Iterable[str]) -> None:
        """Marks batches as done that were split and whose collector died before it could."""
        gone = tuple(locations)
        await self._register.change(
            lambda manifest: claiming.close_abandoned(manifest, gone, now_ms=now_ms(self._clock))
        )

    async def release(self, held: Mapping[str, int]) -> None:
        await self._register.change(lambda manifest: claiming.release(manifest, held))

    async def trim(self, locations: Iterable[str], cleanups: int) -> None:
        """Forgets done batches that left the producer manifest in the clean-up of that number."""
        gone = frozenset(locations)
        await self._register.change(lambda manifest: claiming.trim(manifest, gone, cleanups))
