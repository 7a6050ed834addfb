"""Which files of some versions have the rows that these versions wrote. Pure."""

from __future__ import annotations

import pytest

from lakebed.delta.log import Commit, apply, decode, encode
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.models.changes import apart, written_files
from lakebed.pipeline.tables.changes import FileChanges

SPEC = TableSpec("t", schema_json((("id", "long"),)), keys=("id",))


def file(name: str, *, copied: bool = False) -> DataFile:
    return DataFile(f"{name}.parquet", 1, 1, copied=copied)


OLD, NEW, COPY = file("old"), file("new"), file("copy", copied=True)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([FileChanges(5, (NEW,))], ["new"]),
        ([FileChanges(5, (NEW, COPY), (OLD,))], ["new"]),
        ([FileChanges(5), FileChanges(6, (NEW,))], ["new"]),
        ([FileChanges(5, (NEW,), (OLD,))], None),
        ([FileChanges(5, (COPY,), (OLD,)), FileChanges(6, (NEW,))], ["new"]),
        ([FileChanges(5, (NEW,)), FileChanges(6, (COPY,), (NEW,))], None),
        ([FileChanges(5, (NEW,)), FileChanges(6, (), (file("joined"),))], None),
        ([FileChanges(5, (), (OLD,))], []),
        ([], []),
    ],
    ids=[
        "an append brought its rows",
        "an upsert wrote its rows, and copied the others",
        "a compaction changed nothing",
        "a replace, or another engine's upsert, is not known",
        "a delete of older rows is no matter",
        "a delete of rows that came since is",
        "and so is one of a file that rows may have been moved to",
        "a delete alone wrote nothing",
        "nothing happened",
    ],
)
def test_files_with_written_rows_are_told_from_copies(versions: list[FileChanges], expected: list[str] | None) -> None:
    """Or not told: then both versions are compared."""
    found = written_files(versions, lambda: {"old.parquet"})

    names = None if found is None else [one.path.removesuffix(".parquet") for _, some in found for one in some]
    assert expected == names


def test_the_log_keeps_which_files_were_copied() -> None:
    """In a tag that other engines ignore; both versions' own files are told apart by path."""
    data = encode(Commit("MERGE", (NEW, COPY), spec=SPEC, table_id="x"), attempt_id="a", now_ms=1)

    state = apply(Snapshot(), 0, decode(data, "key"), "key")

    assert {"new.parquet": False, "copy.parquet": True} == {one.path: one.copied for one in state.files}
    assert ([OLD], [NEW]) == apart(Snapshot(files=(OLD, COPY)), Snapshot(files=(COPY, NEW)))
