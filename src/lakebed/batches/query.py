"""Answers latest values and ranges, from live state, the local spool and raw batches, each batch counted once.

An answer is `partial` unless this is the designated query collector and it has caught up, and says why. It is complete
as far as the by-time index goes: what a crashed collector did not index joins it when the reconciler has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec
import numpy as np

from lakebed.batches.follower import Follower
from lakebed.batches.live import Live
from lakebed.batches.matchers import Selector
from lakebed.batches.raw import RawBatches
from lakebed.clock import Clock
from lakebed.errors import Corrupt, Invalid, NotFound
from lakebed.frame.model import Batch, Identity, Kind

SKEW_NS = 300_000_000_000  # how far an agent's clock may run ahead of its collector's
RANGE_S_MAX = 31 * 86400
READ_AHEAD = 16  # raw batches being read at once by one query


class Series(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    kind: str
    points: list[tuple[int, float]]


class QueryAnswer(msgspec.Struct, frozen=True):
    metric: str
    partial: bool
    why_partial: list[str]
    from_unix_ns: int
    to_unix_ns: int
    accepted_through_unix_ns: int  # acceptances up to here were looked at
    sources: dict[str, int]  # batches read from each
    series: list[Series]


class SpoolView(Protocol):
    """What a query needs of the local spool."""

    def unlanded(self) -> AsyncIterator[tuple[Identity, Batch]]: ...


class Querier:
    def __init__(
        self,
        live: Live,
        raw: RawBatches,
        *,
        follower: Follower | None,
        spool: SpoolView | None,
        batches_max: int,
        points_max: int,
        clock: Clock,
    ) -> None:
        self._live, self._raw, self._follower, self._spool = live, raw, follower, spool
        self._batches_max, self._points_max, self._clock = batches_max, points_max, clock

    async def range(self, selector: Selector, from_ns: int, to_ns: int, *, late_s: float = 3600.0) -> QueryAnswer:
        """Every point of the selected series in [from_ns, to_ns), in order of time.

        Batches accepted up to `late_s` after the range are looked for. Raises Invalid over the limits.
        """
        if not 0 <= from_ns < to_ns or to_ns - from_ns > RANGE_S_MAX * 1_000_000_000:
            raise Invalid(f"range {from_ns} to {to_ns} is empty or longer than {RANGE_S_MAX // 86400} days")
        found = _Found(selector, from_ns, to_ns, self._points_max)
        through_ns = min(self._clock.now_ns(), to_ns + round(late_s * 1e9))
        why = await self._read(found, from_ns, through_ns)
        return self._answer(found, why, through_ns)

    async def latest(self, selector: Selector, *, lookback_s: float = 300.0) -> QueryAnswer:
        """The newest point of each selected series, not older than `lookback_s`."""
        now_ns = self._clock.now_ns()
        from_ns = max(0, now_ns - round(lookback_s * 1e9))
        answer = await self.range(selector, from_ns, now_ns + SKEW_NS, late_s=0.0)
        newest = [msgspec.structs.replace(series, points=series.points[-1:]) for series in answer.series]
        return msgspec.structs.replace(answer, series=newest)

    async def _read(self, found: _Found, from_ns: int, through_ns: int) -> list[str]:
        why: list[str] = []
        for identity, batch in self._live.batches():
            found.take("live", identity, batch)
        if self._spool is not None:
            async for identity, batch in self._spool.unlanded():
                if found.sources["spool"] >= self._batches_max:
                    why.append(f"more than {self._batches_max} batches are not landed yet")
                    break
                found.take("spool", identity, batch)
        if self._follower is None:
            why.append("this is not the query collector")
        elif not self._follower.is_fresh():
            why.append("the query collector has not caught up")
        covered = not why and self._live.evicted_through_ns < from_ns - SKEW_NS and self._covers(from_ns)
        if not covered and not await self._read_raw(found, max(0, from_ns - SKEW_NS), through_ns):
            why.append(f"more than {self._batches_max} raw batches lie in the range")
        return why

    def _covers(self, from_ns: int) -> bool:
        assert self._follower is not None
        return from_ns - SKEW_NS >= self._clock.now_ns() - self._follower.window_ns

    async def _read_raw(self, found: _Found, from_ns: int, through_ns: int) -> bool:
        """Takes batches accepted in the span; False when there were more than one query may read."""
        waiting: set[asyncio.Task[None]] = set()
        count = 0
        try:
            async for key, manifest_id in self._raw.entries(from_ns, through_ns):
                if self._live.holds(manifest_id):
                    continue
                if count == self._batches_max:
                    return False
                count += 1
                waiting.add(asyncio.create_task(self._take_raw(found, key)))
                if len(waiting) >= READ_AHEAD:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:
            await asyncio.gather(*waiting)
        return True

    async def _take_raw(self, found: _Found, key: str) -> None:
        entry = await self._raw.entry(key)
        if entry is None or entry.last_time_unix_ns < found.from_ns or entry.first_time_unix_ns >= found.to_ns:
            return
        try:
            batch = await self._raw.batch(entry.frame_sha256)
            found.take("raw", batch.identity, batch)
        except (NotFound, Corrupt):
            found.damaged += 1

    def _answer(self, found: _Found, why: list[str], through_ns: int) -> QueryAnswer:
        if found.damaged:
            why.append(f"{found.damaged} accepted batches cannot be read: see repairs")
        return QueryAnswer(
            metric=found.selector.metric,
            partial=bool(why),
            why_partial=why,
            from_unix_ns=found.from_ns,
            to_unix_ns=found.to_ns,
            accepted_through_unix_ns=through_ns,
            sources=found.sources,
            series=found.series(),
        )


class _Found:
    """Points gathered for one query, by series; each batch at most once, whoever offers it."""

    def __init__(self, selector: Selector, from_ns: int, to_ns: int, points_max: int) -> None:
        self.selector, self.from_ns, self.to_ns = selector, from_ns, to_ns
        self._points_left, self._points_max = points_max, points_max
        self._parts: dict[tuple[tuple[str, str], ...], list[tuple[Any, Any, int]]] = {}
        self.seen: set[Identity] = set()
        self.sources = {"live": 0, "spool": 0, "raw": 0}
        self.damaged = 0

    def take(self, source: str, identity: Identity, batch: Batch) -> None:
        if identity in self.seen:
            return
        self.seen.add(identity)
        self.sources[source] += 1
        columns = batch.columns
        wanted = self.selector.series(columns, identity.agent_id)
        if not wanted:
            return
        mask = np.isin(columns.series, np.fromiter(wanted, np.uint32, len(wanted)))
        rows = np.nonzero(mask & (columns.times_ns >= self.from_ns) & (columns.times_ns < self.to_ns))[0]
        self._points_left -= len(rows)
        if self._points_left < 0:
            raise Invalid(f"more than {self._points_max} points", hint="narrow the range or add matchers")
        rows = rows[np.argsort(columns.series[rows], kind="stable")]
        for part in np.split(rows, np.nonzero(np.diff(columns.series[rows]))[0] + 1):
            if len(part):
                key = tuple(sorted(wanted[int(columns.series[part[0]])].items()))
                kept = (columns.times_ns[part], columns.values[part], int(columns.kinds[part[-1]]))
                self._parts.setdefault(key, []).append(kept)

    def series(self) -> list[Series]:
        return [_series(key, parts) for key, parts in sorted(self._parts.items())]


def _series(key: Iterable[tuple[str, str]], parts: list[tuple[Any, Any, int]]) -> Series:
    times, values = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    order = np.argsort(times, kind="stable")
    points = list(zip(times[order].tolist(), values[order].tolist(), strict=True))
    return Series(dict(key), Kind(parts[-1][2]).name.lower(), points)
