"""What an audit makes of each stored object: sound, or a problem in words; a store that is away is neither."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakebed.batches import paths
from lakebed.batches.codec.pack import encode_pack
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, BatchIdentity
from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.pipeline.audit import reading
from lakebed.pipeline.audit.reading import GONE, OTHER_BATCH
from lakebed.rollups.codec.chunk import encode_rollup, rollup_schema
from support.batch_frames import START_NS, frame_of

IDENTITY = BatchIdentity("agent-a", "boot-1", 0, 9)
FRAME = frame_of(0, 9)
SHA = hashlib.sha256(FRAME).hexdigest()
AT_NS = START_NS + 5
MANIFEST = AcceptedBatch(
    "lightmetrics.accepted_batch.v1",
    "agent-a",
    "boot-1",
    0,
    9,
    SHA,
    len(FRAME),
    paths.blob_key(SHA),
    AT_NS,
    "collector-1",
    1,
    1,
)
ENTRY = AcceptedByTime(
    "lightmetrics.accepted_by_time.v1",
    paths.accepted_key(IDENTITY),
    SHA,
    paths.blob_key(SHA),
    len(FRAME),
    10,
    AT_NS,
    START_NS,
    START_NS + 9,
)


class Reader:
    """Stands for the bucket: bytes by key."""

    def __init__(self, **objects: bytes) -> None:
        self.objects: dict[str, bytes] = objects
        self.away = False

    def get(self, key: str, *, bytes_max: int) -> bytes:
        if self.away:
            raise Unavailable("the store is away")
        if key not in self.objects:
            raise NotFound(f"no {key}")
        if len(self.objects[key]) > bytes_max:
            raise Corrupt(f"{key} has more than {bytes_max} bytes")
        return self.objects[key]


def changed(record: Any, **values: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(record), **values})


KEY = paths.accepted_key(IDENTITY)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (changed(MANIFEST), None),
        (changed(MANIFEST, later_field=1), None),
        (None, GONE),
        (changed(MANIFEST, seq_end=8), OTHER_BATCH),
        (changed(MANIFEST, agent_id="agent-b"), OTHER_BATCH),
        (changed(MANIFEST)[:-5], "does not decode"),
        (b"\xff\xfe", "does not decode"),
        (changed(MANIFEST, schema="lightmetrics.accepted_batch.v2", frame_bytes="many"), "v2' is not known here"),
        (changed(MANIFEST, pad="x" * reading.MANIFEST_BYTES_MAX), "more than"),
    ],
)
def test_a_manifest_is_read_or_has_a_problem(stored: bytes | None, problem: str | None) -> None:
    """Its hash, time and size, or why they are not known: one of another batch is not believed."""
    reader: Any = Reader(**({KEY: stored} if stored is not None else {}))

    *values, said = reading._manifest(reader, KEY)

    if problem is None:
        assert ([SHA, AT_NS, len(FRAME)], None) == (values, said)
    else:
        assert [None] * 3 == values
        assert said is not None and problem in said


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (changed(ENTRY), None),
        (None, GONE),
        (changed(ENTRY, accepted_at_unix_ns=AT_NS + 1), OTHER_BATCH),
        (changed(ENTRY, accepted_manifest_key="accepted/v1/nothing.json"), OTHER_BATCH),
        (changed(ENTRY, accepted_manifest_key=paths.accepted_key(BatchIdentity("b", "b", 0, 9))), OTHER_BATCH),
        (changed(ENTRY, accepted_manifest_key=KEY.replace("accepted/v1/", "elsewhere/v1/")), OTHER_BATCH),
        (changed(ENTRY, raw_blob_key=paths.blob_key("ab" * 32)), "names a blob under another hash than its own"),
        (b"{}", "is not known here"),
    ],
)
def test_an_entry_by_time_is_read_or_has_a_problem(stored: bytes | None, problem: str | None) -> None:
    """It must be under its own key, of an existing kind of manifest, and name the blob of its own hash."""
    key = paths.accepted_by_time_key(IDENTITY, AT_NS)
    reader: Any = Reader(**({key: stored} if stored is not None else {}))

    (row,) = reading._entry(reader, key).to_pylist()

    assert key == row["key"]
    if problem is None:
        assert (None, SHA, len(FRAME), 10, START_NS, START_NS + 9) == tuple(list(row.values())[1:])
    else:
        assert problem in row["problem"] and row["entry_sha256"] is None


def test_the_samples_of_a_blob_are_believed_only_with_its_hash() -> None:
    """Bytes under another hash, half a frame and a missing one are one row with the problem, never fewer samples."""
    key, half = paths.blob_key(SHA), FRAME[:-7]
    reader: Any = Reader(**{key: FRAME, "half": half})

    good = reading._samples(reader, key, SHA)
    other = reading._samples(reader, key, "0" * 64).to_pylist()
    cut = reading._samples(reader, "half", hashlib.sha256(half).hexdigest()).to_pylist()
    gone = reading._samples(reader, "nowhere", SHA).to_pylist()

    assert (10, {SHA}, {None}, {reading.place_of(IDENTITY)}) == (
        good.num_rows, *({row[name] for row in good.to_pylist()} for name in ("sha256", "problem", "place")),
    )  # fmt: skip
    assert list(range(10)) == good["seq"].to_pylist()
    assert (1, 1, 1) == (len(other), len(cut), len(gone))
    assert f"another hash, {SHA}" in other[0]["problem"] and cut[0]["problem"] and GONE == gone[0]["problem"]
    assert good.schema == reading._samples(reader, "nowhere", SHA).schema


def test_a_store_that_is_away_ends_the_audit_and_is_no_finding() -> None:
    """What could not be asked for must not be called missing."""
    reader: Any = Reader()
    reader.away = True

    for read, given in (
        (reading._manifest, (KEY,)),
        (reading._entry, (KEY,)),
        (reading._samples, (KEY, SHA)),
        (reading._rollup, ("rollup/v1/x",)),
        (reading._chunk, ("index/v1/x",)),
        (reading._covers, ("manifests/v1/x",)),
    ):
        with pytest.raises(Unavailable):
            read(reader, *given)


def rollup_rows(*rows: tuple[str, int, float, float, float]) -> bytes:
    """A chunk with so many samples of each agent."""
    schema = rollup_schema()
    known = [dict(zip(("agent_id", "count", "sum", "min", "max"), row, strict=True)) for row in rows]
    empty: dict[str, Any] = {}
    for field in schema:
        kind = field.type
        empty[field.name] = (
            [] if pa.types.is_list(kind) or pa.types.is_map(kind) else "m" if pa.types.is_string(kind) else 0
        )
    table = pa.Table.from_pylist([{**empty, **row} for row in known], schema=schema)
    return bytes(encode_rollup(table))


def test_a_rollup_is_added_up_by_agent_in_the_hour_of_its_key() -> None:
    """Counts and sums add up, least and greatest are those of all its windows; damage is a problem."""
    key = "rollup/v1/window=60s/date=2026-11-17/hour=04/000000000001-abc-000.lmrollup.zst"
    data = rollup_rows(("a", 3, 1.5, 0.0, 2.0), ("a", 4, 2.5, -1.0, 1.0), ("b", 1, 9.0, 9.0, 9.0))
    reader: Any = Reader(**{key: data, "rollup/v1/bad": data[:-3], "index/v1/bad": data})

    rows = {row["agent_id"]: row for row in reading._rollup(reader, key).to_pylist()}
    (bad,) = reading._rollup(reader, "rollup/v1/bad").to_pylist()
    sound, (cut,), (index,), (gone,) = (
        reading._chunk(reader, each).to_pylist() for each in (key, "rollup/v1/bad", "index/v1/bad", "rollup/v1/none")
    )

    assert {"a": (7, 4.0, -1.0, 2.0), "b": (1, 9.0, 9.0, 9.0)} == {
        agent: tuple(row[name] for name in ("rollup", "total", "least", "greatest")) for agent, row in rows.items()
    }
    assert {"date=2026-11-17/hour=04"} == {row["hour"] for row in rows.values()}
    assert bad["problem"] and bad["rollup"] is None
    assert ([], GONE) == (sound, gone["problem"])
    assert cut["problem"] and index["problem"]


def test_a_generation_names_what_it_covers_and_its_chunks_with_their_sizes() -> None:
    """Of an unknown schema nothing is believed; one without chunks has no rows."""

    def chunk(key: str, size: int) -> dict[str, Any]:
        return {"key": key, "window_s": 60, "rows": 1, "samples": 1, "size": size}

    made = {
        "schema": "lightmetrics.rollup_manifest.v1",
        "generation": {"sequence": 1, "digest": "d", "first_at_ns": 0, "last_at_ns": 0},
        "windows_s": [60],
        "samples": 1,
        "covers": ["m1", "m2"],
        "chunks": [chunk("rollup/v1/c", 7)],
        "index": [chunk("index/v1/c", 8)],
    }
    reader: Any = Reader(
        good=msgspec.json.encode(made),
        empty=msgspec.json.encode({**made, "covers": [], "chunks": [], "index": []}),
        later=msgspec.json.encode({**made, "schema": "lightmetrics.rollup_manifest.v2"}),
    )

    good, empty, (later,), (gone,) = (
        reading._covers(reader, key).to_pylist() for key in ("good", "empty", "later", "none")
    )

    assert [
        ("batch", "m1", None),
        ("batch", "m2", None),
        ("rollup", "rollup/v1/c", 7),
        ("index", "index/v1/c", 8),
    ] == [(row["what"], row["name"], row["size_bytes"]) for row in good]
    assert [] == empty
    assert "v2' is not known here" in later["problem"] and GONE == gone["problem"]


class Ranges:
    """Stands for the bucket: ranges of one object."""

    def __init__(self, data: bytes | None) -> None:
        self.data = data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if self.data is None:
            raise NotFound(f"there is no {key}")
        return self.data[offset : offset + length]


@pytest.mark.parametrize("cut", [0, 1, 40, 139, 140, 141, 219, 220, 240])
def test_a_pack_that_ends_early_names_each_frame_that_it_lacks(cut: int) -> None:
    """By the size in the listing alone, whose frames are not read: a batch is not sound whose last byte is missing. The
    frames before the end are found as ever; a pack that is gone is no problem of its own."""
    frames = [(BatchIdentity("a", "b", n * 10, n * 10 + 9), f"{n:064x}", b"x" * (20 + 60 * n)) for n in range(3)]
    data, places = encode_pack(frames)
    size = len(data) - cut

    rows = reading._pack(Ranges(data), "k", 7, size).to_pylist()  # type: ignore[arg-type]

    whole = [each.offset + each.length <= size for each in places]
    assert [None if fits else f"ends before its frame {n:064x}" for n, fits in enumerate(whole)] == [
        row["problem"] for row in rows
    ]
    assert [(paths.blob_key(each.sha256), each.sha256, each.offset, each.length) for each in places] == [
        (row["key"], row["sha256"], row["offset"], row["length"]) for row in rows
    ]
    assert {("k", 7)} == {(row["pack"], row["modified_ns"]) for row in rows}
    assert [] == reading._pack(Ranges(None), "k", 7, size).to_pylist()  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"LMPK", b"PAR1" + b"0" * 60, encode_pack([])[0][:-1] + b"?"])
def test_a_pack_that_is_none_is_one_row_with_its_problem(data: bytes) -> None:
    """Its batches are reported as missing."""
    (row,) = reading._pack(Ranges(data), "k", None, len(data)).to_pylist()  # type: ignore[arg-type]

    assert ("k", None, None) == (row["pack"], row["key"], row["sha256"])
    assert row["problem"]
