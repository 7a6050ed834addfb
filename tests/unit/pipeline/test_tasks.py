"""What executors do with batches and records, and what a run reports of itself: no Spark, no bucket."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakebed.core.feed import FeedSlice
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.bronze import samples, topics
from lakebed.pipeline.bronze.numbering import (
    SampleWork,
    StepNote,
    TakenBatch,
    note_of,
    unnumbered,
    without,
)
from lakebed.pipeline.bronze.payloads import decoder, read_topic_contract, text_of, texts
from lakebed.pipeline.bronze.runs import QuarantinedObject
from support.delta_tables import Folder

SPEC = TableSpec("t", schema_json((("seq", "long"),)), stats=("seq",))


# Samples.


def numbers(*values: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"seq": pa.array(values, pa.int64())})


def test_numbers_in_a_doubled_range_are_left_out() -> None:
    """Both ends included, of each range."""
    assert [1, 4, 7] == samples.without(numbers(1, 2, 3, 4, 5, 6, 7), [(2, 3), (5, 6)]).column(0).to_pylist()
    assert [1, 2] == samples.without(numbers(1, 2), []).column(0).to_pylist()


def ingested(
    monkeypatch: pytest.MonkeyPatch, folder: Path, works: list[SampleWork], answers: dict[str, Any]
) -> list[Any]:
    def reads(feed: Any, pieces: Any, columns: Any, wanted: Any) -> Any:
        for piece in pieces:
            found = answers[piece.id]
            problem = found if isinstance(found, str) else ""
            yield SimpleNamespace(piece=piece, problem=problem, rows=None if problem else found)

    monkeypatch.setattr(samples, "reads", reads)
    place = Folder.at(folder)
    return list(samples._ingested(None, works, SPEC, place, place.filesystem()))


def test_a_task_writes_its_batches_and_tells_what_it_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are those that were written; doubled ones are counted apart; a problem names its object."""
    works = [
        SampleWork(FeedSlice("k1", 3, id="a"), ((2, 2),)),
        SampleWork(FeedSlice("k2", 9, id="b")),
        SampleWork(FeedSlice("k3", 2, id="c")),
    ]
    answers = {"a": numbers(1, 2, 3), "b": "damaged", "c": numbers(8, 9)}
    (reported,) = ingested(monkeypatch, tmp_path, works, answers)

    assert (4, 1, (QuarantinedObject("k2", "damaged", "b", 9),)) == (reported.rows, reported.doubled, reported.problems)
    assert [(4, {"seq": 1}, {"seq": 9})] == [(file.rows, file.low, file.high) for file in reported.files]


