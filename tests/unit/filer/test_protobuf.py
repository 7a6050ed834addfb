"""The protobuf wire format: what is written by hand is what a second reader and the library read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakebed.filer.protobuf import decoder, encode_field
from support.wire import fields, signed

values = st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=200))


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), values), max_size=8))
def test_fields_are_read_back_in_their_order(written: list[tuple[int, int | bytes]]) -> None:
    """Any numbers, any values, small and large."""
    assert written == list(fields(b"".join(encode_field(each, value) for each, value in written)))


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_below_zero_comes_back(value: int) -> None:
    """As int64, sent as a varint; the library reads the same."""
    sent = encode_field(3, value)

    ((_, found),) = fields(sent)
    assert value == signed(found) == decoder("Events")(sent).ts_ns


@given(st.lists(st.tuples(st.integers(20, 2**29 - 1), values), max_size=8))
def test_fields_that_are_not_described_are_skipped(others: list[tuple[int, int | bytes]]) -> None:
    """A newer server may send more."""
    unknown = b"".join(encode_field(each, value) for each, value in others)

    assert "k" == decoder("Entry")(unknown + encode_field(1, b"k") + unknown).name
