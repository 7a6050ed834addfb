"""The newest batches and their agents, from the by-time index alone, at a bounded cost."""

from __future__ import annotations

from batches_frames import frame_of
from batches_gateway import collector
from lakebed.clock import ManualClock
from lakebed.store.memory import MemoryStore
from lakebed.views import batches as views
from lakebed.views.batches import RecentBatches


class CountingStore(MemoryStore):
    gets = 0

    async def get(self, key: str):  # type: ignore[no-untyped-def]
        self.gets += 1
        return await super().get(key)


async def filled(store: MemoryStore, clock: ManualClock) -> None:
    async with collector(store, clock=clock) as (client, part):
        for number in range(3):
            for agent in ("web-1", "web-2"):
                frame = frame_of(number * 10, number * 10 + 9, agent=agent, at_ns=clock.now_ns() - 10**9)
                assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await clock.advance(40 * 60)
        await part.aftermath.stop()


async def test_agents_are_told_from_their_newest_batches() -> None:
    """Counts, the last sequence and when it was heard, over hour folders; a second look reads nothing again."""
    clock = ManualClock()
    store = CountingStore(clock=clock)
    await filled(store, clock)
    recent = RecentBatches(store, clock)

    agents = {row.agent_id: row for row in await recent.agents()}
    read = store.gets
    newest = await recent.newest(2)

    assert {name: (row.batches, row.samples, row.last_seq) for name, row in agents.items()} == {
        "web-1": (3, 30, 29),
        "web-2": (3, 30, 29),
    }
    assert [row.seq_start for row in newest] == [20, 20]
    assert store.gets == read


async def test_an_agent_that_was_not_heard_lately_is_still_named() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await filled(store, clock)

    agents = await RecentBatches(store, clock).agents(limit=1)

    assert sorted(row.agent_id for row in agents) == ["web-1", "web-2"]
    assert sorted(row.batches for row in agents) == [0, 1]


async def test_a_busy_hour_is_looked_at_from_its_end(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """However many entries an hour has, a bounded number of keys is listed."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await filled(store, clock)
    monkeypatch.setattr(views, "LISTED_MAX", 1)

    assert len(await RecentBatches(store, clock).newest(1)) == 1


async def test_of_one_hour_the_newest_are_shown_newest_first() -> None:
    """Five batches within a minute and a look at two: the last two, the last one first."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        for number in range(5):
            frame = frame_of(number * 10, number * 10 + 9, at_ns=clock.now_ns() - 10**9)
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
            await clock.advance(2.0)
        await part.aftermath.stop()

    newest = await RecentBatches(store, clock).newest(2)

    assert [40, 30] == [row.seq_start for row in newest]
    assert all(0.9 < row.delay_s < 1.0 for row in newest)  # seconds from the last sample to its acceptance


async def test_no_more_hours_are_looked_into_than_the_limit(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Batches of several hours: with one hour allowed, those of the newest alone are shown."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await filled(store, clock)
    every = await RecentBatches(store, clock).newest()
    monkeypatch.setattr(views, "HOURS_MAX", 1)
    newest = await RecentBatches(store, clock).newest()

    hours = {row.accepted_at_unix_ns // (3600 * 10**9) for row in every}
    assert len(hours) > 1
    assert {row.accepted_at_unix_ns // (3600 * 10**9) for row in newest} == {max(hours)}
