"""The status of a project: its latest ticks, found without listing a past that has no end."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.ticks import view
from lakebed.ticks.model import TickId, TickState
from lakebed.ticks.receiver import register_of
from lakebed.ticks.view import project_status
from support.tick_fixtures import ORG, PROJECT, context_of

DAY_S = 86_400.0


async def tick(context: Context, back_s: float, number: int) -> str:
    at = datetime.fromtimestamp(context.clock.now_ns() / 1e9 - back_s, UTC)
    name = f"{at:%Y%m%dT%H%M%S}__{number:04x}"
    state = TickState(tick_id=name, state="uploading", created_at_ms=1)
    await register_of(context, TickId(ORG, PROJECT, name)).change(lambda _: (state, None))
    return name


async def reported(context: Context) -> list[str]:
    return [one.tick_id for one in (await project_status(context, ORG, PROJECT)).ticks]


@pytest.fixture
async def context() -> Context:
    clock = ManualClock()
    await clock.advance(1000 * DAY_S)
    return context_of(clock=clock)


async def test_the_latest_ticks_come_newest_first_whatever_their_age(context: Context) -> None:
    """Of today, of this month and of last year: a project that is quiet is found as well."""
    old = [await tick(context, back_s, n) for n, back_s in enumerate((400 * DAY_S, 20 * DAY_S, 60.0))]

    assert old[::-1] == await reported(context)


async def test_a_long_past_is_not_listed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more keys than one look may list, the latest are still the latest, and no more are read than shown."""
    monkeypatch.setattr(view, "LISTED_MAX", 50)
    monkeypatch.setattr(view, "TICKS_MAX", 10)
    for number in range(60):
        await tick(context, 200 * DAY_S - number, number)
    today = [await tick(context, 300.0 - number, number) for number in range(4)]
    few = await reported(context)
    today += [await tick(context, 200.0 - number, number) for number in range(20)]
    many = await reported(context)

    assert today[3::-1] == few
    assert today[:-11:-1] == many
