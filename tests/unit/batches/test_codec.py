"""The frame: round trips, a golden file, and bytes from hell."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import google_crc32c
import msgspec
import numpy as np
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.batches.codec.arrow import record_batch, schema
from lakebed.batches.codec.frame import CRC_AT, HEADER, PREFIX, PREFIX_BYTES, columns_of, decode, encode, peek
from lakebed.batches.model import BatchIdentity, Compression, FrameLimits, Kind, Sample, SampleColumns
from lakebed.core.errors import Invalid

GOLDEN = Path(__file__).parent / "golden"

names = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=20)
samples = st.lists(
    st.builds(
        Sample,
        metric=names,
        time_ns=st.integers(0, 2**62),
        value=st.floats(allow_nan=False),
        kind=st.sampled_from(Kind),
        labels=st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=10), max_size=4),
    ),
    min_size=1,
    max_size=40,
)


def some_samples(count: int = 6) -> list[Sample]:
    return [
        Sample(f"m{n % 2}", 1_760_000_000_000_000_000 + n, n / 4, Kind(n % 4), {"host": "a", "zone": f"z{n % 3}"})
        for n in range(count)
    ]


def some_frame(compression: Compression = Compression.NONE, count: int = 6) -> bytes:
    return encode(BatchIdentity("agent-a", "boot-1", 10, 9 + count), columns_of(some_samples(count)), compression)


def sealed(frame: bytes) -> bytes:
    """The frame with its checksum made right again: damage that only a careful reader sees."""
    crc = google_crc32c.extend(google_crc32c.value(frame[:CRC_AT]), frame[PREFIX_BYTES:])
    return frame[:CRC_AT] + crc.to_bytes(4, "little") + frame[PREFIX_BYTES:]


def patched(frame: bytes, at: int, form: str, value: int) -> bytes:
    return sealed(frame[:at] + struct.pack(form, value) + frame[at + struct.calcsize(form) :])


@pytest.mark.parametrize("compression", list(Compression))
@given(samples=samples)
@settings(max_examples=60, deadline=None)
def test_what_is_encoded_is_decoded_again(compression: Compression, samples: list[Sample]) -> None:
    """Every sample comes back as it was, in order, whatever its names, labels and values."""
    identity = BatchIdentity("agent-ä", "boot", 5, 4 + len(samples))

    batch = decode(encode(identity, columns_of(samples), compression))

    assert identity == batch.identity
    assert samples == [msgspec.structs.replace(row, labels=dict(row.labels)) for row in batch.columns.rows()]


@pytest.mark.parametrize("name", ["plain", "zstd"])
def test_the_golden_frames_are_read_for_ever(name: str) -> None:
    """Frames stored by version 1 decode to the same samples in every later version."""
    batch = decode((GOLDEN / f"v1-{name}.lmbatch").read_bytes())

    assert BatchIdentity("agent-a", "boot-1", 10, 15) == batch.identity
    assert some_samples() == batch.columns.rows()


def test_the_layout_is_the_documented_one() -> None:
    """An uncompressed frame is byte for byte the golden one: the writer has not drifted."""
    assert (GOLDEN / "v1-plain.lmbatch").read_bytes() == some_frame()


@pytest.mark.parametrize("compression", list(Compression))
def test_every_truncation_is_invalid(compression: Compression) -> None:
    """A frame cut anywhere, or with anything behind it, is refused."""
    frame = some_frame(compression)

    for size in range(len(frame)):
        with pytest.raises(Invalid):
            decode(frame[:size])
    with pytest.raises(Invalid):
        decode(frame + b"\0")


@pytest.mark.parametrize("compression", list(Compression))
def test_every_flipped_bit_is_invalid(compression: Compression) -> None:
    """The checksum sees each single flipped bit, wherever it is."""
    frame = some_frame(compression)

    for at in range(len(frame)):
        for bit in range(8):
            with pytest.raises(Invalid):
                decode(frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :])


@given(at=st.integers(0, 10_000), value=st.integers(0, 2**32 - 1), compressed=st.booleans())
@settings(max_examples=600, deadline=None)
def test_lies_under_a_right_checksum_are_invalid_or_harmless(at: int, value: int, compressed: bool) -> None:
    """A frame forged on purpose decodes to something consistent or is Invalid; nothing else ever comes out."""
    frame = some_frame(Compression(int(compressed)))
    at %= len(frame) - 4

    try:
        batch = decode(patched(frame, at, "<I", value))
    except Invalid:
        return

    assert batch.identity.samples == len(batch.columns.rows())


@given(data=st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_noise_is_invalid(data: bytes) -> None:
    """Random bytes are refused, with or without the magic in front."""
    for frame in (data, some_frame()[:8] + data):
        with pytest.raises(Invalid):
            decode(frame)


@pytest.mark.parametrize(
    ("field", "at"),
    [("samples", 16), ("series", 20), ("labels", 24), ("strings", 28), ("string bytes", 32)],
)
def test_lying_counts_are_refused_before_memory_is_spent(field: str, at: int) -> None:
    """A header that claims four billion of anything costs no memory to refuse."""
    frame = patched(some_frame(), PREFIX_BYTES + at, "<I", 2**32 - 1)
    tracemalloc.start()

    with pytest.raises(Invalid):
        decode(frame)

    assert tracemalloc.get_traced_memory()[1] < 1024 * 1024, field
    tracemalloc.stop()


def test_a_decompression_bomb_is_refused_in_bounded_memory() -> None:
    """32 KiB that would become a gigabyte never produce more than the header's correct size."""
    bomb = zstd.compress(b"\0" * (256 * 1024 * 1024), level=3)
    frame = some_frame(Compression.ZSTD)
    fields = list(PREFIX.unpack_from(frame))
    header = frame[PREFIX_BYTES : PREFIX_BYTES + fields[4]]
    fields[5] = len(bomb)
    forged = sealed(PREFIX.pack(*fields) + header + bomb)
    tracemalloc.start()

    with pytest.raises(Invalid, match="larger than"):
        decode(forged)

    assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    tracemalloc.stop()


