"""Files of a table as tasks write and read them: sizes, bounds, partitions and columns. No Spark, no bucket."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FSSpecHandler, PyFileSystem

from lakebed.core.errors import Invalid
from lakebed.core.settings import Secret
from lakebed.delta.log import overlapping
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.tables import files, merge
from lakebed.pipeline.tables.scan import FILE_COLUMN, FileScan
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings
from support.delta_tables import Folder, read_by_task

KINDS = (("id", "long"), ("day", "string"), ("at", "timestamp"), ("note", "string"))
SPEC = TableSpec("t", schema_json(KINDS), keys=("id",), partition_by=("day",), stats=("at", "note"))
BARE = TableSpec("t", schema_json(KINDS[:1]), keys=("id",))
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def rows(**columns: Any) -> pa.Table:
    return pa.table(columns)


def described(batches: Any) -> list[DataFile]:
    return [msgspec.json.decode(text, type=DataFile) for batch in batches for text in batch["file"].to_pylist()]


def test_a_file_says_its_size_rows_bounds_and_nulls(tmp_path: Path) -> None:
    """A moment in microseconds; the partition is in its folder and not in the file."""
    table = rows(
        id=[3, 1, 2],
        day=["x", "x", "x"],
        at=pa.array([NOON, None, datetime(2026, 11, 16, 11, 59, 59, 7, tzinfo=UTC)], pa.timestamp("us", tz="UTC")),
        note=["b", "a", None],
    )
    (file,) = files.write_files(table, SPEC, Folder.at(tmp_path), Folder.at(tmp_path).filesystem())
    stored = tmp_path / "tables/t" / file.path

    assert (3, stored.stat().st_size, {"day": "x"}) == (file.rows, file.size, file.partition)
    assert {"id": 1, "at": "2026-11-16T11:59:59.000007Z", "note": "a"} == file.low
    assert {"id": 3, "at": "2026-11-16T12:00:00.000000Z", "note": "b"} == file.high
    assert {"id": 0, "at": 1, "note": 1} == file.nulls
    assert file.path.startswith("day=x/part-") and file.path.endswith(".parquet")
    assert ["id", "at", "note"] == pq.read_schema(stored).names


def test_each_partition_is_a_file_of_its_own_with_its_true_value(tmp_path: Path) -> None:
    """No value is a partition too; what a folder's name cannot hold is escaped there."""
    days = ["a", None, "b/c:d", "a", None]
    table = rows(id=[1, 2, 3, 4, 5], day=days, note=["n"] * 5)
    written = files.write_files(table, SPEC, Folder.at(tmp_path), Folder.at(tmp_path).filesystem())

    found = {file.partition["day"]: (file.rows, file.path.split("/")[0]) for file in written}
    assert {
        "a": (2, "day=a"),
        None: (2, "day=__HIVE_DEFAULT_PARTITION__"),
        "b/c:d": (1, "day=b%252Fc%253Ad"),
    } == found
    assert "a b%2Fc%25%3D%22%C3%BC" == files.folder_name('a b/c%="ü')


def test_two_partition_columns_make_a_file_for_each_pair(tmp_path: Path) -> None:
    """A missing value in one of them keeps rows of the other apart."""
    spec = TableSpec("t", schema_json((("id", "long"), ("p", "string"), ("q", "long"))), partition_by=("p", "q"))
    table = rows(id=[1, 2, 3, 4], p=["a", "a", None, "a"], q=pa.array([1, 2, 1, None], pa.int64()))
    written = files.write_files(table, spec, Folder.at(tmp_path), Folder.at(tmp_path).filesystem())

    assert [("a", "1"), ("a", "2"), ("a", None), (None, "1")] == sorted(
        ((file.partition["p"], file.partition["q"]) for file in written), key=lambda pair: (pair[0] is None, str(pair))
    )
    assert all(1 == file.rows for file in written)


def test_partition_values_are_texts_as_delta_writes_them() -> None:
    """Moments without a zone, booleans in small letters; an empty text is no value."""
    moments = pa.array([NOON, None], pa.timestamp("us", tz="UTC"))

    assert ["2026-11-16 12:00:00.000000", None] == files.partition_text(moments).to_pylist()
    assert ["true", "false"] == files.partition_text(pa.array([True, False])).to_pylist()
    assert [None, "a"] == files.partition_text(pa.array(["", "a"])).to_pylist()


