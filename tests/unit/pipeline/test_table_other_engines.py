"""Tables that other engines write beside Lakebed: their files are read, and vacuum deletes none that is needed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import deltalake
import msgspec
import pyarrow as pa
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.settings import load
from lakebed.delta import history
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import DataFile, Snapshot, TableSpec, key_of, name_of, path_of
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.delta.predicate import parse_predicate
from lakebed.delta.vacuum import sweep, sweepable
from lakebed.pipeline.runner import vacuum_tables
from lakebed.pipeline.tables import compaction, files, merge
from lakebed.pipeline.tables.files import folder_name
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.pipeline.tables.scan import scan
from lakebed.pipeline.tables.view import Tables
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.delta_tables import VALUES, Folder, read_by_task, stored, written
from support.tick_fixtures import context_of

ROOT = "tables/t"
SPEC = TableSpec("t", schema_json((("id", "long"), ("p", "string"))), keys=("id",), partition_by=("p",))
DAY_S = 86_400.0


def rows_of(folder: Path, state: Snapshot, spec: TableSpec = SPEC) -> list[tuple[int, str | None]]:
    """What the reading task gives for a snapshot's files."""
    types = {"id": pa.int64(), spec.partition_by[0]: pa.string()}
    found = read_by_task(Folder.at(folder), spec.root, state, types)
    return sorted((row["id"], row[spec.partition_by[0]]) for row in found)


