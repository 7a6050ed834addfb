"""What pages ask for is shared by its key: two different things never share one, nor the right of another."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from lakebed.console.looker import Ask, Looker
from ticks_kit import context_of

OTHERS: dict[Any, tuple[Any, Any]] = {str: ("a", "b"), int: (1, 2), float: (1.0, 2.0), int | None: (None, 7)}
ASKS = sorted(
    name
    for name, made in inspect.getmembers(Looker, inspect.isfunction)
    if not name.startswith("_") and get_type_hints(made).get("return") is Ask
)
# The part of a name that a right is given for: who may see one may not see another.
SUBJECTS = {"topic", "name", "org", "project", "bucket"}


def arguments(name: str) -> dict[str, Any]:
    return {field: kind for field, kind in get_type_hints(getattr(Looker, name)).items() if field != "return"}


@pytest.mark.parametrize("name", ASKS)
def test_each_argument_of_an_ask_is_in_its_key_and_each_subject_in_its_right(name: str) -> None:
    """Another partition, offset or project is another thing; another topic or project needs another right."""
    look = Looker(context_of())
    kinds = arguments(name)
    first = {field: OTHERS[kind][0] for field, kind in kinds.items()}
    ask: Ask = getattr(look, name)(**first)

    for field, kind in kinds.items():
        other: Ask = getattr(look, name)(**{**first, field: OTHERS[kind][1]})
        assert ask.key != other.key, field
        assert (ask.right != other.right) == (field in SUBJECTS), field


def test_two_different_asks_have_different_keys() -> None:
    """Nothing is shown under another thing's name."""
    look = Looker(context_of())
    keys = [
        getattr(look, name)(**{field: OTHERS[kind][0] for field, kind in arguments(name).items()}).key for name in ASKS
    ]

    assert len(ASKS) > 20
    assert len(set(keys)) == len(keys)
