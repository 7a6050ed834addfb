"""The lake's numbers over time: counted in the bucket, kept across restarts, with gaps where nobody sampled."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from lakebed.console.history import FINE, GAP_STEPS, RANGES, TIERS, HistoryPoint, HistoryRing, drawn, growth, rates
from lakebed.console.page import Counted
from lakebed.console.sampler import LEVELS_EVERY, ROOT, SETTLE_MS, LakeSampler
from lakebed.core.clock import ManualClock, SystemClock, now_ms
from lakebed.core.errors import Unavailable
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicPartition
from lakebed.log.page import LogPage
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import PartitionAppend
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from lakebed.ticks import view
from lakebed.ticks.model import TickId
from support.batch_frames import frame_of
from support.batches_gateway import collector
from support.console_site import KEYS, WATCHER, site
from support.runtimes import runtime_on
from support.tick_fixtures import ORG, PROJECT, context_of, serving

OLD = "20200101T000000__old"  # a tick


def point(at_s: float, **values: float | None) -> HistoryPoint:
    return HistoryPoint(round(at_s * 1000), {name.replace("_", ".", 1): value for name, value in values.items()})


class Lake:
    """A part that counts what it is told, and remembers how often it was asked."""

    def __init__(self, store: MemoryStore, clock: ManualClock) -> None:
        self.runtime = runtime_on(store, clock)
        self.total, self.added, self.asked, self.refreshed = 0.0, 0.0, 0, 0
        self.spans: list[tuple[int, int]] = []
        self.error: Exception | None = None

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        self.asked += 1
        self.spans.append((from_ms, to_ms))
        if self.error is not None:
            raise self.error
        return Counted({"log_in": self.total}, {"rows": self.added})

    async def refresh(self) -> None:
        self.refreshed += 1

    def sampler(self, **options: Any) -> LakeSampler:
        return LakeSampler(
            self.runtime, count=self.count, refresh=self.refresh, levels=lambda: {"queue_waiting": 3.0},
            own=lambda: {"rate.http_requests": 1.0}, **options,
        )  # fmt: skip


def test_a_rate_is_the_growth_of_a_total_and_unknown_where_it_shrank() -> None:
    found = rates(point(0, lake_a=10.0, lake_b=5.0), point(10, lake_a=30.0, lake_b=1.0), ("lake.a", "lake.b", "lake.c"))

    assert {"lake.a": 2.0, "lake.b": None, "lake.c": None} == found


def test_where_nobody_sampled_the_line_has_a_gap() -> None:
    """A pause of a minute between samples of 15 s is not bridged; a rate needs two samples on one side of it."""
    points = [point(0, lake_a=0.0), point(15, lake_a=15.0), point(75, lake_a=600.0), point(90, lake_a=630.0)]

    found = drawn(points, "1h", totals="lake.")

    assert [15.0, 45.0, 75.0, 90.0] == found.at_s
    assert [1.0, None, None, 2.0] == found.series["lake.a"]


def test_a_level_is_drawn_as_it_is_and_unknown_when_it_was_not_read() -> None:
    points = [point(0, level_x=1.0), point(15, level_x=4.0), point(30, level_x=None), point(45, level_x=0.0)]

    assert [4.0, None, 0.0] == drawn(points, "1h", totals="lake.").series["level.x"]


def test_each_range_has_a_resolution_that_keeps_it_whole() -> None:
    """15 minutes to a day: none asks for more than its tier keeps, and at least an hour is kept of every 15 s."""
    assert {"15m", "1h", "6h", "24h"} == set(RANGES)
    assert all(seconds <= tier.kept_s for seconds, tier in RANGES.values())
    assert FINE.kept_s >= 3600 and FINE.step_s == 15


def test_a_ring_is_bounded_and_two_samples_of_one_step_are_one() -> None:
    ring = HistoryRing()
    for number in range(FINE.rows_max * 2):
        ring = ring.add(point(number * 15, lake_a=float(number)), FINE)
    again = ring.add(point((FINE.rows_max * 2 - 1) * 15 + 3, lake_a=99.0), FINE)

    assert FINE.rows_max == len(ring.rows)
    assert again is ring


def test_a_ring_is_bounded_however_often_gateways_sample() -> None:
    """Several of them may add points a little early, each time."""
    ring = HistoryRing()
    for number in range(FINE.rows_max * 2):
        ring = ring.add(point(number * 15 * 0.8, lake_a=float(number)), FINE)

    assert FINE.rows_max == len(ring.rows)


def test_a_number_that_appears_later_is_unknown_before() -> None:
    ring = HistoryRing().add(point(0, lake_a=1.0), FINE).add(point(15, lake_a=2.0, lake_b=7.0), FINE)

    assert [None, 7.0] == [one.values.get("lake.b") for one in ring.points()]


def test_growth_is_over_what_is_known() -> None:
    points = [point(0, lake_a=5.0), point(15, lake_a=9.0), point(30, lake_a=2.0), point(45, lake_a=4.0)]

    assert (6.0, 45.0) == growth(points, "lake.a")
    assert growth(points[:1], "lake.a") is None


async def test_the_history_survives_a_restart_and_the_pause_is_a_gap() -> None:
    """A gateway that starts later on the same bucket shows what was sampled before it, and when nobody sampled."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    first = lake.sampler()
    for _ in range(4):
        lake.total += 30
        await first.step()
        await clock.advance(FINE.step_s)
    await clock.advance(300)

    second = lake.sampler()
    await second.step()
    await clock.advance(FINE.step_s)
    lake.total += 15
    await second.step()
    shown, _ = second.series("1h")

    assert [2.0, 2.0, 2.0, None, None, 1.0] == shown.series["lake.log_in"]
    assert [3.0, 3.0, 3.0, None, 3.0, 3.0] == shown.series["level.queue_waiting"]


