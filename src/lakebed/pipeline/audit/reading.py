"""What executors read for an audit: manifests, entries by time, rollups, and frames checked against their hash.

What is wrong with an object becomes the `problem` of its row, with its key, and the job continues. Only a store that
does not answer ends it, because an audit that could not read an object must not report it as missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from lakebed.batches import paths
from lakebed.batches.codec.arrow import record_batch, schema
from lakebed.batches.codec.frame import decode
from lakebed.batches.codec.index import decode_segment, single_objects
from lakebed.batches.codec.pack import HEAD, decode_table, table_bytes
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, BatchIdentity, FrameLimits
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.rollups import paths as rollup_paths
from lakebed.rollups.codec.chunk import decode_index, decode_rollup
from lakebed.rollups.model import RollupManifest
from lakebed.store.reader import BucketReader
from lakebed.store.settings import StoreSettings

READS_AT_ONCE = 8  # of one task
MANIFEST_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = 256 * 1024**2
# What was accepted under larger limits than today's is still read.
ANY_FRAME = FrameLimits(frame_bytes=FRAME_BYTES_MAX, body_bytes=1024**3, samples=50_000_000, series=10_000_000)

MANIFESTS = "digest string, key string, read_sha256 string, read_at_ns bigint, frame_bytes bigint, problem string"
SAMPLES = (
    "sha256 string, problem string, place string, agent_id string, boot_id string, seq bigint, metric string, "
    "labels map<string,string>, time_ns bigint, value double, kind int"
)
ROLLUPS = (
    "key string, problem string, agent_id string, hour string, rollup bigint, total double, least double, "
    "greatest double"
)
COVERS = "key string, problem string, what string, name string, size_bytes bigint"
CHUNKS = "key string, problem string"
ENTRIES = (
    "key string, problem string, entry_sha256 string, entry_bytes bigint, entry_samples bigint, entry_first_ns bigint, "
    "entry_last_ns bigint"
)

INDEX_ROWS = (
    "segment string, problem string, modified_ns bigint, pack string, key string, by_blob string, seen string, "
    "entry_sha256 string, entry_bytes bigint, entry_samples bigint, entry_first_ns bigint, entry_last_ns bigint"
)

PACKED = (
    "pack string, problem string, modified_ns bigint, key string, sha256 string, place string, offset bigint, "
    "length bigint"
)

GONE = "gone since it was listed"
OTHER_BATCH = "does not match its key"

Batches = Iterator[Any]
R = TypeVar("R")


def reading_manifests(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `digest` and `key` to MANIFESTS."""

    def read(batches: Batches) -> Batches:
        import pyarrow as pa

        reader = BucketReader(settings)
        names = [column.split()[0] for column in MANIFESTS.split(",")]
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for batch in batches:
                if not (keys := batch["key"].to_pylist()):
                    continue
                rows = list(pool.map(lambda key: _manifest(reader, key), keys))
                kinds = (pa.string(), pa.int64(), pa.int64(), pa.string())
                columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
                yield pa.record_batch([batch["digest"], batch["key"], *columns], names=names)
        reader.close()

    return read


