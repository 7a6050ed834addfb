"""Deletes and upserts of a table's files, and reads with a condition, in this process: no Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, Stale
from lakebed.core.ids import Ids
from lakebed.delta.log import Commit, fields_of
from lakebed.delta.model import CommitResult, DataFile, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.delta.predicate import Predicate, chosen, parse_predicate
from lakebed.delta.types import arrow_type
from lakebed.pipeline.models.changes import written_files
from lakebed.pipeline.tables import changes, files, rewrite
from lakebed.pipeline.tables import merge as merging
from lakebed.pipeline.tables import table as tables
from lakebed.pipeline.tables.scan import FileScan, row_groups, scan
from lakebed.pipeline.tables.table import Table
from lakebed.store.memory import MemoryStore
from support.delta_tables import Folder
from support.runtimes import runtime_on

COLUMNS = (("id", "long"), ("name", "string"), ("day", "string"), ("value", "double"))
SPEC = TableSpec("t", schema_json(COLUMNS), keys=("id",), partition_by=("day",), stats=("name",))


class World:
    """One table in a folder, written without Spark."""

    def __init__(self, folder: Path, spec: TableSpec = SPEC) -> None:
        self.spec, self.store, self.location = spec, MemoryStore(clock=ManualClock()), Folder.at(folder)
        self.folder = folder
        self.table = self.opened()

    def opened(self) -> Table:
        runtime = runtime_on(self.store, ManualClock(), Ids())
        return Table(None, self.spec, runtime, location=self.location)

    def written(self, ids: Sequence[int], name: str = "x", day: str = "mon") -> list[DataFile]:
        count = len(ids)
        rows = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "name": pa.array([f"{name}{n}" for n in ids], pa.string()),
                "day": pa.array([day] * count, pa.string()),
                "value": pa.array([n / 2 for n in ids], pa.float64()),
            }
        )
        return files.write_files(rows, self.spec, self.location, self.location.filesystem())

    def append(self, ids: Sequence[int], name: str = "x", day: str = "mon") -> list[DataFile]:
        made = self.written(ids, name, day)
        self.table.append_files(made)
        return made

    def rows(self, condition: str = "", columns: Sequence[str] = ()) -> list[dict[str, Any]]:
        predicate = parse_predicate(condition) if condition else Predicate()
        state = self.opened().snapshot()
        found = scan(self.location, self.spec.root, state, columns=columns, predicate=predicate)
        return list(found.to_pylist())

    def names(self) -> dict[int, str]:
        found = self.rows(columns=["id", "name"])
        assert len(found) == len({row["id"] for row in found})
        return {row["id"]: row["name"] for row in found}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_delete_removes_what_matches_and_writes_only_those_files(world: World) -> None:
    """Files without a matching row stay as they are; a file whose rows all match leaves the log."""
    (kept,) = world.append(range(100, 110))
    world.append(range(10))
    world.append([20], day="tue")

    done = world.table.delete("id in (3, 4, 20) and name != 'x4'")

    assert (2, 1, 2) == (done.rows_removed, done.files_added, done.files_removed)
    assert sorted(world.names()) == [0, 1, 2, 4, 5, 6, 7, 8, 9, *range(100, 110)]
    assert kept.path in {file.path for file in world.table.snapshot().files}


def test_a_delete_that_matches_nothing_makes_no_version(world: World) -> None:
    """There is nothing to record."""
    world.append(range(10))

    done = world.table.delete("id = 11")

    assert done.repeated
    assert world.table.snapshot().version == 0


def test_a_delete_without_a_condition_is_refused(world: World) -> None:
    """An empty condition is a mistake, not a wish to lose a table."""
    world.append(range(3))

    with pytest.raises(Invalid, match="condition"):
        world.table.delete(Predicate())
    with pytest.raises(Invalid, match="nope"):
        world.table.delete("nope = 1")


def test_an_upsert_of_written_files_counts_exactly(world: World) -> None:
    """Inserted and replaced are exact, also when a row moves to another partition."""
    world.append(range(10), "old")
    world.append(range(10, 20), "old", "tue")

    done = rewrite.upsert_files(world.table, world.written([5, 15, 25], "new", "wed"), WriteBatch("a", 1))
    again = rewrite.upsert_files(world.table, world.written([5, 15, 25], "new", "wed"), WriteBatch("a", 1))

    assert (1, 2) == (done.rows_inserted, done.rows_replaced)
    assert again.repeated
    expected = {n: f"{'new' if n in (5, 15, 25) else 'old'}{n}" for n in [*range(20), 25]}
    assert expected == world.names()


def changed(world: World, version: int, columns: dict[str, pa.DataType]) -> list[tuple[Any, ...]]:
    (change,) = asyncio.run(changes.file_changes(world.store, SPEC.root, version - 1, version))
    wanted = FileScan(world.location, SPEC.root, fields_of(SPEC.schema_json), columns)
    batches = changes.changed(wanted, change, SPEC.keys, world.location.filesystem())
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_an_upsert_deletes_keys_in_the_same_version(world: World) -> None:
    """Counts are exact, keys that are not there are no matter, and readers of changes see what went."""
    world.append(range(10), "old")
    world.append(range(10, 20), "old", "tue")

    done = rewrite.upsert_files(
        world.table, world.written([5, 25], "new"), WriteBatch("a", 1), deleted=world.written([6, 7, 15, 99])
    )
    again = rewrite.upsert_files(world.table, world.written([5, 25], "new"), WriteBatch("a", 1))
    only = rewrite.upsert_files(world.table, [], WriteBatch("a", 2), deleted=world.written([8]))
    nothing = rewrite.upsert_files(world.table, [], WriteBatch("a", 3), deleted=world.written([8]))

    assert (1, 1, 3) == (done.rows_inserted, done.rows_replaced, done.rows_removed)
    assert (True, 2) == (again.repeated, again.version)
    assert (0, 0, 1) == (only.rows_inserted, only.rows_replaced, only.rows_removed)
    assert (4, 0, False) == (nothing.version, nothing.rows_removed, nothing.repeated)
    expected = {n: f"old{n}" for n in range(20) if n not in (5, 6, 7, 8, 15)} | {5: "new5", 25: "new25"}
    assert expected == world.names()
    gone = [row for version in (2, 3) for row in changed(world, version, {"id": pa.int64()}) if row[1] == "delete"]
    assert [(6, "delete", 2), (7, "delete", 2), (8, "delete", 3), (15, "delete", 2)] == sorted(gone)


def test_an_upsert_that_also_deletes_cannot_be_taken_for_one_that_only_writes(world: World) -> None:
    """A model that is given changes compares both sides then: rows that are gone are nowhere in what was written."""
    world.append(range(10), "old")
    rewrite.upsert_files(world.table, world.written([5], "new"), WriteBatch("a", 1))
    rewrite.upsert_files(world.table, world.written([6], "new"), WriteBatch("a", 2), deleted=world.written([7]))

    def told(version: int) -> Any:
        found = asyncio.run(changes.file_changes(world.store, SPEC.root, version - 1, version))
        return written_files(found, lambda: [file.path for file in world.table.snapshot(version - 1).files])

    ((version, files),) = told(1)
    assert (1, [1]) == (version, [file.rows for file in files])
    assert told(2) is None


class Merging:
    """In place of Spark's frames: the task runs here, for each path that it is given; `between` is done after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.between: list[Callable[[], Any]] = []
        self.paths: list[list[str]] = []
        monkeypatch.setattr(tables, "in_arrow", self.run)

    def createDataFrame(self, rows: Sequence[tuple[str]], schema: str) -> Any:
        return pa.RecordBatch.from_pydict({"path": [path for (path,) in rows]})

    def run(self, paths: Any, task: Any, schema: str) -> Any:
        self.paths.append(paths["path"].to_pylist())
        found = [{"file": text} for one in task(iter([paths])) for text in one["file"].to_pylist()]
        if self.between:
            self.between.pop()()
        return SimpleNamespace(collect=lambda: found)


