"""What pages request is shared by its key: two different things never share one, nor the right of another."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from lakebed.console.data import PageData
from lakebed.console.page import DataSource, PartPage
from lakebed.console.pages import PAGES, OverviewPage
from lakebed.core.clock import ManualClock
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import ActionKind, ObjectIdentity
from lakebed.lifecycle.page import LifecyclePage
from lakebed.lifecycle.state import LedgerRow
from lakebed.store.memory import MemoryStore
from support.tick_fixtures import context_of

OTHERS: dict[Any, tuple[Any, Any]] = {str: ("a", "b"), int: (1, 2), float: (1.0, 2.0), int | None: (None, 7)}
THINGS = sorted(
    (page.name, name)
    for page in PAGES
    if page is not OverviewPage
    for name, made in inspect.getmembers(page, inspect.isfunction)
    if not name.startswith("_") and get_type_hints(made).get("return") is DataSource
)
# The part of a name that a right is given for: who may see one may not see another.
SUBJECTS = {"topic", "name", "org", "project", "bucket"}


def page_named(name: str) -> PartPage:
    return next(page for kind, page in PageData(context_of()).pages.items() if kind.name == name)


def arguments(page: PartPage, name: str) -> dict[str, Any]:
    return {field: kind for field, kind in get_type_hints(getattr(page, name)).items() if field != "return"}


@pytest.mark.parametrize(("of", "name"), THINGS)
async def test_each_argument_of_a_thing_is_in_its_key_and_each_subject_in_its_right(of: str, name: str) -> None:
    """Another partition, offset or project is another thing; another topic or project needs another right."""
    page = page_named(of)
    kinds = arguments(page, name)
    first = {field: OTHERS[kind][0] for field, kind in kinds.items()}
    thing: DataSource = getattr(page, name)(**first)

    for field, kind in kinds.items():
        other: DataSource = getattr(page, name)(**{**first, field: OTHERS[kind][1]})
        assert thing.key != other.key, field
        assert (thing.right != other.right) == (field in SUBJECTS), field


async def test_two_different_things_have_different_keys() -> None:
    """Nothing is shown under another thing's name."""
    keys = [
        getattr(page := page_named(of), name)(
            **{field: OTHERS[kind][0] for field, kind in arguments(page, name).items()}
        ).key
        for of, name in THINGS
    ]

    assert len(THINGS) > 20
    assert len(set(keys)) == len(keys)


async def test_the_ledger_of_a_bucket_without_a_key_is_of_every_key(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    book = DeletionLedger(context)
    for key in ("k1", "k2"):
        kind = ActionKind.EXPIRATION_DAYS
        await book.append(
            [LedgerRow(manual_clock.now_ns(), "r", "b", key, "h", kind, "DELETE", ObjectIdentity(1, 1), "original")]
        )
    look = LifecyclePage(context)

    assert ["k1", "k2"] == sorted(row["key"] for row in await look.ledger("b", "").load())
    assert ["k2"] == [row["key"] for row in await look.ledger("b", "k2").load()]
