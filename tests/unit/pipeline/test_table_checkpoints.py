"""Checkpoints and gaps: the log is read from its newest checkpoint, and never as an older table than it is."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.delta import checkpoint, cleanup, history
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import ONCE_WINDOW, DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.delta.vacuum import sweepable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject, Written
from support.counting_store import CountingStore
from support.delta_tables import stored
from support.runtimes import runtime_on

SPEC = TableSpec("t", schema_json((("id", "long"), ("name", "string"))), keys=("id",))
ROOT, LOG = SPEC.root, f"{SPEC.root}/_delta_log"
DAY_S = 86_400.0


def plain(store: MemoryStore, clock: ManualClock) -> PlainTable:
    return PlainTable(runtime_on(store, clock), SPEC)


async def filled(store: MemoryStore, clock: ManualClock, count: int, table: PlainTable | None = None) -> PlainTable:
    """So many commits of one row each, with a batch number each."""
    table = table or plain(store, clock)
    for _ in range(count):
        begin = (await table.snapshot()).version + 1
        file = await table.write(pa.table({"id": pa.array([begin], pa.int64()), "name": [f"n{begin}"]}))
        batch = WriteBatch.once(f"tick-{begin}") if begin % 2 else WriteBatch("app", begin)
        await table.commit(lambda _, file=file, batch=batch: Commit("WRITE", (file,), batch=batch))  # type: ignore[misc]
    return table


async def names(store: MemoryStore) -> list[str]:
    return sorted([info.key.removeprefix(f"{LOG}/") async for info in store.list(f"{LOG}/")])


async def copied(store: MemoryStore, folder: Path) -> str:
    """The store's table in a folder, for delta-rs."""
    async for info in store.list(f"{ROOT}/"):
        file = folder / info.key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((await store.get(info.key)).data)
    return str(folder / ROOT)


def comparable(state: Snapshot) -> tuple[Any, ...]:
    return (state.version, sorted(state.files, key=lambda file: file.path), state.applied, state.keys, state.properties)


