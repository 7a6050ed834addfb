"""Where bronze of each source lies, and how a contract names it."""

from __future__ import annotations

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.pipeline.bronze import places
from lakebed.store.memory import MemoryStore
from lakebed.ticks.paths import RESERVED_ORGS, tick_id


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("batches.samples", "bronze/batches/lake/samples"),
        ("topic.orders", "bronze/topics/lake/orders"),
        ("queue.work", "bronze/queues/lake/work"),
        ("orders", ""),
        ("my.orders", ""),
        ("topic.", ""),
    ],
)
def test_a_contract_names_a_source_by_its_kind(word: str, name: str) -> None:
    """Any other name is a table of ticks; the way back gives the same word."""
    assert name == places.source_of(word)
    assert not name or word == places.word_of(name)


@pytest.mark.parametrize(
    ("name", "before"),
    [
        (places.SAMPLES, "batches/samples"),
        (places.UNREADABLE, "batches/quarantine"),
        ("bronze/topics/lake/orders", "topics/orders"),
        ("quarantine/topics/lake/orders", "topics-quarantine/orders"),
    ],
)
async def test_a_table_of_before_stays_where_it_is(name: str, before: str) -> None:
    """A fresh one is made at its place; an old one is found; one that exists at both is the new one."""
    store = MemoryStore(clock=ManualClock())

    fresh = await places.placed(store, name)
    await store.create(f"tables/{before}/_delta_log/00000000000000000000.json", b"{}")
    old = await places.placed(store, name)
    await store.create(f"tables/{name}/_delta_log/00000000000000000000.json", b"{}")
    both = await places.placed(store, name)

    assert (name, before, name) == (fresh, old, both)


def test_a_source_is_no_org_of_ticks() -> None:
    """Their tables would be in one folder."""
    assert set(RESERVED_ORGS) == set(places.FOLDERS.values())
    for org in RESERVED_ORGS:
        with pytest.raises(Invalid, match="source of bronze"):
            tick_id(org, "lake", "t1")