def test_a_task_begins_a_new_file_when_it_holds_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before is not counted again; a task with nothing but problems writes no file."""
    works = [SampleWork(FeedSlice(f"k{n}", 2, id=str(n)), ((0, 0),) if n == 0 else ()) for n in range(3)]
    answers = {str(n): numbers(2 * n, 2 * n + 1) for n in range(3)}
    monkeypatch.setattr(samples, "ROWS_PER_FILE", 3)
    first, second = ingested(monkeypatch, tmp_path, works, answers)
    assert [(3, 1, 1), (2, 0, 1)] == [
        (reported.rows, reported.doubled, len(reported.files)) for reported in (first, second)
    ]
    monkeypatch.setattr(samples, "ROWS_PER_FILE", 1000)
    monkeypatch.setattr(samples, "BYTES_PER_FILE", 16)
    assert 2 == len(ingested(monkeypatch, tmp_path, works, answers))
    (bad,) = ingested(monkeypatch, tmp_path, works[:1], {"0": "damaged"})
    assert (0, (), 1) == (bad.rows, bad.files, len(bad.problems))
    assert [] == ingested(monkeypatch, tmp_path, [], {})


def test_a_note_names_its_batches_by_series_and_can_forget_some() -> None:
    """Batches that could not be read take no numbers; what is taken out of a note may be taken again."""
    pieces = [
        FeedSlice("k1", id="a", series="s", first=1, last=5),
        FeedSlice("k2", id="b"),
        FeedSlice("k3", id="c", series="t"),
    ]
    note = note_of({"through_ns": 7}, pieces, looked_ns=9)

    assert (("s", "t"), 9, 1) == (note.series, note.looked_ns, note.version)
    assert (TakenBatch("a", 0, 1, 5), TakenBatch("b", -1, 0, -1), TakenBatch("c", 1, 0, -1)) == note.batches
    assert ["b", "c"] == [taken.id for taken in without(note, {"a"}).batches]
    assert [("", 0, -1), ("", 0, -1), ("t", 0, -1)] == [
        (one.series, one.first, one.last) for one in unnumbered(pieces, {"a"})
    ]
    assert StepNote({"through_ns": 1}) == msgspec.json.decode(
        msgspec.json.encode(StepNote({"through_ns": 1})), type=StepNote
    )


# Records of topics.

CONTRACT = (
    "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n  total: {type: double, from: sum}\n"
)


def decoded(frozen: bool, *payloads: bytes) -> list[dict[str, Any]]:
    made = read_topic_contract(CONTRACT, "o")
    rows = pa.RecordBatch.from_pydict(
        {
            "partition": pa.array([0] * len(payloads), pa.int32()),
            "offset": pa.array(range(len(payloads)), pa.int64()),
            "time": pa.array([datetime(2026, 11, 16, tzinfo=UTC)] * len(payloads), pa.timestamp("us", "UTC")),
            "value": pa.array(payloads, pa.binary()),
        }
    )
    found: list[dict[str, Any]] = topics._decoded(rows, decoder("json"), made.sources, frozen).to_pylist()
    return found


def test_a_record_becomes_text_of_each_field_or_a_problem() -> None:
    """Each counts as one row, keeps its place, and a field that no column requests is a problem only when frozen."""
    payloads = (b'{"id": 1, "sum": 1.50, "more": 1, "also": 2}', b"no json", b'{"id": 2}')
    first, bad, short = decoded(False, *payloads)

    assert ("1", "1.50", None, 1) == (first["id"], first["sum"], first["_problem"], first["_rows"])
    assert (None, None, True, 1, 1) == (
        bad["id"],
        bad["sum"],
        "not JSON" in bad["_problem"],
        bad["_rows"],
        bad["_offset"],
    )
    assert ("2", None, None, b'{"id": 2}') == (short["id"], short["sum"], short["_problem"], short["_value"])
    assert "also: not in the contract, which is frozen" == decoded(True, *payloads)[0]["_problem"]
    assert [None] == [one["_problem"] for one in decoded(True, b'{"id": 1}')]
    assert [] == decoded(False)


def test_an_unreadable_slice_is_one_row_that_counts_all_of_its_records() -> None:
    """With its key and the reason; the schema names the same columns in the same order."""
    made = read_topic_contract(CONTRACT, "o")
    batch = topics._unreadable(FeedSlice("llog/x", rows=40), "damaged", made.sources)
    (row,) = batch.to_pylist()

    assert ("llog/x", "damaged", 40, None) == (row["_key"], row["_problem"], row["_rows"], row["_offset"])
    assert batch.schema.names == [part.split("`")[1] for part in topics.schema(made).split(", ")]
    assert "`_rows` bigint" in topics.schema(made) and "`sum` string" in topics.schema(made)


TEXTS = [
    (None, None),
    ("x", "x"),
    (True, "true"),
    (False, "false"),
    (7, "7"),
    (date(2026, 11, 16), "2026-11-16"),
    (datetime(2026, 11, 16, 1, 2, 3, tzinfo=UTC), "2026-11-16T01:02:03+00:00"),
    (b"\xc3\xbc", "ü"),
    ({"a": [1, None]}, '{"a":[1,null]}'),
    ([1, "b"], '[1,"b"]'),
]


@pytest.mark.parametrize(("value", "text"), TEXTS, ids=[str(one[0]) for one in TEXTS])
def test_a_field_is_text_that_spark_reads_as_its_type(value: Any, text: str | None) -> None:
    """Nothing is rounded and nothing is Python's own spelling."""
    assert text == text_of(value)
    assert [text, None] == texts({"a": value}, ["a", "b"])
