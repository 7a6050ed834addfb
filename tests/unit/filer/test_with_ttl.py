"""A TTL is put on an entry, and nothing else of it changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lakebed.filer.codec import read_entry, with_ttl, write_entry
from lakebed.filer.model import Attributes, FileChunk, FilerEntry
from lakebed.filer.protobuf import encode_field
from support.wire import fields


@given(st.binary(max_size=30), st.integers(1, 2**31 - 1))
def test_what_is_not_known_here_is_kept(unknown: bytes, ttl_s: int) -> None:
    """A newer server's fields too; an attribute that was there is replaced, not doubled."""
    chunks = (FileChunk("3,01637037d6", 0, 5, 7, "e"),)
    raw = write_entry(FilerEntry("k", attributes=Attributes(5, 7), chunks=chunks, extended={"a": b"1", "b": b"2"}))
    entry = read_entry(raw + encode_field(200, unknown))

    made = with_ttl(entry, ttl_s, {"b": b"3", "c": b"4"})

    assert ttl_s == made.attributes.ttl_s
    assert {"a": b"1", "b": b"3", "c": b"4"} == made.extended
    assert (entry.name, entry.chunks, entry.attributes.mtime_ns) == (made.name, made.chunks, made.attributes.mtime_ns)
    assert unknown == dict(fields(made.raw))[200]
