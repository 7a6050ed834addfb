"""Queries against a plain list: whatever batches went through, an answer holds each accepted sample of its range once.

A world is made from a seed. Batches come from agents whose clocks are up to five minutes ahead, over this collector,
over others, late, or through the spool; time passes; the follower looks and the roller runs now and then. The list of
what was accepted is the model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.batches.acceptance import manifest, submission
from lakebed.batches.codec.frame import decode
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.matchers import Selector
from lakebed.batches.metric_names import metric_names
from lakebed.batches.model import LATE_NS, AcceptedBatch, Batch, BatchIdentity, Sample
from lakebed.batches.query import Querier
from lakebed.batches.reader import RawBatches
from lakebed.batches.sources import WITHOUT_LIVE, SampleSources
from lakebed.batches.window_query import RollupQuerier
from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.rollups.reader import RollupCoverage
from lakebed.store.memory import MemoryStore
from support.rollup_fixtures import accept, by_hand, frame, make_roller, shown
from support.runtimes import runtime_of, runtime_on

START_NS = 1_760_000_400_000_000_000  # a full hour
SECOND_NS = 10**9
AHEAD_S = 299  # how far an agent's clock may be ahead
OVERLAP_S = 120.0  # how late an index entry may be written without a note
METRIC = Selector("cpu")
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(12, 200))]


class Spooled:
    """What the spool holds. A batch is given until its record is removed, also when it has landed by then."""

    def __init__(self) -> None:
        self.held: dict[BatchIdentity, tuple[int, bytes]] = {}
        self.landed: set[BatchIdentity] = set()

    def damaged_files(self) -> int:
        return 0

    async def unlanded(self) -> AsyncIterator[tuple[AcceptedBatch, Batch | None]]:
        for at_ns, data in list(self.held.values()):
            submitted = submission(data, decode(data))
            yield manifest(submitted, at_ns=at_ns, collector_id="c", attempt_id="a"), submitted.batch


class World:
    def __init__(self, seed: int, *, live_bytes_max: int, follows: bool = True) -> None:
        self.clock = ManualClock(START_NS)
        self.store = MemoryStore(clock=self.clock)
        self.told: list[tuple[str, Sample]] = []
        self.spool = Spooled()
        self._draw, self._seq = Ids.seeded(seed), 0
        raw = RawBatches(self.store)
        self.live = LiveBatches(runtime_of(self.clock), bytes_max=live_bytes_max, window_s=1800.0)
        self.follower = Follower(raw, self.live, window_s=1800.0, overlap_s=OVERLAP_S, interval_s=1.0, clock=self.clock)
        self.sources = SampleSources(
            self.live,
            raw,
            RollupCoverage(self.store, raw),
            follower=self.follower if follows else None,
            spool=self.spool,
            batches_max=10_000,
            clock=self.clock,
        )
        self.querier = Querier(self.sources, points_max=10_000, clock=self.clock)
        self.windows = RollupQuerier(runtime_on(self.store, self.clock), self.sources)
        self.roller = make_roller(self.store, self.clock)

    def number(self, low: int, high: int) -> int:
        return low + int(self._draw.uniform(0, 1) * (high - low + 1))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    async def step(self) -> None:
        steps = [self._accept] * 6 + [self._pass_time] * 3 + [self.follower.poll, self.roller.run] * 2
        await self.one_of(*steps, self._land, self._remove_landed)()

    async def _accept(self) -> None:
        """Over this collector, another one, one that is slow to index, one that died, or into the spool."""
        way = self.one_of("own", "other", "slow", "late", "spool")
        at_ns = self.clock.now_ns() - {"slow": 50, "late": self.one_of(400, 1500)}.get(way, 0) * SECOND_NS
        data = self._batch(at_ns)
        batch = decode(data)
        if way == "spool":
            self.spool.held[batch.identity] = at_ns, data
        else:
            await accept(self.store, data, at_ns, late=way == "late")
        if way in ("own", "spool"):
            self.live.add(at_ns, batch)

    def _batch(self, at_ns: int) -> bytes:
        agent = self.one_of("a", "b")
        ages_s = [self.one_of(-AHEAD_S, 0, 1, self.number(1, 5400)) for _ in range(self.number(1, 3))]
        held = [
            Sample("cpu", at_ns - age_s * SECOND_NS, float(self._seq + n), labels={"c": self.one_of("0", "1")})
            for n, age_s in enumerate(ages_s)
        ]
        data = frame(agent, self._seq, held)
        self._seq += len(held)
        self.told += [(agent, sample) for sample in held]
        return data

    async def _pass_time(self) -> None:
        await self.clock.advance(self.one_of(1, 61, 400, 1300, 2500))

    async def _land(self) -> None:
        for identity, (at_ns, data) in self.spool.held.items():
            if identity not in self.spool.landed:
                await accept(self.store, data, at_ns, late=self.clock.now_ns() - at_ns > LATE_NS)
                self.spool.landed.add(identity)

    async def _remove_landed(self) -> None:
        for identity in self.spool.landed:
            self.spool.held.pop(identity, None)

    def some_range(self) -> tuple[int, int]:
        """Bounds fall on samples more often than not: the start is in a range, the end is not."""
        now_s = self.clock.now_ns() // SECOND_NS
        marks = [sample.time_ns // SECOND_NS for _, sample in self.told] + [now_s]
        low, high = sorted((self.one_of(*marks), self.one_of(*marks, now_s - self.number(0, 5400))))
        return low * SECOND_NS, (high + self.number(0, 1)) * SECOND_NS + (low == high) * SECOND_NS

    def expected(self, from_ns: int, to_ns: int) -> list[tuple[str, str, int, float]]:
        return sorted(
            (agent, sample.labels["c"], sample.time_ns, sample.value)
            for agent, sample in self.told
            if from_ns <= sample.time_ns < to_ns
        )


def points(answer: Any) -> list[tuple[str, str, int, float]]:
    return sorted((s.labels["agent_id"], s.labels["c"], at, value) for s in answer.series for at, value in s.points)


async def a_world(seed: int, *, follows: bool = True, caught_up: bool = True) -> World:
    """Half of them with too little memory for what they hold."""
    world = World(seed, live_bytes_max=10**7 if seed % 2 else 12_000, follows=follows)
    await world._accept()
    for _ in range(25):
        await world.step()
    if caught_up:
        await world.follower.poll()
    return world


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_range_holds_every_accepted_point_once(seed: int) -> None:
    """An answer that is called complete is complete, and none is called partial without a cause."""
    world = await a_world(seed)

    for _ in range(12):
        from_ns, to_ns = world.some_range()
        answer = await world.querier.range(METRIC, from_ns, to_ns, late_s=86400)
        assert world.expected(from_ns, to_ns) == points(answer), (answer.sources, world.clock.now_ns() - from_ns)
        assert [] == answer.why_partial


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_latest_point_of_each_series_is_the_newest_one(seed: int) -> None:
    """Also that of an agent whose clock is ahead; nothing older than the lookback."""
    world = await a_world(seed)
    now_ns = world.clock.now_ns()

    for lookback_s in (1, 300, 1700, 5000):
        newest: dict[tuple[str, str], int] = {}
        for agent, label, at_ns, _ in world.expected(now_ns - lookback_s * SECOND_NS, now_ns + 300 * SECOND_NS):
            newest[agent, label] = max(at_ns, newest.get((agent, label), 0))
        answer = await world.querier.latest(METRIC, lookback_s=lookback_s)
        assert newest == {(agent, label): at_ns for agent, label, at_ns, _ in points(answer)}
        assert len(newest) == len(points(answer))


@pytest.mark.parametrize("seed", SEEDS)
async def test_windows_count_every_accepted_sample_once(seed: int) -> None:
    """From chunks, late chunks, live state, the spool and blobs in any mixture: as from the samples alone."""
    world = await a_world(seed)

    for _ in range(6):
        from_ns, to_ns = world.some_range()
        window_s = world.one_of(60, 90, 300, 3600)
        answer = await world.windows.range(METRIC, window_s, from_ns, to_ns)
        model = {
            series: {start: window for start, window in windows.items() if from_ns <= start < to_ns}
            for series, windows in by_hand(world.told, "cpu", window_s).items()
        }
        assert {series: windows for series, windows in model.items() if windows} == shown(answer)
        assert [] == answer.why_partial


@pytest.mark.parametrize("follows", [True, False], ids=["behind", "follows-none"])
@pytest.mark.parametrize("seed", range(8))
async def test_a_collector_without_all_live_batches_says_so_and_misses_nothing_of_the_bucket(
    seed: int, follows: bool
) -> None:
    """What other collectors accepted since its follower last looked, or ever, is read from the bucket."""
    world = await a_world(seed, follows=follows, caught_up=False)
    data = world._batch(world.clock.now_ns())
    await accept(world.store, data, world.clock.now_ns())  # another collector's
    await world.clock.advance(10)
    now_ns = world.clock.now_ns()
    reason = "the query collector has not caught up" if follows else WITHOUT_LIVE

    for from_ns, to_ns in ((now_ns - 900 * SECOND_NS, now_ns + AHEAD_S * SECOND_NS), world.some_range()):
        asked = await world.querier.range(METRIC, from_ns, to_ns)
        windows = await world.windows.range(METRIC, 1, from_ns, to_ns)
        names = await metric_names(world.sources, from_ns, to_ns, now_ns)

        expected = world.expected(from_ns, to_ns)
        assert expected == points(asked)
        assert len(expected) == sum(bucket.count for series in windows.series for bucket in series.buckets)
        assert [[reason]] * 3 == [answer.why_partial for answer in (asked, windows, names)]
