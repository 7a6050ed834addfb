"""The Delta log, as values: what an entry says, what a table is after it, which files can matter."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.delta import checkpoint, history
from lakebed.delta.log import Commit, apply, change_of, decode, encode, grows, log_key, overlapping
from lakebed.delta.model import ONCE_WINDOW, DataFile, Snapshot, TableSpec, VersionChange, WriteBatch
from lakebed.store.memory import MemoryStore

SCHEMA = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":false,"metadata":{}}]}'
SPEC = TableSpec("bronze/t", SCHEMA, keys=("id",))
ONE = DataFile("part-1.parquet", 10, 3, low={"id": 1}, high={"id": 9})
TWO = DataFile("part-2.parquet", 20, 4, low={"id": 5}, high={"id": 30})


def entry(commit: Commit) -> bytes:
    return encode(commit, attempt_id="a1", now_ms=1)


async def commit_all(store: MemoryStore, *commits: Commit) -> None:
    for version, commit in enumerate(commits):
        await store.create(log_key(SPEC.root, version), entry(commit))


CREATED = Commit("WRITE", adds=(ONE,), batch=WriteBatch("app", 1), spec=SPEC, table_id="id-1")


def test_an_entry_says_what_it_was_given() -> None:
    """A table after its first entry has the schema, the files, their bounds and the batch."""
    state = apply(Snapshot(), 0, decode(entry(CREATED), "k"), "k")

    known = msgspec.structs.replace(state, metadata={})
    assert Snapshot(0, SCHEMA, (), (ONE,), {"app": 1}, "id-1", keys=SPEC.keys) == known
    assert ("bronze/t", {"lakebed.keys": "id"}) == (state.metadata["name"], state.properties)
    assert state.rows == 3


def test_a_remove_takes_a_file_out_and_an_add_puts_one_in() -> None:
    """A merge entry replaces files and keeps the rest."""
    before = Snapshot(4, SCHEMA, (), (ONE,), {"app": 1}, "id-1")

    after = apply(before, 5, decode(entry(Commit("MERGE", (TWO,), (ONE,), WriteBatch("app", 2))), "k"), "k")

    assert (after.files, after.applied, after.version) == ((TWO,), {"app": 2}, 5)


@pytest.mark.parametrize("data", [b"{", b'["x"]\n', b"\xff\xfe\n", b'{"add":1}\nnope\n'])
def test_what_is_no_log_entry_is_corrupt(data: bytes) -> None:
    """Garbage in the log is Corrupt and names the object."""
    with pytest.raises(Corrupt, match="the-key"):
        decode(data, "the-key")


@pytest.mark.parametrize(
    "protocol",
    [
        {"minReaderVersion": 4, "minWriterVersion": 7},
        {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["variantType"], "writerFeatures": []},
    ],
)
def test_a_table_that_could_be_read_wrongly_is_refused(protocol: dict[str, Any]) -> None:
    """A version or a feature that Lakebed does not know, by its name."""
    with pytest.raises(Invalid, match=r"variantType|reader version 4"):
        apply(Snapshot(), 0, [{"protocol": protocol}], "k")


def test_only_files_whose_bounds_overlap_can_matter() -> None:
    """Bounds prune; a file without bounds never is."""
    bare = DataFile("part-3.parquet", 1, 1)

    assert [ONE, bare] == overlapping([ONE, TWO, bare], "id", 0, 4)
    assert [ONE, TWO, bare] == overlapping([ONE, TWO, bare], "id", 9, 9)
    assert [bare] == overlapping([ONE, TWO, bare], "id", 31, 40)
    half = [DataFile("p", 1, 1, low={"id": 50}), DataFile("q", 1, 1, high={"id": 2})]  # one bound proves nothing
    assert half == overlapping(half, "id", 31, 40)


async def test_history_replays_the_log_to_any_version(manual_clock: ManualClock) -> None:
    """The table as it is, and as it was at each version."""
    store = MemoryStore(clock=manual_clock)
    await commit_all(store, CREATED, Commit("WRITE", (TWO,)), Commit("MERGE", (), (ONE,)))

    assert (await history.snapshot(store, SPEC.root, version=0)).files == (ONE,)
    assert (await history.snapshot(store, SPEC.root, version=1)).files == (ONE, TWO)
    assert (await history.snapshot(store, SPEC.root)).files == (TWO,)


async def test_an_older_version_is_not_read_from_a_newer_snapshot(manual_clock: ManualClock) -> None:
    """Neither a checkpoint nor a snapshot that the caller knows is used for a version before it."""
    store = MemoryStore(clock=manual_clock)
    more = [Commit("WRITE", (DataFile(f"part-x{n}.parquet", 1, 1),)) for n in range(20)]
    await commit_all(store, CREATED, *more)
    fifth = await history.snapshot(store, SPEC.root, version=5)
    newest = await history.snapshot(store, SPEC.root)
    await checkpoint.write(store, SPEC.root, 16, [f"{version:020d}.json" for version in range(17)])

    assert (5, 6) == (fifth.version, len(fifth.files))
    assert fifth == await history.snapshot(store, SPEC.root, version=5)
    assert fifth == await history.snapshot(store, SPEC.root, version=5, known=newest)


async def test_joined_files_that_were_changed_again_are_read_where_their_rows_are(manual_clock: ManualClock) -> None:
    """A reader that knows its rows asks for joined files, and finds each of its rows once."""
    store = MemoryStore(clock=manual_clock)
    joined, changed = DataFile("part-3.parquet", 30, 7), DataFile("part-4.parquet", 30, 8)
    await commit_all(
        store,
        CREATED,
        Commit("WRITE", (TWO,)),
        Commit("OPTIMIZE", (joined,), (ONE, TWO), data_change=False),
        Commit("MERGE", (changed,), (joined,)),
    )

    assert [joined] == await history.brought(store, SPEC.root, 0, 2, joined=True)
    assert [changed] == await history.brought(store, SPEC.root, 0, 3, joined=True)


async def test_what_versions_brought_is_read_though_it_was_joined_since(manual_clock: ManualClock) -> None:
    """A file that a compaction replaced still counts as brought; one whose rows were deleted does not."""
    store = MemoryStore(clock=manual_clock)
    joined = DataFile("part-3.parquet", 30, 7)
    await commit_all(
        store,
        CREATED,
        Commit("WRITE", (TWO,)),
        Commit("OPTIMIZE", (joined,), (ONE, TWO), data_change=False),
        Commit("WRITE", (DataFile("part-4.parquet", 1, 1),)),
        Commit("DELETE", (), (DataFile("part-4.parquet", 1, 1),)),
    )

    assert [TWO] == await history.brought(store, SPEC.root, 0, 4)
    assert [ONE, TWO] == await history.brought(store, SPEC.root, -1, 2)


async def test_a_missing_version_is_not_found_and_no_table_is_version_minus_one(manual_clock: ManualClock) -> None:
    """A pinned version that is not there is an error; a table that is not there is empty."""
    store = MemoryStore(clock=manual_clock)

    assert Snapshot() == await history.snapshot(store, SPEC.root)
    with pytest.raises(NotFound):
        await history.snapshot(store, SPEC.root, version=3)


async def test_a_log_whose_beginning_is_gone_is_corrupt(manual_clock: ManualClock) -> None:
    """A log that starts in the middle is never taken for an empty table."""
    store = MemoryStore(clock=manual_clock)
    await store.create(log_key(SPEC.root, 5), entry(Commit("WRITE", (TWO,))))

    with pytest.raises(Corrupt):
        await history.snapshot(store, SPEC.root)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "a b", "a" * 200])
def test_names_that_are_paths_in_disguise_are_refused(name: str) -> None:
    """A table's name cannot leave its folder."""
    with pytest.raises(Invalid):
        TableSpec(name, SCHEMA)


