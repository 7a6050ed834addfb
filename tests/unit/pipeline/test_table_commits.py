"""What a table's commits say and answer, without Spark: counts, batches, schemas, and files that may hold a key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound, Overloaded, Stale
from lakebed.core.ids import Ids
from lakebed.delta import checkpoint, history
from lakebed.delta.log import Commit, apply, decode, encode, file_of, log_key
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.delta.vacuum import KEEP_S, KEEP_S_MIN, checked, is_data, sweepable
from lakebed.pipeline.bronze.drift import fit
from lakebed.pipeline.silver.contract import BadContract, read_contract
from lakebed.pipeline.tables import table as tables
from lakebed.pipeline.tables.compaction import groups
from lakebed.pipeline.tables.table import Table
from lakebed.store.memory import MemoryStore
from support.runtimes import runtime_on

SPEC = TableSpec("t", schema_json((("id", "long"), ("note", "string"))), keys=("id",))
LOCATION: Any = None


def file(name: str, rows: int = 2, low: int = 1, high: int = 9, **said: Any) -> DataFile:
    return DataFile(f"{name}.parquet", 10, rows, low={"id": low}, high={"id": high}, **said)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)

    def table(self, spec: TableSpec = SPEC) -> Table:
        return Table(None, spec, runtime_on(self.store, self.clock, Ids()), location=LOCATION)  # type: ignore[arg-type]

    def entry(self, version: int, spec: TableSpec = SPEC) -> list[dict[str, Any]]:
        key = log_key(spec.root, version)
        return decode(asyncio.run(self.store.get(key)).data, key)


@pytest.fixture
def world() -> World:
    return World()


def test_an_append_answers_what_it_added_and_a_repeat_of_its_batch_changes_nothing(world: World) -> None:
    """An earlier number of the same application is a repeat too; another application is not."""
    table = world.table()
    first = table.append_files([file("a", 3), file("b", 4)], WriteBatch("app", 5), note="from here")
    again = table.append_files([file("c", 9)], WriteBatch("app", 5))
    earlier = table.append_files([file("c", 9)], WriteBatch("app", 4))
    other = world.table().append_files([file("d", 1)], WriteBatch("other", 1))

    assert CommitResult(0, rows_inserted=7, files_added=2) == first
    assert CommitResult(0, repeated=True) == again == earlier
    assert CommitResult(1, rows_inserted=1, files_added=1) == other
    state = world.table().snapshot()
    assert (8, {"app": 5, "other": 1}, "from here") == (state.rows, state.applied, state.note)


def test_a_batch_that_expects_another_one_before_it_is_stale(world: World) -> None:
    """Two writers under one name do not both go on."""
    table = world.table()
    table.append_files([file("a")], WriteBatch("app", 1, after=-1))
    with pytest.raises(Stale, match="has written batch 1"):
        table.append_files([file("b")], WriteBatch("app", 3, after=2))
    table.append_files([file("b")], WriteBatch("app", 2, after=1))

    assert 2 == world.table().snapshot().applied["app"]


def test_an_application_that_writes_once_gets_its_first_answer_again(world: World) -> None:
    """With the counts of the version that it made, whatever came since."""
    table = world.table()
    table.append_files([file("x")])
    first = table.append_files([file("a", 3)], WriteBatch.once("job"))
    table.append_files([file("y")])
    again = world.table().append_files([file("b", 9)], WriteBatch.once("job"))

    assert CommitResult(1, rows_inserted=3, files_added=1) == first
    assert CommitResult(1, rows_inserted=3, repeated=True) == again == table.applied(WriteBatch.once("job"))
    assert table.applied(WriteBatch.once("another")) is None


def test_a_replacement_takes_every_file_out_and_says_so(world: World) -> None:
    """Counts of both sides; the entry says overwrite; `unless` looks at the table that would go."""
    table = world.table()
    table.append_files([file("a", 3), file("b", 4)])
    done = table.replace_by([file("c", 5)], note="why")
    kept = table.replace_by([file("d", 5)], unless=lambda state: state.note == "why")

    assert CommitResult(1, rows_inserted=5, rows_replaced=7, files_added=1, files_removed=2) == done
    assert CommitResult(1, repeated=True) == kept
    assert ["c.parquet"] == [one.path for one in world.table().snapshot().files]
    (change,) = table.changes(0, 1)
    assert (True, "WRITE", 5, 7) == (change.overwrites, change.operation, change.rows_inserted, change.rows_replaced)
    assert not any("metaData" in action for action in world.entry(1))


def test_a_replacement_may_change_the_schema_and_the_keys_and_keeps_the_tables_id(world: World) -> None:
    """Readers see the new columns from that version on, and where its files lie: whichever of these changed."""
    world.table().append_files([file("a")])
    before = world.table().snapshot()
    more = schema_json((("id", "long"), ("note", "string"), ("more", "string")))
    for spec in (
        TableSpec("t", more, keys=("id",)),
        TableSpec("t", more, keys=("id",), partition_by=("note",)),
        TableSpec("t", more, keys=("id",), partition_by=("note",), cluster_by=("more",)),
        TableSpec("t", schema_json((("other", "string"),))),
        TableSpec("t", schema_json((("other", "string"),)), keys=("other",)),
    ):
        world.table(spec).replace_by([DataFile("n.parquet", 1, 1)])
        state = world.table(spec).snapshot()
        assert (spec.schema_json, spec.keys, before.table_id) == (state.schema_json, state.keys, state.table_id)
        assert (spec.partition_by, spec.cluster_by) == (state.partition_by, state.cluster_by)


@pytest.mark.parametrize("write", ["append_files", "replace_by"])
def test_a_write_that_loses_the_race_follows_what_won(
    world: World, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """An append beside the other's rows; a replacement takes these out too."""
    world.table().append_files([file("a", 1)])
    create, raced = world.store.create, list[str]()

    async def overtaken(key: str, data: bytes) -> Any:
        if not raced:
            raced.append(key)
            await asyncio.to_thread(world.table().append_files, [file("theirs", 3)])
        return await create(key, data)

    monkeypatch.setattr(world.store, "create", overtaken)

    done = getattr(world.table(), write)([file("ours", 5)])

    left = ["a.parquet", "theirs.parquet", "ours.parquet"] if write == "append_files" else ["ours.parquet"]
    assert (2, left) == (done.version, [one.path for one in world.table().snapshot().files])


