"""The protobuf wire format, as much of it as OTLP uses. Bad bytes give Invalid; nothing is copied twice."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lakebed.errors import Invalid

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10

Field = tuple[int, int, "int | bytes"]  # number, wire type, value: an int for varints, else the raw bytes

_U64, _I64, _F64 = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<d")


def fields(data: bytes) -> Iterator[Field]:
    """Every field of one message, in order. Groups, which OTLP never uses, are refused."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise Invalid(f"protobuf field number {number} does not exist")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise Invalid(f"protobuf wire type {kind} is not used here")
        if size > end - at:
            raise Invalid(f"protobuf field {number} claims {size} bytes of {end - at}")
        yield number, kind, data[at : at + size]
        at += size


def message(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise Invalid("a protobuf number stands where a message is expected")


def text(value: int | bytes) -> str:
    try:
        return message(value).decode()
    except UnicodeDecodeError as error:
        raise Invalid("a protobuf string is not UTF-8") from error


def varint(value: int | bytes) -> int:
    if isinstance(value, int):
        return value
    raise Invalid("protobuf bytes stand where a number is expected")


def signed(value: int | bytes) -> int:
    """An int64 sent as a varint."""
    number = varint(value)
    return number - 2**64 if number >= 2**63 else number


def fixed64(value: int | bytes) -> int:
    return int(_U64.unpack(_eight(value))[0])


def sfixed64(value: int | bytes) -> int:
    return int(_I64.unpack(_eight(value))[0])


def double(value: int | bytes) -> float:
    return float(_F64.unpack(_eight(value))[0])


def encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def encode_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return encode_varint(number << 3 | VARINT) + encode_varint(value)
    return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value


def _eight(value: int | bytes) -> bytes:
    if isinstance(value, bytes) and len(value) == 8:
        return value
    raise Invalid("a protobuf field is not the 8 bytes it should be")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    for index in range(at, min(at + VARINT_BYTES_MAX, len(data))):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >= 2**64:
                raise Invalid("a protobuf number is over 64 bits")
            return number, index + 1
        shift += 7
    raise Invalid("a protobuf number does not end")
