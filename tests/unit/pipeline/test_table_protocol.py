"""What a table demands: features and properties are obeyed, or that table alone is refused by name."""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path
from typing import Any

import deltalake
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid, Stale
from lakebed.core.ids import Ids
from lakebed.core.settings import load
from lakebed.delta import history
from lakebed.delta.log import Commit, apply, decode, encode, log_key
from lakebed.delta.model import DataFile, Snapshot, TableProtocol, TableSpec, path_of
from lakebed.delta.plain import schema_json
from lakebed.delta.predicate import parse_predicate
from lakebed.delta.protocol import PLAIN, needed, seconds
from lakebed.pipeline.tables import files, rewrite
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.pipeline.tables.scan import scan
from lakebed.pipeline.tables.source import TableSource
from lakebed.pipeline.tables.table import Table
from lakebed.pipeline.tables.view import Tables
from lakebed.pipeline.tables.writers import spec_of
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.delta_tables import Folder, read_by_task
from support.runtimes import runtime_on
from support.tick_fixtures import context_of

KINDS = (("id", "long"), ("name", "string"))
SPEC = TableSpec("t", schema_json(KINDS), keys=("id",))
ONE, TWO = DataFile("one.parquet", 1, 1), DataFile("two.parquet", 1, 1)
APPEND, REWRITE = Commit("WRITE", (TWO,)), Commit("MERGE", (TWO,), (ONE,))
REPLACE, JOIN = Commit("WRITE", (TWO,), (ONE,), overwrites=True), Commit("OPTIMIZE", (TWO,), (ONE,), data_change=False)


def state(**changed: Any) -> Snapshot:
    """A table with one file; `properties` are its configuration."""
    metadata = {"configuration": changed.pop("properties", {}), "schemaString": SPEC.schema_json}
    return Snapshot(3, changed.pop("schema", SPEC.schema_json), files=(ONE,), metadata=metadata, **changed)


def nested(within: str) -> str:
    """A schema whose only column has an invariant on a field inside it."""
    field = {"name": "inner", "type": "long", "nullable": True, "metadata": {"delta.invariants": "1"}}
    kind: dict[str, Any] = {"type": "struct", "fields": [field]}
    if within == "array":
        kind = {"type": "array", "elementType": kind, "containsNull": True}
    if within == "map":
        kind = {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": True}
    column = {"name": "s", "type": kind, "nullable": True, "metadata": {}}
    return msgspec.json.encode({"type": "struct", "fields": [column]}).decode()


def features(*names: str) -> TableProtocol:
    return TableProtocol(3, 7, (), names)


@pytest.mark.parametrize(
    ("held", "commit", "why"),
    [
        (state(properties={"delta.appendOnly": "true"}), REWRITE, "append-only"),
        (state(properties={"delta.appendOnly": "true"}), REPLACE, "append-only"),
        (state(properties={"delta.appendOnly": "true"}), Commit("DELETE", (), (ONE,)), "append-only"),
        (state(properties={"delta.enableChangeDataFeed": "true"}), REWRITE, "change data feed"),
        (state(properties={"delta.constraints.positive": "id > 0"}), APPEND, "constraint positive"),
        (state(properties={"delta.columnMapping.mode": "name"}), APPEND, "maps column names"),
        (state(protocol=TableProtocol(1, 8)), APPEND, "writer version 8"),
        (state(protocol=features("appendOnly", "rowTracking")), APPEND, "rowTracking"),
        (state(protocol=features("inCommitTimestamp")), APPEND, "inCommitTimestamp"),
        (state(protocol=features("deletionVectors")), APPEND, "deletionVectors"),
        (state(schema=SPEC.schema_json.replace("{}", '{"delta.generationExpression":"1"}', 1)), APPEND, "id has"),
        (state(schema=SPEC.schema_json.replace("{}", '{"delta.invariants":"1"}', 1)), APPEND, "invariant"),
        (state(schema=SPEC.schema_json.replace("{}", '{"delta.identity.start":1}', 1)), APPEND, "identity"),
        (state(schema=nested("struct")), APPEND, "s.inner has an invariant"),
        (state(schema=nested("array")), APPEND, "s.element.inner has an invariant"),
        (state(schema=nested("map")), APPEND, "s.value.inner has an invariant"),
    ],
)
def test_a_version_that_would_break_a_promise_is_refused(held: Snapshot, commit: Commit, why: str) -> None:
    """By the table's name and the reason."""
    with pytest.raises(Invalid, match=f"'bronze/t'.*{why}"):
        commit.check(held, "bronze/t")


@pytest.mark.parametrize(
    ("held", "commit"),
    [
        (state(), REWRITE),
        (state(properties={"delta.appendOnly": "true"}), APPEND),
        (state(properties={"delta.appendOnly": "true"}), JOIN),
        (state(properties={"delta.appendOnly": "false"}), REWRITE),
        (state(properties={"delta.enableChangeDataFeed": "true"}), APPEND),
        (state(properties={"delta.enableChangeDataFeed": "true"}), REPLACE),
        (state(protocol=TableProtocol(2, 6)), REWRITE),
        (state(protocol=features("appendOnly", "invariants", "timestampNtz", "v2Checkpoint")), REWRITE),
    ],
)
def test_a_feature_that_nothing_uses_changes_nothing(held: Snapshot, commit: Commit) -> None:
    """A writer version that allows constraints is no constraint."""
    commit.check(held, "bronze/t")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 5.0),
        ("interval 30 days", 30 * 86_400.0),
        ("INTERVAL 1 week 12 HOURS", 7.5 * 86_400.0),
        ("interval 2 minutes 3 seconds", 123.0),
        ("30 days", 30 * 86_400.0),
        ("interval 1 year", float("inf")),
        ("interval 1 week 3 fortnights", float("inf")),
        ("soon", float("inf")),
    ],
)
def test_intervals_are_read_and_what_is_not_understood_keeps_everything(text: str, expected: float) -> None:
    """Nothing is deleted too early."""
    assert expected == seconds({"p": text} if text else {}, "p", 5.0)


