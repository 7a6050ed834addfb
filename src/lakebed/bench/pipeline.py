"""`lakebed bench pipeline`: accepted batches to bronze, beside Spark's own Parquet read and write of the same rows.

Bronze pays for finding the batches, fetching them from the bucket, verifying their hashes, writing to the bucket and
committing; Spark's own pays for none of it: its files come from local disk and go to local disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lakebed.batches import acceptance, paths
from lakebed.batches.model import ACCEPTED_SCHEMA, Accepted, write_record
from lakebed.bench.audit import audit
from lakebed.bench.harness import Check, Stand, at_least, at_most, rounds_of, told
from lakebed.bench.rollups import rollups
from lakebed.context import Context
from lakebed.errors import Corrupt
from lakebed.feed import Limit, ahead
from lakebed.frame.codec import decode, encode
from lakebed.frame.model import Columns, Identity
from lakebed.pipeline.settings import SparkSettings

SAMPLES_PER_BATCH = 10_000
SERIES = 200
NATIVE_BAR = 0.5  # bronze ÷ Spark's own read and write, samples a second
LINEAR_BAR = 2.6  # time for twice the samples ÷ time for the samples: twice, and what noise adds
START_NS = 1_790_000_000_000_000_000


async def bench(stand: Stand) -> Sequence[Check]:
    context = stand.context()
    fleet = Fleet(context)
    folder = Path(tempfile.mkdtemp(prefix="lakebed-bench-"))
    checks: list[Check] = []
    try:
        for part in PARTS:
            checks += await part(stand, context, fleet, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return checks


class Fleet:
    """Accepted batches in the bucket, as collectors leave them: made once, read by every part of the bench."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.batches = 0

    @property
    def samples(self) -> int:
        return self.batches * SAMPLES_PER_BATCH

    async def grow(self, samples: int) -> None:
        """Accepts batches until there are so many samples."""
        wanted = range(self.batches, -(-samples // SAMPLES_PER_BATCH))
        async for _ in ahead(list(wanted), self._accept):
            self.batches += 1

    async def _accept(self, number: int) -> None:
        first = number * SAMPLES_PER_BATCH
        identity = Identity(f"agent-{number % 8}", "boot", first, first + SAMPLES_PER_BATCH - 1)
        frame = encode(identity, _columns(first))
        sha256 = hashlib.sha256(frame).hexdigest()
        accepted = Accepted(
            ACCEPTED_SCHEMA,
            identity.agent_id,
            identity.boot_id,
            identity.seq_start,
            identity.seq_end,
            sha256,
            len(frame),
            paths.blob_key(sha256),
            START_NS + number * 1_000_000,
            "bench",
            1,
            1,
        )
        store = self._context.store
        await store.create(accepted.raw_blob_key, frame)
        await store.create(paths.accepted_key(identity), write_record(accepted))
        entry = acceptance.by_time(accepted, acceptance.span_of(decode(frame)))
        await store.create(entry.key, entry.data)


async def _bronze(stand: Stand, context: Context, fleet: Fleet, folder: Path) -> list[Check]:
    count = 400_000 if stand.quick else 2_000_000
    await fleet.grow(count)
    runs = BronzeRuns(context, folder)
    stand.tell("Spark starts, and warms up on both")
    await asyncio.to_thread(runs.warm, count)
    stand.tell(f"{count} samples to bronze and Spark's own read and write of them, in turn")
    rounds = 3 if stand.quick else 5

    async def ours() -> float:
        return await asyncio.to_thread(runs.ingest, count)

    async def native() -> float:
        return await asyncio.to_thread(runs.native, count)

    seen = await rounds_of(rounds, {"bronze": ours, "native": native})
    stand.tell("twice as many samples")
    await fleet.grow(2 * count)
    doubled = [await asyncio.to_thread(runs.ingest, 2 * count) for _ in range(rounds)]
    once = [count / rate for rate in seen["bronze"]]
    twice = [2 * count / rate for rate in doubled]
    return [
        told(f"{count} accepted samples to bronze", seen["bronze"], "samples/s"),
        told("Spark's own Parquet read and write of them", seen["native"], "samples/s"),
        at_least("bronze ÷ Spark's own", seen["bronze"], seen["native"], NATIVE_BAR),
        at_most("time for twice the samples ÷ for the samples", twice, once, LINEAR_BAR),
    ]


async def _rollups(stand: Stand, context: Context, fleet: Fleet, folder: Path) -> list[Check]:
    return await rollups(stand, context, fleet, folder, START_NS + 1_800_000_000_000)


# What is measured, in order, on one fleet and one session: each gives its checks.
Part = Callable[[Stand, Context, Fleet, Path], Awaitable[list[Check]]]
PARTS: tuple[Part, ...] = (_bronze, _rollups, audit)


class BronzeRuns:
    """One run into a fresh table, and Spark's own run over the same rows. Both give samples a second."""

    def __init__(self, context: Context, folder: Path) -> None:
        self._context, self._folder = context, folder

    @property
    def _spark(self) -> Any:
        from lakebed.pipeline.session import open_session

        return open_session(self._context.settings.of(SparkSettings))

    def warm(self, count: int) -> None:
        """Writes the rows for Spark's own run, from bronze itself, and runs each once."""
        from lakebed.pipeline.samples import Samples

        samples = Samples(self._spark, self._context, name=f"bench/{self._context.ids.token()}")
        samples.step(Limit())
        samples.table.read().repartition(4).write.parquet(str(self._folder / "rows"))
        self.native(count)

    def ingest(self, count: int) -> float:
        from lakebed.pipeline.samples import Samples

        samples = Samples(self._spark, self._context, name=f"bench/{self._context.ids.token()}")
        began = self._context.clock.monotonic_s()
        report = samples.step(Limit())
        seconds = self._context.clock.monotonic_s() - began
        if report is None or report.good != count or samples.table.snapshot().rows != count:
            raise Corrupt(f"{count} samples were accepted, but bronze says {msgspec.to_builtins(report)}")
        return count / seconds

    def native(self, count: int) -> float:
        spark = self._spark
        began = self._context.clock.monotonic_s()
        spark.read.parquet(str(self._folder / "rows")).write.mode("overwrite").parquet(str(self._folder / "written"))
        return count / (self._context.clock.monotonic_s() - began)


def _columns(first: int) -> Columns:
    """Samples of two hundred series, as columns: what a host's exporter gives, each series with two labels."""
    seq = np.arange(first, first + SAMPLES_PER_BATCH)
    metrics = [f"metric_{n:03d}_total" for n in range(SERIES // 4)]
    hosts = [f"host-{n}" for n in range(4)]
    strings = tuple(sorted([*metrics, *hosts, "host", "zone", "eu-1"]))
    at = {text: n for n, text in enumerate(strings)}
    series = range(SERIES)
    values = [(at[hosts[n % 4]], at["eu-1"]) for n in series]
    return Columns(
        times_ns=(START_NS + seq * 1_000_003).astype("<i8"),
        values=np.round(np.sin(seq / 50.0) * 100 + seq % 7, 3).astype("<f8"),
        kinds=np.full(SAMPLES_PER_BATCH, 2, "u1"),
        series=(seq % SERIES).astype("<u4"),
        series_metric=np.array([at[metrics[n // 4]] for n in series], "<u4"),
        label_offsets=np.arange(0, 2 * SERIES + 1, 2).astype("<u4"),
        label_names=np.array([at["host"], at["zone"]] * SERIES, "<u4"),
        label_values=np.array(values, "<u4").reshape(-1),
        strings=strings,
    )