def test_a_merge_takes_the_rows_that_come_out_of_the_files_that_may_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly once, on the table that won a race; files without such a key stay, and many files are for an upsert."""
    world = World(tmp_path, TableSpec("t", schema_json(COLUMNS), keys=("id",)))
    spark = Merging(monkeypatch)
    world.table.spark = spark
    (far,) = world.append(range(100, 110), "old")
    (near,) = world.append([1, 9], "old")
    world.append(range(10, 15), "old")
    coming = {"id": [3, 10, 11, 20], "name": ["new"] * 4, "day": ["mon"] * 4, "value": [0.5] * 4}
    other = world.opened()
    spark.between = [lambda: other.append_files(world.written([3, 4], "theirs"))]

    def merge(batch: WriteBatch) -> CommitResult | None:
        return world.table.merge(lambda filesystem: pa.table(coming), batch, bounds=(3, 20))

    done, again = merge(WriteBatch("a", 1)), merge(WriteBatch("a", 1))
    with monkeypatch.context() as patched:
        patched.setattr(merging, "FILES_MAX", 1)
        many = merge(WriteBatch("a", 2))

    assert done is not None and again is not None
    assert (4, 1, 3, False, True, None) == (
        done.version, done.rows_inserted, done.rows_replaced, done.repeated, again.repeated, many,
    )  # fmt: skip
    kept = {file.path for file in world.opened().snapshot().files}
    assert {far.path, near.path} <= kept and [3, 4] == [len(paths) for paths in spark.paths]
    expected = {n: f"old{n}" for n in (1, 9, 12, 13, 14, *range(100, 110))}
    assert expected | {4: "theirs4"} | dict.fromkeys((3, 10, 11, 20), "new") == world.names()
    assert [True] == [file.copied for file in world.opened().snapshot().files if file.rows == 3]


@pytest.mark.parametrize(
    ("row", "values", "goes"),
    [
        ('{"customer":"c-1","n":5}', {"customer": "c-1"}, True),
        ('{"customer":"c-1","n":5}', {"customer": "c-1", "n": "5"}, True),
        ('{"customer":"c-1","n":5}', {"customer": "c-1", "n": "6"}, False),
        ('{"customer":"c-1"}', {"customer": "c-1", "n": "5"}, False),
        ('{"customer":"c-10"}', {"customer": "c-1"}, False),
        ('{"customer":"007"}', {"customer": "7"}, False),
        ('{"customer":"1e2"}', {"customer": "100"}, False),
        ('{"n":5.00}', {"n": "5"}, True),
        ('{"n":12345678901234567.89}', {"n": "12345678901234567.89"}, True),
        ('{"n":12345678901234567.89}', {"n": "12345678901234567.88"}, False),
        ('{"n":5}', {"n": "five"}, False),
        ('{"active":true}', {"active": "true"}, True),
        ('{"active":true}', {"active": "1"}, False),
        ('{"active":false}', {"active": "true"}, False),
        ('{"n":null}', {"n": "None"}, False),
        ('{"n":[5]}', {"n": "5"}, False),
        (None, {"n": "5"}, False),
        ("no JSON", {"n": "5"}, False),
        ("[5]", {"n": "5"}, False),
    ],
)
def test_a_quarantined_row_goes_by_the_values_that_its_text_has(
    row: str | None, values: dict[str, str], goes: bool
) -> None:
    """Numbers by what they are worth, texts letter by letter as in the table that they came from: 007 is not 7."""
    removal = rewrite.RowRemoval(values=values, column="_row")
    rows = pa.table({"_row": pa.array(['{"other":1}', row], pa.string())})

    assert ([0] if goes else [0, 1]) == removal.stays(rows, {}).to_pylist()
    assert ["_row"] == removal.columns


def test_to_count_writes_nothing(world: World) -> None:
    """A dry run leaves no files that only a vacuum would find."""
    (file,) = world.append(range(10))
    before = sorted(world.folder.rglob("*.parquet"))

    (found,) = rewrite.count(world.table, rewrite.RowRemoval(parse_predicate("id < 3").typed(SPEC.schema_json)), [file])

    assert ((3, ()), before) == ((found.rows, found.files), sorted(world.folder.rglob("*.parquet")))


def test_a_key_that_comes_twice_is_refused_before_anything_changes(world: World) -> None:
    """Which of the two would stay is not for the table to decide."""
    world.append(range(10))

    with pytest.raises(Invalid, match="more than once"):
        rewrite.upsert_files(world.table, world.written([3, 3]), None)

    assert world.table.snapshot().version == 0


def test_an_upsert_that_lost_a_race_takes_the_key_out_of_the_new_file_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another writer commits meanwhile is looked at before ours follows, and files are not read twice."""
    world.append(range(10), "old")
    read: list[str] = []
    original, other = rewrite.Rewriting.run, World.opened(world)

    def run(self: rewrite.Rewriting, file: DataFile, filesystem: Any) -> rewrite.Rewritten:
        read.append(file.path)
        if len(read) == 1:
            other.append_files(world.written([30, 31], "other"))
        return original(self, file, filesystem)

    monkeypatch.setattr(rewrite.Rewriting, "run", run)

    done = rewrite.upsert_files(world.table, world.written([3, 30], "new"), None)

    assert (0, 2) == (done.rows_inserted, done.rows_replaced)
    assert ("new3", "new30", "other31") == tuple(world.names()[n] for n in (3, 30, 31))
    assert len(read) == len(set(read)) == 2