def test_moments_without_a_zone_name_their_feature() -> None:
    """Other readers refuse such a column without it; what the protocol demanded before stays."""
    ntz = schema_json((("id", "long"), ("t", "timestamp_ntz")))

    assert PLAIN == needed(PLAIN, SPEC.schema_json)
    assert TableProtocol(3, 7, ("timestampNtz",), ("appendOnly", "invariants", "timestampNtz")) == needed(PLAIN, ntz)
    raised = needed(TableProtocol(2, 5), ntz)
    assert ("columnMapping", "timestampNtz") == raised.reader_features
    assert {"checkConstraints", "changeDataFeed", "generatedColumns", "columnMapping"} < set(raised.writer_features)
    assert raised == needed(raised, ntz)
    plain = needed(TableProtocol(1, 7, (), ("appendOnly",)), ntz)  # a feature of readers must be one of writers too
    assert TableProtocol(3, 7, ("timestampNtz",), ("appendOnly", "timestampNtz")) == plain
    mapped = needed(TableProtocol(2, 7, (), ("columnMapping",)), ntz)
    assert TableProtocol(3, 7, ("columnMapping", "timestampNtz"), ("columnMapping", "timestampNtz")) == mapped


def grown(folder: Path, *specs: TableSpec, first: bytes = b"") -> tuple[Table, MemoryStore]:
    """A table that is appended to with each spec."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    if first:
        asyncio.run(store.create(log_key(SPEC.root, 0), first))
    for number, spec in enumerate(specs):
        table = Table(None, spec, runtime_on(store, clock, Ids()), location=Folder.at(folder))  # type: ignore[arg-type]
        table.append_files([DataFile(f"f{number}.parquet", 1, 1)])
    return table, store


def test_properties_and_comments_survive_a_new_column(tmp_path: Path) -> None:
    """Only the schema and our keys change; the protocol is not written again, so nothing is downgraded."""
    text = b'"configuration":{"delta.logRetentionDuration":"interval 9 days","owner":"me",'
    data = encode(Commit("WRITE", spec=SPEC, table_id="i"), attempt_id="a", now_ms=5)
    data = data.replace(b'"configuration":{', text).replace(b'"id":"i"', b'"id":"i","description":"of things"')
    data = data.replace(b'\\"metadata\\":{}', b'\\"metadata\\":{\\"comment\\":\\"said\\"}', 1)
    more = TableSpec("t", schema_json((*KINDS, ("more", "double"))), keys=("id",))

    table, store = grown(tmp_path, more, first=data)
    after = table.snapshot()

    entry = decode(asyncio.run(store.get(log_key(SPEC.root, 1))).data, "k")
    assert ["commitInfo", "metaData", "add"] == [next(iter(action)) for action in entry]
    assert {"delta.logRetentionDuration": "interval 9 days", "owner": "me", "lakebed.keys": "id"} == after.properties
    assert ("of things", 5, "i") == (after.metadata["description"], after.metadata["createdTime"], after.table_id)
    fields = msgspec.json.decode(after.schema_json)["fields"]
    assert ["id", "name", "more"] == [field["name"] for field in fields]
    assert {"comment": "said"} == fields[0]["metadata"]


def test_keys_and_order_survive_a_writer_that_knows_neither(tmp_path: Path) -> None:
    """A stream that appends a new column does not make the table lose what others upsert and cluster by."""
    ours = msgspec.structs.replace(SPEC, cluster_by=("name",))
    theirs = TableSpec("t", schema_json((*KINDS, ("more", "double"))))

    after = grown(tmp_path, ours, theirs)[0].snapshot()

    assert (("id",), ("name",)) == (after.keys, after.cluster_by)


def test_files_of_another_layout_are_refused(tmp_path: Path) -> None:
    """A file without its partition's value would be a row without one to every other reader."""
    folders = msgspec.structs.replace(SPEC, partition_by=("name",))

    with pytest.raises(Stale, match="partitioned by name, not by nothing"):
        grown(tmp_path, folders, SPEC)
    with pytest.raises(Stale, match="partitioned by nothing, not by name"):
        grown(tmp_path, SPEC, folders)