@pytest.mark.parametrize(("low", "high", "version"), [(100, 109, 2), (5, 9, None)])
def test_an_insert_that_loses_the_race_looks_at_the_keys_that_won(
    world: World, monkeypatch: pytest.MonkeyPatch, low: int, high: int, version: int | None
) -> None:
    """Beside keys of its own the rows must be merged: inserted, there would be two of them."""
    world.table().append_files([file("a", low=50, high=60)])
    create, raced = world.store.create, list[str]()

    async def overtaken(key: str, data: bytes) -> Any:
        if not raced:
            raced.append(key)
            await asyncio.to_thread(world.table().append_files, [file("theirs", low=low, high=high)])
        return await create(key, data)

    monkeypatch.setattr(world.store, "create", overtaken)

    done = world.table().insert_files([file("ours", 5)], None, bounds=(1, 9))

    assert version == (done.version if done is not None else None)
    assert (version is not None) == ("ours.parquet" in [one.path for one in world.table().snapshot().files])


def test_versions_are_readable_while_their_files_and_log_entries_are_there(world: World) -> None:
    """Files that were joined are read where their rows are now, or where they were; what the log no longer tells is
    not readable, and the newest version always is."""
    table = world.table()
    for name in ("a", "b"):
        table.append_files([file(name)])
    joined = Commit("OPTIMIZE", (file("c", 4),), table.snapshot().files, data_change=False)
    table.commit_on(table.snapshot(), joined, CommitResult(0), None)
    table.append_files([file("d")])

    def put(*names: str) -> None:
        for name in names:
            asyncio.run(world.store.create(f"{SPEC.root}/{name}.parquet", b"rows"))

    def asked() -> list[bool]:
        read = world.table().readable
        return [read(-1, 3), read(-1, 1), read(0, 2), read(0, 2, joined=False), read(0, 3), read(2, 3, joined=False)]

    put("c", "d")
    swept = asked()
    put("b")
    half = asked()
    put("a")
    whole = asked()
    names = [f"{version:020d}.json" for version in range(4)]
    asyncio.run(checkpoint.write(world.store, SPEC.root, 3, names))
    for version in (0, 1):
        asyncio.run(world.store.delete(log_key(SPEC.root, version)))
    cleaned = asked()

    assert [True, False, True, False, True, True] == swept
    assert [True, False, True, True, True, True] == half
    assert [True, True, True, True, True, True] == whole
    assert [True, False, False, False, False, True] == cleaned