async def test_what_was_added_while_no_gateway_ran_is_counted_once() -> None:
    """The span of each count begins where the one before ended, also across a restart."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    lake.added = 7.0
    await lake.sampler().step()
    await clock.advance(120)
    later = lake.sampler()
    await later.step()
    await clock.advance(FINE.step_s)
    await later.step()

    assert [end for _, end in lake.spans[:-1]] == [begin for begin, _ in lake.spans[1:]]
    assert 21.0 == later.points("1h")[-1].values["lake.rows"]
    assert SETTLE_MS == clock.now_ns() // 10**6 - lake.spans[-1][1]


async def test_what_was_added_in_a_long_pause_is_not_counted_afterwards() -> None:
    """A gateway that starts after a week lists an hour, not the week."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    await lake.sampler().step()
    await clock.advance(7 * 86_400)
    await lake.sampler().step()

    begin_ms, end_ms = lake.spans[-1]
    assert (3_600_000, now_ms(clock) - SETTLE_MS) == (end_ms - begin_ms, end_ms)


async def test_a_count_that_does_not_end_is_given_up_and_the_sampler_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that hangs leaves a gap, not a sampler that stands still."""
    monkeypatch.setattr("lakebed.console.sampler.COUNT_TIMEOUT_S", 0.01)
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler, count = lake.sampler(), lake.count

    async def hanging(from_ms: int, to_ms: int) -> Counted:
        await asyncio.Event().wait()
        raise AssertionError

    sampler._count = hanging
    await sampler.step()
    missing = sampler.points("1h")
    sampler._count = count
    await sampler.step()

    assert ([], 1) == (missing, len(sampler.points("1h")))


async def test_a_total_that_was_not_read_once_goes_on_from_its_last_value() -> None:
    """A part that failed for one step is unknown there; its total does not begin at 0 again."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    counts = [Counted({}, {"rows": 7.0}), Counted({}, {}), Counted({}, {"rows": 2.0})]

    async def count(from_ms: int, to_ms: int) -> Counted:
        return counts.pop(0)

    lake.count = count  # type: ignore[method-assign]
    sampler = lake.sampler()
    for _ in range(3):
        await sampler.step()
        await clock.advance(FINE.step_s)

    assert [7.0, None, 9.0] == [each.values.get("lake.rows") for each in sampler.points("1h")]


