"""Fixtures for every lane."""

from __future__ import annotations

import pytest

from lakebed.clock import ManualClock, SystemClock
from lakebed.ids import Ids
from lakebed.metrics import Metrics


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ids() -> Ids:
    return Ids.seeded("tests")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()
