"""The roller that the settings describe."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runs import RunLog
from lakebed.core.settings import load
from lakebed.rollups import workers as rollups
from lakebed.rollups.local_job import LocalJob
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections


def context_of(**flags: Any) -> Context:
    clock = ManualClock()
    settings = load(sections(), flags={f"rollup.{name}": value for name, value in flags.items()})
    return Context(
        node="node-7",
        settings=settings,
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )


def test_every_setting_reaches_the_roller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its own name, with the process's node, clock, ids and metrics."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(rollups, "Roller", lambda *args, **named: given.append({"args": args, **named}))
    wanted: dict[str, Any] = {
        "windows_s": (60, 120), "overlap_s": 1200.0, "batches_max": 7, "lease_s": 33.0, "sweep_after_s": 99_999_999.0,
    }  # fmt: skip
    context = context_of(engine="local", **wanted)

    rollups.roller(context)

    (made,) = given
    assert wanted == {name: made[name] for name in wanted}
    assert "node-7" == made["owner"]
    assert context is made["args"][0]
    assert isinstance(made["args"][1], LocalJob)


def test_a_given_engine_comes_before_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(rollups, "Roller", lambda store, job, **_: made.append(job))
    monkeypatch.setattr(rollups, "spark_job", lambda _: "spark")

    rollups.roller(context_of(engine="local"), "mine")  # type: ignore[arg-type]
    rollups.roller(context_of(engine="spark"))

    assert ["mine", "spark"] == made


async def test_a_worker_rolls_up_only_where_an_interval_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many seconds, as the setting reports; 0 is by command alone."""
    paused: list[float] = []

    async def forever(self: RunLog, kind: str, subject: str, work: Any, *, every_s: float) -> None:
        paused.append(every_s)

    monkeypatch.setattr(RunLog, "forever", forever)
    monkeypatch.setattr(rollups, "roller", lambda _: None)

    (worker,) = rollups.workers(context_of(interval_s=12.5))
    await worker.run()

    assert ("rollup", [12.5]) == (worker.name, paused)
    assert [] == rollups.workers(context_of(interval_s=0))
    assert ["rollup"] == [worker.name for worker in rollups.workers(context_of())]  # by default