def test_an_upsert_that_deletes_counts_once_however_often_it_is_planned(world: World) -> None:
    """After a lost race it counts what it deletes anew, on the table that won."""
    world.append(range(10), "old")
    other, original, raced = world.opened(), world.table.commit_on, list[CommitResult]()

    def commit_on(state: Any, *args: Any) -> CommitResult:
        if not raced:
            raced.append(other.append_files(world.written([30, 31], "other")))
        return original(state, *args)

    world.table.commit_on = commit_on  # type: ignore[method-assign]

    done = rewrite.upsert_files(world.table, world.written([5], "new"), None, deleted=world.written([6, 7, 30]))

    assert (0, 1, 3) == (done.rows_inserted, done.rows_replaced, done.rows_removed)
    assert {n for n in (*range(10), 31) if n not in (6, 7)} == set(world.names())


keys = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["a", "b"])), unique=True, max_size=20)


@given(keys, keys)
def test_what_stays_is_what_does_not_come(held: list[tuple[int, str]], coming: list[tuple[int, str]]) -> None:
    """As a loop over rows would do it, by one key or by several."""

    def table(pairs: list[tuple[int, str]]) -> pa.Table:
        return pa.table(
            {"id": pa.array([n for n, _ in pairs], pa.int64()), "k": pa.array([k for _, k in pairs], pa.string())}
        )

    types = {"id": pa.int64(), "k": pa.string()}
    both = rewrite.RowRemoval(keys=table(coming)).stays(table(held), types)
    one = rewrite.RowRemoval(keys=table(coming).select(["id"])).stays(table(held).select(["id"]), types)

    assert [n for n, pair in enumerate(held) if pair not in coming] == both.to_pylist()
    assert [n for n, pair in enumerate(held) if pair[0] not in {i for i, _ in coming}] == one.to_pylist()


