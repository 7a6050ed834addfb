"""The queue's consuming side: one consumer manifest, changed by compare-and-swap. Claims, heartbeats and acks that one
process requests at the same time share one write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lakebed.core.clock import now_ms
from lakebed.queue import claiming, paths
from lakebed.queue.claiming import ClaimRules, RejectionRules, StaleManifest
from lakebed.queue.model import BatchTrouble, Claimed, ConsumerManifest, PendingView
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
        self._passed_over = 0

    async def read(self) -> ConsumerManifest:
        return self._see((await self._register.read()).value)

    @property
    def passed_over(self) -> int:
        """How many batches at the front of the queue may be no candidates for a claim, as of the last read."""
        return self._passed_over

    def _see(self, manifest: ConsumerManifest) -> ConsumerManifest:
        self._passed_over = len(manifest.done) + len(manifest.claimed) + len(manifest.troubles)
        return manifest

    async def claim(
        self, producer: PendingView, collector: str, held: Collection[str], *, batches_max: int | None = None
    ) -> list[Claimed] | StaleManifest:
        """Claims the next batches of `producer`, in order; none when nothing is free."""
        rules = ClaimRules(
            collector,
            round(self._settings.heartbeat_timeout_s * 1000),
            batches_max or self._settings.prefetch_batches,
            self._settings.prefetch_bytes,
            self._settings.parallel,
            self._settings.silences_max,
        )
        return await self._register.change(
            lambda manifest: claiming.claim(self._see(manifest), producer, rules, held=held, now_ms=now_ms(self._clock))
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

    async def reject(
        self, claimed: Claimed, reason: str, *, last: bool = False, also: Mapping[str, int] | None = None
    ) -> BatchTrouble:
        """Counts a rejection; with `last`, or after too many, the batch becomes a dead letter. Raises Fenced.

        Otherwise it is given back for a while, and with it the claims in `also` (location → epoch).
        """
        rules = RejectionRules(
            1 if last else self._settings.rejections_max,
            round(self._settings.redelivery_delay_s * 1000),
            round(self._settings.redelivery_delay_max_s * 1000),
            dict(also or {}),
        )
        return await self._register.change(
            lambda manifest: claiming.reject(manifest, claimed, reason, now_ms=now_ms(self._clock), rules=rules)
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