def test_a_null_in_a_column_that_may_have_none_is_refused(tmp_path: Path) -> None:
    """Delta calls it an invariant, which every writer keeps."""
    schema = schema_json(KINDS[:1]).replace('"nullable":true', '"nullable":false')
    with pytest.raises(Invalid, match="id may not be null"):
        files.write_files(
            rows(id=[1, None]), TableSpec("t", schema), Folder.at(tmp_path), Folder.at(tmp_path).filesystem()
        )


def test_a_task_begins_a_new_file_when_enough_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows or by bytes, whichever comes first; what is left at the end is a file too, and nothing is none."""
    batches = [pa.RecordBatch.from_pydict({"id": [n, n + 1]}) for n in range(0, 10, 2)]
    task = files.writing(BARE, Folder.at(tmp_path))
    monkeypatch.setattr(files, "ROWS_PER_FILE_MAX", 4)
    by_rows = described(task(iter(batches)))
    monkeypatch.setattr(files, "ROWS_PER_FILE_MAX", 1000)
    monkeypatch.setattr(files, "BYTES_PER_FILE_MAX", 6 * 8)
    by_bytes = described(task(iter(batches)))

    assert [4, 4, 2] == [file.rows for file in by_rows]
    assert [6, 4] == [file.rows for file in by_bytes]
    assert [] == described(task(iter([])))
    assert [(0, 3), (4, 7), (8, 9)] == [(file.low["id"], file.high["id"]) for file in by_rows]


@pytest.mark.parametrize("keys", [["a", "k" * 300], ["k" * 257, "z"], ["k" * 5000, "k" * 6000]])
def test_a_key_of_any_length_is_just_a_key(tmp_path: Path, keys: list[str]) -> None:
    """What a task says of its file can be read, and the file is found by each of its keys."""
    spec = TableSpec("t", schema_json((("id", "string"),)), keys=("id",))
    task = files.writing(spec, Folder.at(tmp_path))

    (file,) = described(task(iter([pa.RecordBatch.from_pydict({"id": keys})])))

    assert [[file], [file]] == [overlapping([file], "id", key, key) for key in keys]
    assert [] == overlapping([file], "id", "zz", "zzz")


def test_files_are_read_with_the_wanted_columns_in_their_order(tmp_path: Path) -> None:
    """A column that a file is older than is null, a partition's value is text from the log, the file may be named."""
    folder = Folder.at(tmp_path)
    (file,) = files.write_files(rows(id=[1, 2], day=["x", "x"]), SPEC, folder, folder.filesystem())
    state = Snapshot(0, SPEC.schema_json, ("day",), (msgspec.structs.replace(file, partition={"day": "true value"}),))
    types = {"note": pa.string(), "day": pa.string(), "id": pa.int64()}

    found = read_by_task(folder, SPEC.root, state, types, with_file=True)
    plain = read_by_task(folder, SPEC.root, state, {"id": pa.int64()})

    assert ["note", "day", "id", FILE_COLUMN] == list(found[0])
    assert {"note": None, "day": "true value", "id": 1, FILE_COLUMN: file.path} == found[0]
    assert [{"id": 1}, {"id": 2}] == plain


def test_dense_files_lay_columns_out_by_their_kind() -> None:
    """Text and maps of text by dictionary, whole numbers and moments by differences, the rest as it is."""
    schema = pa.schema(
        [
            ("s", pa.string()),
            ("b", pa.binary()),
            ("m", pa.map_(pa.string(), pa.string())),
            ("i", pa.int64()),
            ("t", pa.timestamp("us")),
            ("d", pa.float64()),
        ]
    )
    found = files.encodings(schema)

    assert ["s", "b", "m.key_value.key", "m.key_value.value"] == found["use_dictionary"]
    assert {"i": "DELTA_BINARY_PACKED", "t": "DELTA_BINARY_PACKED"} == found["column_encoding"]


# Merging.


def merged(folder: Folder, paths: list[str], coming: pa.Table) -> list[merge.Merged]:
    task = merge.merging(BARE, folder, lambda _: coming, pa.schema([("id", pa.int64())]))
    asked = pa.RecordBatch.from_pydict({"path": paths})
    return [
        msgspec.json.decode(text, type=merge.Merged)
        for batch in task(iter([asked]))
        for text in batch["file"].to_pylist()
    ]


