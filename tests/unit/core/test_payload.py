"""Bytes as text: bounded, never interpreted, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.payload import CHARS_MAX, HEX_BYTES, JSON_BYTES_MAX, ONE_LINE_BYTES, payload


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


def test_json_is_indented_when_it_is_not_short() -> None:
    """Up to 100 bytes it is shown as it came, above that with one field a line."""
    fits = b'{"a":"' + b"x" * (ONE_LINE_BYTES - 8) + b'"}'
    longer = b'{"a":"' + b"x" * (ONE_LINE_BYTES - 7) + b'"}'
    listed = b"[" + b"1, " * 50 + b"1]"

    assert (ONE_LINE_BYTES, fits.decode()) == (len(fits), payload(fits).text)
    assert ("json", '{\n  "a": ') == (payload(longer).kind, payload(longer).text[:9])
    assert ("json", "[\n  1,\n ") == (payload(listed).kind, payload(listed).text[:8])


def test_indented_json_is_cut_by_its_indented_length() -> None:
    """Indented, it may be longer than what is shown though its bytes are not."""
    data = b"[" + b"1," * 1500 + b"1]"
    shown = payload(data)

    assert len(data) < CHARS_MAX
    assert ("json", CHARS_MAX, True) == (shown.kind, len(shown.text), shown.cut)


def test_json_that_is_too_large_is_shown_as_text() -> None:
    small = b'["' + b"x" * (JSON_BYTES_MAX - 4) + b'"]'
    large = b'["' + b"x" * (JSON_BYTES_MAX - 3) + b'"]'

    assert (JSON_BYTES_MAX, "json", "text") == (len(small), payload(small).kind, payload(large).kind)
    assert payload(large).cut


def test_other_bytes_are_shown_in_hex_up_to_the_limit() -> None:
    fits, longer = payload(b"\xff" * HEX_BYTES), payload(b"\xff" * (HEX_BYTES + 1))

    assert (HEX_BYTES, False) == (fits.text.count("ff"), fits.cut)
    assert (HEX_BYTES, True, HEX_BYTES + 1) == (longer.text.count("ff"), longer.cut, longer.size)


@pytest.mark.parametrize(("size", "cut"), [(CHARS_MAX, False), (CHARS_MAX + 1, True)])
def test_text_is_cut_behind_the_last_character_that_is_shown(size: int, cut: bool) -> None:
    shown = payload(b"x" * size)

    assert (CHARS_MAX, cut, size) == (len(shown.text), shown.cut, shown.size)


def test_long_bytes_that_are_no_text_are_hex_wherever_the_first_bad_one_is() -> None:
    """Only a character that the cut itself broke is left out."""
    bad = b"x" * 100 + b"\xff" + b"x" * CHARS_MAX * 4

    assert "binary" == payload(bad).kind
    assert "text" == payload(b"x" * (CHARS_MAX * 4 - 1) + "ü".encode() * 10).kind
