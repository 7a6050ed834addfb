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
        ("bronze/ticks/acme/shop/orders", "bronze/acme/shop/orders"),
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


async def test_tables_of_both_layouts_are_those_of_their_project() -> None:
    """Old and new tables of ticks are found beside each other; a source without an org is no project of ticks."""
    store = MemoryStore(clock=ManualClock())
    every = [
        "bronze/batches/lake/samples",
        "bronze/acme/shop/both",
        "bronze/acme/shop/old",
        "bronze/ticks/acme/shop/both",
        "bronze/ticks/acme/shop/new",
        "bronze/ticks/zoo/main/animals",
        "silver/acme/shop/orders",
    ]
    for name in every:
        await store.create(f"tables/{name}/_delta_log/00000000000000000000.json", b"{}")
    await store.create("tables/bronze/ticks/acme/shop/nolog/x.parquet", b"x")

    assert [("acme", "shop"), ("zoo", "main")] == await places.projects(store, "bronze")
    assert {
        "both": "bronze/ticks/acme/shop/both",
        "new": "bronze/ticks/acme/shop/new",
        "old": "bronze/acme/shop/old",
    } == await places.tables_of(store, "bronze", "acme", "shop")
    assert sorted(set(every) - {"bronze/acme/shop/both"}) == sorted(await places.every_table(store))
    assert [("acme", "shop")] == await places.projects(store, "silver")


def test_a_source_is_no_org_of_ticks() -> None:
    """Their tables would be in one folder."""
    assert set(RESERVED_ORGS) == set(places.FOLDERS.values())
    for org in RESERVED_ORGS:
        with pytest.raises(Invalid, match="source of bronze"):
            tick_id(org, "lake", "t1")
