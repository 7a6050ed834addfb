"""What the filer is asked, as it reads it off the wire (protobuf); field numbers are its own.

Zero, empty and false are left out, as the format has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakebed.filer.model import Chunk, Clause, Entry, Mutation, Transaction
from lakebed.protobuf import encode_field

SECOND_NS = 1_000_000_000


def lookup(directory: str, name: str) -> bytes:
    return _put(1, directory) + _put(2, name)


def list(directory: str, *, prefix: str, after: str, inclusive: bool, limit: int) -> bytes:
    return _put(1, directory) + _put(2, prefix) + _put(3, after) + _put(4, inclusive) + _put(5, limit)


def subscribe(
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


def delete(directory: str, name: str, *, delete_data: bool, recursive: bool) -> bytes:
    return _put(1, directory) + _put(2, name) + _put(4, delete_data) + _put(5, recursive)


def create(directory: str, entry: Entry, *, ballast_bytes: int = 0) -> bytes:
    """`ballast_bytes` is the weight of signatures, of a byte each, that the change carries to its listeners."""
    return _put(1, directory) + encode_field(2, write_entry(entry)) + _put(5, b"\x01" * ballast_bytes)


def transaction(transaction: Transaction) -> bytes:
    return b"".join(
        (
            _put(1, transaction.path),
            _put(2, b"".join(_put(1, _clause(clause)) for clause in transaction.clauses)),
            *(encode_field(3, _mutation(mutation)) for mutation in transaction.mutations),
            _put(6, transaction.condition_path),
            _put(7, f"s3.object.write:{transaction.path}"),
        )
    )


def write_entry(entry: Entry) -> bytes:
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


def _write_chunk(chunk: Chunk) -> bytes:
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
