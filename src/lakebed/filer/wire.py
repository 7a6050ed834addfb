"""What the filer writes, read off the wire (protobuf): nothing trusted.

Field numbers are the filer's (`filer_pb`). Bytes that are no such message raise Corrupt.
"""

from __future__ import annotations

from lakebed.errors import Corrupt
from lakebed.filer.model import Attributes, Chunk, Entry, Event
from lakebed.protobuf import fields, fixed32, message, number, signed, text

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a file of a million chunks; larger answers are refused by the channel too
EVENTS_MAX = 1_000_000  # in one message
SECOND_NS = 1_000_000_000


def read_entry(data: bytes) -> Entry:
    name, is_directory, attributes, content = "", False, Attributes(), b""
    chunks: list[Chunk] = []
    extended: dict[str, bytes] = {}
    for field, value in fields(data):
        if field == 1:
            name = text(value)
        elif field == 2:
            is_directory = bool(number(value))
        elif field == 3:
            chunks.append(_chunk(message(value)))
        elif field == 4:
            attributes = _attributes(message(value))
        elif field == 5:
            key, held = _pair(message(value))
            extended[key] = held
        elif field == 9:
            content = message(value)
    return Entry(name, is_directory, attributes, tuple(chunks), extended, content, raw=data)


def read_lookup(data: bytes) -> Entry | None:
    """The entry in an answer to a lookup or in one message of a listing."""
    for field, value in fields(data):
        if field == 1:
            return read_entry(message(value))
    return None


def read_events(whole: bytes) -> list[Event]:
    """The changes in one message of the stream, batched ones in their order. A message without any is a heartbeat."""
    found: list[Event] = []
    _read_event(whole, found, nested=False)
    return found


def _read_event(whole: bytes, found: list[Event], *, nested: bool) -> None:
    directory, ts_ns = "", 0
    notification: bytes | None = None
    batched: list[bytes] = []
    for field, value in fields(whole):
        if field == 1:
            directory = text(value)
        elif field == 2:
            notification = message(value)
        elif field == 3:
            ts_ns = signed(value)
        elif field == 4 and not nested:
            batched.append(message(value))
        elif field == 4:
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
        for field, value in fields(notification):
            if field == 1:
                old = read_entry(message(value))
            elif field == 2:
                new = read_entry(message(value))
            elif field == 4:
                parent = text(value)
    except Corrupt as error:
        return Event(directory, ts_ns, unreadable=error.message)
    return Event(directory, ts_ns, old, new, parent)


def read_outcome(data: bytes) -> tuple[str, int]:
    """The error text and error code of an answer to a change; ("", 0) when it was made."""
    error, code = "", 0
    for field, value in fields(data):
        if field == 1:
            error = text(value)
        elif field == 2 and isinstance(value, int):
            code = value
    return error, code


def _chunk(data: bytes) -> Chunk:
    fid, etag, offset, size, modified_ns = "", "", 0, 0, 0
    for field, value in fields(data):
        if field == 1:
            fid = text(value) or fid
        elif field == 2:
            offset = signed(value)
        elif field == 3:
            size = number(value)
        elif field == 4:
            modified_ns = signed(value)
        elif field == 5:
            etag = text(value)
        elif field == 7:
            fid = fid or _fid(message(value))
    return Chunk(fid, offset, size, modified_ns, etag)


def _fid(data: bytes) -> str:
    volume = key = cookie = 0
    for field, value in fields(data):
        if field == 1:
            volume = number(value)
        elif field == 2:
            key = number(value)
        elif field == 3:
            cookie = fixed32(value)
    # Whole leading zero bytes are left out, never half of one.
    name = key.to_bytes(8, "big").lstrip(b"\0") + cookie.to_bytes(4, "big")
    return f"{volume},{name.hex()}"


def _attributes(data: bytes) -> Attributes:
    size = mtime_s = mtime_part = crtime_s = crtime_part = mode = ttl_s = 0
    mime, md5 = "", b""
    for field, value in fields(data):
        if field == 1:
            size = number(value)
        elif field == 2:
            mtime_s = signed(value)
        elif field == 3:
            mode = number(value)
        elif field == 6:
            crtime_s = signed(value)
        elif field == 7:
            mime = text(value)
        elif field == 10:
            ttl_s = signed(value)
        elif field == 14:
            md5 = message(value)
        elif field == 19:
            mtime_part = signed(value)
        elif field == 21:
            crtime_part = signed(value)
    return Attributes(
        size, mtime_s * SECOND_NS + mtime_part, crtime_s * SECOND_NS + crtime_part, mode, mime, ttl_s, md5
    )


def _pair(data: bytes) -> tuple[str, bytes]:
    key, held = "", b""
    for field, value in fields(data):
        if field == 1:
            key = text(value)
        elif field == 2:
            held = message(value)
    return key, held
