"""Parts as executors see them: what is read, and the word for each thing that is wrong. No Spark, no bucket."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_kit import Folder
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.bronze import may_repeat
from lakebed.pipeline.bronze_parts import Asked, Draft, Seen, loading, rows_of, see, with_place
from lakebed.tick_manifest import BadManifest, Column, TickTable

COLUMNS = (Column("id", "long"), Column("note", "string"))


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


GOOD = parquet(note=["a", "b", "c"], id=[3, 1, 2])


def test_a_good_part_is_seen_with_its_keys() -> None:
    """Rows, range and uniqueness of the first key, whatever the order of columns."""
    assert Seen(0, 4, rows=3, unique=True, low=1, high=3) == see(GOOD, Asked(0, 4, "k", 3, len(GOOD)), COLUMNS, ("id",))
    twice = parquet(id=[1, 1], note=["a", "b"])
    assert not see(twice, Asked(0, 4, "k", 2), COLUMNS, ("id",)).unique


@pytest.mark.parametrize(
    ("error_class", "data", "rows"),
    [
        ("not_parquet", b"", 0),
        ("not_parquet", b"PAR1" + b"\x00" * 40 + b"PAR1", 0),
        ("not_parquet", GOOD[:-1], 3),
        ("row_count_mismatch", GOOD, 4),
        ("missing_column", parquet(id=[1]), 1),
        ("unknown_column", parquet(id=[1], note=["a"], extra=[1]), 1),
        ("wrong_type", parquet(id=["1"], note=["a"]), 1),
        ("wrong_type", parquet(id=[1], note=[["a"]]), 1),
        ("null_key", parquet(id=pa.array([None], pa.int64()), note=["a"]), 1),
    ],
)
def test_a_bad_part_is_told_by_its_word(error_class: str, data: bytes, rows: int) -> None:
    """Nothing is raised in the executor: the answer carries what is wrong."""
    seen = see(data, Asked(0, 1, "k", rows), COLUMNS, ("id",))

    assert error_class == seen.error_class
    assert seen.message


def test_a_part_of_another_size_is_refused() -> None:
    """The manifest's bytes are checked too."""
    assert see(GOOD, Asked(0, 1, "k", 3, 7), COLUMNS, ("id",)).error_class == "part_size_mismatch"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_part_is_read_or_refused(data: st.DataObject) -> None:
    """A flipped byte or a cut never ends in anything but rows or a word."""
    body = bytearray(GOOD)
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(body)))

    seen = see(bytes(body[cut:] if cut < 4 else body), Asked(0, 1, "k", 3), COLUMNS, ("id",))

    assert seen.error_class or seen.rows == 3


def test_nothing_is_cast_with_loss() -> None:
    """Nanoseconds that would go are refused; representations of one thing are not."""
    moment = (Column("at", "timestamp"),)
    fine = parquet(at=pa.array([1_000], pa.timestamp("ns")))
    lossy = parquet(at=pa.array([1_001], pa.timestamp("ns")))

    assert [pa.timestamp("us", tz="UTC")] == [batch.schema.field("at").type for batch in rows_of(fine, moment)]
    with pytest.raises(BadManifest, match="lose"):
        list(rows_of(lossy, moment))


def test_rows_know_their_place() -> None:
    """Part and position, counted over batches."""
    batches = [pa.record_batch({"id": [1, 2]}), pa.record_batch({"id": [3]})]

    placed = pa.Table.from_batches(list(with_place(iter(batches), 9)))

    assert ([9, 9, 9], [0, 1, 2]) == (placed["_file_seq"].to_pylist(), placed["_row"].to_pylist())


def seen(low: int | None, high: int | None, *, unique: bool = True, rows: int = 2) -> Seen:
    return Seen(0, 0, rows=rows, unique=unique, low=low, high=high)


@pytest.mark.parametrize(
    ("parts", "repeat"),
    [
        ([], False),
        ([seen(1, 5)], False),
        ([seen(1, 5, unique=False)], True),
        ([seen(6, 9), seen(1, 5)], False),
        ([seen(5, 9), seen(1, 5)], True),
        ([seen(None, None), seen(1, 5)], True),
        ([seen(None, None, rows=0), seen(1, 5)], False),
    ],
)
def test_keys_repeat_unless_their_ranges_prove_otherwise(parts: list[Seen], repeat: bool) -> None:
    """The costly look for duplicates is left out only where it cannot find any."""
    table = TickTable("t", "delta", COLUMNS, 0, (), ("id",))

    assert repeat == may_repeat(table, parts)


@pytest.mark.parametrize(
    ("low", "high", "unique", "taken"),
    [
        (1, 9, True, True),
        (1, 10, True, False),
        (20, 30, True, False),
        (21, 30, True, True),
        (12, 15, True, False),
        (1, 99, True, False),
        (1, 9, False, False),
        (None, None, True, False),
    ],
)
def test_a_part_is_written_at_once_only_when_no_key_of_it_can_be_in_the_table(
    low: int | None, high: int | None, unique: bool, taken: bool
) -> None:
    """A part whose first or last key is the last or first one of a file has to be merged with that file."""
    fields = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}'
    draft = Draft(TableSpec("t", fields, keys=("id",)), {}, datetime(2026, 11, 16, tzinfo=UTC), ((10, 20),))

    assert taken == draft.takes(Seen(0, 1, rows=3, unique=unique, low=low, high=high))
    assert not draft.takes(Seen(0, 1, rows=0, unique=unique, low=low, high=high))


def test_of_a_key_in_several_parts_the_highest_part_wins_in_whatever_order_they_are_listed(tmp_path: Path) -> None:
    """The manifest may list parts in any order: part 2 is later than part 1, and part 10 than both."""
    folder = Folder.at(tmp_path)
    fields = schema_json((("id", "long"), ("note", "string"), ("_file_seq", "long")))
    draft = Draft(TableSpec("t", fields, keys=("id",)), {}, datetime(2026, 11, 16, tzinfo=UTC))
    asked = []
    for seq, ids in ((10, [1]), (2, [1, 2]), (1, [1, 2, 3])):
        data = parquet(id=ids, note=[f"of {seq}"] * len(ids))
        Path(folder.path(f"parts/{seq}")).write_bytes(data)
        asked.append(Asked(0, seq, f"parts/{seq}", len(ids), len(data)))

    rows = loading(folder, asked, COLUMNS, draft)(folder.filesystem())

    found = {row["id"]: (row["note"], row["_file_seq"]) for row in rows.to_pylist()}
    assert {1: ("of 10", 10), 2: ("of 2", 2), 3: ("of 1", 1)} == found
    assert 3 == rows.num_rows
