"""Rollup and index chunks: golden files, keys of series, and bytes from hell."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.model import BatchIdentity, Kind, Sample
from lakebed.core.errors import Invalid
from lakebed.rollups.aggregate import chunks, noted, partials
from lakebed.rollups.codec.chunk import (
    build_index,
    decode_index,
    decode_rollup,
    encode_index,
    encode_rollup,
    rollup_schema,
    rollup_schema_v1,
    series_schema,
)
from lakebed.rollups.codec.windows import row_keys, series_keys, split_keys
from lakebed.rollups.model import RollupInputReport

GOLDEN = Path(__file__).parent / "golden"
START_NS = 1_760_000_400_000_000_000


def batch(samples: list[Sample], agent: str = "agent-a") -> Any:
    return decode(encode(BatchIdentity(agent, "boot-1", 0, len(samples) - 1), columns_of(samples)))


@cache
def some_chunks() -> tuple[bytes, bytes]:
    """A rollup chunk and an index chunk of a few samples with everything odd in them."""
    values = (0.1, 0.2, 0.3, math.nan, -0.0, 1e300, math.inf)
    samples = [
        Sample("cpu", START_NS + n * 10**10, value, Kind.GAUGE, {"host": f"h{n % 2}", "zone": ""})
        for n, value in enumerate(values)
    ]
    table = partials([(0, batch(samples))], (60, 300, 3600))
    reported = [
        RollupInputReport(0, f"{5:020d}-{'0' * 32}", "k", "ab" * 32, 9, START_NS, START_NS + 6 * 10**10, len(values))
    ]
    ((_, index),) = build_index(reported, list(noted(table).values()))
    return next(chunks(table, (60, 300, 3600))).data, index


def test_a_batch_over_many_hours_is_indexed_as_one_over_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a stray clock spans decades: its hours are found by sorting, and are the same."""
    samples = [
        Sample(f"m{n % 2}", START_NS + hour * 3600 * 10**9 + n, 1.0) for hour in (0, 1, 1, 300) for n in range(3)
    ]
    marked = partials([(3, batch(samples))], (60,))
    monkeypatch.setattr("lakebed.rollups.aggregate.MARKS_MAX", 0)

    assert marked == partials([(3, batch(samples))], (60,))
    assert [START_NS + hour * 3600 * 10**9 for hour in (0, 1, 300)] == sorted(noted(marked))


def test_a_golden_chunk_of_version_1_is_read_for_ever() -> None:
    """What version 1 stored comes back with its numbers, no NaN, no rest and no sketch."""
    (row,) = decode_rollup((GOLDEN / "v1.lmrollup.zst").read_bytes()).to_pylist()

    assert ("agent-a", [("host", "h0")], 2, 3.0, 2.0) == tuple(
        row[name] for name in ("agent_id", "labels", "count", "sum", "last")
    )
    assert (0, [], [], []) == tuple(row[name] for name in ("nan_count", "sum_rest", "sketch_bucket", "sketch_count"))


def test_golden_chunks_of_today_are_read_for_ever_and_made_the_same() -> None:
    """Rollup chunks of version 3 and index chunks of version 1 decode to what the same samples give today; version 2 is
    the same without the kinds."""
    rollup, index = some_chunks()

    today = decode_rollup(rollup).to_pylist()
    assert str(decode_rollup((GOLDEN / "v3.lmrollup.zst").read_bytes()).to_pylist()) == str(today)
    assert {Kind.GAUGE} == {row["sample_kind"] for row in today}
    untyped = [row | {"sample_kind": 0} for row in today]
    assert str(decode_rollup((GOLDEN / "v2.lmrollup.zst").read_bytes()).to_pylist()) == str(untyped)
    for expected, found in zip(
        decode_index((GOLDEN / "v1.lmindex.zst").read_bytes()), decode_index(index), strict=True
    ):
        assert expected.to_pylist() == found.to_pylist()


READERS = [(0, decode_rollup), (1, decode_index)]


@pytest.mark.parametrize(("which", "read"), READERS)
def test_every_truncation_is_invalid(which: int, read: Any) -> None:
    """A chunk cut anywhere, or with something behind it, is refused."""
    data = some_chunks()[which]

    for size in range(len(data)):
        with pytest.raises(Invalid):
            read(data[:size])
    with pytest.raises(Invalid):
        read(data + b"\0")


