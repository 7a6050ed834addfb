"""Messages of the filer (protobuf): requests are encoded, responses and events are decoded and not trusted.

Field numbers are the filer's (`filer_pb`). Bytes that are no such message raise Corrupt. In requests, zero, empty and
false are left out, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakebed.core.errors import Corrupt
from lakebed.filer.model import Attributes, Clause, FileChunk, FilerEntry, FilerEvent, Mutation, Transaction
from lakebed.filer.protobuf import encode_field, fields, fixed32, message, number, signed, text

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a file of a million chunks; the channel refuses larger responses too
EVENTS_MAX = 1_000_000  # in one message
SECOND_NS = 1_000_000_000


def read_entry(data: bytes) -> FilerEntry:
    name, is_directory, attributes, content = "", False, Attributes(), b""
    chunks: list[FileChunk] = []
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
    return FilerEntry(name, is_directory, attributes, tuple(chunks), extended, content, raw=data)


def read_lookup(data: bytes) -> FilerEntry | None:
    """The entry in an answer to a lookup or in one message of a listing."""
    for field, value in fields(data):
        if field == 1:
            return read_entry(message(value))
    return None


def read_events(whole: bytes) -> list[FilerEvent]:
    """The changes in one message of the stream, batched ones in their order. A message without any is a heartbeat."""
    found: list[FilerEvent] = []
    _read_event(whole, found, nested=False)
    return found


def _read_event(whole: bytes, found: list[FilerEvent], *, nested: bool) -> None:
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
            raise Corrupt("a batch of events contains a batch of events")
    if notification is not None or not batched:
        found.append(_change(directory, ts_ns, notification or b""))
    if len(found) + len(batched) > EVENTS_MAX:
        raise Corrupt(f"one message of the filer has more than {EVENTS_MAX} events")
    for one in batched:
        _read_event(one, found, nested=True)


def _change(directory: str, ts_ns: int, notification: bytes) -> FilerEvent:
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
        return FilerEvent(directory, ts_ns, unreadable=error.message)
    return FilerEvent(directory, ts_ns, old, new, parent)


def read_outcome(data: bytes) -> tuple[str, int]:
    """The error text and error code of an answer to a change; ("", 0) when it was made."""
    error, code = "", 0
    for field, value in fields(data):
        if field == 1:
            error = text(value)
        elif field == 2 and isinstance(value, int):
            code = value
    return error, code


def _chunk(data: bytes) -> FileChunk:
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
    return FileChunk(fid, offset, size, modified_ns, etag)


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


def lookup_request(directory: str, name: str) -> bytes:
    return _put(1, directory) + _put(2, name)


def list_request(directory: str, *, prefix: str, after: str, inclusive: bool, limit: int) -> bytes:
    return _put(1, directory) + _put(2, prefix) + _put(3, after) + _put(4, inclusive) + _put(5, limit)


def subscribe_request(
    client: str, prefixes: Iterable[str], *, since_ns: int, until_ns: int, client_id: int, heartbeats: bool
) -> bytes:
    """`path_prefix` is always given: an empty one would leave out nothing but is not taken as everything."""
    first, *others = [*prefixes] or ["/"]
    return b"".join(
        (
            _put(1, client),
            _put(2, first),
            _put(3, since_ns),
            *(_put(6, other) for other in others),
            _put(7, client_id),
            _put(8, until_ns),
            _put(9, 1),
            _put(11, True),
            _put(13, heartbeats),
        )
    )


def delete_request(directory: str, name: str, *, delete_data: bool, recursive: bool) -> bytes:
    return _put(1, directory) + _put(2, name) + _put(4, delete_data) + _put(5, recursive)


def create_request(directory: str, entry: FilerEntry, *, ballast_bytes: int = 0) -> bytes:
    """`ballast_bytes` is the weight of signatures, of a byte each, that the change carries to its listeners."""
    return _put(1, directory) + encode_field(2, write_entry(entry)) + _put(5, b"\x01" * ballast_bytes)


def transaction_request(transaction: Transaction) -> bytes:
    return b"".join(
        (
            _put(1, transaction.path),
            _put(2, b"".join(_put(1, _clause(clause)) for clause in transaction.clauses)),
            *(encode_field(3, _mutation(mutation)) for mutation in transaction.mutations),
            _put(6, transaction.condition_path),
            _put(7, f"s3.object.write:{transaction.path}"),
        )
    )


def write_entry(entry: FilerEntry) -> bytes:
    """The entry as the filer reads it: as it was written, when it came from there."""
    if entry.raw:
        return entry.raw
    seconds, part = divmod(entry.attributes.mtime_ns, SECOND_NS)
    made_s, made_part = divmod(entry.attributes.crtime_ns, SECOND_NS)
    seen = entry.attributes
    attributes = (
        _put(1, seen.file_size) + _put(2, seconds) + _put(3, seen.mode) + _put(6, made_s) + _put(7, seen.mime)
    ) + (_put(10, seen.ttl_s) + _put(14, seen.md5) + _put(19, part) + _put(21, made_part))
    return b"".join(
        (
            _put(1, entry.name),
            _put(2, entry.is_directory),
            *(encode_field(3, _write_chunk(chunk)) for chunk in entry.chunks),
            encode_field(4, attributes),
            _pairs(5, entry.extended),
            _put(9, entry.content),
        )
    )


def _write_chunk(chunk: FileChunk) -> bytes:
    return (
        _put(1, chunk.fid)
        + _put(2, chunk.offset)
        + _put(3, chunk.size)
        + _put(4, chunk.modified_ts_ns)
        + _put(5, chunk.etag)
    )


def _clause(clause: Clause) -> bytes:
    return b"".join(
        (
            _put(1, int(clause.kind)),
            *(_put(2, etag) for etag in clause.etags),
            _put(3, clause.unix_time_s),
            _put(5, clause.ext_key),
            _put(6, clause.ext_value),
            *(_put(9, fid) for fid in clause.fids),
            _put(10, clause.expected),
        )
    )


def _mutation(mutation: Mutation) -> bytes:
    return b"".join(
        (
            _put(1, int(mutation.kind)),
            _put(2, mutation.directory),
            _put(3, mutation.name),
            encode_field(4, write_entry(mutation.entry)) if mutation.entry is not None else b"",
            _pairs(5, mutation.set_extended),
            *(encode_field(6, key.encode()) for key in mutation.delete_extended),
            _put(7, mutation.delete_data),
            _put(8, mutation.recursive),
            _put(13, mutation.remove_empty_parent),
        )
    )


def _pairs(number: int, pairs: Mapping[str, bytes]) -> bytes:
    return b"".join(encode_field(number, _put(1, key) + _put(2, pairs[key])) for key in sorted(pairs))


def _put(number: int, value: int | str | bytes) -> bytes:
    if not value:
        return b""
    return encode_field(number, value.encode() if isinstance(value, str) else value)
