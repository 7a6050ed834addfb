"""Accepted batches in a real bucket for the tests of audits, and ways to damage what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from pyspark.sql import SparkSession

from lakebed.batches import acceptance, paths
from lakebed.batches.findings import FindingsRepairer
from lakebed.batches.index import write_rows
from lakebed.batches.model import AcceptedBatch, write_record
from lakebed.batches.packer import Packer, write_blob
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.sweeper import BlobSweeper
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.pipeline.audit.job import BucketAuditor
from lakebed.pipeline.audit.model import AuditRecord
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections
from support.batch_frames import frame_of, submit

DAY_NS = 86_400_000_000_000


class AuditYard:
    def __init__(self, spark: SparkSession, store: Store, settings: StoreSettings) -> None:
        flags = {"audit.grace_s": 0.0} | settings.as_layer()
        self.context = Context(
            node="audit-test",
            settings=load(sections(), flags=flags),
            store=store,
            clock=SystemClock(),
            ids=Ids(),
            metrics=Metrics(),
        )
        self.spark, self.store, self.settings = spark, store, settings

    def accept(
        self,
        frame: bytes,
        *,
        derived: Sequence[str] | Literal["row"] = ("by_time", "by_blob", "seen"),
        ago_s: float = 0.0,
        noted: bool = False,
    ) -> AcceptedBatch:
        """Accepts a frame as a collector does, which then writes only some of what is derived, or a row of the index.

        `ago_s`: it was accepted so long ago, and is written only now; `noted`: whoever wrote it asked for rollup work.
        """

        async def accept() -> AcceptedBatch:
            submitted = submit(frame)
            await write_blob(self.store, submitted)
            at_ns = self.context.clock.now_ns() - round(ago_s * 1e9)
            accepted = acceptance.manifest(
                submitted, at_ns=at_ns, collector_id="c", attempt_id=self.context.ids.token()
            )
            await self.store.create(paths.accepted_key(accepted.identity), write_record(accepted))
            if noted:
                note = acceptance.rollup_work(accepted)
                await self.store.create(note.key, note.data)
            writes = dict(
                zip(
                    ("by_time", "by_blob", "seen"),
                    acceptance.derived(accepted, acceptance.span_of(submitted.batch)),
                    strict=True,
                )
            )
            if derived == "row":
                entry = acceptance.entry_of(accepted, acceptance.span_of(submitted.batch))
                await write_rows(self.store, [entry], writer="c")
                return accepted
            for name in derived:
                await self.store.create(writes[name].key, writes[name].data)
            return accepted

        return asyncio.run(accept())

    def pack(self, frames: Sequence[bytes], *, accepted: int | None = None) -> list[AcceptedBatch]:
        """Stores the frames in one pack, and accepts the first `accepted` of them, or all."""

        async def pack() -> list[AcceptedBatch]:
            submitted = [submit(frame) for frame in frames]
            packer = Packer(self.context, wait_s=0.01)
            places = await asyncio.gather(*map(packer.store, submitted))
            made = [
                acceptance.manifest(
                    each,
                    place,
                    at_ns=self.context.clock.now_ns(),
                    collector_id="c",
                    attempt_id=self.context.ids.token(),
                )
                for each, place in list(zip(submitted, places, strict=True))[:accepted]
            ]
            for each, one in zip(made, submitted, strict=False):
                await self.store.create(paths.accepted_key(each.identity), write_record(each))
                entry = acceptance.entry_of(each, acceptance.span_of(one.batch))
                await write_rows(self.store, [entry], writer="c")
            return made

        return asyncio.run(pack())

    def fleet(self, agents: int = 2, batches: int = 3) -> list[AcceptedBatch]:
        return [
            self.accept(frame_of(n * 10, n * 10 + 9, agent=f"agent-{agent}"))
            for agent in range(agents)
            for n in range(batches)
        ]

    def conflict(self, accepted: AcceptedBatch, frame: bytes, *, referred: bool = True) -> str:
        """Other bytes under an accepted identity, recorded as a collector does."""

        async def conflict() -> str:
            submitted = submit(frame)
            await write_blob(self.store, submitted)
            record = acceptance.conflict(
                accepted, submitted.sha256, at_ns=self.context.clock.now_ns(), collector_id="c"
            )
            key = paths.quarantine_key(record.identity, submitted.sha256)
            await self.store.create(key, write_record(record))
            if referred:
                write = acceptance.quarantine_by_blob(record.identity, submitted.sha256)
                await self.store.create(write.key, write.data)
            return key

        return asyncio.run(conflict())

    def overwrite(self, key: str, data: bytes) -> None:
        """What nobody may do, and disks and people do all the same."""

        async def overwrite() -> None:
            await self.store.delete(key)
            await self.store.create(key, data)

        asyncio.run(overwrite())

    def delete(self, key: str) -> None:
        asyncio.run(self.store.delete(key))

    def read(self, key: str) -> bytes:
        async def read() -> bytes:
            return (await self.store.get(key)).data

        return asyncio.run(read())

    def keys(self, prefix: str = "") -> set[str]:
        async def keys() -> set[str]:
            return {info.key async for info in self.store.list(prefix)}

        return asyncio.run(keys())

    def audit(self, *, verify: bool = False, horizon_s: float = 0.0) -> AuditRecord:
        return BucketAuditor(self.spark, self.context).run(verify=verify, horizon_s=horizon_s)

    def reconciler(self) -> Reconciler:
        return Reconciler(
            self.context.on(self.store),
            overlap_s=900.0,
            concurrency=4,
        )

    def mender(self) -> FindingsRepairer:
        return FindingsRepairer(self.context.on(self.store), self.reconciler())

    def sweeper(self, horizon_s: float = 0.0) -> BlobSweeper:
        return BlobSweeper(
            self.context.on(self.store),
            horizon_s=horizon_s,
            undecided="keep",
            name="gc",
        )


def found(record: AuditRecord) -> set[tuple[str, str, str]]:
    return {(each.finding, each.kind, each.key) for each in record.findings}