def test_a_moment_without_a_zone_that_comes_later_raises_the_protocol(tmp_path: Path) -> None:
    """In the same version; delta-rs reads the table."""
    more = TableSpec("t", schema_json((*KINDS, ("at", "timestamp_ntz"))), keys=("id",))
    table, store = grown(tmp_path, SPEC, more)

    assert (
        features("appendOnly", "invariants", "timestampNtz").writer_features
        == table.snapshot().protocol.writer_features
    )
    for version in range(2):
        log = tmp_path / "copy" / "_delta_log" / f"{version:020d}.json"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(asyncio.run(store.get(log_key(SPEC.root, version))).data)
    theirs = deltalake.DeltaTable(str(tmp_path / "copy"))
    assert (3, 7) == (theirs.protocol().min_reader_version, theirs.protocol().min_writer_version)
    assert "timestamp_ntz" in theirs.schema().to_json()


async def refused_and_sound(context: Any) -> None:
    """Two bronze tables, of which the first needs a feature that nobody here knows."""
    for name in ("a", "b"):
        spec = TableSpec(f"bronze/o/p/{name}", SPEC.schema_json, keys=("id",))
        data = encode(Commit("WRITE", (ONE, TWO), spec=spec, table_id="i"), attempt_id="a", now_ms=0)
        if name == "a":
            features = b'"readerFeatures":["catalogManaged"],"writerFeatures":["catalogManaged"]'
            theirs = b'"minReaderVersion":3,"minWriterVersion":7,' + features
            data = data.replace(b'"minReaderVersion":1,"minWriterVersion":2', theirs)
        await context.store.create(log_key(spec.root, 0), data)


def test_one_table_that_is_refused_does_not_hold_up_the_others(manual_clock: ManualClock) -> None:
    """Listing, compaction and vacuum name it with its problem and go on."""
    context = context_of(clock=manual_clock)
    asyncio.run(refused_and_sound(context))

    listed = asyncio.run(Tables(context).all())
    joined = TableMaintenance(context).compact(dry_run=True)
    swept = TableMaintenance(context).vacuum(dry_run=True)

    assert [True, False] == ["catalogManaged" in row.problem for row in listed]
    assert [("bronze/o/p/a", 0), ("bronze/o/p/b", 2)] == [(report.table, report.files_joined) for report in joined]
    assert ["catalogManaged" in report.problem for report in joined] == [True, False]
    assert ["bronze/o/p/a"] == [report.table for report in swept]
    with pytest.raises(Invalid, match="catalogManaged"):
        TableMaintenance(context).compact("bronze/o/p/a")