async def test_vacuum_keeps_every_live_file_whatever_its_partition_is_called(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """The log's path is the key URL-encoded: it is decoded once, the key never. Files of an overwrite all go."""
    store = MemoryStore(clock=manual_clock)
    written(tmp_path)
    live = await stored(tmp_path, store, ROOT)
    await manual_clock.advance(8 * DAY_S)

    kept = await sweepable(store, ROOT, clock=manual_clock)
    written(tmp_path, mode="overwrite")
    now = await stored(tmp_path, store, ROOT)
    await manual_clock.advance(8 * DAY_S)
    gone = await sweep(store, ROOT, clock=manual_clock)

    assert (len(VALUES), []) == (len(live), kept)
    assert len(live) == gone
    assert sorted(set(now) - set(live)) == sorted(
        [info.key async for info in store.list(f"{ROOT}/") if "=" in info.key]
    )


async def test_rows_of_escaped_partitions_are_read(tmp_path: Path, manual_clock: ManualClock) -> None:
    """By the tasks of Spark, by a small table's reader and by the console's sample."""
    written(tmp_path / ROOT)
    context = context_of(clock=manual_clock)
    await stored(tmp_path / ROOT, context.store, ROOT)

    state = await history.snapshot(context.store, ROOT)
    plain = PlainTable(context, SPEC)
    ids = [id for file in state.files for id in (await plain.read(file)).column("id").to_pylist()]
    sample = await Tables(context).sample("t")

    assert list(enumerate(VALUES)) == rows_of(tmp_path, state)
    assert list(range(len(VALUES))) == sorted(ids)
    assert 1 == len(sample.rows)


async def test_escaped_partitions_are_merged_and_joined(tmp_path: Path, manual_clock: ManualClock) -> None:
    """Upserts and compaction open the same files as readers do."""
    for _ in range(2):
        written(tmp_path / ROOT, ["a:b", "e%f"], mode="append")
    store = MemoryStore(clock=manual_clock)
    await stored(tmp_path / ROOT, store, ROOT)
    state = await history.snapshot(store, ROOT)
    location, schema = Folder.at(tmp_path), pa.schema([("id", pa.int64())])

    groups = compaction.groups(state.files, 10_000_000)
    asked = pa.RecordBatch.from_pydict({"files": [msgspec.json.encode(group).decode() for group in groups]})
    joined = [
        msgspec.json.decode(batch["file"][0].as_py(), type=compaction.CompactedFiles)
        for batch in compaction.joining(SPEC, location, schema)(iter([asked]))
    ]
    bare = TableSpec("t", schema_json((("id", "long"),)), keys=("id",))
    one = pa.RecordBatch.from_pydict({"path": [state.files[0].path]})
    task = merge.merging(bare, location, lambda _: pa.table({"id": pa.array([0, 1], pa.int64())}), schema)
    merged = [msgspec.json.decode(batch["file"][0].as_py(), type=merge.Merged) for batch in task(iter([one]))]

    assert [2, 2] == [each.files[0].rows for each in joined]
    assert 1 == merged[0].rows


async def test_what_is_written_with_a_column_of_any_name_is_read_by_other_engines(tmp_path: Path) -> None:
    """The log's path is encoded, so a percent sign in a column's name is none of an encoding."""
    spec = TableSpec("t", schema_json((("id", "long"), ("50%25 ö", "string"))), partition_by=("50%25 ö",))
    rows = pa.table({"id": pa.array([1], pa.int64()), "50%25 ö": ["x"]})
    made = files.write_files(rows, spec, Folder.at(tmp_path), Folder.at(tmp_path).filesystem())
    log = tmp_path / log_key(ROOT, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(encode(Commit("WRITE", tuple(made), spec=spec, table_id="i"), attempt_id="a", now_ms=0))

    theirs = deltalake.DeltaTable(str(tmp_path / ROOT)).to_pyarrow_table().to_pylist()

    assert [{"id": 1, "50%25 ö": "x"}] == theirs
    state = Snapshot(0, spec.schema_json, spec.partition_by, tuple(made))
    assert [(1, "x")] == rows_of(tmp_path, state, spec)


async def test_a_remove_is_of_the_same_file_however_its_path_is_encoded(tmp_path: Path) -> None:
    """delta-rs encodes a path that an older Lakebed wrote as it was: the rows it deleted stay deleted."""
    folder = tmp_path / ROOT
    written(folder, ["x", "y"], column="ö p")
    log = folder / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["path"] = name_of(action["add"]["path"])
    log.write_text("\n".join(json.dumps(action, ensure_ascii=False) for action in actions))
    deltalake.DeltaTable(str(folder)).delete("id = 0")
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await stored(folder, store, ROOT)

    state = await history.snapshot(store, ROOT)
    brought = await history.brought(store, ROOT, -1, 1)

    assert [{"ö p": "y"}] == [file.partition for file in state.files]
    assert [{"ö p": "y"}] == [file.partition for file in brought]


async def test_vacuum_leaves_checkpoints_hidden_folders_and_strangers(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Only what has the form of a data file or a change file of this table goes."""
    store = MemoryStore(clock=manual_clock)
    written(tmp_path)
    deltalake.DeltaTable(str(tmp_path)).create_checkpoint()
    await stored(tmp_path, store, ROOT)
    others = [
        "_delta_log/_sidecars/a.parquet",
        "_change_data/notes/a.parquet",
        "_hidden.parquet",
        ".hidden/a.parquet",
        "exports/report.parquet",
        "p=x/notes/a.parquet",
        "notes.txt",
    ]
    for name in others:
        await store.create(f"{ROOT}/{name}", b"x")
    orphans = ["_change_data/cdc.parquet", "_change_data/p=x/cdc.parquet", "orphan.parquet", "p=x/orphan.parquet"]
    for name in orphans:
        await store.create(f"{ROOT}/{name}", b"x")
    before = [info.key async for info in store.list(f"{ROOT}/")]
    await manual_clock.advance(8 * DAY_S)

    gone = await sweepable(store, ROOT, clock=manual_clock)

    assert any(key.endswith(".checkpoint.parquet") for key in before)
    assert [f"{ROOT}/{name}" for name in orphans] == sorted(info.key for info in gone)


async def test_a_table_inside_a_tables_folder_is_swept_by_its_own_log_alone(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Its files are in no version of the outer table."""
    store = MemoryStore(clock=manual_clock)
    written(tmp_path)
    await stored(tmp_path, store, ROOT)
    await stored(tmp_path, store, f"{ROOT}/p=inner")
    await manual_clock.advance(8 * DAY_S)

    assert [] == await sweepable(store, ROOT, clock=manual_clock)
    assert [] == await sweepable(store, f"{ROOT}/p=inner", clock=manual_clock)


async def test_files_without_a_log_are_not_swept(tmp_path: Path, manual_clock: ManualClock) -> None:
    """A folder without a version is no table: nobody knows whose files these are."""
    store = MemoryStore(clock=manual_clock)
    await store.create(f"{ROOT}/a.parquet", b"x")
    await manual_clock.advance(8 * DAY_S)

    assert [] == await sweepable(store, ROOT, clock=manual_clock)

    await store.create(f"{ROOT}/_delta_log/{9:020d}.checkpoint.parquet", b"x")
    with pytest.raises(Corrupt):
        await sweepable(store, ROOT, clock=manual_clock)


@pytest.mark.parametrize("age_days", [1, 8])
async def test_a_table_whose_first_versions_are_gone_is_not_swept(
    tmp_path: Path, manual_clock: ManualClock, age_days: int
) -> None:
    """Another engine cleaned the log up behind a checkpoint: live files of older versions are not in it any more."""
    store = MemoryStore(clock=manual_clock)
    written(tmp_path, ["x"])
    await stored(tmp_path, store, ROOT)
    await manual_clock.advance(10 * DAY_S)
    written(tmp_path, ["y"], mode="append")
    await stored(tmp_path, store, ROOT)
    await store.delete(log_key(ROOT, 0))
    await manual_clock.advance(age_days * DAY_S)

    with pytest.raises(Exception) as refused:
        await sweepable(store, ROOT, clock=manual_clock)

    assert type(refused.value).__name__ in ("Corrupt", "NotFound")


@pytest.mark.parametrize(
    "path", ["s3://other/t/a.parquet", "file:/t/a.parquet", "/t/a.parquet", "../u/a.parquet", "%2E%2E/a"]
)
async def test_a_file_outside_the_table_is_neither_read_nor_swept(manual_clock: ManualClock, path: str) -> None:
    """A shallow clone refers to another table's files: its folder is left as it is."""
    store = MemoryStore(clock=manual_clock)
    commit = Commit("CLONE", (DataFile(path, 1, 1),), spec=SPEC, table_id="i")
    await store.create(log_key(ROOT, 0), encode(commit, attempt_id="a", now_ms=0))
    await store.create(f"{ROOT}/a.parquet", b"x")
    await manual_clock.advance(8 * DAY_S)

    with pytest.raises(Invalid, match="not in the table's folder"):
        await sweepable(store, ROOT, clock=manual_clock)
    with pytest.raises(Invalid):
        key_of(ROOT, path)


def test_a_path_is_the_keys_encoding() -> None:
    """Encoding and decoding give the key again; bytes that are no text are refused."""
    for name in ("p=a%3Ab/f.parquet", "p=c d/f.parquet", "p=ü/f", "p=1+1/f", "p=#?&/f"):
        assert f"{ROOT}/{name}" == key_of(ROOT, path_of(name))
    with pytest.raises(Corrupt):
        name_of("p=%FF/f.parquet")


async def test_one_table_that_cannot_be_swept_does_not_hold_up_the_others(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """The daily sweep and the upkeep's vacuum go on with the next table; asked for by name, it says why."""
    context = context_of(clock=manual_clock)
    store = context.store
    for table in ("a", "b"):
        root = f"tables/gold/o/p/{table}"
        written(tmp_path / table, ["x"])
        await stored(tmp_path / table, store, root)
        await store.create(f"{root}/orphan.parquet", b"12345")
    await store.delete(log_key("tables/gold/o/p/a", 0))
    await store.create(log_key("tables/gold/o/p/a", 1), b"{}\n")
    await manual_clock.advance(8 * DAY_S)

    done = await TableMaintenance(context)._vacuum("", True)
    with pytest.raises(Exception, match="missing"):
        await TableMaintenance(context)._vacuum("gold/o/p/a", True)
    swept = await vacuum_tables(context)

    assert [("gold/o/p/a", 0, 0), ("gold/o/p/b", 1, 5)] == [
        (each.table, each.files_swept, each.bytes_swept) for each in done
    ]
    assert [True, False] == ["missing" in each.problem for each in done]
    assert {"gold/o/p/b": 1} == swept


async def test_the_daily_sweep_keeps_versions_as_long_as_the_setting_says(tmp_path: Path) -> None:
    """`bronze.keep_versions_s` is for every table, also for those of ticks; never less than a message's life."""
    counts: Counter[str] = Counter()
    for name, days in (("long", 30), ("short", 1)):
        clock = ManualClock()
        flags = {"store.url": "memory:", "bronze.keep_versions_s": days * DAY_S}
        context = msgspec.structs.replace(context_of(clock=clock), settings=load(sections(), flags=flags))
        root = "tables/bronze/o/p/t"
        written(tmp_path / name, ["x"])
        await stored(tmp_path / name, context.store, root)
        await context.store.create(f"{root}/orphan.parquet", b"x")
        for day in (5, 5, 25):
            await clock.advance(day * DAY_S)
            counts[f"{name} after {day}"] += sum((await vacuum_tables(context)).values())

    assert {"long after 5": 0, "long after 25": 1, "short after 5": 1, "short after 25": 0} == dict(counts)


@pytest.mark.parametrize("value", ["ü%20", "日本", "(1)!~*'@&+$,;:", '"#<>?[]^`{|}', "\u00a0\x1f", "a b", "x/y=z"])
def test_folders_of_partitions_have_only_what_every_engine_encodes_alike(value: str) -> None:
    """delta-spark's VACUUM and delta-rs's RESTORE compare encoded paths, and encode other characters."""
    folder = folder_name(value)

    assert re.fullmatch(r"[A-Za-z0-9_.% -]+", folder)
    assert value == unquote(folder)
    assert folder.replace("%", "%25").replace(" ", "%20") == path_of(folder)


async def test_an_empty_text_is_no_value_of_a_partition(tmp_path: Path) -> None:
    """Delta's rule for every type: delta-rs writes one as it is, and reads a null."""
    written(tmp_path / "tables/t", ["", None, "x"])
    store = MemoryStore(clock=ManualClock())
    await stored(tmp_path / "tables/t", store, "tables/t")
    theirs = deltalake.DeltaTable(str(tmp_path / "tables/t")).to_pyarrow_table().to_pylist()

    def found(condition: str) -> list[int]:
        rows = scan(Folder.at(tmp_path), "tables/t", state, predicate=parse_predicate(condition)).to_pylist()
        assert all(row in theirs for row in rows)
        return sorted(row["id"] for row in rows)

    state = await history.snapshot(store, "tables/t")
    assert ([0, 1], [2], []) == (found("p is null"), found("p is not null"), found("p = ''"))
