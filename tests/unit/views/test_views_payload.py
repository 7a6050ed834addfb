"""Bytes as text: bounded, never interpreted, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.views.payload import CHARS_MAX, HEX_BYTES, payload


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"hello", "text", "hello"),
        (b'{"a":1}', "json", '{"a":1}'),
        (b'{"a":', "text", '{"a":'),
        ("größe".encode(), "text", "größe"),
        (b"\xff\x00", "binary", "ff 00"),
        (b"", "text", ""),
    ],
)
def test_text_json_and_other_bytes(data: bytes, kind: str, text: str) -> None:
    """JSON is indented, other text stays as it is, the rest is hex."""
    shown = payload(data)

    assert (shown.kind, shown.text, shown.size, shown.cut) == (kind, text, len(data), False)


def test_long_ones_are_cut_and_say_so() -> None:
    """Whatever the size, little is shown: a character cut in the middle does not make text binary."""
    texts = [payload(b"x" * 10**6), payload("ü".encode() * 10**6), payload(b"a" + "ü".encode() * 10**6)]

    assert all(one.kind == "text" and one.cut and len(one.text) <= CHARS_MAX for one in texts)
    assert payload("😀".encode() * (CHARS_MAX + 1)).cut  # the start alone fills what is shown
    assert not payload("😀".encode() * CHARS_MAX).cut
    assert len(payload(b"\xff" * 10**6).text) <= HEX_BYTES * 3
    assert payload(b"[" * 60_000).kind == "text"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_nothing_breaks_it(data: bytes) -> None:
    shown = payload(data)

    assert shown.size == len(data) and len(shown.text) <= CHARS_MAX