# Column mapping and deletion vectors.


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_read_by_their_physical_names(tmp_path: Path, mode: str) -> None:
    """Renamed columns, also inside structs, and partitions; a dropped name that is used again is another column."""

    def field(name: str, kind: Any, number: int, physical: str) -> dict[str, Any]:
        said = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
        return {"name": name, "type": kind, "nullable": True, "metadata": said}

    inner = {"type": "struct", "fields": [field("x", "long", 3, "col-x")]}
    fields = [field("id", "long", 1, "col-1"), field("s", inner, 2, "col-2"), field("p", "string", 4, "col-p")]
    schema = msgspec.json.encode({"type": "struct", "fields": [*fields, field("old", "string", 9, "col-9")]}).decode()
    stored = pa.schema(
        [
            pa.field("old" if mode == "id" else "col-1", pa.int64(), metadata={"PARQUET:field_id": "1"}),
            pa.field("col-2", pa.struct([pa.field("col-x", pa.int32())]), metadata={"PARQUET:field_id": "2"}),
        ]
    )
    (tmp_path / "tables/t").mkdir(parents=True)
    pq.write_table(pa.table([[1, 2], [{"col-x": 5}, None]], schema=stored), tmp_path / "tables/t/f.parquet")
    held = Snapshot(
        0,
        schema,
        ("p",),
        (DataFile("f.parquet", 1, 2, {"col-p": "v"}),),
        metadata={"configuration": {"delta.columnMapping.mode": mode}},
    )
    types = {"id": pa.int64(), "s": pa.struct([("x", pa.int64())]), "p": pa.string(), "old": pa.string()}

    found = read_by_task(Folder.at(tmp_path), "tables/t", held, types)

    assert [{"id": 1, "s": {"x": 5}, "p": "v", "old": None}, {"id": 2, "s": None, "p": "v", "old": None}] == found
    assert found == scan(Folder.at(tmp_path), "tables/t", held).to_pylist()
    misleading = msgspec.structs.replace(held.files[0], low={"id": 7}, high={"id": 9})  # of a column named so in files
    mapped = msgspec.structs.replace(held, files=(misleading,))
    wanted = parse_predicate("id = 2 and p = 'v'")
    assert found[1:] == scan(Folder.at(tmp_path), "tables/t", mapped, predicate=wanted).to_pylist()
    with pytest.raises(Invalid, match="maps column names"):
        rewrite.check_plain(held, "t")


Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def inline_vector(deleted: list[int]) -> dict[str, Any]:
    """A deletion vector as the protocol defines it: a 64-bit Roaring bitmap, in Z85, inside the log."""
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(deleted) - 1, 16) + struct.pack(f"<{len(deleted)}H", *deleted)
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    padded = data + b"\0" * (-len(data) % 4)
    text = base64.b85encode(padded).decode().translate(str.maketrans(B85, Z85))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(data), "cardinality": len(deleted)}


PROTOCOL = {
    "minReaderVersion": 3,
    "minWriterVersion": 7,
    "readerFeatures": ["deletionVectors"],
    "writerFeatures": ["deletionVectors"],
}


def marked(folder: Path, *versions: dict[str, dict[str, Any] | None]) -> MemoryStore:
    """A table of six rows a file, on disk and its log in a store; each version gives its files new deletion vectors."""
    root, store = folder / "tables/t", MemoryStore(clock=ManualClock())
    (root / "_delta_log").mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"protocol": PROTOCOL}]
    lines += decode(encode(Commit("WRITE", spec=SPEC, table_id="i"), attempt_id="a", now_ms=0), "k")[2:]
    before: dict[str, dict[str, Any]] = {}
    for version, changed in enumerate(versions):
        for name, vector in changed.items():
            ids = range(begin := 10 * list(versions[0]).index(name), begin + 6)
            if name not in before:
                pq.write_table(pa.table({"id": list(ids), "name": [f"n{one}" for one in ids]}), root / name)
            lines += [{"remove": before[name]}] if name in before else []
            add = {"path": path_of(name), "size": (root / name).stat().st_size, "partitionValues": {}}
            add |= {"modificationTime": 0, "dataChange": True, "stats": '{"numRecords":6}'}
            before[name] = add | ({"deletionVector": vector} if vector else {})
            lines.append({"add": before[name]})
        data = b"\n".join(map(msgspec.json.encode, lines))
        (root / "_delta_log" / f"{version:020d}.json").write_bytes(data)
        asyncio.run(store.create(log_key("tables/t", version), data))
        lines = []
    return store


def test_rows_that_a_deletion_vector_marks_are_not_read(tmp_path: Path) -> None:
    """Neither counted nor read; files without one are read whole."""
    vectors = {"f.parquet": inline_vector([0, 2, 3]), "g h.parquet": None, "e%20f ü.parquet": inline_vector([5])}
    store = marked(tmp_path, vectors)

    held = asyncio.run(history.snapshot(store, "tables/t"))
    found = read_by_task(Folder.at(tmp_path), "tables/t", held, {"id": pa.int64()})

    assert 14 == held.rows
    assert [1, 4, 5, *range(10, 16), *range(20, 25)] == [row["id"] for row in found]
    assert found == scan(Folder.at(tmp_path), "tables/t", held, columns=["id"]).to_pylist()
    some = scan(Folder.at(tmp_path), "tables/t", held, predicate=parse_predicate("id in (2, 4, 11)"))
    assert [{"id": 4, "name": "n4"}, {"id": 11, "name": "n11"}] == some.to_pylist()
    unknown = msgspec.structs.replace(held, files=(msgspec.structs.replace(held.files[1], vector=inline_vector([1])),))
    with pytest.raises(Corrupt, match="deletion vector"):  # not of this version: its rows are not known to be there
        scan(Folder.at(tmp_path), "tables/t", unknown)


