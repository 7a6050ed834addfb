"""The prover looks with another client than the one that wrote: a client that reads its own cache is found out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject
from lakebed.store.prover import REPORTS, demand, prove
from support.runtimes import runtime_of


class Behind:
    """A client whose first read of each key gives bytes that nobody wrote."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._seen: set[str] = set()
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str) -> StoredObject:
        self.reads += 1
        found = await self._store.get(key)
        if key in self._seen:
            return found
        self._seen.add(key)
        return msgspec.structs.replace(found, data=b"old")


async def test_a_first_read_that_gives_other_bytes_is_a_finding(manual_clock: ManualClock) -> None:
    """After the race of creates already, not only at the end."""
    store = MemoryStore(clock=manual_clock)
    correct = await prove([store, store], runtime_of(manual_clock), rounds=2)

    behind = Behind(store)
    proof = await prove([store, behind], runtime_of(manual_clock), rounds=2)  # type: ignore[list-item]

    assert correct.held
    assert 2 == behind.reads  # in each round before the replaces; a lie is not asked for again
    assert ["reads_see_the_winner"] == [finding.name for finding in proof.findings if not finding.held]


async def test_scratch_objects_that_cannot_be_removed_now_are_a_missing_answer(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report of it is kept, so the store is tested again; it is not refused either."""
    store = MemoryStore(clock=manual_clock)

    async def silent(key: str) -> None:
        raise Unavailable("no answer")

    monkeypatch.setattr(store, "delete", silent)
    proof = await prove([store, store], runtime_of(manual_clock), rounds=1)

    assert ["answers"] == [finding.name for finding in proof.findings if not finding.held]
    with pytest.raises(Unavailable):
        demand(proof)
    assert [] == [info.key async for info in store.list(REPORTS)]


class Forgetful(MemoryStore):
    """Its first listing shows nothing; later ones are right."""

    listings = 0

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.listings += 1
        async for info in super().list(prefix, after=after):
            if self.listings > 1:
                yield info


async def test_a_listing_that_misses_a_write_once_is_a_finding(manual_clock: ManualClock) -> None:
    """Later rounds that are right do not make up for it."""
    store = Forgetful(clock=manual_clock)

    proof = await prove([store, store], runtime_of(manual_clock), rounds=3)

    assert ["lists_see_the_write"] == [finding.name for finding in proof.findings if not finding.held]
