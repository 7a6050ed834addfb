"""The few protobuf messages lifecycle speaks with a SeaweedFS filer, coded by hand.

Only the fields it uses; others are stepped over. Lengths are checked against the bytes that are there, so lying or
truncated messages are Corrupt and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lakebed.errors import Corrupt

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10

Fields = dict[int, list[int | bytes]]


def decode(data: bytes) -> Fields:
    """A message as lists of raw values by field number. Raises Corrupt."""
    fields: Fields = {}
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == VARINT:
            value, at = _varint(data, at)
        elif wire == BYTES:
            size, at = _varint(data, at)
            value, at = _cut(data, at, size)
        elif wire in (FIXED64, FIXED32):
            raw, at = _cut(data, at, 8 if wire == FIXED64 else 4)
            value = int.from_bytes(raw, "little")
        else:
            raise Corrupt(f"protobuf wire type {wire} at byte {at}")
        if number == 0:
            raise Corrupt("protobuf field 0")
        fields.setdefault(number, []).append(value)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(VARINT_BYTES_MAX):
        if at >= len(data):
            raise Corrupt("a protobuf message is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise Corrupt("a protobuf number is too long")


def _cut(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if size > len(data) - at:
        raise Corrupt("a protobuf field is longer than its message")
    return data[at : at + size], at + size


def number(fields: Fields, place: int, default: int = 0) -> int:
    value = fields.get(place, [default])[-1]
    if isinstance(value, bytes):
        raise Corrupt(f"protobuf field {place} is not a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def raw(fields: Fields, place: int) -> bytes:
    value = fields.get(place, [b""])[-1]
    if not isinstance(value, bytes):
        raise Corrupt(f"protobuf field {place} is not bytes")
    return value


def text(fields: Fields, place: int) -> str:
    try:
        return raw(fields, place).decode()
    except UnicodeDecodeError:
        raise Corrupt(f"protobuf field {place} is not UTF-8") from None


def all_raw(fields: Fields, place: int) -> list[bytes]:
    found = fields.get(place, [])
    if not all(isinstance(value, bytes) for value in found):
        raise Corrupt(f"protobuf field {place} is not bytes")
    return [value for value in found if isinstance(value, bytes)]


def encode(fields: Iterable[tuple[int, int | str | bytes | bool]]) -> bytes:
    """A message from (field number, value); zero and empty values are left out, as proto3 does."""
    out = bytearray()
    for place, value in fields:
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, bytes):
            if value:
                out += _number(place << 3 | BYTES) + _number(len(value)) + value
        elif value:
            out += _number(place << 3 | VARINT) + _number(int(value) & 0xFFFF_FFFF_FFFF_FFFF)
    return bytes(out)


def message(place: int, data: bytes) -> bytes:
    """A message inside a message, written even when it is empty."""
    return _number(place << 3 | BYTES) + _number(len(data)) + data


def mapping(place: int, values: Mapping[str, bytes]) -> bytes:
    return b"".join(message(place, encode([(1, key), (2, value)])) for key, value in sorted(values.items()))


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class FilerEntry(msgspec.Struct, frozen=True):
    """A filer entry, as far as lifecycle looks at it."""

    name: str
    is_directory: bool = False
    size: int = 0
    mtime_ns: int = 0
    crtime_s: int = 0
    ttl_s: int = 0
    md5: bytes = b""
    fids: tuple[str, ...] = ()
    extended: dict[str, bytes] = {}


def entry_of(data: bytes) -> FilerEntry:
    fields = decode(data)
    attributes = decode(raw(fields, 4))
    chunks = [decode(chunk) for chunk in all_raw(fields, 3)]
    size = max([number(attributes, 1), *(number(chunk, 2) + number(chunk, 3) for chunk in chunks)])
    extended = [decode(pair) for pair in all_raw(fields, 5)]
    return FilerEntry(
        name=text(fields, 1),
        is_directory=bool(number(fields, 2)),
        size=size or len(raw(fields, 9)),
        mtime_ns=number(attributes, 2) * 1_000_000_000 + number(attributes, 19),
        crtime_s=number(attributes, 6),
        ttl_s=number(attributes, 10),
        md5=raw(attributes, 14),
        fids=tuple(fid_of(chunk) for chunk in chunks),
        extended={text(pair, 1): raw(pair, 2) for pair in extended},
    )


def fid_of(chunk: Fields) -> str:
    """The chunk's file id in its text form."""
    fid = decode(raw(chunk, 7))
    if not fid:
        return text(chunk, 1)
    tail = (number(fid, 2) << 32 | number(fid, 3)).to_bytes(12, "big")
    return f"{number(fid, 1)},{tail.lstrip(bytes(1)).hex()}"


class FilerEvent(msgspec.Struct, frozen=True):
    """One event of the metadata stream. Without entries it is a heartbeat."""

    directory: str
    ts_ns: int
    old: FilerEntry | None = None
    new: FilerEntry | None = None
    new_directory: str = ""
    unreadable: str = ""


def events_of(data: bytes) -> list[FilerEvent]:
    """The events of one answer; batched ones lie inside. What cannot be read is an event that says so."""
    fields = decode(data)
    first = _event(fields)
    inside = [event for batched in all_raw(fields, 4) for event in events_of(batched)]
    return [*([first] if first is not None else []), *inside]


def _event(fields: Fields) -> FilerEvent | None:
    ts_ns = number(fields, 3)
    if 2 not in fields or not ts_ns:
        return None
    directory = text(fields, 1)
    try:
        note = decode(raw(fields, 2))
        old = entry_of(raw(note, 1)) if 1 in note else None
        new = entry_of(raw(note, 2)) if 2 in note else None
        return FilerEvent(directory, ts_ns, old, new, text(note, 4)) if old or new else None
    except Corrupt as error:
        return FilerEvent(directory, ts_ns, unreadable=error.message)