def test_over_long_names_are_refused() -> None:
    """Names and values over the reader's limits are Invalid, no matter who wrote them."""
    long = [
        Sample("m" * 256, 1, 1.0),
        Sample("m", 1, 1.0, Kind.GAUGE, {"l" * 256: "v"}),
        Sample("m", 1, 1.0, Kind.GAUGE, {"l": "v" * 1025}),
        Sample("", 1, 1.0),
        Sample("m", 1, 1.0, Kind.GAUGE, {f"l{n}": "v" for n in range(65)}),
    ]

    for sample in long:
        with pytest.raises(Invalid):
            decode(encode(BatchIdentity("a", "b", 0, 0), columns_of([sample])))


@pytest.mark.parametrize(
    "identity",
    [
        BatchIdentity("", "b", 0, 0),
        BatchIdentity("a", "x" * 129, 0, 0),
        BatchIdentity("a\n", "b", 0, 0),
        BatchIdentity("a", "b", 5, 4),
        BatchIdentity("a", "b", 2**63, 2**63),
    ],
)
def test_identities_that_cannot_be_keys_are_refused(identity: BatchIdentity) -> None:
    """Empty, over-long and control-character ids and impossible ranges never become frames."""
    with pytest.raises(Invalid):
        encode(identity, columns_of([Sample("m", 1, 1.0)]))


def test_samples_must_fill_their_sequence_range() -> None:
    """Each sample has its own number, so a range of ten holds ten."""
    with pytest.raises(Invalid):
        encode(BatchIdentity("a", "b", 0, 9), columns_of(some_samples(6)))
    with pytest.raises(Invalid):
        decode(patched(some_frame(), PREFIX_BYTES + 8, "<Q", 99))


@pytest.mark.parametrize(
    "limits", [FrameLimits(frame_bytes=50), FrameLimits(samples=5), FrameLimits(series=1), FrameLimits(strings=2)]
)
def test_a_readers_limits_hold(limits: FrameLimits) -> None:
    """What is over the limits is refused by its header alone."""
    with pytest.raises(Invalid):
        peek(some_frame(), limits)


def test_labels_named_twice_or_out_of_order_are_refused() -> None:
    """A series has each label once, in order, so one set of labels has one form."""
    columns = columns_of([Sample("m", 1, 1.0, Kind.GAUGE, {"a": "x", "b": "y"})])
    fields = {field: getattr(columns, field) for field in columns.__struct_fields__}

    for names in (columns.label_names[::-1], columns.label_names[[0, 0]]):
        with pytest.raises(Invalid, match="ascending"):
            decode(encode(BatchIdentity("a", "b", 0, 0), SampleColumns(**fields | {"label_names": names})))


def test_unknown_kinds_and_times_before_1970_are_refused() -> None:
    """Values a reader would misread are refused at the door."""
    columns = columns_of([Sample("m", 1, 1.0)])
    fields = {field: getattr(columns, field) for field in columns.__struct_fields__}

    for wrong in ({"kinds": np.array([4], "u1")}, {"times_ns": np.array([-1], "<i8")}):
        with pytest.raises(Invalid):
            decode(encode(BatchIdentity("a", "b", 0, 0), SampleColumns(**fields | wrong)))


def test_arrow_rows_are_the_samples() -> None:
    """The Arrow form has one row a sample, numbered in sequence, labels as a map."""
    batch = decode(some_frame(Compression.ZSTD))

    table = record_batch(batch)

    assert schema() == table.schema
    assert list(range(10, 16)) == table.column("seq").to_pylist()
    assert [dict(s.labels) for s in some_samples()] == [dict(labels) for labels in table.column("labels").to_pylist()]
    assert [s.metric for s in some_samples()] == table.column("metric").to_pylist()
    assert HEADER.size == 40
