"""Parts as executors check_part them: what is read, and the word for each thing that is wrong. No Spark, no bucket."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Unavailable
from lakebed.delta.model import CommitResult, Snapshot, TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.bronze import parts as bronze_parts
from lakebed.pipeline.bronze.drift import Fit
from lakebed.pipeline.bronze.parts import (
    Draft,
    PartReport,
    PartRequest,
    check_part,
    checking_parts,
    fetch,
    loading,
    rows_of,
    with_place,
)
from lakebed.pipeline.bronze.ticks import _bounds, _check_keys, _result, may_repeat
from lakebed.ticks.model import BadManifest, TickColumn, TickTable
from support.delta_tables import Folder

COLUMNS = (TickColumn("id", "long"), TickColumn("note", "string"))


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


GOOD = parquet(note=["a", "b", "c"], id=[3, 1, 2])


def test_a_good_part_is_seen_with_its_keys() -> None:
    """Rows, range and uniqueness of the first key, whatever the order of columns."""
    assert PartReport(0, 4, rows=3, unique=True, low=1, high=3) == check_part(
        GOOD, PartRequest(0, 4, "k", 3, len(GOOD)), COLUMNS, ("id",)
    )
    twice = parquet(id=[1, 1], note=["a", "b"])
    assert not check_part(twice, PartRequest(0, 4, "k", 2), COLUMNS, ("id",)).unique


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
    seen = check_part(data, PartRequest(0, 1, "k", rows), COLUMNS, ("id",))

    assert error_class == seen.error_class
    assert seen.message


def test_a_part_of_another_size_is_refused() -> None:
    """The manifest's bytes are checked too."""
    assert check_part(GOOD, PartRequest(0, 1, "k", 3, 7), COLUMNS, ("id",)).error_class == "part_size_mismatch"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_part_is_read_or_refused(data: st.DataObject) -> None:
    """A flipped byte or a cut never ends in anything but rows or a word."""
    body = bytearray(GOOD)
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(body)))

    seen = check_part(bytes(body[cut:] if cut < 4 else body), PartRequest(0, 1, "k", 3), COLUMNS, ("id",))

    assert seen.error_class or seen.rows == 3


def test_nothing_is_cast_with_loss() -> None:
    """Nanoseconds that would go are refused; representations of one thing are not."""
    moment = (TickColumn("at", "timestamp"),)
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


def seen(low: int | None, high: int | None, *, unique: bool = True, rows: int = 2) -> PartReport:
    return PartReport(0, 0, rows=rows, unique=unique, low=low, high=high)


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
def test_keys_repeat_unless_their_ranges_prove_otherwise(parts: list[PartReport], repeat: bool) -> None:
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

    assert taken == draft.takes(PartReport(0, 1, rows=3, unique=unique, low=low, high=high))
    assert not draft.takes(PartReport(0, 1, rows=0, unique=unique, low=low, high=high))


def test_of_a_key_in_several_parts_the_highest_part_wins_in_whatever_order_they_are_listed(tmp_path: Path) -> None:
    """The manifest may list parts in any order: part 2 is later than part 1, and part 10 than both."""
    folder = Folder.at(tmp_path)
    fields = schema_json((("id", "long"), ("note", "string"), ("_file_seq", "long")))
    draft = Draft(TableSpec("t", fields, keys=("id",)), {}, datetime(2026, 11, 16, tzinfo=UTC))
    requested = []
    for seq, ids in ((10, [1]), (2, [1, 2]), (1, [1, 2, 3])):
        data = parquet(id=ids, note=[f"of {seq}"] * len(ids))
        Path(folder.path(f"parts/{seq}")).write_bytes(data)
        requested.append(PartRequest(0, seq, f"parts/{seq}", len(ids), len(data)))

    rows = loading(folder, requested, COLUMNS, draft)(folder.filesystem())

    found = {row["id"]: (row["note"], row["_file_seq"]) for row in rows.to_pylist()}
    assert {1: ("of 10", 10), 2: ("of 2", 2), 3: ("of 1", 1)} == found
    assert 3 == rows.num_rows


TABLE = TickTable("t", "delta", COLUMNS, 10, (), ("id",))


def test_the_bounds_of_a_tick_are_those_of_its_parts_with_rows() -> None:
    """Unknown as soon as one part's are; a part without rows reports nothing."""
    assert (1, 9) == _bounds([seen(4, 9), seen(1, 5), seen(None, None, rows=0)])
    assert [None, None] == [_bounds([]), _bounds([seen(1, 5), seen(None, 9)])]


