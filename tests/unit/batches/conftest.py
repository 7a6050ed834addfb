"""A bucket in memory, frames by number, and a collector whose parts can be looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.aftermath import Aftermath
from lakebed.clock import ManualClock
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store


@pytest.fixture
def store(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


MakeAcceptor = Callable[..., Acceptor]


@pytest.fixture
async def make_acceptor(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> AsyncIterator[MakeAcceptor]:
    def make(store: Store, name: str = "collector-1", won: list[Submission] | None = None, **more: float) -> Acceptor:
        aftermath = Aftermath(store, waiting_max=100, writers=1, clock=manual_clock, ids=ids, metrics=metrics)
        aftermath.start()
        made.append(aftermath)
        limits = {"accepting_max": 10, "known_max": 10, "timeout_s": 5.0, "retry_after_s": 2.0} | more
        return Acceptor(
            store,
            aftermath,
            collector_id=name,
            won=lambda accepted, submitted: (won if won is not None else []).append(submitted),
            clock=manual_clock,
            ids=ids,
            metrics=metrics,
            **limits,  # type: ignore[arg-type]
        )

    made: list[Aftermath] = []
    yield make
    for aftermath in made:
        await aftermath.stop(drain_s=0.01)
