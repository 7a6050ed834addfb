"""Clock, ids and metrics as one value: every role takes it, so tests and simulation pass their own."""

from __future__ import annotations

import msgspec

from lakebed.core.clock import Clock, SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics


class Runtime(msgspec.Struct, frozen=True):
    """Clock, ids and metrics. A role that uses a bucket takes a `lakebed.store.runtime.StoreRuntime` instead."""

    clock: Clock
    ids: Ids
    metrics: Metrics


def system_runtime() -> Runtime:
    """The runtime of a real process: the system's clock and randomness, and a new metrics registry."""
    return Runtime(SystemClock(), Ids(), Metrics())