@pytest.mark.parametrize(
    ("held", "discarded", "mode", "refused"),
    [
        (Snapshot(3, keys=("id",)), (), "delta", False),
        (Snapshot(3, keys=("note",)), (), "delta", True),
        (Snapshot(3, keys=("note",)), (), "full", False),
        (Snapshot(), (), "delta", False),
        (Snapshot(3, keys=("id",)), ("id",), "full", True),
    ],
)
def test_a_delta_has_the_keys_of_its_table(
    held: Snapshot, discarded: tuple[str, ...], mode: Any, refused: bool
) -> None:
    """A full may change them; a key that drift leaves out is refused in either mode."""
    table = TickTable("t", mode, COLUMNS, 0, (), ("id",))
    if not refused:
        return _check_keys(table, held, Fit({}, discarded=discarded))
    with pytest.raises(BadManifest) as caught:
        _check_keys(table, held, Fit({}, discarded=discarded))
    assert "keys_changed" == caught.value.detail["error_class"]
    return None


def test_what_a_tick_did_adds_up() -> None:
    """A delta keeps what it inserted and replaced, a full only what it inserted; the rest were duplicates."""
    done = CommitResult(5, rows_inserted=6, rows_replaced=3, repeated=True)
    fitted = Fit({}, added=("a",), discarded=("d",))
    delta = _result(TABLE, done, fitted)
    full = _result(TickTable("t", "full", COLUMNS, 10, (), ("id",)), done, fitted)

    assert (1, 4) == (delta.duplicates, full.duplicates)
    assert ("t", 5, 10, 6, 3, True, ("a",), ("d",)) == (
        delta.name,
        delta.version,
        delta.rows_in,
        delta.rows_inserted,
        delta.rows_replaced,
        delta.repeated,
        delta.added,
        delta.discarded,
    )


def test_a_part_is_fetched_whole_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself is allowed; one byte more is refused as the part's fault."""
    folder = Folder.at(tmp_path)
    Path(folder.path("k")).write_bytes(b"12345")
    monkeypatch.setattr(bronze_parts, "PART_BYTES_MAX", 5)
    assert b"12345" == fetch(folder.filesystem(), folder, "k").to_pybytes()
    monkeypatch.setattr(bronze_parts, "PART_BYTES_MAX", 4)
    with pytest.raises(BadManifest) as caught:
        fetch(folder.filesystem(), folder, "k")
    assert "part_too_large" == caught.value.detail["error_class"]


def test_a_part_of_which_not_all_was_received_is_fetched_again(tmp_path: Path) -> None:
    """The bucket's fault, which a retry corrects: a refused tick would wait for a person."""
    folder = Folder.at(tmp_path)
    Path(folder.path("k")).write_bytes(b"12345")

    class Cut:
        def open_input_file(self, path: str) -> Any:
            file = folder.filesystem().open_input_file(path)
            whole = type("File", (), {"size": lambda self: file.size(), "__enter__": lambda self: self})
            whole.read_buffer = lambda self, size: file.read_buffer(size - 1)  # type: ignore[attr-defined]
            whole.__exit__ = lambda self, *_: file.close()  # type: ignore[attr-defined]
            return whole()

    with pytest.raises(Unavailable, match="4 of 5 bytes"):
        fetch(Cut(), folder, "k")


def test_a_part_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a row of it is read."""
    monkeypatch.setattr(bronze_parts, "UNPACKED_BYTES_MAX", 1)
    assert "part_too_large" == check_part(GOOD, PartRequest(0, 1, "k", 3), COLUMNS, ()).error_class


def test_the_looking_task_writes_a_part_whose_keys_are_new(tmp_path: Path) -> None:
    """With lineage, the part's number and the time of the tick; without a draft it only looks."""
    folder = Folder.at(tmp_path)
    Path(folder.path("parts/1")).write_bytes(GOOD)
    kinds = (("id", "long"), ("note", "string"), ("_tick_id", "string"), ("_file_seq", "integer"))
    spec = TableSpec("t", schema_json((*kinds, ("_ingested_at", "timestamp"), ("older", "string"))), keys=("id",))
    at = datetime(2026, 11, 16, tzinfo=UTC)
    draft = Draft(spec, {"_tick_id": "tick"}, at, ((10, 20),))
    requested = [PartRequest(table, 7, "parts/1", 3, len(GOOD)) for table in (0, 1)]
    batch = pa.RecordBatch.from_pydict({"request": [msgspec.json.encode(one).decode() for one in requested]})
    (reported,) = checking_parts(folder, [COLUMNS, COLUMNS], [("id",), ("id",)], [draft, None])(iter([batch]))
    first, second = (msgspec.json.decode(text, type=PartReport) for text in reported["report"].to_pylist())

    assert (1, 0, 1, 3, 3) == (len(first.files), len(second.files), first.low, first.high, first.rows)
    row = pq.read_table(folder.path(f"{spec.root}/{first.files[0].path}")).to_pylist()[0]
    assert {"id": 3, "note": "a", "_tick_id": "tick", "_file_seq": 7, "_ingested_at": at, "older": None} == row
    assert (0, 1) == (first.table, second.table)