async def test_a_table_whose_log_another_writer_cleaned_up_is_read_as_it_is(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """Neither a new reader nor one that knew an older version stays behind, and commits follow the newest version."""
    store = MemoryStore(clock=manual_clock)
    known = await filled(store, manual_clock, 12)
    other = MemoryStore(clock=manual_clock)
    await filled(other, manual_clock, 12)
    theirs = await copied(store, tmp_path)
    for number in range(12, 30):
        deltalake.write_deltalake(
            theirs, pa.table({"id": pa.array([number], pa.int64()), "name": ["x"]}), mode="append"
        )
    deltalake.DeltaTable(theirs).create_checkpoint()
    for version in range(29):
        (tmp_path / log_key(ROOT, version)).unlink()
        await store.delete(log_key(ROOT, version))
    await stored(tmp_path / ROOT, store, ROOT)

    cold = await history.snapshot(store, ROOT)
    warm = await known.snapshot()
    await filled(store, manual_clock, 1, known)

    assert (29, 30) == (cold.version, cold.rows)
    assert comparable(cold) == comparable(warm)
    assert 31 == deltalake.DeltaTable(await copied(store, tmp_path / "after")).to_pyarrow_table().num_rows


async def test_a_gap_in_the_log_is_corrupt_for_every_reader(manual_clock: ManualClock) -> None:
    """Cold or warm, with later entries behind the gap: nobody reads an older table, nobody commits into the gap."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 4)
    await filled(store, manual_clock, 4)  # by another writer
    await store.delete(log_key(ROOT, 5))

    with pytest.raises(Corrupt, match="version 5"):
        await history.snapshot(store, ROOT)
    with pytest.raises(Corrupt, match="version 5"):
        await table.commit(lambda _: Commit("WRITE"))
    assert 4 == (await history.snapshot(store, ROOT, version=4)).version


async def test_checkpoints_are_written_and_every_engine_reads_them(tmp_path: Path, manual_clock: ManualClock) -> None:
    """Every 50 versions; the state read through them is the state of the whole log, batch numbers and ranges too."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 104)
    whole = MemoryStore(clock=manual_clock)
    for version in range(104):
        await whole.create(log_key(ROOT, version), (await store.get(log_key(ROOT, version))).data)

    state = await history.snapshot(store, ROOT)
    theirs = deltalake.DeltaTable(await copied(store, tmp_path))

    made = [name for name in await names(store) if "checkpoint" in name]
    assert [f"{49:020d}.checkpoint.parquet", f"{99:020d}.checkpoint.parquet", "_last_checkpoint"] == made
    assert comparable(await history.snapshot(whole, ROOT)) == comparable(state)
    assert (99, 104) == (state.checkpoint, theirs.to_pyarrow_table().num_rows)
    assert (102, 101) == (theirs.transaction_version("app"), theirs.transaction_version("once:tick-101"))


async def test_large_entries_are_worth_a_checkpoint_sooner(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 MB of log, however few versions."""
    monkeypatch.setattr(checkpoint, "TAIL_BYTES", 2000)
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 12)

    found = checkpoint.found(await names(store))
    assert len(found) >= 2
    assert 12 == (await history.snapshot(store, ROOT)).rows


async def test_large_entries_of_writers_that_take_turns_are_counted_together(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each knows the log up to its own last version, and goes on from there."""
    monkeypatch.setattr(checkpoint, "TAIL_BYTES", 4000)
    store = MemoryStore(clock=manual_clock)
    writers = [plain(store, manual_clock) for _ in range(2)]
    for turn in range(24):
        await filled(store, manual_clock, 1, writers[turn % 2])

    sizes = [info.size async for info in store.list(f"{LOG}/") if info.key.endswith(".json")]
    assert sum(sizes) // 4000 // 2 <= len(checkpoint.found(await names(store))) <= sum(sizes) // 4000


async def test_a_reader_lists_and_reads_the_log_from_its_newest_checkpoint_on(manual_clock: ManualClock) -> None:
    """However old the table is; also where no note names the checkpoint."""
    store = CountingStore(clock=manual_clock)
    await filled(store, manual_clock, 104)
    seen: list[str] = []
    plainly = store.list

    async def noted(prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in plainly(prefix, after=after):
            seen.append(info.key)
            yield info

    store.list = noted  # type: ignore[method-assign]
    await history.snapshot(store, ROOT)
    listed, seen = len(seen), []
    await store.delete(f"{LOG}/{checkpoint.LAST}")
    store.gets.clear()
    await history.snapshot(store, ROOT)

    entries = [key for key in store.gets if key.endswith(".json")]
    assert listed <= 7
    assert [log_key(ROOT, version) for version in range(99, 104)] == entries


async def test_a_file_is_the_same_behind_a_checkpoint_as_in_the_log(manual_clock: ManualClock) -> None:
    """Partition, bounds of its columns, nulls, and that an upsert wrote it with rows of the table as they were."""
    store = MemoryStore(clock=manual_clock)
    spec = TableSpec("t", schema_json((("id", "long"), ("name", "string"))), keys=("id",), partition_by=("name",))
    ranges: dict[str, Any] = {"low": {"id": 1}, "high": {"id": 9}, "nulls": {"id": 0}}
    stats = '{"numRecords":3,"minValues":{"id":1},"maxValues":{"id":9},"nullCount":{"id":0,"name":0}}'
    commits = [
        Commit("CREATE", spec=spec, table_id="x"),
        Commit("WRITE", (DataFile("name=a/1.parquet", 10, 3, {"name": "a"}, **ranges),)),
        Commit("WRITE", (DataFile("name=a/2.parquet", 11, 3, {"name": "a"}, **ranges, stats=stats),)),
        Commit("MERGE", (DataFile("name=b/3.parquet", 12, 4, {"name": "b"}, **ranges, copied=True),)),
        Commit("MERGE", (DataFile("name=x/4.parquet", 13, 5, {"name": None}),)),
    ]
    for version, commit in enumerate(commits):
        await store.create(log_key(ROOT, version), encode(commit, attempt_id=f"a{version}", now_ms=1, version=version))
    from_log = await history.snapshot(store, ROOT)
    await checkpoint.write(store, ROOT, 4, [f"{version:020d}.json" for version in range(5)])
    for version in range(4):
        await store.delete(log_key(ROOT, version))

    behind = await history.snapshot(store, ROOT)

    assert [False, False, True, False] == [file.copied for file in from_log.files]
    assert comparable(from_log) == comparable(behind)


class CleanedUp(MemoryStore):
    """While the log is read, another writer cleans it up behind a checkpoint of its own; or an entry is not listed."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.unlisted: set[str] = set()

    async def get(self, key: str) -> StoredObject:
        if self.meanwhile is not None and key == log_key(ROOT, 0):
            work, self.meanwhile = self.meanwhile, None
            await work()
        return await super().get(key)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        hidden, self.unlisted = self.unlisted, set()
        async for info in super().list(prefix, after=after):
            if info.key not in hidden:
                yield info


async def test_a_log_that_is_cleaned_up_while_it_is_read_is_read_again(manual_clock: ManualClock) -> None:
    """What was listed is gone, or the listing was taken in between: neither is a loss before it was seen twice."""
    store = CleanedUp(manual_clock)
    await filled(store, manual_clock, 40)

    async def clean() -> None:
        await checkpoint.write(store, ROOT, 39, [f"{version:020d}.json" for version in range(40)])
        for version in range(39):
            await store.delete(log_key(ROOT, version))

    store.unlisted = {log_key(ROOT, 7)}
    assert 40 == (await history.snapshot(store, ROOT)).rows
    store.meanwhile = clean
    assert 40 == (await history.snapshot(store, ROOT)).rows


async def test_an_entry_that_is_listed_and_cannot_be_found_is_a_damaged_log(manual_clock: ManualClock) -> None:
    """However often it is read: the error names the table."""

    class Lost(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if key == log_key(ROOT, 2):
                raise NotFound(f"there is no {key}")
            return await super().get(key)

    store = Lost(clock=manual_clock)
    for version in range(4):
        commit = Commit("WRITE", spec=SPEC if version == 0 else None, table_id="i")
        await store.create(log_key(ROOT, version), encode(commit, attempt_id="a", now_ms=0))

    with pytest.raises(Corrupt, match=ROOT):
        await history.snapshot(store, ROOT)


async def test_a_table_may_say_how_often_it_wants_checkpoints(manual_clock: ManualClock) -> None:
    """`delta.checkpointInterval` is obeyed."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 1)
    data = (await store.get(log_key(ROOT, 0))).data.replace(
        b'"configuration":{', b'"configuration":{"delta.checkpointInterval":"5",'
    )
    store = MemoryStore(clock=manual_clock)
    await store.create(log_key(ROOT, 0), data)
    await filled(store, manual_clock, 10)

    assert [4, 9] == [each.version for each in checkpoint.found(await names(store))]


class Overtaken(MemoryStore):
    """Another writer names a later checkpoint between this writer's reads and its write of the note."""

    def __init__(self, clock: ManualClock, before: dict[str, int] | None) -> None:
        super().__init__(clock=clock)
        self._before, self._overtaken = before, False

    async def get(self, key: str) -> StoredObject:
        if not key.endswith(checkpoint.LAST) or self._overtaken:
            return await super().get(key)
        self._overtaken = True
        later = json.dumps({"version": 9}).encode()
        try:
            return await super().get(key)
        finally:
            if self._before is None:
                await self.create(key, later)
            else:
                await self.replace(key, later, (await super().get(key)).etag)


@pytest.mark.parametrize("before", [None, {"version": 1}])
async def test_the_note_of_the_last_checkpoint_never_moves_back(
    manual_clock: ManualClock, before: dict[str, int] | None
) -> None:
    """A writer that was overtaken leaves the later note, and fails nothing; one that is ahead replaces the note."""
    store = Overtaken(manual_clock, before)
    key = f"{LOG}/{checkpoint.LAST}"
    if before is not None:
        await store.create(key, json.dumps(before).encode())

    await checkpoint._point(store, ROOT, 5, b'{"version": 5}')
    overtaken = await checkpoint.last(store, ROOT)
    await checkpoint._point(store, ROOT, 12, b'{"version": 12}')
    ahead = await checkpoint.last(store, ROOT)
    await checkpoint._point(store, ROOT, 11, b'{"version": 11}')

    assert (9, 12, 12) == (overtaken, ahead, await checkpoint.last(store, ROOT))


async def test_a_checkpoint_by_another_writer_is_enough(tmp_path: Path, manual_clock: ManualClock) -> None:
    """A writer that only knows of none looks before it writes one."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 45)
    await checkpoint.write(store, ROOT, 40, [f"{version:020d}.json" for version in range(41)])

    await filled(store, manual_clock, 10, table)

    assert [40] == [each.version for each in checkpoint.found(await names(store))]


async def test_the_next_checkpoint_is_made_from_an_older_one_when_the_noted_one_is_gone(
    tmp_path: Path, manual_clock: ManualClock
) -> None:
    """The note names a checkpoint that somebody deleted; the first entries were cleaned up behind the one before."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 103)
    for version in range(49):
        await store.delete(log_key(ROOT, version))
    await store.delete(f"{LOG}/{99:020d}.checkpoint.parquet")

    await filled(store, manual_clock, 52)

    assert [49, 149] == [each.version for each in checkpoint.found(await names(store))]
    assert 155 == deltalake.DeltaTable(await copied(store, tmp_path)).to_pyarrow_table().num_rows


async def test_a_table_that_was_made_anew_is_not_taken_for_the_one_that_was_known(manual_clock: ManualClock) -> None:
    """Somebody deleted its folder and wrote another table there: a writer that knew the old one follows the new one."""
    store = MemoryStore(clock=manual_clock)
    known = await filled(store, manual_clock, 8)
    keys = [info.key async for info in store.list(f"{ROOT}/")]
    for key in keys:
        await store.delete(key)

    gone = (await known.snapshot()).version
    await filled(store, manual_clock, 3)
    await filled(store, manual_clock, 1, known)

    assert (-1, 3) == (gone, (await history.snapshot(store, ROOT)).version)
    assert [3] * 2 == [(await table.snapshot()).version for table in (known, plain(store, manual_clock))]


@pytest.mark.parametrize("damage", ["gone", "broken", "no note", "note ahead"])
async def test_a_checkpoint_that_cannot_be_read_costs_time_only(manual_clock: ManualClock, damage: str) -> None:
    """While the entries are there; without them the table is Corrupt."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 103)
    whole = await history.snapshot(store, ROOT)
    key = f"{LOG}/{99:020d}.checkpoint.parquet"
    if damage in ("gone", "broken"):
        await store.delete(key)
    if damage == "broken":
        await store.create(key, b"PAR1 no Parquet PAR1")
    if damage in ("no note", "note ahead"):
        await store.delete(f"{LOG}/_last_checkpoint")
    if damage == "note ahead":
        await store.create(f"{LOG}/_last_checkpoint", b'{"version":400,"size":3}')

    assert comparable(whole) == comparable(await history.snapshot(store, ROOT))
    if damage == "broken":
        for version in range(60):
            await store.delete(log_key(ROOT, version))
        with pytest.raises(Corrupt):
            await history.snapshot(store, ROOT)


class ReadOnlyLog(MemoryStore):
    """Takes log entries, and nothing else in the log's folder."""

    async def create(self, key: str, data: bytes) -> Written:
        if "checkpoint" in key:
            raise Unavailable("away")
        return await super().create(key, data)


async def test_a_checkpoint_that_cannot_be_written_fails_no_commit(manual_clock: ManualClock) -> None:
    """It is derived; the next commit tries again."""
    store = ReadOnlyLog(clock=manual_clock)
    await filled(store, manual_clock, 52)

    assert 52 == (await history.snapshot(store, ROOT)).rows


async def test_a_library_that_fails_to_make_a_checkpoint_fails_no_commit(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises."""
    monkeypatch.setattr(checkpoint, "_made", lambda *_: 1 / 0)
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 52)

    assert 52 == (await history.snapshot(store, ROOT)).rows


async def test_checkpoints_forget_applications_that_wrote_once_long_ago(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick each minute would make them grow for ever; numbered batches stay."""
    assert ONCE_WINDOW > 1000
    monkeypatch.setattr(checkpoint, "ONCE_WINDOW", 20)
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 60)

    (tmp_path / "c.parquet").write_bytes((await store.get(f"{LOG}/{49:020d}.checkpoint.parquet")).data)
    kept = [row["txn"]["appId"] for row in pq.read_table(tmp_path / "c.parquet").to_pylist() if row["txn"]]

    assert ["app", *(f"once:tick-{number}" for number in range(31, 50, 2))] == sorted(kept)
    assert 60 == deltalake.DeltaTable(await copied(store, tmp_path)).to_pyarrow_table().num_rows


# Version 2 and several parts, as other engines write them.


async def entries(store: MemoryStore, count: int) -> list[dict[str, Any]]:
    """What the first entries say, but for who wrote them."""
    read = [(await store.get(log_key(ROOT, version))).data for version in range(count)]
    actions = [json.loads(line) for data in read for line in data.splitlines()]
    return [action for action in actions if "commitInfo" not in action]


def lines(actions: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(action).encode() + b"\n" for action in actions)


@pytest.mark.parametrize("kind", ["json", "parquet"])
async def test_checkpoints_of_version_2_are_read_with_their_sidecars(manual_clock: ManualClock, kind: str) -> None:
    """Files stand in sidecars, the rest in a manifest that is JSON or Parquet."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 3)
    whole = await history.snapshot(store, ROOT)
    actions = [
        action for v in range(3) for action in map(json.loads, (await store.get(log_key(ROOT, v))).data.splitlines())
    ]
    adds = [action for action in actions if "add" in action]
    rest = [action for action in actions if "add" not in action and "commitInfo" not in action]
    rest += [
        {"checkpointMetadata": {"version": 2}},
        {"sidecar": {"path": "one.parquet", "sizeInBytes": 1, "modificationTime": 0}},
    ]
    await store.create(f"{LOG}/_sidecars/one.parquet", parquet(adds))
    manifest = f"{2:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.{kind}"
    await store.create(f"{LOG}/{manifest}", lines(rest) if kind == "json" else parquet(rest))
    for version in range(3):
        await store.delete(log_key(ROOT, version))

    found = await history.snapshot(store, ROOT)

    assert comparable(whole) == comparable(found)


@pytest.mark.parametrize("path", ["../other/secret.parquet", "a/b.parquet", "/etc/x", ".hidden"])
async def test_a_sidecar_outside_its_folder_is_not_fetched(manual_clock: ManualClock, path: str) -> None:
    """Another engine writes the checkpoint: what it names must not lead out of the table."""
    store = MemoryStore(clock=manual_clock)
    name = f"{3:020d}.checkpoint.{'0' * 8}-0000-4000-8000-{'0' * 12}.json"
    await store.create(f"{LOG}/{name}", json.dumps({"sidecar": {"path": path, "sizeInBytes": 1}}).encode() + b"\n")

    with pytest.raises(Corrupt, match="sidecar"):
        await checkpoint.content(store, ROOT, checkpoint.Checkpoint(3, (name,)))


@pytest.mark.parametrize("note", [b"no JSON", b"[]", b"{}", b'{"version":"x"}', b'{"version":null}'])
async def test_a_note_of_the_last_checkpoint_that_is_damaged_costs_time_only(
    manual_clock: ManualClock, note: bytes
) -> None:
    """The listing shows what is there; the next checkpoint mends it."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 55)
    await store.delete(f"{LOG}/{checkpoint.LAST}")
    await store.create(f"{LOG}/{checkpoint.LAST}", note)

    found = await history.snapshot(store, ROOT)
    await filled(store, manual_clock, 50, table)

    assert (54, 49) == (found.version, found.checkpoint)
    assert 99 == await checkpoint.last(store, ROOT)


async def test_a_checkpoint_in_parts_counts_when_all_are_there(manual_clock: ManualClock) -> None:
    """One part alone is no checkpoint."""
    store = MemoryStore(clock=manual_clock)
    await filled(store, manual_clock, 2)
    whole = await history.snapshot(store, ROOT)
    actions = [
        action for v in range(2) for action in map(json.loads, (await store.get(log_key(ROOT, v))).data.splitlines())
    ]
    actions = [action for action in actions if "commitInfo" not in action]
    first = f"{LOG}/{1:020d}.checkpoint.{1:010d}.{2:010d}.parquet"
    await store.create(first, parquet(actions[:2]))
    assert whole == await history.snapshot(store, ROOT)
    await store.create(first.replace(f"{1:010d}.{2:010d}", f"{2:010d}.{2:010d}"), parquet(actions[2:]))
    for version in range(2):
        await store.delete(log_key(ROOT, version))

    assert comparable(whole) == comparable(await history.snapshot(store, ROOT))


def parquet(actions: list[dict[str, Any]]) -> bytes:
    """Actions as a checkpoint's file; objects of the log that are maps in Parquet become maps."""
    text = pa.map_(pa.string(), pa.string())
    kinds = {"partitionValues": text, "tags": text, "configuration": text, "options": text}

    def typed(value: Any, name: str = "") -> Any:
        if name in kinds:
            return list(value.items())
        return {key: typed(each, key) for key, each in value.items()} if isinstance(value, dict) else value

    def kind_of(values: list[Any], name: str = "") -> pa.DataType:
        if name in kinds:
            return kinds[name]
        dicts = [value for value in values if isinstance(value, dict)]
        if not dicts:
            return pa.array(values).type
        inner = dict.fromkeys(key for value in dicts for key in value)
        return pa.struct([(key, kind_of([value.get(key) for value in dicts], key)) for key in inner])

    rows = {kind: [action.get(kind) for action in actions] for kind in dict.fromkeys(k for a in actions for k in a)}
    table = pa.table({kind: pa.array(list(map(typed, some)), kind_of(some)) for kind, some in rows.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


# Notes.


@pytest.mark.parametrize("later", [3, 60, 130])
async def test_the_note_outlives_checkpoints(manual_clock: ManualClock, later: int) -> None:
    """It says where rows come from, and silver what it was made by; no checkpoint has it, so entries carry it on."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 3)
    await table.commit(lambda _: Commit("WRITE", note="made by contract 7"))
    await filled(store, manual_clock, later, table)

    assert "made by contract 7" == (await history.snapshot(store, ROOT)).note
    assert "made by contract 7" == (await plain(store, manual_clock).commit(lambda _: Commit("WRITE"))).note


async def test_a_note_of_an_older_lakebed_is_found_behind_a_checkpoint(manual_clock: ManualClock) -> None:
    """Its entries, and those of other writers, say nothing about notes before them."""
    store = MemoryStore(clock=manual_clock)
    for version in range(30):
        commit = Commit("WRITE", spec=SPEC if version == 0 else None, table_id="i", note="old" if version == 4 else "")
        data = encode(commit, attempt_id="a", now_ms=0)
        await store.create(log_key(ROOT, version), data)
    await checkpoint.write(store, ROOT, 29, [f"{version:020d}.json" for version in range(30)])

    assert (29, "old") == ((found := await history.snapshot(store, ROOT)).checkpoint, found.note)


async def test_of_several_notes_behind_a_checkpoint_the_last_one_counts(manual_clock: ManualClock) -> None:
    """It says how far a topic is loaded: with an earlier one, rows that the table has would be loaded again."""
    store = MemoryStore(clock=manual_clock)
    notes = ["", "to 10", "to 20", "to 30", "", ""]  # the last two are another writer's
    for version, note in enumerate(notes):
        commit = Commit("WRITE", spec=SPEC if version == 0 else None, table_id="i", note=note)
        await store.create(log_key(ROOT, version), encode(commit, attempt_id="a", now_ms=0))
    await checkpoint.write(store, ROOT, 5, [f"{version:020d}.json" for version in range(6)])

    assert (5, "to 30") == ((found := await history.snapshot(store, ROOT)).checkpoint, found.note)


# Clean-up of the log.


@pytest.mark.parametrize(
    ("made", "copied", "data_change"),
    [([], False, True), (["joined"], False, False), (["rest"], True, True)],
    ids=["files go", "files are joined", "files go in part"],
)
async def test_a_table_that_rests_keeps_the_log_of_its_last_rows(
    manual_clock: ManualClock, made: list[str], copied: bool, data_change: bool
) -> None:
    """Retention removes rows day by day, or files are joined, and nothing comes: what a writer looks back to is still
    there."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 60)
    for day in range(50):
        await manual_clock.advance(DAY_S)
        adds = tuple(DataFile(f"{name}-{day}.parquet", 10, 1, copied=copied) for name in made)
        await table.commit(
            lambda state, adds=adds: Commit("DELETE", adds, state.files[:1], data_change=data_change)  # type: ignore[misc]
        )

    assert 0 == await cleanup.clean(store, ROOT, clock=manual_clock)


async def test_old_entries_go_by_the_tables_own_retention(tmp_path: Path, manual_clock: ManualClock) -> None:
    """30 days unless it says otherwise: every younger version stays readable, for delta-rs too; nothing goes twice."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 60)
    await manual_clock.advance(31 * DAY_S)
    await filled(store, manual_clock, 60, table)
    await store.create(f"{ROOT}/_lakebed/{16:020d}.json", b"{}")

    gone = await cleanup.clean(store, ROOT, clock=manual_clock)
    again = await cleanup.clean(store, ROOT, clock=manual_clock)

    left = await names(store)
    assert (1 + 49, 0) == (gone, again)
    assert f"{49:020d}.json" == left[1]
    assert [] == [info async for info in store.list(f"{ROOT}/_lakebed/")]
    assert [50, 120] == [(await history.snapshot(store, ROOT, version=v)).rows for v in (49, 119)]
    assert 120 == deltalake.DeltaTable(await copied(store, tmp_path)).to_pyarrow_table().num_rows
    with pytest.raises(NotFound, match="cleaned up"):
        await history.snapshot(store, ROOT, version=20)


@pytest.mark.parametrize("data", [b"PAR1 no Parquet PAR1", b'{"sidecar":{"path":"gone.parquet","sizeInBytes":1}}\n'])
async def test_nothing_goes_behind_a_checkpoint_that_cannot_be_read(manual_clock: ManualClock, data: bytes) -> None:
    """It stands in for what is older only if it is sound: until then the older entries are the table."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 48)
    kind = "json" if data.startswith(b"{") else "parquet"
    await store.create(f"{LOG}/{40:020d}.checkpoint.{'0' * 8}-0000-4000-8000-{'0' * 12}.{kind}", data)
    await manual_clock.advance(31 * DAY_S)
    await filled(store, manual_clock, 1, table)

    assert 0 == await cleanup.clean(store, ROOT, clock=manual_clock)
    assert 49 == (await history.snapshot(store, ROOT)).rows


@pytest.mark.parametrize(
    ("properties", "gone"),
    [
        ({"delta.logRetentionDuration": "interval 7 days"}, 49),
        ({"delta.logRetentionDuration": "interval 1 weeks 2 days"}, 0),
        ({"delta.logRetentionDuration": "interval 3 moons"}, 0),
        ({"delta.logRetentionDuration": "interval 1 day", "delta.enableExpiredLogCleanup": "false"}, 0),
    ],
)
async def test_retention_properties_are_obeyed(
    manual_clock: ManualClock, properties: dict[str, str], gone: int
) -> None:
    """An interval that is not understood keeps everything."""
    store = MemoryStore(clock=manual_clock)
    text = json.dumps(properties)[1:-1].encode()
    data = encode(Commit("WRITE", spec=SPEC, table_id="i"), attempt_id="a", now_ms=0)
    await store.create(log_key(ROOT, 0), data.replace(b'"configuration":{', b'"configuration":{' + text + b","))
    table = await filled(store, manual_clock, 55)
    await manual_clock.advance(8 * DAY_S)
    await filled(store, manual_clock, 1, table)

    assert gone == await cleanup.clean(store, ROOT, clock=manual_clock)


async def test_vacuum_knows_the_files_of_a_log_that_was_cleaned_up(tmp_path: Path, manual_clock: ManualClock) -> None:
    """Kept files stand in a checkpoint only; what a later version removed is known too."""
    store = MemoryStore(clock=manual_clock)
    table = await filled(store, manual_clock, 55)
    await manual_clock.advance(40 * DAY_S)
    await filled(store, manual_clock, 3, table)
    await cleanup.clean(store, ROOT, clock=manual_clock)
    state = await table.snapshot()
    await table.commit(lambda _: Commit("DELETE", removes=state.files[:5]))
    await store.create(f"{ROOT}/orphan.parquet", b"x")
    await manual_clock.advance(6 * DAY_S)
    early = await sweepable(store, ROOT, clock=manual_clock)
    await manual_clock.advance(2 * DAY_S)

    late = await sweepable(store, ROOT, clock=manual_clock)

    assert [] == early
    expected = {f"{ROOT}/{file.path}" for file in state.files[:5]} | {f"{ROOT}/orphan.parquet"}
    assert expected == {info.key for info in late}


async def test_vacuum_keeps_what_was_removed_at_a_time_that_no_checkpoint_names(manual_clock: ManualClock) -> None:
    """The time of a remove is optional: without one it may have been a moment ago."""
    store = MemoryStore(clock=manual_clock)
    await manual_clock.advance(400 * DAY_S)
    files = tuple(DataFile(f"{name}.parquet", 1, 1) for name in ("dated", "undated"))
    now = int(manual_clock.now_ns() // 1_000_000)
    for file in files:
        await store.create(f"{ROOT}/{file.path}", b"x")
    await manual_clock.advance(10 * DAY_S)
    await store.create(
        log_key(ROOT, 0), encode(Commit("WRITE", files, spec=SPEC, table_id="i"), attempt_id="a", now_ms=now)
    )
    await store.create(log_key(ROOT, 1), encode(Commit("DELETE", (), files), attempt_id="b", now_ms=now))
    actions = [action for action in await entries(store, 2) if "add" not in action]
    for action in actions:
        if action.get("remove", {}).get("path") == "undated.parquet":
            del action["remove"]["deletionTimestamp"]
    await store.create(f"{LOG}/{1:020d}.checkpoint.parquet", parquet(actions))
    await store.delete(log_key(ROOT, 0))
    await manual_clock.advance(DAY_S)

    assert [f"{ROOT}/dated.parquet"] == [info.key for info in await sweepable(store, ROOT, clock=manual_clock)]


async def test_vacuum_keeps_what_a_cleaned_up_log_remembers_as_removed(manual_clock: ManualClock) -> None:
    """Another writer keeps its log for an hour: files that were removed yesterday are still read by somebody."""
    store = MemoryStore(clock=manual_clock)
    await manual_clock.advance(400 * DAY_S)
    old = DataFile("old.parquet", 1, 1)
    await store.create(f"{ROOT}/old.parquet", b"x")
    now = int(manual_clock.now_ns() // 1_000_000)
    await manual_clock.advance(10 * DAY_S)
    later = int(manual_clock.now_ns() // 1_000_000)
    await store.create(
        log_key(ROOT, 0), encode(Commit("WRITE", (old,), spec=SPEC, table_id="i"), attempt_id="a", now_ms=now)
    )
    await store.create(log_key(ROOT, 1), encode(Commit("DELETE", (), (old,)), attempt_id="b", now_ms=later))
    actions = [action for action in await entries(store, 2) if "add" not in action]
    await store.create(f"{LOG}/{1:020d}.checkpoint.parquet", parquet(actions))
    await store.delete(log_key(ROOT, 0))
    await manual_clock.advance(DAY_S)
    soon = await sweepable(store, ROOT, clock=manual_clock)
    await manual_clock.advance(8 * DAY_S)

    assert [] == soon
    assert [f"{ROOT}/old.parquet"] == [info.key for info in await sweepable(store, ROOT, clock=manual_clock)]


@pytest.mark.parametrize(
    ("kept", "days"),
    [("", 7), ("interval 30 days", 30), ("interval 1 day", 7), ("interval 2 weeks", 14), ("for long", None)],
)
async def test_vacuum_obeys_a_table_that_keeps_its_files_longer(
    manual_clock: ManualClock, kept: str, days: int | None
) -> None:
    """Another engine's readers count on it: a longer time counts, a shorter one does not, a strange one keeps all."""
    store = MemoryStore(clock=manual_clock)
    await manual_clock.advance(400 * DAY_S)
    text = json.dumps({"delta.deletedFileRetentionDuration": kept})[1:-1].encode() + b"," if kept else b""
    data = encode(Commit("WRITE", spec=SPEC, table_id="i"), attempt_id="a", now_ms=0)
    await store.create(log_key(ROOT, 0), data.replace(b'"configuration":{', b'"configuration":{' + text))
    await store.create(f"{ROOT}/orphan.parquet", b"x")
    found: list[bool] = []
    for _ in range(40):
        found.append(bool(await sweepable(store, ROOT, clock=manual_clock)))
        await manual_clock.advance(DAY_S)

    assert [days is not None and day > days for day in range(40)] == found