class Source(TableSource):
    """The table in this folder and store, without settings."""

    folder: Path
    store: MemoryStore
    settings = load(sections(), env={})

    @property
    def location(self) -> Folder:
        return Folder.at(self.folder)

    def snapshot(self, version: int | None = None, *, existing: bool = True) -> Snapshot:
        return asyncio.run(history.snapshot(self.store, self.root, version=version))


def test_a_stream_reads_the_rows_of_the_version_that_it_planned(tmp_path: Path) -> None:
    """One that is started again repeats its last micro-batch, though the table has other deletion vectors since."""
    first, second = {"a.parquet": None}, {"a.parquet": inline_vector([1])}
    source = Source({"path": "t"})
    source.folder, source.store = tmp_path, marked(tmp_path, first, second, {"a.parquet": inline_vector([1, 4])})
    stream = source.streamReader(StructType([StructField("id", LongType())]))

    def ids(until: int) -> list[int]:
        tasks = stream.partitions({"version": -1}, {"version": until})
        return [one for task in tasks for batch in stream.read(task) for one in batch.column(0).to_pylist()]

    assert [[0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 2, 3, 5]] == [ids(until) for until in range(3)]


def test_a_write_of_spark_keeps_the_tables_keys_and_order() -> None:
    """Rows of an append are ordered like all others, and a new column changes only the schema."""
    held = state(properties={"lakebed.keys": "id", "lakebed.cluster_by": "name"}, keys=("id",))
    schema = StructType([StructField("id", LongType()), StructField("name", StringType())])

    added = spec_of("t", held, StructType([*schema.fields, StructField("more", LongType())]), {})
    without = spec_of("t", held, StructType(schema.fields[:1]), {}, overwrite=True)

    assert (("id",), ("name",), ["id", "name", "more"]) == (added.keys, added.cluster_by, added.columns)
    assert (("id",), ()) == (without.keys, without.cluster_by)


def test_a_file_that_gets_a_deletion_vector_stays_in_the_table() -> None:
    """The log removes it without the vector and adds it with one, in any order: these are two files to Delta."""
    add = {"path": "a%20b.parquet", "size": 1, "stats": '{"numRecords":6}'}
    vector = inline_vector([1])
    marked = [{"add": add | {"deletionVector": vector}}, {"remove": {"path": "a b.parquet"}}]

    first = apply(Snapshot(), 0, [{"add": add}], "k")
    second = apply(first, 1, marked, "k")
    third = apply(second, 2, [{"remove": {"path": "a b.parquet", "deletionVector": vector}}], "k")

    assert [(6, 1), (5, 1), (0, 0)] == [(each.rows, len(each.files)) for each in (first, second, third)]


def test_moments_and_nested_values_of_other_engines_are_read(tmp_path: Path) -> None:
    """INT96, nanoseconds, structs without a field or with one that may not be null, narrower numbers."""
    folder = tmp_path / "tables/t"
    folder.mkdir(parents=True)
    moments = pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns", tz="UTC"))
    inner = pa.array([{"a": 1}, {"a": 2}], pa.struct([pa.field("a", pa.int32(), nullable=False)]))
    rows = pa.table({"t": moments, "s": inner, "l": [[{"a": 1}], None], "n": pa.array([1, 2], pa.int32())})
    for name, old in (("int96.parquet", True), ("ns.parquet", False)):
        pq.write_table(rows, folder / name, use_deprecated_int96_timestamps=old, version="2.6")
    us = pa.timestamp("us", tz="UTC")
    new = pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.string())])
    types = {"t": us, "s": new, "l": pa.list_(new), "n": pa.int64()}
    held = Snapshot(0, SPEC.schema_json, files=(DataFile("int96.parquet", 1, 2), DataFile("ns.parquet", 1, 2)))

    found = read_by_task(Folder.at(tmp_path), "tables/t", held, types)

    assert found[:2] == found[2:]
    assert (123456, None) == (found[0]["t"].microsecond, found[1]["t"])
    assert ({"a": 1, "b": None}, [{"a": 1, "b": None}], 1) == (found[0]["s"], found[0]["l"], found[0]["n"])
    location = Folder.at(tmp_path)
    whole = files.read_file(location, location.filesystem(), "tables/t", "int96.parquet", pa.schema(types))
    assert found[:2] == whole.to_pylist()
