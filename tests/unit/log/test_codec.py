"""bytes-batch-v1, the shared blob and the binary frame: what is written is read, and nothing else is believed."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.errors import Corrupt, Invalid
from lakebed.log import blob, codec, contracts
from lakebed.log.codec import BatchSegment, checked, columns
from lakebed.log.model import TopicPartition

GOLDEN = Path(__file__).parent / "golden"
RECORDS = [b"alpha", b"", b"\x00\x01\xff", "grün".encode()]


def body(records: list[bytes] = RECORDS, at_ms: int = 1_760_000_000_000) -> bytes:
    return b"".join(codec.encode([columns(records)], [BatchSegment(len(records), at_ms)]))


def shared() -> bytes:
    bodies = [
        blob.PartitionBody(TopicPartition("orders", 0), 4, codec.encode([columns(RECORDS)], [BatchSegment(4, 7)])),
        blob.PartitionBody(TopicPartition("clicks", 12), 1, codec.encode([columns([b"x"])], [BatchSegment(1, 7)])),
    ]
    return blob.encode(bodies, 1_760_000_000_000)[0]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=50))
def test_every_batch_is_read_as_it_was_written(records: list[bytes]) -> None:
    """Any bytes in any number come back, in order."""
    batch = codec.decode(body(records))

    assert records == list(batch.records)
    assert batch.segments == (BatchSegment(len(records), 1_760_000_000_000),)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=30), st.data())
def test_a_slice_of_columns_is_the_slice_of_the_records(records: list[bytes], data: st.DataObject) -> None:
    """Slicing and fitting agree with the list they represent."""
    first = data.draw(st.integers(0, len(records) - 1))
    last = data.draw(st.integers(first + 1, len(records)))
    limit = data.draw(st.integers(0, 200))
    whole = columns(records)

    fitting = whole.fitting(first, limit)

    assert records[first:last] == list(whole.slice(first, last))
    assert sum(map(len, records[first : first + fitting])) <= limit
    assert first + fitting == len(records) or sum(map(len, records[first : first + fitting + 1])) > limit


def test_bodies_are_joined_without_looking_at_records() -> None:
    """A compacted body is the parts' columns end to end, and keeps when each was appended."""
    one, two = codec.decode(body([b"a", b"b"], 5)), codec.decode(body([b"c"], 9))

    whole = codec.decode(b"".join(codec.encode([one.records, two.records], [*one.segments, *two.segments])))

    assert list(whole.records) == [b"a", b"b", b"c"]
    assert tuple(whole.first_at(at) for at in (5, 6, 9, 10)) == (0, 2, 2, None)


def test_the_formats_are_those_of_the_golden_files() -> None:
    """Bytes written once are read for ever: a change of layout needs a new version."""
    assert (GOLDEN / "bytes-batch-v1.bin").read_bytes() == body()
    assert (GOLDEN / "wal-shared-v1.bin").read_bytes() == shared()


def test_a_shared_blob_has_the_seeds_layout() -> None:
    """Magic, big-endian header length, JSON header with its six fields, bodies end to end."""
    data = shared()
    length = int.from_bytes(data[4:8], "big")
    header = msgspec.json.decode(data[8 : 8 + length])

    assert data[:4] == b"LLS1"
    assert {"version", "created_at_ms", "partitions"} == set(header)
    assert list(header["partitions"][0]) == [
        "topic",
        "partition",
        "msg_count",
        "encoding",
        "body_offset",
        "body_length",
    ]
    for part, records in zip(header["partitions"], [RECORDS, [b"x"]], strict=True):
        start = 8 + length + part["body_offset"]
        assert list(codec.decode(data[start : start + part["body_length"]]).records) == records


