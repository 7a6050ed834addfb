"""Bronze runs by itself only where the settings report it."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Invalid
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.settings import BronzeSettings
from lakebed.pipeline.workers import bronze_workers
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context


def names(**values: object) -> list[str]:
    stack = {"store.url": "memory:", **{f"bronze.{name}": value for name, value in values.items()}}
    context = make_context(load([StoreSettings, BronzeSettings], stack=stack), role="test")
    return [worker.name for worker in bronze_workers(context)]


def test_runs_are_asked_for_and_upkeep_is_not() -> None:
    """By default tables are kept and nothing is brought in; both can be switched."""
    assert ["bronze-upkeep"] == names()
    assert ["bronze-ingest", "bronze-upkeep"] == names(run_every_s=30)
    assert [] == names(upkeep_every_s=0)


def test_settings_are_limits_of_a_step() -> None:
    """What a commit takes is bounded three ways, and none of the bounds can be nothing."""
    assert Limit(5, 6, 7) == BronzeSettings(step_objects=5, step_rows=6, step_bytes=7).limit
    with pytest.raises(Invalid, match="step_rows"):
        BronzeSettings.of({"step_rows": 0})
