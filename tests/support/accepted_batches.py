"""Accepted batches for the tests of sources and bronze: frames in the bucket as a collector leaves them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.model import AcceptedBatch, BatchIdentity, Kind, Sample, write_record
from lakebed.store.protocol import Store

ACCEPTED_NS = 1_760_000_000_000_000_000
SECOND_NS = 1_000_000_000


class BatchesYard:
    """Accepts batches at times of its own choosing; each knows the samples it holds."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def accept(
        self,
        start: int,
        end: int,
        *,
        agent: str = "agent-a",
        boot: str = "boot-1",
        at_s: float = 0.0,
        indexed: bool = True,
        noted: bool = False,
        samples: Sequence[Sample] = (),
    ) -> AcceptedBatch:
        """`indexed=False`: the collector died before it wrote the index; `noted`: the reconciler found it late."""
        identity = BatchIdentity(agent, boot, start, end)
        frame = encode(identity, columns_of(samples or samples_of(identity)))
        sha256 = hashlib.sha256(frame).hexdigest()
        accepted = AcceptedBatch(
            "lightmetrics.accepted_batch.v1",
            agent,
            boot,
            start,
            end,
            sha256,
            len(frame),
            paths.blob_key(sha256),
            ACCEPTED_NS + round(at_s * SECOND_NS),
            "collector-1",
            1,
            1,
            "attempt",
        )
        writes = [(accepted.raw_blob_key, frame), (paths.accepted_key(identity), write_record(accepted))]
        span = acceptance.span_of(decode(frame))
        writes += [(write.key, write.data) for write in acceptance.derived(accepted, span)] if indexed else []
        writes += [(w.key, w.data) for w in [acceptance.rollup_work(accepted)]] if noted else []

        async def store_all() -> None:
            for key, data in writes:
                await self.store.create(key, data)

        asyncio.run(store_all())
        return accepted

    def frame(self, accepted: AcceptedBatch) -> bytes:
        return asyncio.run(self.store.get(accepted.raw_blob_key)).data

    def damage(self, accepted: AcceptedBatch, data: bytes = b"half of a fra") -> str:
        """Puts other bytes in the blob's place; gives the key by which it is reported."""

        async def overwrite() -> None:
            await self.store.delete(accepted.raw_blob_key)
            await self.store.create(accepted.raw_blob_key, data)

        asyncio.run(overwrite())
        return paths.accepted_by_time_key(accepted.identity, accepted.accepted_at_unix_ns)


def samples_of(identity: BatchIdentity) -> list[Sample]:
    return [
        Sample(
            "cpu" if seq % 2 else "memory",
            ACCEPTED_NS + seq * SECOND_NS + seq,
            seq + 0.5,
            Kind.COUNTER if seq % 3 == 0 else Kind.GAUGE,
            {"host": f"h{seq % 4}", "zone": "z"} if seq % 2 else {},
        )
        for seq in range(identity.seq_start, identity.seq_end + 1)
    ]
