"""Which keys every backend of meta takes."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakebed.core.errors import Invalid
from lakebed.meta.model import UNSAFE, check_key


@given(st.text("ab./\\\x00\x7f é\u200b", min_size=1, max_size=12))
@example("a/../b")
@example("a/.")
@example("..a/b..")
@example("a//b")
@example("a b\u200b")
def test_the_quick_look_at_a_key_finds_what_the_slow_one_finds(key: str) -> None:
    """A key is refused exactly when it has an empty or dotted segment, a backslash or a control character."""
    try:
        refused = check_key(key) != key
    except Invalid:
        refused = True

    assert refused == (UNSAFE.search(key) is not None)


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513])
def test_a_key_has_a_length(key: str) -> None:
    """An empty key, or one longer in bytes than an object's name may be, is refused."""
    with pytest.raises(Invalid):
        check_key(key)
