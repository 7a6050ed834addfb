"""The protobuf wire format: what is written is read back; what is no message is Corrupt, and costs little."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lakebed
from lakebed.core.errors import Corrupt
from lakebed.filer.protobuf import encode_field, encode_varint, fields, fixed32, message, number, signed, text

values = st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=200))


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), values), max_size=8))
def test_fields_are_read_back_in_their_order(written: list[tuple[int, int | bytes]]) -> None:
    """Any numbers, any values, small and large."""
    assert written == list(fields(b"".join(encode_field(each, value) for each, value in written)))


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_below_zero_comes_back(value: int) -> None:
    """As int64, sent as a varint."""
    ((_, sent),) = fields(encode_field(1, value))

    assert value == signed(sent)


def test_fixed_fields_are_the_bytes_they_are() -> None:
    """Eight and four bytes, little end first, and nothing else in their place."""
    data = b"\x09" + struct.pack("<d", 21.5) + b"\x15" + struct.pack("<I", 7)

    (_, first), (_, second) = fields(data)

    assert (struct.pack("<d", 21.5), 7) == (first, fixed32(second))
    for wrong in (1, b"123", b"12345"):
        with pytest.raises(Corrupt):
            fixed32(wrong)


@pytest.mark.parametrize(
    "data",
    [
        encode_varint(1 << 3 | 2) + encode_varint(2**40) + b"x",  # a length of a terabyte
        b"\x80" * 11,  # a number without end
        b"\x80",  # a number that ends inside
        b"\xff" * 9 + b"\x7f",  # a number of more than 64 bits
        b"\x0b",  # a group
        b"\x00\x00",  # field 0
        b"\x08",  # a field without its number
        b"\x0a",  # a field without its length
        b"\x09\x01",  # eight bytes that are one
    ],
)
def test_hostile_bytes_are_corrupt(data: bytes) -> None:
    """A lying length is refused before anything is set aside for it."""
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            list(fields(data))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_number_is_no_text_and_bytes_are_no_number() -> None:
    """What a field must be is asked of it, not assumed."""
    for read, value in ((message, 1), (text, 1), (text, b"\xff"), (number, b"1"), (signed, b"1")):
        with pytest.raises(Corrupt):
            read(value)


def test_there_is_one_reader_of_the_wire() -> None:
    """Nobody else in the tree takes a tag apart: one piece of code for one idea."""
    root = Path(lakebed.__file__).parent
    apart = [file.relative_to(root).as_posix() for file in root.rglob("*.py") if ">> 3" in file.read_text()]

    assert ["filer/protobuf.py"] == [name for name in apart if "& 7" in (root / name).read_text()]
