"""A second reader of the protobuf wire format, written by hand: what Lakebed writes is checked with it."""

from __future__ import annotations

from collections.abc import Iterator

Value = int | bytes  # an unsigned number for a varint, else the raw bytes: fixed ones too


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Every field of one message in its order, as (number, value). For well-formed messages only."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        assert at + size <= len(data), "a field is longer than its message"
        yield tag >> 3, data[at : at + size]
        at += size


def signed(value: Value) -> int:
    """An int64 sent as a varint."""
    assert isinstance(value, int)
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
