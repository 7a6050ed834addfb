"""SeaweedFS's own lifecycle worker on the same cluster is noticed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.lifecycle import checks
from lakebed.lifecycle.checks import judged
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections

HOUR_NS = 3_600 * 1_000_000_000
NOW_NS = 1_760_000_000 * 1_000_000_000


@pytest.mark.parametrize(
    ("ran_ns", "verdict"), [(0, "pass"), (NOW_NS - 49 * HOUR_NS, "pass"), (NOW_NS - HOUR_NS, "warn")]
)
def test_doctor_warns_while_it_runs(ran_ns: int, verdict: str) -> None:
    """It runs daily: after two days without a run it counts as gone."""
    found = judged(ran_ns, NOW_NS)

    assert verdict == found.verdict
    assert verdict == "pass" or ("1.0 h ago" in found.seen and "s3_lifecycle" in found.fix)


@pytest.mark.parametrize("away", [False, True])
async def test_doctor_asks_the_filer_and_says_which_buckets_are_acted_on(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """Both lines where a filer is configured; one that does not answer fails, with how to go on."""
    clock = ManualClock()

    class Lake:
        async def own_worker_ns(self) -> int:
            if away:
                raise Unavailable("no filer answers", hint="is it up?")
            return clock.now_ns() - HOUR_NS

    @asynccontextmanager
    async def opened(context: Context) -> AsyncIterator[Any]:
        yield SimpleNamespace(lake=Lake())

    monkeypatch.setattr(checks, "open_services", opened)

    def context(**flags: Any) -> Context:
        settings = load(sections(), flags=flags)
        store = MemoryStore(clock=clock)
        return Context(node="n", settings=settings, store=store, clock=clock, ids=Ids(), metrics=Metrics())

    found = await checks.checks(context(**{"filer.grpc": "a:1", "lifecycle.buckets": ("landing",)}))

    if away:
        assert [("fail", "no filer answers", "is it up?")] == [(one.verdict, one.seen, one.fix) for one in found]
    else:
        assert [("lifecycle", "warn"), ("lifecycle buckets", "pass")] == [(one.name, one.verdict) for one in found]
        assert "landing" in found[1].seen
    assert [] == await checks.checks(context())