@pytest.mark.parametrize("make", [body, shared])
def test_truncated_and_flipped_bytes_are_corrupt_never_wrong(make: object) -> None:
    """Every prefix and every flipped bit either raises Corrupt or gives exactly what was written."""
    data = make()  # type: ignore[operator]
    decode = codec.decode if make is body else blob.decode_header
    rng = random.Random(1)

    for end in range(0, len(data), 3):
        with pytest.raises(Corrupt):
            _all_of(decode, data[:end])
    for _ in range(300):
        at = rng.randrange(len(data))
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(broken))  # type: ignore[operator]
        except Corrupt:
            continue
        assert make is shared, f"a flipped bit at {at} of a body was not noticed"


def _all_of(decode: object, data: bytes) -> None:
    found = decode(data)  # type: ignore[operator]
    if isinstance(found, tuple):  # a truncated blob may keep its header whole, but not its bodies
        header, base = found
        for part in header.partitions:
            codec.decode(data[base + part.body_offset : base + part.body_offset + part.body_length])


@given(st.binary(max_size=200))
def test_no_bytes_make_a_decoder_fail_in_another_way(data: bytes) -> None:
    """Garbage is Corrupt or Invalid, whatever it looks like."""
    for prefix in (b"", b"LLB1", b"LLS1", b"LLC1"):
        for decode, error in (
            (codec.decode, Corrupt),
            (blob.decode_header, Corrupt),
            (contracts.decode_frame, Invalid),
        ):
            try:
                decode(prefix + data)  # type: ignore[operator]
            except error:
                continue


def test_lengths_that_lie_are_refused_before_anything_is_allocated() -> None:
    """A claim of four billion records in sixteen bytes is corrupt."""
    for fields in ((2**32 - 1, 1), (1, 2**32 - 1), (0, 0), (1, 0), (2, 3)):
        with pytest.raises(Corrupt):
            codec.decode(codec.HEADER.pack(b"LLB1", *fields, 0) + b"\0" * 32)
    with pytest.raises(Invalid):
        checked(2, b"\x05\0\0\0\x05\0\0\0", b"123456789")


def test_a_frame_carries_partitions_as_views() -> None:
    """What encode wrote, decode gives, and a frame that is too short or too long is refused."""
    parts = [columns([b"a", b"bc"]), columns([b""])]
    header = {
        "topic_partitions": [
            {"topic": "t", "partition": 0, "count": 2, "payload_bytes": 3},
            {"topic": "t", "partition": 1, "count": 1, "payload_bytes": 0, "producer_id": "p", "sequence": 4},
        ]
    }
    data = contracts.encode_frame(header, parts)

    found = contracts.decode_frame(data)

    assert [list(records) for _, records in found] == [[b"a", b"bc"], [b""]]
    assert (found[1][0].producer_id, found[1][0].sequence) == ("p", 4)
    for wrong in (data[:-1], data + b"x", data[:6], b"LLC2" + data[4:]):
        with pytest.raises(Invalid):
            contracts.decode_frame(wrong)


@pytest.mark.parametrize("counts", [(3,), (1,), (2, 0), (0, 2), (1, 2)])
def test_segments_that_do_not_add_up_are_corrupt(counts: tuple[int, ...]) -> None:
    """A body whose checksum is right and whose segments claim other records, or none, is refused."""
    rest = b"".join(codec.SEGMENT.pack(count, 7) for count in counts)
    rest += bytes(memoryview(columns([b"a", b"b"]).lengths)) + b"ab"
    body = codec.HEADER.pack(codec.MAGIC, 2, len(counts), zlib.crc32(rest)) + rest

    with pytest.raises(Corrupt, match="segments"):
        codec.decode(body)


def test_a_header_that_reaches_over_the_end_of_its_blob_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too long, and one that is cut off, each alone."""
    whole = blob.PREFIX.pack(blob.MAGIC, 40) + b" " * 40
    for data in (whole[:-1], blob.PREFIX.pack(blob.MAGIC, 41) + b" " * 40):
        with pytest.raises(Corrupt, match="claims a header"):
            blob.decode_header(data)
    monkeypatch.setattr(blob, "HEADER_BYTES_MAX", 39)
    with pytest.raises(Corrupt, match="claims a header"):
        blob.decode_header(whole)
