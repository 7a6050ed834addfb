"""What the filer writes, read off the wire (protobuf): nothing trusted.

Field numbers are the filer's (`filer_pb`). Bytes that are no such message raise Corrupt; memory stays in proportion to
the bytes given, because every length is checked against what is there before anything is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from lakebed.errors import Corrupt
from lakebed.filer.model import Attributes, Chunk, Entry, Event

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a file of a million chunks; larger answers are refused by the channel too
EVENTS_MAX = 1_000_000  # in one message
NUMBER_BYTES_MAX = 10  # 64 bits, seven in each
SECOND_NS = 1_000_000_000
_INT64 = 1 << 63

Value = int | bytes


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Every field of a message in its order: numbers as unsigned, fixed ones too."""
    at, end = 0, len(data)
    while at < end:
        # Most numbers are of one byte: read here, they cost a third.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise Corrupt(f"a message of the filer has a field number {number}")
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise Corrupt(f"a message of the filer has wire type {kind}")
        if at + size > end:
            raise Corrupt("a message of the filer ends inside a field")
        part = data[at : at + size]
        at += size
        yield number, part if kind == 2 else int.from_bytes(part, "little")


def read_entry(data: bytes) -> Entry:
    name, is_directory, attributes, content = "", False, Attributes(), b""
    chunks: list[Chunk] = []
    extended: dict[str, bytes] = {}
    for number, value in fields(data):
        if number == 1:
            name = _text(value)
        elif number == 2:
            is_directory = bool(_number(value))
        elif number == 3:
            chunks.append(_chunk(_bytes(value)))
        elif number == 4:
            attributes = _attributes(_bytes(value))
        elif number == 5:
            key, held = _pair(_bytes(value))
            extended[key] = held
        elif number == 9:
            content = _bytes(value)
    return Entry(name, is_directory, attributes, tuple(chunks), extended, content, raw=data)


def read_lookup(data: bytes) -> Entry | None:
    """The entry in an answer to a lookup or in one message of a listing."""
    for number, value in fields(data):
        if number == 1:
            return read_entry(_bytes(value))
    return None


def read_events(message: bytes) -> list[Event]:
    """The changes in one message of the stream, batched ones in their order. A message without any is a heartbeat."""
    found: list[Event] = []
    _read_event(message, found, nested=False)
    return found


def _read_event(message: bytes, found: list[Event], *, nested: bool) -> None:
    directory, ts_ns = "", 0
    notification: bytes | None = None
    batched: list[bytes] = []
    for number, value in fields(message):
        if number == 1:
            directory = _text(value)
        elif number == 2:
            notification = _bytes(value)
        elif number == 3:
            ts_ns = _signed(value)
        elif number == 4 and not nested:
            batched.append(_bytes(value))
        elif number == 4:
            raise Corrupt("a batch of events lies in a batch of events")
    if notification is not None or not batched:
        found.append(_change(directory, ts_ns, notification or b""))
    if len(found) + len(batched) > EVENTS_MAX:
        raise Corrupt(f"one message of the filer has more than {EVENTS_MAX} events")
    for one in batched:
        _read_event(one, found, nested=True)


def _change(directory: str, ts_ns: int, notification: bytes) -> Event:
    old = new = None
    parent = ""
    try:
        for number, value in fields(notification):
            if number == 1:
                old = read_entry(_bytes(value))
            elif number == 2:
                new = read_entry(_bytes(value))
            elif number == 4:
                parent = _text(value)
    except Corrupt as error:
        return Event(directory, ts_ns, unreadable=error.message)
    return Event(directory, ts_ns, old, new, parent)


def read_outcome(data: bytes) -> tuple[str, int]:
    """The error text and error code of an answer to a change; ("", 0) when it was made."""
    error, code = "", 0
    for number, value in fields(data):
        if number == 1:
            error = _text(value)
        elif number == 2 and isinstance(value, int):
            code = value
    return error, code


def _chunk(data: bytes) -> Chunk:
    fid, etag, offset, size, modified_ns = "", "", 0, 0, 0
    for number, value in fields(data):
        if number == 1:
            fid = _text(value) or fid
        elif number == 2:
            offset = _signed(value)
        elif number == 3:
            size = _number(value)
        elif number == 4:
            modified_ns = _signed(value)
        elif number == 5:
            etag = _text(value)
        elif number == 7:
            fid = fid or _fid(_bytes(value))
    return Chunk(fid, offset, size, modified_ns, etag)


def _fid(data: bytes) -> str:
    parts = {number: _number(value) for number, value in fields(data)}
    key, cookie = parts.get(2, 0), parts.get(3, 0)
    if key >= 1 << 64 or cookie >= 1 << 32:
        raise Corrupt("a chunk's name is out of range")
    # Whole leading zero bytes are left out, never half of one.
    name = key.to_bytes(8, "big").lstrip(b"\0") + cookie.to_bytes(4, "big")
    return f"{parts.get(1, 0)},{name.hex()}"


def _attributes(data: bytes) -> Attributes:
    size = mtime_s = mtime_part = crtime_s = crtime_part = mode = ttl_s = 0
    mime, md5 = "", b""
    for number, value in fields(data):
        if number == 1:
            size = _number(value)
        elif number == 2:
            mtime_s = _signed(value)
        elif number == 3:
            mode = _number(value)
        elif number == 6:
            crtime_s = _signed(value)
        elif number == 7:
            mime = _text(value)
        elif number == 10:
            ttl_s = _signed(value)
        elif number == 14:
            md5 = _bytes(value)
        elif number == 19:
            mtime_part = _signed(value)
        elif number == 21:
            crtime_part = _signed(value)
    return Attributes(
        size, mtime_s * SECOND_NS + mtime_part, crtime_s * SECOND_NS + crtime_part, mode, mime, ttl_s, md5
    )


def _pair(data: bytes) -> tuple[str, bytes]:
    key, held = "", b""
    for number, value in fields(data):
        if number == 1:
            key = _text(value)
        elif number == 2:
            held = _bytes(value)
    return key, held


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[at : at + NUMBER_BYTES_MAX]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at
        shift += 7
    if at >= len(data) and shift < 7 * NUMBER_BYTES_MAX:
        raise Corrupt("a message of the filer ends inside a number")
    raise Corrupt("a number of the filer is too long")


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise Corrupt("the filer wrote a number where bytes belong")
    return value


def _number(value: Value) -> int:
    if isinstance(value, bytes):
        raise Corrupt("the filer wrote bytes where a number belongs")
    return value


def _signed(value: Value) -> int:
    number = _number(value)
    return number - (1 << 64) if number >= _INT64 else number


def _text(value: Value) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise Corrupt("the filer wrote a text that is not UTF-8") from error
