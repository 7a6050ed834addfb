"""Time and chance are passed in, and can be held still."""

from __future__ import annotations

import asyncio
import uuid

from lakebed.core.clock import ManualClock, SystemClock, now_ms
from lakebed.core.ids import ORDERED_MAX, Ids


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    """Advancing a manual clock wakes sleepers in order, each at its own instant."""
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic_s()))

    tasks = [asyncio.create_task(sleeper(name, s)) for name, s in (("late", 3.0), ("early", 1.0), ("never", 9.0))]
    await clock.advance(5.0)

    assert woken == [("early", 1.0), ("late", 3.0)]
    assert clock.monotonic_s() == 5.0
    tasks[2].cancel()


async def test_a_sleep_begun_while_time_moves_is_honoured() -> None:
    """A task that sleeps again on waking is woken again inside the same advance."""
    clock = ManualClock()
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            await clock.sleep(1.0)
            beats += 1

    task = asyncio.create_task(heart())
    await clock.advance(4.5)

    assert beats == 4
    task.cancel()


def test_wall_time_is_plausible() -> None:
    """The system clock gives nanoseconds since 1970."""
    assert now_ms(SystemClock()) > 1_700_000_000_000


def test_the_same_seed_gives_the_same_ids() -> None:
    """Seeded ids repeat; unseeded ones do not."""
    one, two = Ids.seeded(7), Ids.seeded(7)

    assert [one.uuid(), one.token(), one.secret()] == [two.uuid(), two.token(), two.secret()]
    assert Ids().token() != Ids().token()
    assert uuid.UUID(Ids().uuid()).version == 4


def test_backoff_stays_under_its_cap() -> None:
    """Jitter is between nothing and the cap, whatever the attempt."""
    ids = Ids.seeded(1)

    assert all(0 <= ids.jitter_s(n, base_s=0.1, cap_s=2.0) <= min(2.0, 0.1 * 2**n) for n in range(200))


def test_ordered_ids_sort_as_they_were_drawn_whatever_the_clock_does() -> None:
    """More than one millisecond can count, and a clock that is set back: the next id still sorts last."""
    ids = Ids.seeded(1)
    moments = [7] * (ORDERED_MAX + 2) + [9, 8, 9, 10]

    drawn = [ids.ordered(at_ms) for at_ms in moments]

    assert sorted(drawn) == drawn
    assert {len(drawn[0])} == {len(each) for each in drawn}
    assert ["000000000000007-9999", "000000000000008-0000"] == [each[:20] for each in drawn[9999:10001]]
    assert "000000000000010-0000" == drawn[-1][:20]