def reading_samples(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key`, `sha256`, `offset` and `length` of frames to SAMPLES: the samples of a good frame, one row
    for a bad one. Without an offset the frame is the whole object."""

    def read(batches: Batches) -> Batches:
        reader = BucketReader(settings)
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for batch in batches:
                columns = [batch[name].to_pylist() for name in ("key", "sha256", "offset", "length")]
                blobs = list(zip(*columns, strict=True))
                for at in range(0, len(blobs), READS_AT_ONCE):  # frames are held for a few blobs, never for all
                    yield from pool.map(lambda blob: _samples(reader, *blob), blobs[at : at + READS_AT_ONCE])
        reader.close()

    return read


def _manifest(reader: BucketReader, key: str) -> tuple[str | None, int | None, int | None, str | None]:
    try:
        found = _record(reader.get(key, bytes_max=MANIFEST_BYTES_MAX), AcceptedBatch)
    except NotFound:
        return None, None, None, GONE
    except Corrupt as error:
        return None, None, None, error.message
    if paths.accepted_key(found.identity) != key:
        return None, None, None, OTHER_BATCH
    return found.frame_sha256, found.accepted_at_unix_ns, found.frame_bytes, None


def _record(data: bytes, kind: type[R]) -> R:
    """The record in these bytes. Raises Corrupt; a later schema may have other fields, so it is named first."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(_unknown_schema(data, kind) or f"does not decode: {error}") from error


def _unknown_schema(data: bytes, kind: type[Any]) -> str:
    (known,) = get_args(get_type_hints(kind)["schema"])
    try:
        named = msgspec.json.decode(data, type=dict).get("schema")
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return ""
    return f"schema {str(named)[:80]!r} is not known here" if named != known else ""


def _samples(reader: BucketReader, key: str, sha256: str, offset: int = 0, length: int = 0) -> Any:
    try:
        if offset:
            frame = reader.get_range(key, offset, length)
        else:
            frame = reader.get(key, bytes_max=FRAME_BYTES_MAX)
        if (digest := hashlib.sha256(frame).hexdigest()) != sha256:
            raise Corrupt(f"holds bytes with another hash, {digest}")
        return _rows(sha256, decode(frame, ANY_FRAME))
    except NotFound:
        return _problem(sha256, GONE)
    except (Corrupt, Invalid) as error:
        return _problem(sha256, error.message)


def _rows(sha256: str, batch: Any) -> Any:
    import pyarrow as pa

    rows, count, place = record_batch(batch), batch.columns.samples, place_of(batch.identity)
    arrays = [pa.repeat(sha256, count), pa.nulls(count, pa.string()), pa.repeat(place, count)]
    arrays += [rows[name].cast(pa.int32()) if name == "kind" else rows[name] for name in schema().names]
    return pa.record_batch(arrays, names=["sha256", "problem", "place", *schema().names])


def _problem(sha256: str, problem: str) -> Any:
    import pyarrow as pa

    kinds = {field.name: pa.int32() if field.name == "kind" else field.type for field in schema()}
    arrays = [pa.array([sha256]), pa.array([problem]), pa.nulls(1, pa.string())]
    arrays += [pa.nulls(1, kind) for kind in kinds.values()]
    return pa.record_batch(arrays, names=["sha256", "problem", "place", *kinds])


def place_of(identity: BatchIdentity) -> str:
    """The part that every key of a batch has: agent, boot and sequence numbers."""
    return paths.accepted_key(identity).removeprefix(paths.ACCEPTED).removesuffix(".json")


def reading_rollups(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key` of rollup chunks to ROLLUPS: what a chunk counts of each agent, or its problem."""
    return _reading(settings, _rollup)


def reading_covers(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key` of rollup manifests to COVERS: the batches a generation covers, its chunks, or its problem.

    `what` is `batch`, with a manifest id as its `name`, or `rollup` or `index`, with a chunk's key and size.
    """
    return _reading(settings, _covers)


def reading_chunks(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key` of any chunk of rollups or of the index to CHUNKS: a row where one cannot be read."""
    return _reading(settings, _chunk)


def reading_entries(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key` of entries by time to ENTRIES: what each says of its batch, or its problem."""
    return _reading(settings, _entry)


def reading_segments(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key` and `modified_ns` of index segments to INDEX_ROWS: the keys and the content of the single
    objects that each row stands for, or one row with the problem of the segment."""

    def read(batches: Batches) -> Batches:
        reader = BucketReader(settings)
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for batch in batches:
                found = list(zip(batch["key"].to_pylist(), batch["modified_ns"].to_pylist(), strict=True))
                for at in range(0, len(found), READS_AT_ONCE):
                    yield from pool.map(lambda each: _segment(reader, *each), found[at : at + READS_AT_ONCE])
        reader.close()

    return read


def reading_packs(settings: StoreSettings) -> Callable[[Batches], Batches]:
    """The task from `key`, `modified_ns` and `size_bytes` of packs to PACKED: a row for each frame, with the key of the
    blob that it stands for, or one row with the problem of the pack."""

    def read(batches: Batches) -> Batches:
        reader = BucketReader(settings)
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for batch in batches:
                found = [batch[name].to_pylist() for name in ("key", "modified_ns", "size_bytes")]
                yield from pool.map(lambda each: _pack(reader, *each), zip(*found, strict=True))
        reader.close()

    return read


def _pack(reader: BucketReader, key: str, modified_ns: int | None, size_bytes: int) -> Any:
    rows: list[tuple[Any, ...]] = []
    try:
        head = reader.get_range(key, 0, HEAD.size)
        for frame in decode_table(head + reader.get_range(key, HEAD.size, table_bytes(head))):
            blob = paths.blob_key(frame.sha256)
            fits = frame.offset + frame.length <= size_bytes
            where = (place_of(frame.identity), frame.offset, frame.length)
            problem = None if fits else f"ends before its frame {frame.sha256}"
            rows.append((key, problem, modified_ns, blob, frame.sha256, *where))
    except NotFound:
        rows = []  # gone since it was listed
    except (Corrupt, Invalid) as error:
        rows = [(key, error.message, modified_ns, *[None] * 5)]
    return _batch_of(rows, PACKED)


def _segment(reader: BucketReader, key: str, modified_ns: int | None) -> Any:
    rows: list[tuple[Any, ...]] = []
    try:
        for row in decode_segment(key, reader.get(key, bytes_max=FRAME_BYTES_MAX)).rows:
            names = [name for name, _ in single_objects(row)]
            times = (row.first_time_unix_ns, row.last_time_unix_ns)
            pack = row.raw_blob_key if row.raw_blob_offset else None
            rows.append((key, None, modified_ns, pack, *names, row.frame_sha256, row.frame_bytes, row.samples, *times))
    except NotFound:
        rows = []  # gone since it was listed
    except (Corrupt, Invalid) as error:
        rows = [(key, error.message, modified_ns, *[None] * 9)]
    return _batch_of(rows, INDEX_ROWS)


def _batch_of(rows: list[tuple[Any, ...]], names: str) -> Any:
    import pyarrow as pa

    fields = [column.split() for column in names.split(",")]
    kinds = {"string": pa.string(), "bigint": pa.int64()}
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    return pa.record_batch(
        [pa.array(column, kinds[kind]) for column, (_, kind) in zip(columns, fields, strict=True)],
        names=[name for name, _ in fields],
    )


def _reading(settings: StoreSettings, one: Callable[[BucketReader, str], Any]) -> Callable[[Batches], Batches]:
    def read(batches: Batches) -> Batches:
        reader = BucketReader(settings)
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for batch in batches:
                found = batch["key"].to_pylist()
                for at in range(0, len(found), READS_AT_ONCE):
                    yield from pool.map(lambda key: one(reader, key), found[at : at + READS_AT_ONCE])
        reader.close()

    return read


def _rollup(reader: BucketReader, key: str) -> Any:
    import pyarrow as pa

    kinds = [pa.string(), pa.string(), pa.string(), pa.string(), pa.int64(), *[pa.float64()] * 3]
    names = [column.split()[0] for column in ROLLUPS.split(",")]
    try:
        table = decode_rollup(reader.get(key, bytes_max=FRAME_BYTES_MAX))
    except NotFound:
        return _bad(names, kinds, key, GONE)
    except (Corrupt, Invalid) as error:
        return _bad(names, kinds, key, error.message)
    sums = table.group_by("agent_id").aggregate([("count", "sum"), ("sum", "sum"), ("min", "min"), ("max", "max")])
    count = sums.num_rows
    hour = "/".join(key.split("/")[3:5])
    columns = [pa.repeat(key, count), pa.nulls(count, pa.string()), sums["agent_id"], pa.repeat(hour, count)]
    columns += [sums["count_sum"], sums["sum_sum"], sums["min_min"], sums["max_max"]]
    flat = [column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in columns]
    return pa.record_batch([column.cast(kind) for column, kind in zip(flat, kinds, strict=True)], names=names)


def _chunk(reader: BucketReader, key: str) -> Any:
    import pyarrow as pa

    names, kinds = ["key", "problem"], [pa.string()] * 2
    try:
        (decode_index if key.startswith(rollup_paths.INDEX) else decode_rollup)(
            reader.get(key, bytes_max=FRAME_BYTES_MAX)
        )
    except NotFound:
        return _bad(names, kinds, key, GONE)
    except (Corrupt, Invalid) as error:
        return _bad(names, kinds, key, error.message)
    return pa.record_batch([pa.array([], kind) for kind in kinds], names=names)


def _entry(reader: BucketReader, key: str) -> Any:
    import pyarrow as pa

    names = [column.split()[0] for column in ENTRIES.split(",")]
    kinds = [*[pa.string()] * 3, *[pa.int64()] * 4]
    try:
        found = _record(reader.get(key, bytes_max=MANIFEST_BYTES_MAX), AcceptedByTime)
    except NotFound:
        return _bad(names, kinds, key, GONE)
    except Corrupt as error:
        return _bad(names, kinds, key, error.message)
    if _by_time_key(found) != key:
        return _bad(names, kinds, key, OTHER_BATCH)
    if not found.raw_blob_offset and found.raw_blob_key != paths.blob_key(found.frame_sha256):
        return _bad(names, kinds, key, "names a blob under another hash than its own")
    times = (found.first_time_unix_ns, found.last_time_unix_ns)
    row = (key, None, found.frame_sha256, found.frame_bytes, found.samples, *times)
    return pa.record_batch([pa.array([value], kind) for value, kind in zip(row, kinds, strict=True)], names=names)


def _by_time_key(entry: AcceptedByTime) -> str:
    """The key that an entry by time must have; empty when it names no manifest."""
    try:
        identity = paths.identity_of(entry.accepted_manifest_key)
    except Invalid:
        return ""
    if paths.accepted_key(identity) != entry.accepted_manifest_key:
        return ""
    return paths.accepted_by_time_key(identity, entry.accepted_at_unix_ns)


def _covers(reader: BucketReader, key: str) -> Any:
    import pyarrow as pa

    names, kinds = ["key", "problem", "what", "name", "size_bytes"], [*[pa.string()] * 4, pa.int64()]
    try:
        found = _record(reader.get(key, bytes_max=FRAME_BYTES_MAX), RollupManifest)
    except NotFound:
        return _bad(names, kinds, key, GONE)
    except Corrupt as error:
        return _bad(names, kinds, key, error.message)
    rows: list[tuple[str, str, int | None]] = [("batch", manifest_id, None) for manifest_id in found.covers]
    rows += [("rollup", chunk.key, chunk.size) for chunk in found.chunks]
    rows += [("index", chunk.key, chunk.size) for chunk in found.index]
    what, name, size = zip(*rows, strict=True) if rows else ((), (), ())
    arrays = [pa.repeat(key, len(rows)), pa.nulls(len(rows), pa.string()), pa.array(what, pa.string())]
    return pa.record_batch([*arrays, pa.array(name, pa.string()), pa.array(size, pa.int64())], names=names)


def _bad(names: list[str], kinds: list[Any], key: str, problem: str) -> Any:
    import pyarrow as pa

    values = {"key": key, "problem": problem}
    arrays = [pa.array([values.get(name)], kind) for name, kind in zip(names, kinds, strict=True)]
    return pa.record_batch(arrays, names=names)