def test_a_file_is_written_again_only_when_rows_leave_it(tmp_path: Path) -> None:
    """One that loses all of its rows leaves none; the task without a path writes what comes."""
    folder = Folder.at(tmp_path)

    def put(*ids: int) -> str:
        (file,) = files.write_files(rows(id=list(ids)), BARE, folder, folder.filesystem())
        return file.path

    untouched, part, whole = put(1, 2), put(3, 4, 5), put(6)
    found = merged(folder, [merge.COMING, untouched, part, whole], rows(id=[4, 6, 7]))

    assert [(merge.COMING, 3, [3]), (untouched, 0, []), (part, 1, [2]), (whole, 1, [])] == [
        (one.path, one.rows, [file.rows for file in one.files]) for one in found
    ]
    assert (3, 5) == (found[2].files[0].low["id"], found[2].files[0].high["id"])
    assert [(merge.COMING, 0, 0)] == [
        (one.path, one.rows, len(one.files))
        for one in merged(folder, [merge.COMING], rows(id=pa.array([], pa.int64())))
    ]


# The bucket, as plain values.


def test_a_location_is_what_the_store_settings_say() -> None:
    """Slashes at the ends aside; its text shows no secret; a store that is no S3 bucket has no tables."""
    settings = StoreSettings(
        url="s3://lake/",
        prefix="/a/b/",
        endpoint="http://host:1",
        region="eu",
        access_key_id=Secret("id"),
        secret_access_key=Secret("key"),
    )
    found = Location.of(settings)

    assert ("lake", "a/b", "http://host:1", "eu", "id", "key") == msgspec.structs.astuple(found)
    assert ("lake/a/b/k", "s3://lake/a/b/k") == (found.path("k"), found.uri("k"))
    assert "Location(lake/a/b)" == repr(found)
    assert "lake/k" == Location.of(StoreSettings(url="s3://lake")).path("k")
    with pytest.raises(Invalid, match="memory:"):
        Location.of(StoreSettings(url="memory:"))


def test_a_locations_options_are_those_of_delta_rs() -> None:
    """Plain HTTP is allowed only where the endpoint asks for it; keys are given together or left to the machine."""
    told = Location("lake", "", "http://host:1", "eu", "id", "key").storage_options()
    assert {
        "AWS_REGION": "eu",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": "http://host:1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
    } == told
    assert {"AWS_REGION": "eu", "AWS_ALLOW_HTTP": "false"} == Location("l", "", "", "eu", "", "").storage_options()
    assert "false" == Location("l", "", "https://h", "eu", "", "").storage_options()["AWS_ALLOW_HTTP"]


class CountedFile(io.FileIO):
    """A file that records what is read of it, in order: place and size."""

    reads: list[tuple[int, int]]

    def read(self, size: int | None = -1, /) -> bytes:
        begin, found = self.tell(), super().read(size)
        self.reads.append((begin, len(found)))
        return found


class CountedFolder(FSSpecHandler):
    """What pyarrow needs of a file system to read one file; every read is noted."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reads: list[tuple[int, int]] = []

    def get_type_name(self) -> str:
        return "counted"

    def open_input_file(self, path: str) -> pa.PythonFile:
        file = CountedFile(path)
        file.reads = self.reads
        return pa.PythonFile(file, mode="r")


@pytest.mark.parametrize(("between", "requests"), [(200_000, 1), (3_000_000, 2)])
def test_columns_that_are_near_each_other_are_fetched_together(tmp_path: Path, between: int, requests: int) -> None:
    """One request where the bytes between them cost less than a second one; what is far is left out."""
    count = 1_000
    wide = [Random(n).randbytes(between // count) for n in range(count)]
    table = rows(id=pa.array(range(count), pa.int64()), body=wide, value=[n / 7 for n in range(count)])
    kinds = schema_json((("id", "long"), ("body", "binary"), ("value", "double")))
    (file,) = files.write_files(table, TableSpec("t", kinds), Folder.at(tmp_path), Folder.at(tmp_path).filesystem())
    handler = CountedFolder()
    scan = FileScan.of(Folder.at(tmp_path), "tables/t", Snapshot(0, kinds, files=(file,)), ["value", "id"])

    found = pa.Table.from_batches(scan.batches(file, PyFileSystem(handler)))

    assert found.equals(table.select(["value", "id"]))
    end = file.size - 8 - int.from_bytes((tmp_path / "tables/t" / file.path).read_bytes()[-8:-4], "little")
    data = [(begin, size) for begin, size in handler.reads if begin < end and begin + size <= end]
    assert requests == len(data)
    assert (sum(size for _, size in data) < between) == (requests == 2)
