"""Types of columns: words, Delta's JSON and Arrow, and which type may become which."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.errors import Invalid
from lakebed.delta.types import PRIMITIVES, arrow_type, is_type, parse_type, widens, word_of

leaves = st.sampled_from([*PRIMITIVES, "decimal(12,2)", "decimal(38,38)"])
words = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.map(lambda one: f"array<{one}>"),
        st.tuples(leaves, inner).map(lambda two: f"map<{two[0]},{two[1]}>"),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda some: f"struct<{','.join(f'f{n}:{one}' for n, one in enumerate(some))}>"
        ),
    ),
    max_leaves=5,
)


@given(words)
def test_a_type_comes_back_as_its_word_and_has_an_arrow_type(word: str) -> None:
    """Nested as deep as it may be."""
    if word.count("<") > 8:
        return

    assert word == word_of(parse_type(word))
    assert isinstance(arrow_type(parse_type(word)), pa.DataType)


@pytest.mark.parametrize(
    "word",
    ["", "text", "array", "array<>", "array<long", "map<string>", "struct<>", "struct<a>", "struct<a:long,a:long>",
     "decimal(39,0)", "decimal(2,3)", "long>", "array<long>x", "array<" * 10 + "long" + ">" * 10],
)  # fmt: skip
def test_what_is_no_type_is_refused(word: str) -> None:
    """The hint names the types there are."""
    assert not is_type(word)
    with pytest.raises(Invalid) as refused:
        parse_type(word)
    assert "array<type>" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("old", "new", "safe"),
    [
        ("byte", "long", True),
        ("integer", "long", True),
        ("long", "integer", False),
        ("long", "long", False),
        ("float", "double", True),
        ("integer", "double", True),
        ("long", "double", False),  # not every long is one
        ("decimal(10,2)", "decimal(12,4)", True),
        ("decimal(10,2)", "decimal(10,4)", False),
        ("integer", "decimal(10,0)", True),
        ("long", "decimal(20,0)", True),
        ("long", "decimal(19,0)", False),
        ("string", "long", False),
        ("date", "timestamp", False),
    ],
)
def test_only_widenings_that_lose_nothing_are_safe(old: str, new: str, safe: bool) -> None:
    """As Delta's protocol lists them."""
    assert safe == widens(old, new)
