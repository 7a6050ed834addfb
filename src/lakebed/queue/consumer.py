"""The queue's consuming side: one consumer manifest, changed by compare-and-swap. Claims, heartbeats and acks that one
process requests at the same time share one write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lakebed.core.clock import now_ms
from lakebed.queue import claiming, paths
from lakebed.queue.claiming import ClaimRules, StaleManifest
from lakebed.queue.model import BatchTrouble, Claimed, ConsumerManifest, ProducerManifest
from lakebed.queue.settings import QueueSettings
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

REGISTER = "queue_consumer"


class Consumer:
    def __init__(self, settings: QueueSettings, runtime: StoreRuntime) -> None:
        self._settings, self._clock = settings, runtime.clock
        self._register = Register(
            runtime,
            paths.consumer_manifest(settings.manifest_path),
            ConsumerManifest,
            ConsumerManifest(),
            name=REGISTER,
        )

    async def read(self) -> ConsumerManifest:
        return (await self._register.read()).value

    async def claim(
        self, producer: ProducerManifest, collector: str, held: Collection[str]
    ) -> list[Claimed] | StaleManifest:
        """Claims the next batches of `producer`, in order; none when nothing is free."""
        rules = ClaimRules(
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
        """Refreshes claims (location → epoch); returns those that are lost."""
        return await self._register.change(
            lambda manifest: claiming.heartbeat(manifest, held, now_ms=now_ms(self._clock))
        )

    async def ack(self, claimed: Claimed) -> int:
        """Marks a batch as done; returns how many done ones wait for clean-up. Idempotent; raises Fenced."""
        return await self._register.change(lambda manifest: claiming.ack(manifest, claimed, now_ms=now_ms(self._clock)))

    async def bury(self, claimed: Claimed) -> None:
        """Marks a batch as done and dead. Idempotent; raises Fenced."""
        await self._register.change(lambda manifest: claiming.bury(manifest, claimed, now_ms=now_ms(self._clock)))

    async def reject(self, claimed: Claimed, reason: str, *, last: bool = False) -> BatchTrouble:
        """Counts a rejection; with `last`, or after too many, the batch becomes a dead letter. Raises Fenced."""
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
