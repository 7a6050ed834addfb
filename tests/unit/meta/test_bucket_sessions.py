"""Sessions in the bucket: nobody is ended by a look that is out of date."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Fenced
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.bucket.model import BucketPaths
from lakebed.meta.bucket.sessions import BucketSessions
from lakebed.meta.protocol import HeartbeatSession
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject, Written
from lakebed.store.runtime import StoreRuntime


class Between(MemoryStore):
    """Something happens once, between a look and its answer."""

    happens: Callable[[], Awaitable[object]] | None = None

    async def get(self, key: str) -> StoredObject:
        found = await super().get(key)
        happens, self.happens = self.happens, None
        if happens is not None:
            await happens()
        return found


def sessions(store: MemoryStore, clock: ManualClock, seed: int) -> BucketSessions:
    return BucketSessions(StoreRuntime(clock, Ids.seeded(seed), Metrics(), store), BucketPaths("meta"), skew_s=1.0)


async def silent(opened: BucketSessions, timeout_s: float) -> HeartbeatSession:
    """A session whose heartbeats do not come by themselves."""
    session = await opened.open(timeout_s)
    session._beating.cancel()
    return session


async def test_a_session_that_beat_while_it_was_looked_at_lives(manual_clock: ManualClock) -> None:
    """It had expired when it was read, and was prolonged before it could be ended."""
    store = Between(clock=manual_clock)
    session = await silent(sessions(store, manual_clock, 1), 10.0)
    await manual_clock.advance(11.5)
    store.happens = session._beat

    lives = await sessions(store, manual_clock, 2).lives(session.id)

    assert lives
    await session._beat()


async def test_a_session_counts_from_when_its_opening_was_sent(manual_clock: ManualClock) -> None:
    """The store was slow to answer the opening: the owner does not believe to live longer than others see it."""

    class SlowCreate(MemoryStore):
        async def create(self, key: str, data: bytes) -> Written:
            made = await super().create(key, data)
            await manual_clock.advance(8.0)
            return made

    store = SlowCreate(clock=manual_clock)
    session = await silent(sessions(store, manual_clock, 1), 10.0)
    assert session.alive

    await manual_clock.advance(3.5)

    assert not session.alive
    assert not await sessions(store, manual_clock, 2).lives(session.id)


async def test_a_session_that_was_ended_stays_ended(manual_clock: ManualClock) -> None:
    """Up to its timeout and the skew it lives; after that its owner learns it at its next heartbeat."""
    store = Between(clock=manual_clock)
    session = await silent(sessions(store, manual_clock, 1), 10.0)
    page_data = sessions(store, manual_clock, 2)

    await manual_clock.advance(10.9)
    before = await page_data.lives(session.id)
    await manual_clock.advance(0.1)
    after = await page_data.lives(session.id)

    assert (True, False) == (before, after)
    with pytest.raises(Fenced):
        await session._beat()
    assert not await sessions(store, manual_clock, 3).lives(session.id)


async def test_only_sessions_that_ended_and_are_old_are_swept(manual_clock: ManualClock) -> None:
    """One that lives stays, however old its object is; one that has just ended stays for those who still query."""
    store = Between(clock=manual_clock)
    opened = sessions(store, manual_clock, 1)
    long = await silent(opened, 1000.0)
    await silent(opened, 10.0)
    await manual_clock.advance(100.0)
    now_ms = manual_clock.now_ns() // 10**6

    young = await opened.sweep(now_ms - 200_000)
    old = await opened.sweep(now_ms - 50_000)

    assert (0, 1) == (young, old)
    assert [f"meta/sessions/{long.id}.json"] == [info.key async for info in store.list("meta/sessions/")]
