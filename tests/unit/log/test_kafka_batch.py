"""Kafka's record batches: what is stored as it came is read by every reader, and damage is never believed."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import aiokafka.record.default_records as theirs
import cramjam
import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.compression import compress
from lakebed.core.errors import Corrupt, TooLarge
from lakebed.log import codec, kafka_batch, kafka_compression
from lakebed.log.codec import BatchSegment, RecordBatch, columns
from lakebed.log.kafka_batch import HEADER, DecodeBudget, KafkaRecord, KafkaRecords
from lakebed.log.model import ENCODING, KAFKA_ENCODING

RECORDS = [
    KafkaRecord(b"one", b"k1", (("trace", b"\x00\xff"), ("empty", None)), 1_760_000_000_000),
    KafkaRecord(None, b"k2", (), 1_760_000_000_500),
    KafkaRecord(b"", None, (), 1_759_999_999_000),
]
COMPRESSED = {
    kafka_compression.GZIP: gzip.compress,
    kafka_compression.SNAPPY: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    kafka_compression.LZ4: lambda data: bytes(cramjam.lz4.compress(data)),
    kafka_compression.ZSTD: compress,
}

RECORD = st.builds(
    KafkaRecord,
    value=st.none() | st.binary(max_size=200),
    key=st.none() | st.binary(max_size=50),
    headers=st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=20)), max_size=3).map(tuple),
    timestamp_ms=st.integers(1, 2**50),
)


def packed(records: list[KafkaRecord], codec_id: int) -> bytes:
    """A batch as a producer makes it that compresses its records."""
    plain = kafka_batch.encode(records)
    content = COMPRESSED[codec_id](plain[HEADER.size :])
    head = bytearray(plain[: HEADER.size])
    struct.pack_into(">i", head, 8, HEADER.size - 12 + len(content))
    struct.pack_into(">h", head, 21, codec_id)
    made = bytes(head) + content
    return made[:17] + struct.pack(">I", google_crc32c.value(made[21:])) + made[21:]


def batches(*counts: int) -> KafkaRecords:
    made = [
        kafka_batch.encode([KafkaRecord(f"{b}-{n}".encode()) for n in range(c)], now_ms=5 + b)
        for b, c in enumerate(counts)
    ]
    return KafkaRecords(sum(counts), b"".join(made))


@given(st.lists(RECORD, min_size=1, max_size=20))
def test_every_record_comes_back_as_it_was_written(records: list[KafkaRecord]) -> None:
    """Key, value, headers and timestamp, also where they are missing."""
    (batch,) = kafka_batch.checked(kafka_batch.encode(records))

    assert records == kafka_batch.decode(batch)


def test_another_implementation_reads_what_is_written_here() -> None:
    """aiokafka's decoder gives the same records, and accepts the checksum."""
    found = theirs.DefaultRecordBatch(kafka_batch.encode(RECORDS))

    assert found.validate_crc()
    assert [(one.value, one.key, tuple(one.headers), one.timestamp_ms) for one in RECORDS] == [
        (one.value, one.key, tuple(one.headers), one.timestamp) for one in found
    ]


@pytest.mark.parametrize("codec_id", COMPRESSED)
def test_a_compressed_batch_is_decoded(codec_id: int) -> None:
    """With each compression that Kafka has."""
    (batch,) = kafka_batch.checked(packed(RECORDS, codec_id))

    assert RECORDS == kafka_batch.decode(batch)


@pytest.mark.parametrize("codec_id", COMPRESSED)
def test_a_batch_that_decompresses_to_more_than_the_limit_is_refused(codec_id: int) -> None:
    """A small batch cannot demand much memory."""
    (batch,) = kafka_batch.checked(packed([KafkaRecord(b"x" * 1_000_000, timestamp_ms=1)], codec_id))

    with pytest.raises(Corrupt):
        kafka_batch.decode(batch, bytes_max=10_000)


def test_a_batch_of_very_many_records_is_refused_before_one_is_decoded() -> None:
    """Millions of empty records are some kilobytes when they are compressed, and gigabytes of objects."""
    made = bytearray(kafka_batch.encode([KafkaRecord(b"x", timestamp_ms=1)]))
    count = kafka_batch.BATCH_RECORDS_MAX + 1
    struct.pack_into(">i", made, 23, count - 1)
    struct.pack_into(">i", made, 57, count)
    struct.pack_into(">I", made, 17, google_crc32c.value(bytes(made[21:])))

    with pytest.raises(TooLarge, match="200001 records"):
        kafka_batch.checked(bytes(made))


