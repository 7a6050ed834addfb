"""Answers ranges from rollups, where the pipeline has built them: fewer bytes than raw batches, one row a window."""

from __future__ import annotations

import msgspec

from lakebed.batches import paths
from lakebed.batches.matchers import Selector
from lakebed.errors import Invalid, NotFound
from lakebed.frame.rollup import decode_rollup
from lakebed.store.protocol import Store

CHUNKS_MAX = 2_000  # chunks one query may read
BUCKETS_MAX = 100_000  # windows one query may answer
RANGE_S_MAX = 366 * 86400


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What the samples of one series came to in one window."""

    start_ns: int
    count: int
    sum: float
    min: float
    max: float
    last_ns: int
    last: float

    def plus(self, other: Bucket) -> Bucket:
        newer = other if other.last_ns >= self.last_ns else self
        return Bucket(
            self.start_ns,
            self.count + other.count,
            self.sum + other.sum,
            min(self.min, other.min),
            max(self.max, other.max),
            newer.last_ns,
            newer.last,
        )


class RollupSeries(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    buckets: list[Bucket]


class RollupAnswer(msgspec.Struct, frozen=True):
    """`partial` whenever a chunk could not be read; what was not rolled up yet is not in the answer."""

    metric: str
    window_s: int
    partial: bool
    why_partial: list[str]
    from_unix_ns: int
    to_unix_ns: int
    sources: dict[str, int]
    series: list[RollupSeries]


class Rollups:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def range(self, selector: Selector, window_s: int, from_ns: int, to_ns: int) -> RollupAnswer:
        """Every window that begins in [from_ns, to_ns), by series. Raises Invalid over the limits."""
        if window_s < 1 or not 0 <= from_ns < to_ns or to_ns - from_ns > RANGE_S_MAX * 1_000_000_000:
            raise Invalid(f"windows of {window_s} s from {from_ns} to {to_ns} are not a range of up to a year")
        found: dict[tuple[tuple[str, str], ...], dict[int, Bucket]] = {}
        chunks, damaged = 0, 0
        for hour in paths.hours(from_ns, to_ns - 1):
            async for info in self._store.list(paths.rollup_folder(window_s, hour, selector.metric)):
                chunks += 1
                if chunks > CHUNKS_MAX:
                    raise Invalid(f"more than {CHUNKS_MAX} chunks", hint="narrow the range or take a larger window")
                try:
                    table = decode_rollup((await self._store.get(info.key)).data)
                except (Invalid, NotFound):
                    damaged += 1
                    continue
                _take(found, selector, table.to_pylist(), from_ns, to_ns)
        why = [f"{damaged} rollup chunks cannot be read"] if damaged else []
        return RollupAnswer(
            metric=selector.metric,
            window_s=window_s,
            partial=bool(why),
            why_partial=why,
            from_unix_ns=from_ns,
            to_unix_ns=to_ns,
            sources={"rollup": chunks},
            series=[
                RollupSeries(dict(labels), [buckets[start] for start in sorted(buckets)])
                for labels, buckets in sorted(found.items())
            ],
        )


def _take(
    found: dict[tuple[tuple[str, str], ...], dict[int, Bucket]],
    selector: Selector,
    rows: list[dict[str, object]],
    from_ns: int,
    to_ns: int,
) -> None:
    for row in rows:
        labels = {"agent_id": str(row.pop("agent_id")), **dict(row.pop("labels"))}  # type: ignore[call-overload]
        bucket = Bucket(**row)  # type: ignore[arg-type]
        if not from_ns <= bucket.start_ns < to_ns or not selector.takes(labels):
            continue
        buckets = found.setdefault(tuple(sorted(labels.items())), {})
        known = buckets.get(bucket.start_ns)
        buckets[bucket.start_ns] = known.plus(bucket) if known else bucket
        if len(buckets) > BUCKETS_MAX:
            raise Invalid(f"more than {BUCKETS_MAX} windows", hint="narrow the range or take a larger window")