def test_the_newest_version_is_not_readable_as_it_came_once_the_files_it_came_in_are_swept(world: World) -> None:
    """Rows of an appended source are read in the files that brought them: where those were joined and swept, a step
    that counted on them would fail for ever."""
    table = world.table()
    for name in ("a", "b"):
        table.append_files([file(name)])
    joined = Commit("OPTIMIZE", (file("c", 4),), table.snapshot().files, data_change=False)
    table.commit_on(table.snapshot(), joined, CommitResult(0), None)
    for name in ("b", "c"):
        asyncio.run(world.store.create(f"{SPEC.root}/{name}.parquet", b"rows"))

    def asked() -> list[bool]:
        return [world.table().readable(0, 2, joined=both) for both in (True, False)]

    there = asked()
    asyncio.run(world.store.delete(f"{SPEC.root}/b.parquet"))

    assert ([True, True], [True, False]) == (there, asked())


def test_files_are_inserted_only_where_no_file_may_hold_their_keys(world: World) -> None:
    """The bounds are inclusive; without bounds, or with a file that has none, rows must be merged."""
    table = world.table()
    table.append_files([file("a", low=10, high=20)])
    asked = [((1, 9), True), ((21, 30), True), ((20, 25), False), ((5, 10), False), (None, False)]
    for number, (bounds, inserted) in enumerate(asked):
        done = table.insert_files([file(f"n{number}", 6, 100 + number, 100 + number)], None, bounds=bounds)
        assert inserted == (done is not None), bounds
        if done is not None:
            assert (6, 1, 0) == (done.rows_inserted, done.files_added, done.rows_replaced)
    table.append_files([DataFile("bare.parquet", 1, 1)])
    assert table.insert_files([file("z", 1, 500, 500)], None, bounds=(500, 500)) is None


def test_a_writer_that_knows_more_columns_adds_them_and_one_that_knows_others_is_stale(world: World) -> None:
    """The table keeps its id; a writer that knows fewer columns is stale as well."""
    world.table().append_files([file("a")])
    grown = TableSpec("t", schema_json((("id", "long"), ("note", "string"), ("more", "double"))), keys=("id",))
    before = world.table().snapshot()
    world.table(grown).append_files([file("b")])
    state = world.table(grown).snapshot()

    assert (grown.schema_json, before.table_id) == (state.schema_json, state.table_id)
    assert ["id", "note", "more"] == world.table(grown).columns_of(state)
    for spec in (SPEC, TableSpec("t", schema_json((("id", "string"), ("note", "string"))), keys=("id",))):
        with pytest.raises(Stale, match="another schema at version 1"):
            world.table(spec).append_files([file("c")])