async def test_two_gateways_sample_a_lake_once_a_step() -> None:
    """Both show the same points; the parts were counted by one of them."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    one, other = lake.sampler(), lake.sampler()
    for _ in range(6):
        await one.step()
        await other.step()
        await clock.advance(FINE.step_s)

    assert 6 == lake.asked
    assert one.points("1h") == other.points("1h") and 6 == len(other.points("1h"))


async def test_a_sample_that_another_gateway_stored_meanwhile_stays() -> None:
    """One that is slow to count may store after a younger sample of another gateway: that one is kept, for both."""
    clock = ManualClock()
    lake = Lake(MemoryStore(clock=clock), clock)
    slow, quick = lake.sampler(), lake.sampler()
    await slow.step()
    began_ms = now_ms(clock)
    await clock.advance(FINE.step_s)
    count = lake.count

    async def late(from_ms: int, to_ms: int) -> Counted:
        counted = await count(from_ms, to_ms)
        await clock.advance(5.0)
        await quick.step()
        return counted

    slow._count = late

    await slow.step()
    await quick.step()

    assert [0, (FINE.step_s + 5) * 1000] == [each.at_ms - began_ms for each in quick.points("1h")]
    assert slow.points("1h") == quick.points("1h")


async def test_a_gateway_that_takes_no_sample_itself_shows_every_range() -> None:
    """The samples are those of its neighbour; when that one stops, it goes on from there without a gap or a jump."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    lake.added = 2.0
    one, other = lake.sampler(), lake.sampler()
    for _ in range(120):
        await one.step()
        await other.step()
        await clock.advance(FINE.step_s)
    behind_s = {chosen: (now_ms(clock) - other.points(chosen)[-1].at_ms) / 1000 for chosen in RANGES}
    for _ in range(60):
        await other.step()
        await clock.advance(FINE.step_s)

    for chosen, (_, tier) in RANGES.items():
        assert behind_s[chosen] <= 2 * tier.step_s, chosen
        for before, after in pairwise(other.points(chosen)):
            took_s = (after.at_ms - before.at_ms) / 1000
            assert took_s < GAP_STEPS * tier.step_s
            assert {"lake.rows": round(2.0 / FINE.step_s, 3)} == rates(before, after, ["lake.rows"])


