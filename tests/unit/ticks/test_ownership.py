"""Which projects a replica owns: taken at the first finalize, let go when idle, when too many, and at the drain."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.context import Context
from lakebed.core.errors import Overloaded, TooEarly, Unavailable
from lakebed.store.lease import HeldLease, Lease
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.ticks.finalizer import OrgLocks
from lakebed.ticks.ownership import Ownership
from support.tick_fixtures import context_of


@pytest.fixture
def store(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


def replica(store: MemoryStore, clock: ManualClock, node: str, **ticks: float) -> Context:
    return context_of(store, clock=clock, node=node, seed=hash(node), **ticks)


async def hold(ownership: Ownership, project: str = "p") -> int:
    async with ownership.of("o", project) as epoch:
        return epoch


async def test_a_warm_project_stays_owned_between_finalizes(store: MemoryStore, manual_clock: ManualClock) -> None:
    """The same epoch serves the next finalize; another replica is instructed to come later."""
    first = Ownership(replica(store, manual_clock, "a"))
    other = Ownership(replica(store, manual_clock, "b"))

    epochs = [await hold(first), await hold(first)]

    assert 1 == len(set(epochs))
    with pytest.raises(TooEarly):
        await hold(other)


async def test_an_idle_project_is_let_go(store: MemoryStore, manual_clock: ManualClock) -> None:
    """After the idle time another replica takes it at once, under a higher epoch."""
    first = Ownership(replica(store, manual_clock, "a", idle_ttl_s=30.0, lease_s=15.0))
    other = Ownership(replica(store, manual_clock, "b"))
    epoch = await hold(first)
    for _ in range(6):  # kept while it is not idle for long enough
        await first.keep()
        await manual_clock.advance(5.0)

    assert [("o", "p")] == first.projects
    await first.keep()

    assert [] == first.projects
    assert await hold(other) > epoch


async def test_the_longest_unused_project_makes_room(store: MemoryStore, manual_clock: ManualClock) -> None:
    """With room for two, the third takes the place of the one that was used first."""
    first = Ownership(replica(store, manual_clock, "a", warm_max=2))
    for project in ("p1", "p2", "p1", "p3"):
        await hold(first, project)

    assert [("o", "p1"), ("o", "p3")] == first.projects


async def test_projects_at_work_are_never_let_go(store: MemoryStore, manual_clock: ManualClock) -> None:
    """When all are busy, one more is refused with a time to come back."""
    first = Ownership(replica(store, manual_clock, "a", warm_max=1, idle_ttl_s=1.0, lease_s=3.0))
    async with first.of("o", "p1"):
        await manual_clock.advance(2.0)
        await first.keep()

        with pytest.raises(Overloaded):
            await hold(first, "p2")
        assert [("o", "p1")] == first.projects


async def test_projects_that_begin_at_once_keep_the_limit(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start: each of five acquires its lease while the others do, and two are held."""
    first, plainly, go_on = Ownership(replica(store, manual_clock, "a", warm_max=2)), Lease.acquire, asyncio.Event()

    async def acquire(lease: Lease) -> HeldLease:
        await go_on.wait()
        return await plainly(lease)

    monkeypatch.setattr(Lease, "acquire", acquire)
    holding = [asyncio.create_task(hold(first, f"p{number}")) for number in range(5)]
    await settle()
    go_on.set()
    ended = await asyncio.gather(*holding, return_exceptions=True)

    assert [int, int, Overloaded, Overloaded, Overloaded] == [type(each) for each in ended]
    assert [("o", "p0"), ("o", "p1")] == first.projects


