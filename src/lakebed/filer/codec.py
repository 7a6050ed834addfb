"""Messages of the filer (protobuf): requests are encoded, responses and events are decoded and not trusted.

Field numbers are the filer's (`filer_pb`). Bytes that are no such message raise Corrupt. In requests, zero, empty and
false are left out, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lakebed.core.errors import Corrupt, Unavailable
from lakebed.filer.model import (
    Attributes,
    Clause,
    FileChunk,
    FilerEntry,
    FilerEvent,
    Mutation,
    SkippedEntries,
    Transaction,
)
from lakebed.filer.protobuf import decoder, encode_field

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a file of a million chunks; the channel refuses larger responses too
EVENTS_MAX = 1_000_000  # in one message
SECOND_NS = 1_000_000_000
INT64_MAX = (1 << 63) - 1
ABSENT = "no entry is found"  # the filer's text, in an unknown error, for an entry that does not exist
NOWHERE = "/lakebed/nowhere/"  # a prefix that no entry has, where only directories are asked for


_ENTRY, _FOUND, _EVENTS = decoder("Entry"), decoder("Found"), decoder("Events")
_CONFIGURATION, _OUTCOMES = decoder("Configuration"), decoder("Outcomes")
_LOOKED, _LISTING = decoder("Looked"), decoder("Listing")
_NOTIFICATION, _OUTCOME, _NODES = decoder("Notification"), decoder("Outcome"), decoder("ClusterNodes")


def read_entry(data: bytes) -> FilerEntry:
    read = _ENTRY(data)
    seen = read.attributes
    return FilerEntry(
        read.name,
        read.is_directory,
        Attributes(
            seen.file_size,
            seen.mtime * SECOND_NS + seen.mtime_ns,
            seen.crtime * SECOND_NS + seen.crtime_ns,
            seen.file_mode,
            seen.mime,
            seen.ttl_sec,
            seen.md5,
        ),
        tuple(
            FileChunk(one.file_id or _fid(one.fid), one.offset, one.size, one.modified_ts_ns, one.e_tag)
            for one in read.chunks
        ),
        {pair.key: pair.value for pair in read.extended},
        read.content,
        raw=data,
    )


def read_lookup(data: bytes) -> FilerEntry | None:
    """The entry in an answer to a lookup or in one message of a listing."""
    found = _FOUND(data)
    return read_entry(found.entry) if found.HasField("entry") else None


def read_page(messages: Sequence[bytes], newest_ns: int | None = None) -> tuple[list[FilerEntry | SkippedEntries], str]:
    """The entries in the messages of a listing, and the last name. Files that changed after `newest_ns` are counted.

    All messages are decoded in one step, which costs a small part of what an entry costs: the messages of a listing,
    one after the other, are one message with all entries.
    """
    listed = _LISTING(b"".join(messages)).entries
    if len(listed) != len(messages):  # a message without an entry
        messages = [message for message in messages if _FOUND(message).HasField("entry")]
    newest_s = newest_ns // SECOND_NS if newest_ns is not None else INT64_MAX
    found: list[FilerEntry | SkippedEntries] = []
    skipped, name = 0, ""
    for message, one in zip(messages, listed, strict=True):
        if one.attributes.mtime > newest_s and not one.is_directory:
            skipped, name = skipped + 1, one.name
            continue
        if skipped:
            found.append(SkippedEntries(name, skipped))
            skipped = 0
        found.append(read_entry(_FOUND(message).entry))
    if skipped:
        found.append(SkippedEntries(name, skipped))
    return found, listed[-1].name if listed else ""


def read_lookups(data: bytes) -> list[FilerEntry | Exception | None]:
    """The entries in an answer to several lookups, in their order; None for one that does not exist."""
    return [_looked(one) for one in _LOOKED(data).results]


def _looked(one: Any) -> FilerEntry | Exception | None:
    if one.error and ABSENT not in one.error:
        return Unavailable(f"the filer could not look an entry up: {one.error}")
    try:
        return read_entry(one.entry) if one.found and one.HasField("entry") else None
    except Corrupt as error:
        return error


def read_events(whole: bytes) -> list[FilerEvent]:
    """The changes in one message of the stream, batched ones in their order. A message without any is a heartbeat."""
    first = _EVENTS(whole)
    if len(first.events) >= EVENTS_MAX:
        raise Corrupt(f"one message of the filer has more than {EVENTS_MAX} events")
    found = [_change(first)] if first.HasField("notification") or not first.events else []
    for one in first.events:
        event = _EVENTS(one)
        if event.events:
            raise Corrupt("a batch of events contains a batch of events")
        found.append(_change(event))
    return found


def _change(event: Any) -> FilerEvent:
    if not event.notification:
        return FilerEvent(event.directory, event.ts_ns)
    try:
        told = _NOTIFICATION(event.notification)
        old = read_entry(told.old_entry) if told.HasField("old_entry") else None
        new = read_entry(told.new_entry) if told.HasField("new_entry") else None
    except Corrupt as error:
        return FilerEvent(event.directory, event.ts_ns, unreadable=error.message)
    return FilerEvent(event.directory, event.ts_ns, old, new, told.new_parent_path)


def read_outcome(data: bytes) -> tuple[str, int]:
    """The error text and error code of an answer to a change; ("", 0) when it was made."""
    read = _OUTCOME(data)
    return read.error, read.error_code


def read_outcomes(data: bytes) -> list[tuple[str, int]]:
    """The outcomes of transactions that were sent together, in their order."""
    return [(read.error, read.error_code) for read in _OUTCOMES(data).responses]


def read_nodes(data: bytes) -> list[str]:
    """The addresses in a master's answer."""
    return [node.address for node in _NODES(data).cluster_nodes]