def test_a_table_that_others_commit_to_without_end_is_overloaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many races, not before."""
    tries: list[str] = []

    async def lost(key: str, data: bytes, **_: Any) -> None:
        tries.append(key)
        raise AlreadyExists("another")

    monkeypatch.setattr(world.store, "create", lost)
    with pytest.raises(Overloaded, match=f"{tables.RACES_MAX} times"):
        world.table().append_files([file("a")])
    with pytest.raises(Overloaded, match="30 times"):
        asyncio.run(PlainTable(runtime_on(world.store, world.clock), SPEC).commit(lambda _: Commit("WRITE")))
    assert tables.RACES_MAX + 30 == len(tries)


def test_changes_are_those_after_one_version_up_to_another(world: World) -> None:
    """In order; asking backwards is refused; the first version carries protocol, schema and time."""
    table = world.table()
    for name in ("a", "b", "c"):
        table.append_files([file(name)], WriteBatch(name, 1))

    assert [("b",), ("c",)] == [change.applications for change in table.changes(0, 2)]
    assert [] == table.changes(2, 2)
    with pytest.raises(Invalid):
        table.added(2, 1)
    with pytest.raises(NotFound):
        table.changes(1, 3)
    first = {name: action[name] for action in world.entry(0) for name in action}
    assert {"minReaderVersion": 1, "minWriterVersion": 2} == first["protocol"]
    assert (["t", {"lakebed.keys": "id"}, []]) == [
        first["metaData"][name] for name in ("name", "configuration", "partitionColumns")
    ]
    now_ms = world.clock.now_ns() // 1_000_000
    assert (now_ms, now_ms, now_ms) == (
        first["commitInfo"]["timestamp"],
        first["metaData"]["createdTime"],
        first["add"]["modificationTime"],
    )
    assert ("a", 1, now_ms) == (first["txn"]["appId"], first["txn"]["version"], first["txn"]["lastUpdated"])


# The log as values.


def test_a_file_is_the_same_after_a_round_through_the_log() -> None:
    """Bounds, nulls, partition and counts; a file of another engine without statistics has -1 rows."""
    one = DataFile("p=a/x.parquet", 10, 3, {"p": "a", "q": None}, {"id": 1, "s": "a"}, {"id": 9, "s": "b"}, {"id": 2})
    data = encode(Commit("WRITE", adds=(one,)), attempt_id="a", now_ms=1)
    state = apply(Snapshot(), 0, decode(data, "k"), "k")

    assert (one,) == state.files
    theirs = {"path": "x", "size": 5, "stats": '{"numRecords": 2, "minValues": {"id": 3}, "maxValues": {"id": 4}}'}
    assert (2, {"id": 3}, {"id": 4}, {}) == (
        file_of(theirs).rows,
        file_of(theirs).low,
        file_of(theirs).high,
        file_of(theirs).nulls,
    )
    assert (-1, {}) == (file_of({"path": "x", "size": 5}).rows, file_of({"path": "x", "size": 5}).low)


def test_a_removal_in_the_log_names_the_whole_file() -> None:
    """Readers of change feeds need its size, partition and whether data changed."""
    one = DataFile("x.parquet", 10, 3, {"p": "a"})
    data = encode(Commit("OPTIMIZE", removes=(one,), adds=(one,), data_change=False), attempt_id="a", now_ms=7)
    (remove,) = [action["remove"] for action in decode(data, "k") if "remove" in action]
    (add,) = [action["add"] for action in decode(data, "k") if "add" in action]

    assert {
        "path": "x.parquet",
        "deletionTimestamp": 7,
        "dataChange": False,
        "extendedFileMetadata": True,
        "partitionValues": {"p": "a"},
        "size": 10,
    } == remove
    assert (False, 7, {"p": "a"}) == (add["dataChange"], add["modificationTime"], add["partitionValues"])
    assert "tags" not in add


# History.


async def replay(store: MemoryStore, count: int) -> None:
    table = PlainTable(runtime_on(store, ManualClock()), SPEC)
    for number in range(count):
        name = f"f{number}"
        await table.commit(lambda _, name=name: Commit("WRITE", adds=(file(name, 1),)))  # type: ignore[misc]


async def test_what_versions_brought_leaves_out_what_they_took_away_again() -> None:
    """Joins neither bring nor take; the bounds are after the one and up to the other."""
    store = MemoryStore(clock=ManualClock())
    a, b, c, joined = (file(name) for name in ("a", "b", "c", "joined"))
    commits = [
        Commit("WRITE", adds=(a,), spec=SPEC, table_id="i"),
        Commit("WRITE", adds=(b, c)),
        Commit("OPTIMIZE", adds=(joined,), removes=(a, b), data_change=False),
        Commit("DELETE", removes=(c,)),
    ]
    for version, commit in enumerate(commits):
        await store.create(log_key(SPEC.root, version), encode(commit, attempt_id="x", now_ms=1))

    async def names(after: int, until: int) -> list[str]:
        return [one.path[0] for one in await history.brought(store, SPEC.root, after, until)]

    assert [["a"], ["b", "c"], ["a", "b", "c"], ["a", "b"], []] == [
        await names(*span) for span in ((-1, 0), (0, 1), (-1, 2), (-1, 3), (1, 3))
    ]


# Vacuum.


def test_a_kept_time_has_a_minimum() -> None:
    """An hour is enough, a second less is not; a week is the default."""
    assert (3600.0, 7 * 86_400.0) == (KEEP_S_MIN, KEEP_S)
    assert 3600.0 == checked(3600.0)
    with pytest.raises(Invalid, match="3599 s"):
        checked(3599.0)


NAMES = [
    ("part-1.parquet", True),
    ("p=a/q=b/part.parquet", True),
    ("p=a/part.txt", False),
    ("folder/part.parquet", False),
    ("p=a/folder/part.parquet", False),
    ("_part.parquet", False),
    (".part.parquet", False),
    ("_delta_log/00.checkpoint.parquet", False),
]


@pytest.mark.parametrize(("name", "data"), NAMES)
def test_only_names_of_data_files_are_swept(name: str, data: bool) -> None:
    """Everything else in the folder is somebody's."""
    assert data == is_data(name)


