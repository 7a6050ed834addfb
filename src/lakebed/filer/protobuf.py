"""The protobuf wire format, as much of it as the filer's messages need. Nothing is trusted.

Written by hand because filer entries are compared by their raw bytes. All other protobuf is decoded by a library.

Bytes that are no message raise Corrupt; memory stays in proportion to the bytes given, because every length is checked
against what is there before anything is taken. Groups, which nobody sends any more, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from lakebed.core.errors import Corrupt

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10  # 64 bits, seven in each
NUMBER_END = 1 << 29  # of field numbers
_U64 = (1 << 64) - 1

Value = int | bytes  # an unsigned number for a varint, else the raw bytes: fixed ones too


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Every field of one message in its order, as (number, value)."""
    at, end = 0, len(data)
    while at < end:
        # Most numbers are of one byte: read here, they cost a third.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < NUMBER_END:
            raise Corrupt(f"a protobuf message has a field number {number}")
        if kind == VARINT:
            value, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise Corrupt(f"a protobuf message has wire type {kind}")
        if size > end - at:
            raise Corrupt(f"field {number} of a protobuf message claims {size} bytes of {end - at}")
        yield number, data[at : at + size]
        at += size


def message(value: Value) -> bytes:
    """A message, bytes or a text that is not decoded."""
    if isinstance(value, int):
        raise Corrupt("a protobuf field has a number instead of bytes")
    return value


def text(value: Value) -> str:
    try:
        return message(value).decode()
    except UnicodeDecodeError as error:
        raise Corrupt("a protobuf text is not UTF-8") from error


def number(value: Value) -> int:
    """An unsigned number or a flag, sent as a varint."""
    if isinstance(value, bytes):
        raise Corrupt("a protobuf field has bytes instead of a number")
    return value


def signed(value: Value) -> int:
    """An int64 sent as a varint."""
    unsigned = number(value)
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def fixed32(value: Value) -> int:
    if isinstance(value, bytes) and len(value) == 4:
        return int.from_bytes(value, "little")
    raise Corrupt("a protobuf field is not the 4 bytes it should be")


def encode_varint(value: int) -> bytes:
    """Numbers below zero as int64 has them: ten bytes."""
    value &= _U64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return encode_varint(number << 3 | VARINT) + encode_varint(value)
    return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + VARINT_BYTES_MAX]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _U64:
                raise Corrupt("a protobuf number is over 64 bits")
            return value, at
        shift += 7
    raise Corrupt("a protobuf number is not terminated")
