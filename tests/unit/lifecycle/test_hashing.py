"""Hashes of rules and of entries."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.lifecycle.model import ObjectIdentity, Rule, extended_hash, rule_hash
from support.lifecycle_makers import T0, rule

FULL = Rule("id", True, "logs/", (("a", "1"), ("b", "2")), 5, 9, 3, None, False, 4, 5, None)


def test_the_hash_is_stable_across_versions() -> None:
    """State is kept under this hash: it must never change for a given rule."""
    assert "8a39319a78bb3b48" == rule_hash(FULL)


def test_id_status_and_order_do_not_count() -> None:
    """Renaming, disabling or reordering a rule keeps its state."""
    other = msgspec.structs.replace(FULL, rule_id="other", enabled=False, tags=(("b", "2"), ("a", "1")))

    assert rule_hash(FULL) == rule_hash(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"prefix": "logs"},
        {"tags": (("a", "1"),)},
        {"tags": (("a", "12"), ("b", ""))},
        {"size_greater_than": 6},
        {"size_greater_than": None},
        {"size_greater_than": 9, "size_less_than": 5},
        {"expiration_days": 4},
        {"expiration_days": None, "expiration_date_ns": 3},
        {"noncurrent_days": None},
        {"newer_noncurrent": 4},
        {"abort_days": 7},
        {"expired_delete_marker": True},
    ],
)
def test_everything_else_counts(changed: dict[str, object]) -> None:
    """A rule that means something else is another rule."""
    assert rule_hash(FULL) != rule_hash(msgspec.structs.replace(FULL, **changed))


@given(
    st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3), st.text(max_size=4), st.text(max_size=4)
)
def test_no_value_forges_the_border_between_two_fields(tags: list[tuple[str, str]], one: str, other: str) -> None:
    """Length prefixes: two rules hash alike only when their prefixes and tags are alike."""
    left = rule(prefix=one, tags=tuple(sorted(set(tags))), expiration_days=1)
    right = rule(prefix=one + other, tags=(), expiration_days=1)

    alike = (left.prefix, left.tags) == (right.prefix, right.tags)
    assert alike == (rule_hash(left) == rule_hash(right))


def test_an_identity_sees_tags_and_a_restored_object() -> None:
    """The same attributes in any order hash alike; another tag or another head chunk is another identity."""
    same = extended_hash({"X-Amz-Tagging-a": b"1", "k": b"v"})

    assert same == extended_hash({"k": b"v", "X-Amz-Tagging-a": b"1"})
    assert same != extended_hash({"k": b"v", "X-Amz-Tagging-a": b"2"})
    assert extended_hash({"ab": b"c"}) != extended_hash({"a": b"bc"})
    assert ObjectIdentity(T0, 5, "3,01", same) != ObjectIdentity(T0, 5, "4,02", same)
