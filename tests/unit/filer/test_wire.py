"""What the filer writes is read back as it was; what it did not write is Corrupt, and costs little."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Corrupt
from lakebed.filer.codec import read_entry, read_events, read_lookup, read_outcome, transaction_request, write_entry
from lakebed.filer.model import (
    Attributes,
    Clause,
    ConditionKind,
    FileChunk,
    FilerEntry,
    Mutation,
    MutationKind,
    Transaction,
)
from lakebed.filer.protobuf import encode_varint
from support.wire import fields

# An entry as SeaweedFS 4.48 wrote it: an empty object named "e", with fields that are not read here.
GOLDEN = bytes.fromhex(
    "0a0165223a10b5dbe8d70618b00330b5dbe8d7067210d41d8cd98f00b204e9800998ecf8427e8801d587d5eec9f09cb41f9001b5dbe8d706"
    "b001b5dbe8d7062a360a12536561776565642d582d416d7a2d4554616712206434316438636439386630306232303465393830303939386563"
    "66383432376"
    "52a1e0a13536561776565642d582d416d7a2d4f776e657212076c616b65626564"
)

texts = st.text(max_size=20)
numbers = st.integers(0, 2**62)
chunks = st.builds(
    FileChunk,
    fid=st.from_regex(r"[1-9][0-9]{0,3},[0-9a-f]{10}", fullmatch=True),
    offset=numbers,
    size=numbers,
    modified_ts_ns=numbers,
    etag=texts,
)
attributes = st.builds(
    Attributes,
    file_size=numbers,
    mtime_ns=numbers,
    crtime_ns=numbers,
    mode=st.integers(0, 2**32 - 1),
    mime=texts,
    ttl_s=st.integers(0, 2**31 - 1),
    md5=st.binary(max_size=16),
)
entries = st.builds(
    FilerEntry,
    name=texts,
    is_directory=st.booleans(),
    attributes=attributes,
    chunks=st.lists(chunks, max_size=3).map(tuple),
    extended=st.dictionaries(texts, st.binary(max_size=20), max_size=4),
    content=st.binary(max_size=20),
    raw=st.just(b""),
)


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def test_an_entry_of_the_server_is_understood() -> None:
    """Field numbers are the server's own."""
    entry = read_entry(GOLDEN)

    assert ("e", False, 0) == (entry.name, entry.is_directory, entry.size)
    assert 1_794_780_597_000_000_000 == entry.attributes.mtime_ns == entry.attributes.crtime_ns
    assert {"Seaweed-X-Amz-ETag", "Seaweed-X-Amz-Owner"} == set(entry.extended)
    assert "lakebed" == entry.text("Seaweed-X-Amz-Owner")
    assert GOLDEN == write_entry(entry)  # with what was not understood


@given(entries)
def test_what_is_written_is_read_back(entry: FilerEntry) -> None:
    """Nothing is lost or invented between writing and reading."""
    data = write_entry(entry)

    assert data == (back := read_entry(data)).raw
    assert entry == FilerEntry(
        back.name, back.is_directory, back.attributes, back.chunks, back.extended, back.content, raw=b""
    )


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_corrupt(data: bytes) -> None:
    """Bytes from nowhere never raise anything but Corrupt."""
    for read in (read_entry, read_events, read_lookup, read_outcome):
        try:
            read(data)
        except Corrupt:
            continue


@settings(max_examples=200)
@given(entries, st.data())
def test_a_damaged_entry_is_read_or_corrupt(entry: FilerEntry, data: st.DataObject) -> None:
    """A flipped bit or a cut anywhere gives an entry or Corrupt, and an event that says so."""
    whole = write_entry(entry)
    at = data.draw(st.integers(0, len(whole)))
    cut = whole[:at]
    flipped = bytearray(whole or b"\0")
    flipped[at % len(flipped)] ^= 1 << data.draw(st.integers(0, 7))

    for damaged in (cut, bytes(flipped)):
        try:
            read_entry(damaged)
        except Corrupt:
            if len(damaged) < 128:
                event = read_events(field(1, b"/d") + bytes([3 << 3, 7]) + _notification(damaged))[0]
                assert ("/d", 7) == (event.directory, event.ts_ns)
                assert event.unreadable


def _notification(entry: bytes) -> bytes:
    inner = b"\x12" + encode_varint(len(entry)) + entry
    return b"\x12" + encode_varint(len(inner)) + inner


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\xff\xff\xff\xff\x7f",  # a length of 32 GiB
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # one of 2^64 - 1
        b"\x80" * 11,  # a number without end
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a number of more than 64 bits
        b"\x0b",  # a group
        b"\x00\x00",  # field 0
        b"\x0a\x02\xff\xfe",  # a name that is not UTF-8
        b"\x22\x02\x08",  # attributes that end inside
    ],
)
def test_hostile_bytes_are_corrupt(data: bytes) -> None:
    """A lying length is refused before anything is set aside for it."""
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            read_entry(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_batched_events_come_in_their_order() -> None:
    """The first event lies in the message itself, the others in its batch."""
    one = field(1, b"/a") + _notification(write_entry(FilerEntry("x"))) + bytes([3 << 3, 1])
    two = field(1, b"/b") + field(2, b"") + bytes([3 << 3, 2])

    found = read_events(one + field(4, two))

    assert [("/a", 1, False), ("/b", 2, True)] == [(event.directory, event.ts_ns, event.heartbeat) for event in found]
    assert found[0].created


def test_a_batch_inside_a_batch_is_corrupt() -> None:
    """Depth has a limit: no message makes the reader call itself without end."""
    inner = field(1, b"/a")
    with pytest.raises(Corrupt):
        read_events(field(4, field(4, inner)))


def test_a_chunk_is_named_as_the_cluster_names_it() -> None:
    """Leading zero bytes of the key are left out, the cookie is always whole."""
    fid = bytes([1 << 3, 9, 2 << 3, 2, 3 << 3 | 5]) + bytes.fromhex("63443d97")[::-1]
    entry = read_entry(field(3, field(7, fid)))

    assert "9,0263443d97" == entry.head_fid


def test_a_transaction_names_its_lock_conditions_and_changes() -> None:
    """Each clause and each mutation is its own field, and the route follows from the path."""
    transaction = Transaction(
        "/buckets/b/k",
        (Clause(ConditionKind.ENTRY_EQUAL, expected=GOLDEN), Clause(ConditionKind.EXISTS)),
        (Mutation(MutationKind.DELETE, "/buckets/b", "k", delete_data=True),),
        condition_path="/buckets/b/k.versions/v_1",
    )

    found = list(fields(transaction_request(transaction)))

    assert [1, 2, 3, 6, 7] == [number for number, _ in found]
    assert (7, b"s3.object.write:/buckets/b/k") == found[-1]
    clauses = [dict(fields(value)) for _, value in fields(found[1][1]) if isinstance(value, bytes)]
    assert [{1: 10, 10: GOLDEN}, {1: 2}] == clauses
    assert {1: 1, 2: b"/buckets/b", 3: b"k", 7: 1} == dict(fields(found[2][1]))