async def test_a_file_is_swept_when_it_is_older_than_the_kept_time_and_not_at_it() -> None:
    """To the millisecond."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await replay(store, 1)
    await store.create("tables/t/orphan.parquet", b"x")
    await clock.advance(KEEP_S)
    at = await sweepable(store, "tables/t", clock=clock)
    await clock.advance(0.001)
    after = await sweepable(store, "tables/t", clock=clock)

    assert ([], ["tables/t/orphan.parquet"]) == (at, [info.key for info in after])


async def test_a_log_entry_that_is_damaged_stops_the_sweep() -> None:
    """What it may refer to is not known."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await store.create(log_key("tables/t", 0), b"no json")
    await store.create("tables/t/orphan.parquet", b"x")
    await clock.advance(2 * KEEP_S)
    with pytest.raises(Corrupt):
        await sweepable(store, "tables/t", clock=clock)


def test_each_group_of_small_files_is_filled_from_nothing() -> None:
    """Six files of which two fit together make three groups."""
    held = [DataFile(f"{number}", 3, 1) for number in range(6)]

    assert [["0", "1"], ["2", "3"], ["4", "5"]] == [[one.path for one in group] for group in groups(held, 8)]


def test_columns_that_rows_lack_are_told_under_every_policy() -> None:
    """Discarding what is new does not hide what is missing."""
    for drift in ("evolve", "discard"):
        found = fit("t", {"a": "long", "b": "long"}, {"a": "long", "c": "long"}, drift)  # type: ignore[arg-type]
        assert ("b",) == found.missing, drift


def test_the_source_of_a_contract_is_a_table_name_too() -> None:
    """It becomes a part of a key."""
    text = "table: t\nsource: ../x\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n"
    with pytest.raises(BadContract, match="no table name"):
        read_contract(text, "t.yaml")