async def test_a_drain_lets_everything_go(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Nobody has to wait for the leases of a replica that ended in order."""
    first, other = Ownership(replica(store, manual_clock, "a")), Ownership(replica(store, manual_clock, "b"))
    await hold(first, "p1")
    await hold(first, "p2")

    await first.stop()

    assert await hold(other, "p1") and await hold(other, "p2")


async def test_an_owner_that_slept_past_its_lease_starts_a_new_term(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """What was taken over is found lost at the next use, and taken back only when it is free."""
    first = Ownership(replica(store, manual_clock, "a", lease_s=10.0))
    other = Ownership(replica(store, manual_clock, "b", lease_s=10.0))
    await hold(first)
    await manual_clock.advance(30.0)
    taken = await hold(other)

    with pytest.raises(TooEarly):
        await hold(first)
    lost = first.projects
    await other.stop()

    assert [] == lost
    assert await hold(first) > taken


async def test_an_org_with_too_many_waiting_is_overloaded() -> None:
    """The line of one org is bounded, and forgotten when it is empty."""
    turns = OrgLocks(0)
    async with turns.of("o"):
        with pytest.raises(Overloaded):
            async with turns.of("o"):
                pass
        async with turns.of("another"):
            pass

    assert 0 == len(turns)


async def test_a_project_that_is_taken_again_is_not_let_go_meanwhile(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """maintenance finds it idle while its lease is being renewed for the next finalize: it stays."""

    class Slow(MemoryStore):
        async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
            if key == "ticks/v1/leases/o/p.json":
                await manual_clock.sleep(1.0)
            return await super().replace(key, data, etag)

    first = Ownership(replica(Slow(clock=manual_clock), manual_clock, "a", idle_ttl_s=8.0, lease_s=15.0))
    await hold(first)
    await manual_clock.advance(9.0)
    taking = asyncio.create_task(hold(first))
    await manual_clock.advance(0.1)

    keeping = asyncio.create_task(first.keep())
    await manual_clock.advance(5.0)
    await asyncio.gather(taking, keeping)

    assert [("o", "p")] == first.projects


async def test_a_project_that_another_replica_wants_is_handed_over(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Queried for once, it is let go at the owner's next round, unless a finalize runs; the wish is used up."""
    first, other = Ownership(replica(store, manual_clock, "a")), Ownership(replica(store, manual_clock, "b"))
    async with first.of("o", "p"):
        with pytest.raises(TooEarly):
            await hold(other)
        await first.keep()
        with pytest.raises(TooEarly):
            await hold(other)

    await first.keep()
    taken = await hold(other)
    await other.keep()

    assert ([], [("o", "p")]) == (first.projects, other.projects)
    assert taken > 1


async def test_a_finalize_renews_a_lease_of_which_less_than_half_is_left(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A finalize that begins shortly before the lease ends still owns the project after the old end."""
    first = Ownership(replica(store, manual_clock, "a", lease_s=10.0))
    other = Ownership(replica(store, manual_clock, "b", lease_s=10.0))
    await hold(first)
    await manual_clock.advance(8.0)

    async with first.of("o", "p"):
        await manual_clock.advance(5.0)  # 13 s: past the first end and the allowed clock difference

        with pytest.raises(TooEarly):
            await hold(other)


async def test_a_lease_that_was_taken_over_is_found_lost_by_the_next_round(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Without a finalize too: the project is the other's, and counts as no warm one here."""
    context = replica(store, manual_clock, "a", lease_s=10.0)
    first, other = Ownership(context), Ownership(replica(store, manual_clock, "b", lease_s=10.0))
    await hold(first)
    warm = context.metrics.value("lakebed_ticks_warm_projects")
    await manual_clock.advance(30.0)
    await hold(other)

    await first.keep()

    assert ([], [("o", "p")]) == (first.projects, other.projects)
    assert (1, 0) == (warm, context.metrics.value("lakebed_ticks_warm_projects"))


async def test_a_stop_lets_a_project_go_whose_finalize_was_cut_off(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Nothing is served any more: another replica need not wait for the lease to expire."""
    first = Ownership(replica(store, manual_clock, "a"))
    other = Ownership(replica(store, manual_clock, "b"))

    async with first.of("o", "p") as epoch:
        await first.stop()

        assert await hold(other) > epoch


async def test_a_finalize_whose_renewal_failed_does_not_keep_the_project_busy(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away for a moment: later the project is idle like any other, and is let go."""
    first = Ownership(replica(store, manual_clock, "a", lease_s=10.0, idle_ttl_s=5.0))
    await hold(first)
    await manual_clock.advance(8.0)

    async def away(warm: object) -> None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(first, "_renewed", away)
        await hold(first)
    await first.keep()

    assert [] == first.projects


async def test_the_lease_of_a_busy_project_is_renewed_though_it_is_idle_for_long_or_wanted(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A finalize that takes longer than the idle time and the lease is not taken over by a replica that requests it."""
    first = Ownership(replica(store, manual_clock, "a", lease_s=10.0, idle_ttl_s=1.0))
    other = Ownership(replica(store, manual_clock, "b", lease_s=10.0))

    async with first.of("o", "p"):
        for _ in range(4):
            await manual_clock.advance(4.0)
            with pytest.raises(TooEarly):
                await hold(other)
            await first.keep()


async def test_a_project_is_idle_since_its_last_finalize_and_not_its_first(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Used again after 25 s, it is kept at 50 s and let go at 55 s."""
    first = Ownership(replica(store, manual_clock, "a", idle_ttl_s=30.0, lease_s=15.0))
    kept = []
    for second in range(0, 60, 5):
        if second in (0, 25):
            await hold(first)
        await first.keep()
        kept.append(bool(first.projects))
        await manual_clock.advance(5.0)

    assert [True] * 11 + [False] == kept


async def test_a_project_that_becomes_busy_while_it_is_let_go_is_kept(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica wants it, and a finalize begins before the lease is released: the finalize goes on."""
    first = Ownership(replica(store, manual_clock, "a"))
    other = Ownership(replica(store, manual_clock, "b"))
    await hold(first)
    begun, ends = asyncio.Event(), asyncio.Event()

    async def finalize() -> None:
        async with first.of("o", "p"):
            begun.set()
            await ends.wait()

    async def wanted(project: tuple[str, str]) -> bool:
        tasks.append(asyncio.ensure_future(finalize()))
        await begun.wait()
        return True

    tasks: list[asyncio.Future[None]] = []
    monkeypatch.setattr(first, "_requested", wanted)
    await first.keep()

    with pytest.raises(TooEarly):
        await hold(other)
    ends.set()
    await asyncio.gather(*tasks)
    assert [("o", "p")] == first.projects


@pytest.mark.parametrize("slow", [1, 2])
async def test_a_round_gives_nothing_up_that_was_let_go_and_taken_again_meanwhile(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """It finds the former term lost, and not the one of a finalize that runs: that lease is kept, then released."""
    first, plainly = Ownership(replica(store, manual_clock, "a", warm_max=2, lease_s=10.0)), Lease.renew
    other, go_on = Ownership(replica(store, manual_clock, "b", lease_s=10.0)), asyncio.Event()
    renewals: list[Lease] = []

    async def renew(lease: Lease, held: HeldLease) -> HeldLease:
        renewals.append(lease)
        if len(renewals) == slow:
            await go_on.wait()
        return await plainly(lease, held)

    async with first.of("o", "p1"):
        await hold(first, "p2")
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "renew", renew)
            keeping = asyncio.create_task(first.keep())
            await settle()  # p1 or p2 is being renewed
            await hold(first, "p3")  # in the place of p2
            async with first.of("o", "p2"):
                go_on.set()
                await keeping
                kept = first.projects
                for _ in range(4):
                    await manual_clock.advance(4.0)
                    await first.keep()
                with pytest.raises(TooEarly):
                    await hold(other, "p2")
        await first.stop()

    assert [("o", "p1"), ("o", "p2")] == kept
    assert await hold(other, "p2")