def test_headers_of_a_batch_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is within its own limit; all of them would be millions of objects."""
    monkeypatch.setattr(kafka_batch, "HEADERS_ALL_MAX", 10)
    records = [KafkaRecord(b"v", None, (("h", None),) * 6, 1)] * 2
    (batch,) = kafka_batch.checked(kafka_batch.encode(records))

    with pytest.raises(Corrupt, match="10 headers"):
        kafka_batch.decode(batch)


def test_what_one_response_decodes_is_limited() -> None:
    """It ends with the batch that uses the budget up, by bytes or by records; other partitions wait their turn."""
    one = kafka_batch.encode([KafkaRecord(b"v" * 100, timestamp_ms=1)] * 10)
    records = KafkaRecords(47, one * 5, 3)

    by_bytes = records.decoded_within(DecodeBudget(1500, 1_000_000))
    by_count = records.decoded_within(DecodeBudget(1_000_000, 21))
    spent = DecodeBudget(1, 1)
    first, then = records.decoded_within(spent), records.decoded_within(spent)
    whole = records.decoded_within(DecodeBudget(1_000_000, 1_000_000))

    assert [17, 27, 7, 0, 47] == [found.count for found in (by_bytes, by_count, first, then, whole)]
    assert whole.decoded() == records.decoded()


@pytest.mark.parametrize("codec_id", COMPRESSED)
def test_damaged_compressed_content_is_corrupt(codec_id: int) -> None:
    """Never another exception than Corrupt."""
    good = packed(RECORDS, codec_id)
    for cut in (1, 5, 9):
        with pytest.raises(Corrupt):
            kafka_compression.decompress(codec_id, good[HEADER.size : -cut], bytes_max=1 << 20)


def test_snappy_in_the_framing_of_the_java_client_is_decoded() -> None:
    """Blocks with their lengths, after a header of 16 bytes."""
    blocks = [bytes(cramjam.snappy.compress_raw(part)) for part in (b"abc" * 50, b"def")]
    framed = (
        kafka_compression.XERIAL + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(b)) + b for b in blocks)
    )

    assert b"abc" * 50 + b"def" == kafka_compression.decompress(kafka_compression.SNAPPY, framed, bytes_max=1000)


@pytest.mark.parametrize("at", [*range(8, 12), *range(16, HEADER.size + 3)])
def test_a_changed_byte_is_found(at: int) -> None:
    """All but the base offset and the leader epoch, which a broker rewrites."""
    data = bytearray(kafka_batch.encode(RECORDS))
    data[at] ^= 0x41

    with pytest.raises(Corrupt):
        kafka_batch.checked(bytes(data))


@pytest.mark.parametrize(("count", "last_delta"), [(3, 3), (3, 1), (0, -1), (-1, -2), (2, 1)])
def test_a_batch_whose_offsets_are_not_its_records_is_corrupt(count: int, last_delta: int) -> None:
    """It would be stored over the offsets of others: its last offset delta is one less than its records."""
    fields = list(HEADER.unpack_from(kafka_batch.encode(RECORDS)))
    fields[6], fields[12] = last_delta, count
    data = HEADER.pack(*fields) + kafka_batch.encode(RECORDS)[HEADER.size :]

    if (count, last_delta) == (2, 1):
        assert [2] == [batch.count for batch in kafka_batch.split(data)]
        return
    with pytest.raises(Corrupt, match="last offset delta"):
        list(kafka_batch.split(data))


def test_a_served_batch_has_its_offset_and_still_its_checksum() -> None:
    """Eight bytes are rewritten, and no record is touched."""
    (batch,) = kafka_batch.checked(kafka_batch.encode(RECORDS))

    served = b"".join(batch.at(1234))

    assert 1234 == struct.unpack_from(">q", served)[0]
    assert batch.crc == kafka_batch.checked(served)[0].crc
    assert bytes(batch.data[8:]) == served[8:]


@pytest.mark.parametrize(
    ("first", "bytes_max", "least", "expected"),
    [
        (0, 10_000, 1, ["0-0", "0-1", "1-0", "1-1", "1-2", "2-0"]),
        (1, 10_000, 1, ["0-1", "1-0", "1-1", "1-2", "2-0"]),
        (2, 10_000, 1, ["1-0", "1-1", "1-2", "2-0"]),
        (3, 100, 1, ["1-1", "1-2"]),
        (3, 10, 1, ["1-1", "1-2"]),
        (3, 10, 0, []),
        (5, 10, 1, ["2-0"]),
    ],
)
def test_a_part_begins_at_its_record_and_ends_with_a_batch(
    first: int, bytes_max: int, least: int, expected: list[str]
) -> None:
    """Whole batches, of which the first records may be skipped; taking again from a part gives the same."""
    part = batches(2, 3, 1).take(first, bytes_max, least=least)

    assert expected == [value.decode() for value in part]
    assert len(expected) == part.count
    if part.count > 1:
        assert expected[1:] == [value.decode() for value in part.take(1, 10_000, least=1)]


def test_a_body_of_record_batches_is_read_as_it_was_written() -> None:
    """It has its own magic; the batches in it are the producer's bytes."""
    sent = batches(2, 3)
    body = b"".join(codec.encode([sent], [BatchSegment(5, 9)]))
    read = codec.decode(body)

    assert (KAFKA_ENCODING, b"LLK1") == (codec.encoding_of([sent]), body[:4])
    assert isinstance(read.records, KafkaRecords)
    assert sent.payload == bytes(read.records.payload)
    for at in range(len(body)):
        with pytest.raises(Corrupt):
            codec.decode(body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :])


def test_plain_records_beside_record_batches_become_batches_with_their_time() -> None:
    """A body has one form; no record and no time of append is lost."""
    plain = RecordBatch(columns([b"a", b"b", b"c"]), (BatchSegment(1, 100), BatchSegment(2, 200)))
    keyed = RecordBatch(KafkaRecords(3, kafka_batch.encode(RECORDS)), (BatchSegment(3, 300),))

    joined = codec.decode(b"".join(codec.join([plain, keyed])))

    assert ENCODING == codec.encoding_of([plain.records])
    assert (*plain.segments, *keyed.segments) == joined.segments
    assert [(b"a", 100), (b"b", 200), (b"c", 200)] == [
        (one.value, one.timestamp_ms) for one in codec.decoded(joined.records)[:3]
    ]
    assert RECORDS == codec.decoded(joined.records)[3:]


def test_the_golden_file_is_what_is_written() -> None:
    """The stored form does not change by accident."""
    golden = (Path(__file__).parent / "golden" / "kafka-batches-v1.bin").read_bytes()

    sent = KafkaRecords(3, kafka_batch.encode(RECORDS))
    assert golden == b"".join(codec.encode([sent], [BatchSegment(3, 1_760_000_000_000)]))
    assert RECORDS == codec.decoded(codec.decode(golden).records)