def test_a_spec_names_only_columns_it_has() -> None:
    """Keys, partitions and stats must be columns."""
    for role in ("keys", "partition_by", "stats"):
        with pytest.raises(Invalid, match="nope"):
            TableSpec("t", SCHEMA, **{role: ("nope",)})  # type: ignore[arg-type]


def test_the_entry_is_json_lines_that_delta_readers_expect() -> None:
    """One action a line; stats are JSON inside JSON, and ranges of some columns alone stand in a tag."""
    lines = [msgspec.json.decode(line) for line in entry(CREATED).splitlines()]

    assert [next(iter(line)) for line in lines] == ["commitInfo", "protocol", "metaData", "txn", "add"]
    assert msgspec.json.decode(lines[-1]["add"]["stats"]) == {"numRecords": 3}
    assert msgspec.json.decode(lines[-1]["add"]["tags"]["lakebed.bounds"]) == {
        "minValues": {"id": 1},
        "maxValues": {"id": 9},
        "nullCount": {},
    }


def test_an_application_that_writes_once_is_known_by_the_version_it_made() -> None:
    """Its place in the log can be found again, with what it changed."""
    commit = Commit("MERGE", (TWO,), batch=WriteBatch.once("tick-1"), rows_inserted=4, rows_replaced=2)
    actions = decode(encode(commit, attempt_id="a", now_ms=1, version=7), "k")

    after = apply(Snapshot(6, SCHEMA, (), (ONE,)), 7, actions, "k")

    assert after.applied == {"once:tick-1": 7}
    assert change_of(7, actions) == VersionChange(7, "MERGE", False, ("once:tick-1",), 4, 2)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_batch_of_an_application_is_known_by_its_number_whatever_version_it_makes(number: int) -> None:
    """Spark's streams begin with batch 0: under another number the batches behind it would be taken for written."""
    commit = Commit("WRITE", (TWO,), batch=WriteBatch("stream", number))
    actions = decode(encode(commit, attempt_id="a", now_ms=1, version=7), "k")

    assert {"stream": number} == apply(Snapshot(6, SCHEMA, (), (ONE,)), 7, actions, "k").applied


def test_applications_that_wrote_once_are_forgotten_and_others_are_not() -> None:
    """What is remembered of them is bounded, however many ticks there are."""
    at = 256 * 50
    before = Snapshot(at - 1, SCHEMA, applied={"once:old": at - ONCE_WINDOW, "once:new": at - 9, "silver": 3})

    after = apply(before, at, decode(entry(Commit("WRITE", (ONE,))), "k"), "k")

    assert after.applied == {"once:new": at - 9, "silver": 3}


def test_a_schema_grows_by_new_names_only() -> None:
    """Another type, a lost column or a name that differs in case is no growth."""

    def schema(**types: str) -> str:
        fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
        return msgspec.json.encode({"type": "struct", "fields": fields}).decode()

    old = schema(id="long", note="string")

    assert grows(old, old)
    assert grows(old, schema(id="long", note="string", more="double"))
    assert not grows(old, schema(id="long"))
    assert not grows(old, schema(id="string", note="string"))
    assert not grows(old, schema(id="long", note="string", NOTE="string"))


def test_the_last_note_stays_until_the_next() -> None:
    """Where rows come from is told by the version that brought them."""
    noted = apply(Snapshot(0, SCHEMA), 1, decode(entry(Commit("WRITE", note="from a")), "k"), "k")
    later = apply(noted, 2, decode(entry(Commit("WRITE")), "k"), "k")

    assert (noted.note, later.note) == ("from a", "from a")