def test_only_files_and_row_groups_that_can_match_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup by key opens one file of many, and of it one row group."""
    for start in range(0, 1000, 100):
        world.append(range(start, start + 100))
    opened: list[str] = []
    original = pq.ParquetFile.__init__

    def init(self: Any, source: Any, *args: Any, **options: Any) -> None:
        opened.append(str(source))
        original(self, source, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", init)

    assert ["x642"] == [row["name"] for row in world.rows("id = 642", ["name"])]
    assert len(opened) == 1


def test_row_groups_are_left_out_by_their_statistics(tmp_path: Path) -> None:
    """Of ten row groups one can hold the value."""
    rows = pa.table({"id": pa.array(range(100), pa.int64()), "n": pa.array([None] * 90 + list(range(10)), pa.int64())})
    pq.write_table(rows, tmp_path / "f.parquet", row_group_size=10)
    kinds = {"id": "long", "n": "long"}
    metadata = pq.read_metadata(tmp_path / "f.parquet")

    def groups(condition: str) -> list[int]:
        predicate = parse_predicate(condition).typed(schema_json(tuple(kinds.items())))
        return row_groups(metadata, DataFile("f", 0, 100), predicate, kinds)

    assert [4] == groups("id = 42")
    assert [0, 9] == groups("id in (1, 99)")
    assert [9] == groups("n is not null")
    assert list(range(9)) == groups("n is null")


def test_a_scan_gives_only_the_columns_and_the_rows_that_are_wanted(world: World) -> None:
    """Partition values come back as columns; the limit ends the read."""
    world.append(range(10))
    world.append(range(10, 20), day="tue")

    assert [{"day": "tue", "id": 12}] == world.rows("day = 'tue' and id = 12", ["day", "id"])
    assert [] == world.rows("day = 'wed'")
    state = world.table.snapshot()
    assert 4 == scan(world.location, SPEC.root, state, limit=4).num_rows
    with pytest.raises(Invalid, match="no column 'nope'"):
        world.rows(columns=["nope"])


def test_deleted_rows_stay_in_older_versions_until_vacuum(world: World) -> None:
    """A reader at a pinned version is not disturbed."""
    world.append(range(10))

    world.table.delete("id < 5")

    before = world.table.snapshot(0)
    assert 10 == scan(world.location, SPEC.root, before).num_rows
    assert 5 == len(world.rows())


def test_a_race_after_the_files_were_written_is_planned_again(world: World) -> None:
    """A file that another writer removed meanwhile is not brought back."""
    (first,) = world.append(range(10))
    other = world.opened()
    original = world.table.commit_on
    raced = []

    def commit_on(state: Any, *args: Any) -> CommitResult:
        if not raced:
            raced.append(other.commit_on(other.snapshot(), Commit("DELETE", (), (first,)), CommitResult(0), None))
        return original(state, *args)

    world.table.commit_on = commit_on  # type: ignore[method-assign]

    done = world.table.delete("id = 3")

    assert done.repeated
    assert [] == world.rows()


def test_files_are_chosen_by_every_known_range() -> None:
    """A file is left out only when no row of it can match."""
    schema = schema_json((("id", "long"), ("name", "string"), ("at", "timestamp"), ("x", "double"), ("d", "date")))
    file = DataFile(
        "f",
        1,
        10,
        {"d": "2026-01-02"},
        {"id": 5, "name": "b", "at": "2026-01-01T00:00:00.123Z", "x": 1.0},
        {"id": 9, "name": "d", "at": "2026-01-01T00:00:00.456Z", "x": 2.0},
        {"id": 0, "name": 10 - 10, "at": 0, "x": 10 - 10},
    )

    def may(condition: str) -> bool:
        return bool(chosen([file], parse_predicate(condition).typed(schema), schema))

    assert [True, False, True, False] == [may(f"id {one}") for one in ("= 5", "= 10", "<= 5", "< 5")]
    assert [True, False, True] == [may(f"name {one}") for one in ("= 'c'", "in ('a', 'e')", "!= 'c'")]
    assert [True, True, False] == [
        may(f"at {one}")
        for one in (">= '2026-01-01'", "> '2026-01-01T00:00:00.456500Z'", "> '2026-01-01T00:00:00.458Z'")
    ]
    assert [True, False, True] == [may(f"x {one}") for one in ("> 100", "< 1", "= 1.5")]  # NaN is above every number
    assert [True, False, False] == [may(f"d {one}") for one in ("= '2026-01-02'", "< '2026-01-02'", "is null")]
    assert [False, True] == [may(f"id {one}") for one in ("is null", "is not null")]


def test_null_counts_do_not_leave_out_a_file_with_a_deletion_vector() -> None:
    """They count the rows that the vector marks too: of ten rows it may have left the five that are not null."""
    schema = schema_json((("id", "long"),))
    file = DataFile("f", 1, 5, low={"id": 5}, high={"id": 9}, nulls={"id": 5})
    marked = msgspec.structs.replace(file, vector={"cardinality": 5})
    predicate = parse_predicate("id = 7").typed(schema)

    assert ([], [marked]) == (chosen([file], predicate, schema), chosen([marked], predicate, schema))


@pytest.mark.parametrize(
    "text",
    ["", "id", "id =", "id = 5 or id = 6", "id ~ 5", "id in ()", "id is 5", "id = 5 and", "= 5", "id = 5 6", "a.b = 5"],
)
def test_what_is_no_condition_is_refused_with_an_example(text: str) -> None:
    """Nothing is guessed: a wrong condition on a delete would remove other rows."""
    with pytest.raises(Invalid) as refused:
        parse_predicate(text)

    assert "column = value" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("long", "1.5"),
        ("long", "'x'"),
        ("long", "9223372036854775808"),
        ("integer", "-2147483649"),
        ("byte", "128"),
        ("decimal(12,2)", "1.005"),
        ("decimal(12,2)", "12345678901"),
        ("decimal(12,2)", "'NaN'"),
        ("timestamp", "'soon'"),
        ("timestamp", "'0001-01-01T00:00:00+05:00'"),
        ("boolean", "3"),
        ("date", "5"),
    ],
)
def test_a_value_that_its_column_cannot_have_is_refused(kind: str, value: str) -> None:
    """`id = 1.5` on whole numbers is a mistake, and so is text that is no date."""
    with pytest.raises(Invalid, match="is no value of it"):
        parse_predicate(f"c = {value}").typed(schema_json((("c", kind),)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("long", "-9223372036854775808"), ("byte", "127"), ("decimal(12,2)", "1.50"), ("decimal(12,2)", "-9999999999.99")],
)
def test_the_last_value_that_a_column_can_have_is_compared(kind: str, value: str) -> None:
    """What fits is found in Arrow too."""
    wanted = parse_predicate(f"c = {value}").typed(schema_json((("c", kind),)))
    rows = pa.table({"c": pa.array([wanted.terms[0].value, None], arrow_type(kind))})

    assert 1 == rows.filter(wanted.expression({"c": arrow_type(kind)})).num_rows


def test_a_row_without_a_key_is_never_taken_for_another(tmp_path: Path) -> None:
    """As in SQL, null equals nothing: such a row neither replaces one nor is replaced, in whatever file it is."""
    world = World(tmp_path, TableSpec("n", schema_json((("id", "long"), ("name", "string"))), keys=("id",)))

    def written(ids: list[int | None], name: str) -> list[DataFile]:
        rows = pa.table({"id": pa.array(ids, pa.int64()), "name": pa.array([name] * len(ids))})
        return files.write_files(rows, world.spec, world.location, world.location.filesystem())

    world.table.append_files(written([1, None], "old"))
    done = rewrite.upsert_files(world.table, written([1, None], "new"), None)

    assert (1, 1) == (done.rows_inserted, done.rows_replaced)
    assert {(1, "new"), (None, "new"), (None, "old")} == {(row["id"], row["name"]) for row in world.rows()}


def test_a_widening_writes_every_file_again_and_changes_no_row(world: World) -> None:
    """Afterwards the log has the wider type, in one version that brings no rows; again, nothing happens."""
    narrow = TableSpec("w", schema_json((("id", "integer"), ("x", "float"))), keys=("id",))
    rows = pa.table({"id": pa.array([1, 2], pa.int32()), "x": pa.array([0.5, 1.5], pa.float32())})
    table = Table(None, narrow, runtime_on(world.store), location=world.location)
    table.append_files(files.write_files(rows, narrow, world.location, world.location.filesystem()))
    wide = TableSpec("w", schema_json((("id", "long"), ("x", "double"), ("more", "string"))), keys=("id",))
    wider = Table(None, wide, runtime_on(world.store), location=world.location)

    done, again = rewrite.widen(wider), rewrite.widen(wider)

    assert (1, False, True) == (done.version, done.repeated, again.repeated)
    state = wider.snapshot()
    found = scan(world.location, wide.root, state)
    assert [{"id": 1, "x": 0.5, "more": None}, {"id": 2, "x": 1.5, "more": None}] == found.to_pylist()
    stored = pq.read_schema(world.location.path(f"{wide.root}/{state.files[0].path}"))
    assert (pa.int64(), pa.float64()) == (stored.field("id").type, stored.field("x").type)
    (change,) = asyncio.run(changes.file_changes(world.store, wide.root, 0, 1))
    assert ((), ()) == (change.adds, change.removes)
    with pytest.raises(Stale):
        rewrite.widen(Table(None, narrow, runtime_on(world.store), location=world.location))


def test_the_changes_of_a_version_are_only_the_rows_that_changed(world: World) -> None:
    """A copied row is none; values of an update come before and after it."""
    world.append(range(5), "old")
    rewrite.upsert_files(world.table, world.written([3, 9], "new"), None)
    world.table.delete("id = 0")

    name = {"name": pa.string()}
    assert [(f"old{n}", "insert", 0) for n in range(5)] == changed(world, 0, name)
    assert [
        ("old3", "update_preimage", 1),
        ("new3", "update_postimage", 1),
        ("new9", "insert", 1),
    ] == changed(world, 1, name)
    assert [("old0", "delete", 2)] == changed(world, 2, name)


def test_copied_rows_without_a_key_or_with_the_same_key_are_no_changes() -> None:
    """An append may bring a key twice, or none: such rows are paired in their order."""

    def held(*rows: tuple[int | None, str | None, int]) -> pa.Table:
        names = [("a", pa.int64()), ("b", pa.string()), ("v", pa.int64())]
        return pa.Table.from_pylist([dict(zip(("a", "b", "v"), row, strict=True)) for row in rows], pa.schema(names))

    same = [(None, "x", 1), (None, "x", 2), (5, None, 3), (None, None, 4), (7, "y", 5), (7, "y", 6)]
    before = held(*same, (8, "z", 7), (9, "z", 9), (9, "z", 10))
    after = held(*same[4:], *same[:4], (8, "z", 8), (9, "z", 11), (None, None, 12))

    found = {kind: rows.column("v").to_pylist() for kind, rows in changes.paired(before, after, ("a", "b"))}

    assert [10] == found["delete"]
    assert [12] == found["insert"]
    assert ([7, 9], [8, 11]) == (found["update_preimage"], found["update_postimage"])


def test_clustered_rows_are_ordered_in_files_and_skipped_by_row_group(tmp_path: Path) -> None:
    """The table's log remembers the columns; rows of one value lie together."""
    spec = TableSpec("c", schema_json((("id", "long"), ("customer", "long"))), keys=("id",), cluster_by=("customer",))
    world = World(tmp_path, spec)
    rows = pa.table({"id": pa.array(range(300_000)), "customer": pa.array([n % 1000 for n in range(300_000)])})

    world.table.append_files(files.write_files(rows, spec, world.location, world.location.filesystem()))

    state = world.opened().snapshot()
    assert ("customer",) == state.cluster_by
    metadata = pq.read_metadata(world.location.path(f"{spec.root}/{state.files[0].path}"))
    wanted = parse_predicate("customer = 7").typed(spec.schema_json)
    assert 3 == metadata.num_row_groups
    assert [0] == row_groups(metadata, state.files[0], wanted, fields_of(spec.schema_json))
    assert 300 == len(world.rows("customer = 7"))