async def test_a_sample_costs_a_bounded_number_of_requests() -> None:
    """Besides the parts' own counts: one read, and a write of each resolution that is due."""

    class Counting(MemoryStore):
        asked = 0

        async def get(self, key: str) -> Any:
            self.asked += key.startswith(ROOT)
            return await super().get(key)

        async def replace(self, key: str, data: Any, version: Any) -> Any:
            self.asked += key.startswith(ROOT)
            return await super().replace(key, data, version)

    store, clock = Counting(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler = lake.sampler()
    await sampler.step()
    store.asked = 0
    for _ in range(20):
        await clock.advance(FINE.step_s)
        await sampler.step()
        for _ in range(50):
            sampler.series("1h")
            sampler.now()

    assert store.asked <= 20 * 2 + 2 * (20 * 15 // 60 + 2)
    assert lake.refreshed <= 21 // LEVELS_EVERY + 1


async def test_a_store_that_fails_leaves_a_gap_and_the_sampler_goes_on() -> None:
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler = lake.sampler()
    for number in range(9):
        lake.error = Unavailable("gone") if 3 <= number < 6 else None
        await sampler.step()
        await clock.advance(FINE.step_s)

    shown, _ = sampler.series("1h")
    assert [0.0, 0.0, None, None, 0.0, 0.0] == shown.series["lake.log_in"]


async def test_a_read_only_gateway_samples_for_itself_and_writes_nothing() -> None:
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler = lake.sampler(stores=False)
    for _ in range(3):
        await sampler.step()
        await clock.advance(FINE.step_s)

    assert 3 == len(sampler.points("1h"))
    assert [] == [info.key async for info in store.list(ROOT)]


async def test_rates_of_the_overview_are_of_the_last_minute() -> None:
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler = lake.sampler()
    assert {} == sampler.now()
    for _ in range(9):
        await sampler.step()
        await clock.advance(FINE.step_s)
        lake.total += 45
    assert 3.0 == sampler.now()["log_in"]
    await clock.advance(600)

    assert {} == sampler.now()


async def test_the_sampler_runs_by_itself() -> None:
    """Nobody looks, and the history grows."""
    store, clock = MemoryStore(clock=ManualClock()), ManualClock()
    lake = Lake(store, clock)
    sampler = lake.sampler()
    sampler.start()
    await clock.advance(0.0)
    for _ in range(4):
        await clock.advance(FINE.step_s)
    await sampler.stop()

    assert len(sampler.points("1h")) >= 4


async def test_traffic_by_a_command_shows_though_it_passed_no_gateway() -> None:
    """Records, batches of a queue, samples and ticks that other processes wrote into the bucket are counted from it:
    also a tick of days ago that an agent brings now, once, and no replay of it."""
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here:
        data = here.console.data
        await data.sampler.step()
        page = data.pages[LogPage]
        assert isinstance(page, LogPage)
        broker = Broker(here.context, page.log.meta)
        chunk = RecordChunk(columns((b"a", b"b", b"c")))
        await broker.writer.append_shared([PartitionAppend(TopicPartition("clicks", 0), (chunk,))])
        await broker.writer.drain()
        entry = KeyValueEntry(b"k", b"v")
        await (await Queue.of(here.context, "work").ingestor().ingest([entry])).await_durable()
        async with collector(store) as (client, part):
            frame = frame_of(0, 9, agent="web-1", at_ns=here.context.clock.now_ns())
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await part.derived_writes.stop()
        begin_ms = now_ms(here.context.clock) - 60_000
        ticks_context = context_of(store)
        async with serving(ticks_context) as service:
            manifest = await service.upload(tick=OLD)
            assert (await service.finalize(manifest, tick=OLD)).status_code == 200
        end_ms = now_ms(here.context.clock) + 1
        found = await data.count(begin_ms, end_ms)
        await view.auditor(ticks_context).replay(TickId(ORG, PROJECT, OLD), "again")
        later = await data.count(end_ms, end_ms + 60_000)

    assert (3.0, 1.0, 0.0) == (found.totals["log_in"], found.totals["queue_in"], found.totals["queue_done"])
    assert (1.0, 10.0) == (found.added["batches_accepted"], found.added["batches_samples"])
    assert (1.0, 5.0) == (found.added["ticks_committed"], found.added["ticks_rows"])
    assert (0.0, 0.0) == (later.added["ticks_committed"], later.added["ticks_rows"])


async def test_a_gateway_samples_from_its_start_on() -> None:
    """Nobody has opened a page."""
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here, asyncio.timeout(30):
        await here.console.start()
        while not [info.key async for info in store.list(ROOT)]:
            await asyncio.sleep(0.01)


async def test_a_history_is_for_those_who_may_read_the_console() -> None:
    async with site(keys=KEYS) as here:
        refused = await here.browser.client.get("/history.json")
        await here.browser.sign_in(WATCHER)
        allowed = await here.browser.client.get("/history.json?range=6h")
        odd = await here.browser.client.get("/history.json?range=1y")

    assert (401, 200, 400) == (refused.status_code, allowed.status_code, odd.status_code)
    assert {"lake", "gateway"} == set(allowed.json())


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_the_object_of_a_resolution_stays_small(tier: Any) -> None:
    """A full ring of 40 numbers is written every step: it stays below 200 KB."""
    ring = HistoryRing()
    values = {f"lake.some_number_{n}": 123_456.789 for n in range(40)}
    for number in range(tier.rows_max + 1):
        ring = ring.add(HistoryPoint(1_790_000_000_000 + number * tier.step_s * 1000, dict(values)), tier)

    assert len(msgspec.json.encode(ring)) < 200_000
