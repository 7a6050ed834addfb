"""A reader's limits, exactly: what is at the limit is read, one beyond is refused."""

from __future__ import annotations

import math
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from lakebed.batches.codec import arrow
from lakebed.batches.codec.frame import (
    CRC_AT,
    HEADER,
    PREFIX_BYTES,
    columns_of,
    decode,
    decode_body,
    encode,
    peek,
    unseal,
)
from lakebed.batches.model import (
    ID_BYTES_MAX,
    SEQ_MAX,
    BatchIdentity,
    Compression,
    FrameLimits,
    Kind,
    Sample,
    check_identity,
)
from lakebed.core.errors import Invalid
from lakebed.rollups.aggregate import check_windows
from lakebed.rollups.codec.chunk import check_schema, ipc_bytes, ipc_table, pack, unpack
from lakebed.rollups.codec.statistics import QUANTILES_MAX, check_quantiles, exact_sums, quantile
from lakebed.rollups.codec.windows import merged, rows_of


def held(count: int = 3, **more: Any) -> bytes:
    samples = [Sample(f"m{n}", 10 + n, float(n), Kind(n % 4), {"a": "x", "bb": "yy"}) for n in range(count)]
    return encode(BatchIdentity("ag", "bo", 7, 6 + count), columns_of(samples), **more)


FRAME = held(compression=Compression.NONE)
EXACT = FrameLimits(
    frame_bytes=len(FRAME),
    body_bytes=unseal(FRAME).body_at and len(FRAME) - unseal(FRAME).body_at,
    samples=3,
    series=3,
    labels_per_series=2,
    strings=7,
    name_bytes=2,
    label_value_bytes=2,
)


@pytest.mark.parametrize("field", FrameLimits.__struct_fields__)
def test_each_limit_is_taken_exactly_and_not_one_beyond(field: str) -> None:
    """The limits that just fit read the frame; each one less refuses it."""
    assert 3 == decode(FRAME, EXACT).columns.samples
    with pytest.raises(Invalid):
        decode(FRAME, msgspec.structs.replace(EXACT, **{field: getattr(EXACT, field) - 1}))


def test_an_identity_is_at_its_limits_a_key() -> None:
    """120 bytes of an id, the largest sequence, a range of one."""
    longest = "é" * (ID_BYTES_MAX // 2)
    assert check_identity(BatchIdentity(longest, "b", SEQ_MAX, SEQ_MAX)).samples == 1
    for wrong in (
        BatchIdentity(longest + "x", "b", 0, 0),
        BatchIdentity("a", longest + "x", 0, 0),
        BatchIdentity("", "b", 0, 0),
        BatchIdentity("a", "", 0, 0),
        BatchIdentity("a\n", "b", 0, 0),
        BatchIdentity("a", "b", 1, 0),
        BatchIdentity("a", "b", -1, 0),
        BatchIdentity("a", "b", 0, SEQ_MAX + 1),
    ):
        with pytest.raises(Invalid):
            check_identity(wrong)


def test_a_frame_says_whose_it_is_before_its_body_is_read() -> None:
    """Identity, compression and counts; the body gives the same batch."""
    data = held(4)
    envelope = unseal(data)
    assert BatchIdentity("ag", "bo", 7, 10) == envelope.identity == peek(data)
    assert (Compression.ZSTD, (4, 4, 8, 8, 14)) == (envelope.compression, envelope.counts)
    batch = decode_body(data, envelope)
    assert (1, 1, Compression.ZSTD) == (batch.wire_version, batch.frame_version, batch.compression)
    assert [("m1", 11, 1.0, Kind.GAUGE, {"a": "x", "bb": "yy"})] == [
        (row.metric, row.time_ns, row.value, row.kind, row.labels) for row in batch.columns.rows()[1:2]
    ]


@pytest.mark.parametrize("wrong", [Sample("m", 2**63, 1.0), Sample("m", 1, "x"), Sample("\ud800", 1, 1.0)])  # type: ignore[arg-type]
def test_a_sample_that_no_reader_takes_is_not_encoded(wrong: Sample) -> None:
    """A time beyond 64 bits, a value that is no number, a name that is no text."""
    with pytest.raises(Invalid, match="cannot be encoded"):
        columns_of([wrong])


def test_columns_for_tables_have_times_and_kinds_in_words() -> None:
    """Microseconds, rounded down; kinds by their names; sequences from the first on."""
    samples = [Sample("m", 1_999, 1.0, Kind.COUNTER), Sample("n", 3_000, 2.0, Kind.DELTA, {"k": "v"})]
    batch = decode(encode(BatchIdentity("a", "b", 5, 6), columns_of(samples)))

    assert [1, 3] == [round(each.timestamp() * 10**6) for each in arrow.column(batch, "time").to_pylist()]
    assert ["counter", "delta"] == arrow.column(batch, "kind_name").to_pylist()
    rows = arrow.record_batch(batch).to_pylist()
    assert [(5, "m", [], 2), (6, "n", [("k", "v")], 3)] == [
        (row["seq"], row["metric"], row["labels"], row["kind"]) for row in rows
    ]
    assert {("a", "b")} == {(row["agent_id"], row["boot_id"]) for row in rows}


def test_tables_are_packed_and_come_back_and_nothing_else_does() -> None:
    """Too few or too many tables, something behind them, more than the limit: all are refused."""
    one, two = pa.table({"a": [1, 2]}), pa.table({"b": ["x"]})
    data = pack(one, two)
    first, second = unpack("it", data, 2)
    assert one.equals(first) and two.equals(second)
    for wrong, count in ((data, 1), (data, 3), (data + b"x", 2), (data[:-1], 2)):
        with pytest.raises(Invalid):
            unpack("it", wrong, count)
    size = sum(len(part) for part in ([*ipc_plain(one), *ipc_plain(two)]))
    assert 2 == len(unpack("it", data, 2, bytes_max=size))
    with pytest.raises(Invalid, match="larger than"):
        unpack("it", data, 2, bytes_max=size - 1)
    assert one.equals(ipc_table(ipc_bytes(one)))


def ipc_plain(table: Any) -> list[bytes]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return [sink.getvalue().to_pybytes()]


def test_nulls_are_refused_where_none_may_be() -> None:
    """In a column, and inside its lists."""
    plain = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.list_(pa.int64()), nullable=False)])
    check_schema("it", pa.table({"a": [1], "b": [[1]]}, schema=plain), plain)
    for columns in ({"a": [None], "b": [[1]]}, {"a": [1], "b": [[None]]}, {"a": [1], "b": [None]}):
        arrays = [pa.array(columns[field.name], field.type) for field in plain]
        table = pa.Table.from_arrays(arrays, schema=plain)
        with pytest.raises(Invalid, match="nulls"):
            check_schema("it", table, plain)
    with pytest.raises(Invalid, match="other columns"):
        check_schema("it", pa.table({"a": [1]}), plain)


