"""Accepted batches, a roller without Spark, and windows computed by hand: what rollups are held against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.live import LiveBatches
from lakebed.batches.matchers import Selector
from lakebed.batches.model import AcceptedBatch, BatchIdentity, Sample, write_record
from lakebed.batches.reader import RawBatches
from lakebed.batches.sources import SampleSources
from lakebed.batches.window_query import RollupQuerier, RollupResponse, WindowValues
from lakebed.core.clock import Clock
from lakebed.core.errors import LakebedError
from lakebed.core.metrics import Metrics
from lakebed.rollups.local_job import LocalJob
from lakebed.rollups.model import RollupJob, StoredChunk
from lakebed.rollups.reader import RollupCoverage
from lakebed.rollups.roller import Roller
from lakebed.store.protocol import Store
from support.runtimes import runtime_of, runtime_on

WINDOWS_S = (60, 300, 3600)


def frame(agent: str, start: int, samples: list[Sample], boot: str = "boot-1") -> bytes:
    return encode(BatchIdentity(agent, boot, start, start + len(samples) - 1), columns_of(samples))


async def accept(store: Store, data: bytes, at_ns: int, *, indexed: bool = True, late: bool = False) -> AcceptedBatch:
    """What a collector leaves of an accepted batch; without its index entries when it died, with work when late."""
    submitted = acceptance.submission(data, decode(data))
    await store.create(submitted.blob_key, data)
    accepted = acceptance.manifest(submitted, at_ns=at_ns, collector_id="c", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    if indexed:
        now = (lambda: at_ns + 2 * acceptance.LATE_NS) if late else None
        for write in acceptance.derived(accepted, acceptance.span_of(submitted.batch), now):
            await store.create(write.key, write.data)
    return accepted


def make_roller(
    store: Store, clock: Clock, *, job: RollupJob | None = None, owner: str = "roller", **more: Any
) -> Roller:
    given = {"windows_s": WINDOWS_S, "overlap_s": 900.0, "batches_max": 1000, "lease_s": 60.0} | more
    runtime = runtime_on(store, clock, ids=given.pop("ids", None), metrics=given.pop("metrics", None))
    return Roller(runtime, job or LocalJob(store), owner=owner, **given)


def make_sources(store: Store, clock: Clock, batches_max: int = 2_000) -> SampleSources:
    raw = RawBatches(store)
    return SampleSources(
        LiveBatches(runtime_of(clock, metrics=Metrics()), bytes_max=0, window_s=0.0),
        raw,
        RollupCoverage(store, raw),
        follower=None,
        spool=None,
        batches_max=batches_max,
        clock=clock,
    )


async def ask(
    store: Store, clock: Clock, metric: str, window_s: int, from_ns: int, to_ns: int, q: Iterable[float] = ()
) -> RollupResponse:
    return await RollupQuerier(runtime_on(store, clock), make_sources(store, clock)).range(
        Selector(metric), window_s, from_ns, to_ns, list(q)
    )


Series = tuple[tuple[str, str], ...]


def by_hand(samples: Iterable[tuple[str, Sample]], metric: str, window_s: int) -> dict[Series, dict[int, Any]]:
    """(agent, sample) to windows by series, one sample at a time, in plain Python."""
    found: dict[Series, dict[int, list[Sample]]] = {}
    for agent, sample in samples:
        if sample.metric == metric:
            key = tuple(sorted({"agent_id": agent, **sample.labels}.items()))
            start = sample.time_ns // (window_s * 10**9) * (window_s * 10**9)
            found.setdefault(key, {}).setdefault(start, []).append(sample)
    return {key: {start: _window(start, held) for start, held in windows.items()} for key, windows in found.items()}


def _window(start: int, held: list[Sample]) -> tuple[Any, ...]:
    numbers = [sample for sample in held if not math.isnan(sample.value)]
    if not numbers:
        return (start, len(held), 0.0, None, None, -1, None, len(held))
    values = [sample.value for sample in numbers]
    last = max((sample.time_ns, sample.value) for sample in numbers)
    return (start, len(held), added(values), min(values), max(values), *last, len(held) - len(numbers))


def added(values: list[float]) -> float | None:
    """The exact sum, rounded once; a value of 2^960 or beyond is infinite, and both infinities are no number."""
    far = {math.copysign(math.inf, value) for value in values if abs(value) >= 2.0**960}
    if far:
        return far.pop() if len(far) == 1 else None
    return math.fsum(values)


def shown(answer: RollupResponse) -> dict[Series, dict[int, Any]]:
    return {
        tuple(sorted(series.labels.items())): {bucket.start_ns: plain(bucket) for bucket in series.buckets}
        for series in answer.series
    }


def plain(bucket: WindowValues) -> tuple[Any, ...]:
    reported = (bucket.start_ns, bucket.count, bucket.sum, bucket.min, bucket.max, bucket.last_ns, bucket.last)
    return tuple(
        None if isinstance(each, float) and math.isnan(each) else each for each in (*reported, bucket.nan_count)
    )


class Failing(LocalJob):
    """An engine that ends right behind its last chunk."""

    async def write(self, generation_id: str) -> list[StoredChunk]:
        await super().write(generation_id)
        raise LakebedError("the engine ended")
