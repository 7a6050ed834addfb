"""A runtime for a role under test: what is not given is fresh."""

from __future__ import annotations

from lakebed.core.clock import Clock, SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime


def runtime_of(clock: Clock | None = None, ids: Ids | None = None, metrics: Metrics | None = None) -> Runtime:
    return Runtime(clock=clock or SystemClock(), ids=ids or Ids(), metrics=metrics or Metrics())


def runtime_on(
    store: Store, clock: Clock | None = None, ids: Ids | None = None, metrics: Metrics | None = None
) -> StoreRuntime:
    return StoreRuntime(clock=clock or SystemClock(), ids=ids or Ids(), metrics=metrics or Metrics(), store=store)
