"""How a queue stands, told from its two manifests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.queue.model import ConsumerManifest, ProducerManifest, QueueStatus


def standing(
    queue: str, producer: ProducerManifest, consumer: ConsumerManifest, *, dead: int, timeout_ms: int, now_ms: int
) -> QueueStatus:
    done = set(consumer.done)
    waiting = [producer.entries[location] for location in producer.pending if location not in done]
    return QueueStatus(
        queue=queue,
        pending=len(waiting),
        bytes_waiting=sum(entry.size_bytes for entry in waiting),
        claimed=len(consumer.claimed),
        done=len(done),
        dead=dead,
        pending_age_s=_age_s((entry.enqueued_ms for entry in waiting), now_ms),
        claimed_age_s=_age_s((claim.since_ms for claim in consumer.claims.values()), now_ms),
        done_age_s=_age_s((one.at_ms for one in consumer.finished.values()), now_ms),
        stale_claims=sum(now_ms - at_ms > timeout_ms for at_ms in consumer.claimed.values()),
        next_sequence=producer.next_sequence,
        generation=producer.generation,
        collectors=sorted({claim.collector for claim in consumer.claims.values() if claim.collector}),
    )


def _age_s(times_ms: Iterable[int], now_ms: int) -> float | None:
    oldest = min((at for at in times_ms if at), default=None)
    return None if oldest is None else max(0.0, (now_ms - oldest) / 1000)