def read_started(data: bytes) -> tuple[tuple[str, int], ...]:
    """The addresses in a master's answer, and when each node joined the cluster."""
    return tuple(sorted((node.address, node.created_at_ns) for node in _NODES(data).cluster_nodes))


def read_masters(data: bytes) -> list[str]:
    """The masters in a filer's configuration."""
    return list(_CONFIGURATION(data).masters)


def _fid(fid: Any) -> str:
    # Whole leading zero bytes are left out, never half of one.
    name = fid.file_key.to_bytes(8, "big").lstrip(b"\0") + fid.cookie.to_bytes(4, "big")
    return f"{fid.volume_id},{name.hex()}"


def nodes_request(kind: str) -> bytes:
    """Asks a master for the cluster's nodes of a kind: `filer`, `s3`."""
    return _put(1, kind)


def lookup_request(directory: str, name: str) -> bytes:
    return _put(1, directory) + _put(2, name)


def list_request(directory: str, *, prefix: str, after: str, inclusive: bool, limit: int) -> bytes:
    return _put(1, directory) + _put(2, prefix) + _put(3, after) + _put(4, inclusive) + _put(5, limit)


def subscribe_request(
    client: str,
    prefixes: Iterable[str],
    *,
    since_ns: int,
    until_ns: int,
    client_id: int,
    heartbeats: bool,
    directories: Iterable[str] = (),
) -> bytes:
    """`path_prefix` is always given: an empty one would leave out nothing but is not taken as everything."""
    exact = [*directories]
    first, *others = [*prefixes] or [NOWHERE if exact else "/"]
    return b"".join(
        (
            _put(1, client),
            _put(2, first),
            _put(3, since_ns),
            *(_put(6, other) for other in others),
            _put(7, client_id),
            _put(8, until_ns),
            _put(9, 1),
            *(_put(10, directory) for directory in exact),
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


def joined(requests: Iterable[bytes]) -> bytes:
    """Several requests of one kind as one: a batch of lookups or transactions."""
    return b"".join(encode_field(1, request) for request in requests)


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


def with_ttl(entry: FilerEntry, ttl_s: int, extended: Mapping[str, bytes]) -> FilerEntry:
    """The entry as the filer wrote it, with a TTL and more extended attributes. All else is kept, known here or not."""
    read = _ENTRY(entry.raw)
    read.attributes.ttl_sec = ttl_s
    kept = [pair for pair in read.extended if pair.key not in extended]
    del read.extended[:]
    read.extended.extend(kept)
    for key in sorted(extended):
        read.extended.add(key=key, value=extended[key])
    return read_entry(read.SerializeToString())


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