@pytest.mark.parametrize(("which", "read"), READERS)
@given(at=st.integers(0, 100_000), value=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_damage_inside_is_invalid_or_harmless(which: int, read: Any, at: int, value: int) -> None:
    """A changed byte inside a well-formed zstd frame gives a table that fits together, or Invalid; nothing else."""
    plain = bytearray(zstd.decompress(some_chunks()[which]))
    plain[at % len(plain)] = value

    with suppress(Invalid):
        read(zstd.compress(bytes(plain)))


@pytest.mark.parametrize(("which", "read"), READERS)
def test_bombs_strangers_and_later_versions_are_invalid(which: int, read: Any) -> None:
    """What unpacks to more than the bound, is no chunk, or has a later version is refused, in bounded memory."""
    bomb = zstd.compress(b"\0" * (80 * 1024 * 1024))
    table = pa.table({"a": [1]}, metadata={"schema": "lightmetrics.rollup.v9"})
    sink = pa.BufferOutputStream()
    for _ in range(which + 1):
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    for wrong in (bomb, b"", b"x" * 100, zstd.compress(sink.getvalue().to_pybytes())):
        with pytest.raises(Invalid):
            read(wrong)
    with pytest.raises(Invalid):
        read(some_chunks()[which], 10)


def test_tables_with_other_columns_are_not_encoded() -> None:
    """A writer cannot store what a reader would refuse."""
    with pytest.raises(Invalid):
        encode_rollup(pa.table({"a": [1]}))
    with pytest.raises(Invalid):
        encode_index(pa.table({"a": [1]}), series_schema().empty_table())
    old = rollup_schema_v1().empty_table()
    with pytest.raises(Invalid):
        encode_rollup(old)
    assert decode_rollup(encode_rollup(rollup_schema().empty_table())).num_rows == 0


texts = st.text(st.characters(codec="utf-8") | st.sampled_from("\x1e\x1fab"), min_size=1, max_size=6)


@given(
    series=st.lists(st.tuples(texts, st.dictionaries(texts, texts | st.just(""), max_size=3)), min_size=1, max_size=6)
)
@settings(max_examples=150, deadline=None)
def test_a_key_is_its_series_and_nothing_else(series: list[tuple[str, dict[str, str]]]) -> None:
    """Metric, agent and labels come back from a key, whatever characters they have; two series never share one."""
    held = batch([Sample(metric, START_NS, 1.0, labels=labels) for metric, labels in series])
    columns = held.columns
    wanted = [(columns.metric(n), "agent-a", columns.labels(n)) for n in range(len(columns.series_metric))]

    keys = series_keys(held)
    metrics, agents, labels = split_keys(keys)

    found = zip(metrics.to_pylist(), agents.to_pylist(), map(dict, labels.to_pylist()), strict=True)
    assert wanted == list(found)
    assert len(set(keys.to_pylist())) == len(wanted)
    distinct = {(agent, tuple(sorted(pairs.items()))) for _, agent, pairs in wanted}
    assert len(set(row_keys(agents, labels).to_pylist())) == len(distinct)


def test_an_hour_with_many_series_is_several_index_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk stays small; each lists the batches of its own series, and together they list all."""
    monkeypatch.setattr("lakebed.rollups.codec.chunk.SERIES_MAX", 3)
    held = [(n, batch([Sample(f"m{n}", START_NS, 1.0), Sample("all", START_NS, 2.0)], f"a{n}")) for n in range(5)]
    table = partials(held, (60,))
    reported = [
        RollupInputReport(n, f"{n:020d}-{'0' * 32}", "k", f"{n}" * 64, 9, START_NS, START_NS, 2) for n in range(5)
    ]

    made = [decode_index(data) for _, data in build_index(reported, list(noted(table).values()))]

    assert 4 == len(made)
    pairs = {
        (row["metric"], row["agent_id"], batches["manifest_id"][number].as_py())
        for batches, series in made
        for row in series.to_pylist()
        for number in row["batches"]
    }
    wanted = {(metric, f"a{n}", reported[n].manifest_id) for n in range(5) for metric in (f"m{n}", "all")}
    assert wanted == pairs