def test_quantiles_are_ranks_inside_the_range_of_the_samples() -> None:
    """The least at 0, the greatest at 1, none without samples; 16 at once, each from 0 to 1."""
    buckets, counts = np.array([0, 100, 200], np.int32), np.array([1, 2, 1])
    assert [0.5, 0.5] == [quantile(q, buckets, counts, 0.5, 5.0) for q in (0.0, 1.0)]  # all their middles are below
    assert [0.0, -1.0] == [quantile(0.0, buckets, counts, -1.0, high) for high in (5.0, -1.0)]
    assert math.isnan(quantile(0.5, buckets[:0], counts[:0], 0.0, 0.0))
    assert [0.0, 1.0] == check_quantiles([0.0, 1.0]) and QUANTILES_MAX == len(check_quantiles([0.5] * QUANTILES_MAX))
    for wrong in ([-0.01], [1.01], [math.nan], [0.5] * (QUANTILES_MAX + 1)):
        with pytest.raises(Invalid):
            check_quantiles(wrong)


def test_sums_have_as_many_groups_as_are_told() -> None:
    """A group without values is a mistake of the caller."""
    sums, _, _ = exact_sums(np.array([1.0, 2.0, 4.0]), np.array([0, 0, 1]), 2)
    assert [3.0, 4.0] == sums.tolist()
    with pytest.raises(ValueError, match="groups"):
        exact_sums(np.array([1.0]), np.array([0]), 2)


def test_no_rows_are_no_windows() -> None:
    """And rows of several series and windows come in the order of both."""
    none = rows_of(np.array([], np.int64), np.array([], np.int64), np.array([]))
    assert 0 == len(merged(none, 10))
    rows = merged(rows_of(np.array([1, 0, 1, 0]), np.array([25, 11, 3, 19]), np.array([1.0, 2.0, 3.0, 4.0])), 10)
    assert [(0, 10, 2, 6.0, 19, 4.0), (1, 0, 1, 3.0, 3, 3.0), (1, 20, 1, 1.0, 25, 1.0)] == list(
        zip(
            rows.series.tolist(),
            rows.starts_ns.tolist(),
            rows.counts.tolist(),
            rows.sums.tolist(),
            rows.lasts_ns.tolist(),
            rows.lasts.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("windows", [(), (0,), (60, 90), (120, 300)])
def test_windows_that_do_not_nest_are_refused(windows: tuple[int, ...]) -> None:
    """Each is made of whole smaller ones."""
    with pytest.raises(Invalid):
        check_windows(windows)
    assert (60, 300, 3600) == check_windows((60, 300, 3600))


def test_padding_of_the_header_is_zero() -> None:
    """One batch has one form: a byte in the padding is refused although the checksum is right."""
    data = encode(BatchIdentity("a", "b", 0, 0), columns_of([Sample("m", 1, 1.0)]))
    at = PREFIX_BYTES + HEADER.size + 2  # behind both ids
    assert at < unseal(data).body_at
    for place in (at, unseal(data).body_at - 1):
        wrong = data[:place] + b"\1" + data[place + 1 :]
        crc = google_crc32c.extend(google_crc32c.value(wrong[:CRC_AT]), wrong[PREFIX_BYTES:])
        with pytest.raises(Invalid, match="padding"):
            decode(wrong[:CRC_AT] + crc.to_bytes(4, "little") + wrong[PREFIX_BYTES:])
