"""A bucket in memory, frames by number, and a collector whose parts can be looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from support.runtimes import runtime_on


@pytest.fixture
def store(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


MakeAcceptor = Callable[..., Acceptor]


@pytest.fixture
async def make_acceptor(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> AsyncIterator[MakeAcceptor]:
    def make(
        store: Store, name: str = "collector-1", on_accepted: list[Submission] | None = None, **more: float
    ) -> Acceptor:
        derived_writes = DerivedWrites(runtime_on(store, manual_clock, ids=ids, metrics=metrics), waiting_max=100)
        derived_writes.start()
        made.append(derived_writes)
        limits = {"accepting_max": 10, "known_max": 10, "timeout_s": 5.0, "retry_after_s": 2.0} | more
        return Acceptor(
            runtime_on(store, manual_clock, ids=ids, metrics=metrics),
            derived_writes,
            collector_id=name,
            on_accepted=lambda accepted, submitted: (on_accepted if on_accepted is not None else []).append(submitted),
            **limits,
        )

    made: list[DerivedWrites] = []
    yield make
    for derived_writes in made:
        await derived_writes.stop(drain_s=0.01)
