"""Checkpoints of a table's log: the whole state at one version, so that a reader replays only what came after.

Read: the classic form in one or more parts, and version 2 with its sidecars. Written by delta-rs, in the classic form:
it is given the log's objects in a folder of its own, and what it makes goes into the bucket through the store. So the
library knows the format, and the store seam moves the bytes. A checkpoint is derived: one that cannot be written costs
time, never rows.
"""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lakebed.core.errors import AlreadyExists, Corrupt, NotFound, Stale
from lakebed.delta.log import LOG_FOLDER, decode, file_with
from lakebed.delta.model import ONCE, ONCE_WINDOW, DataFile, Snapshot
from lakebed.store.model import StoredObject
from lakebed.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa

EVERY = 50  # versions between two checkpoints, unless the table says otherwise (delta.checkpointInterval)
TAIL_BYTES = 10 * 1024 * 1024  # of log entries since the last one: large entries are worth a checkpoint sooner
LAST = "_last_checkpoint"
SIDECARS = "_sidecars"
INLINE_BYTES = 512 * 1024  # of checkpoint and entries: some 50 ms of decoding
PARALLEL = 16  # objects of a log read at once
_NAME = re.compile(
    r"(?P<version>\d{20})\.checkpoint"
    r"(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<id>[0-9a-fA-F-]{36}))?\.(?P<kind>parquet|json)"
)
_ADD = ("path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector")
_REMOVE = ("path", "deletionTimestamp")
_KINDS = ("txn", "metaData", "protocol", "sidecar")
_MAPS = ("configuration", "options")

R = TypeVar("R")


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint with all of its parts, by name in the log's folder."""

    version: int
    names: tuple[str, ...]


class CheckpointContent(msgspec.Struct):
    """What is in a checkpoint: its files and batch numbers, and everything else as a log entry has it."""

    files: list[DataFile] = []
    applied: dict[str, int] = {}
    actions: list[dict[str, Any]] = []

    def add(self, other: CheckpointContent) -> None:
        self.files, self.applied = self.files + other.files, self.applied | other.applied
        self.actions = self.actions + other.actions


def found(names: Iterable[str]) -> list[Checkpoint]:
    """The complete checkpoints among these names of the log's folder, in order of version."""
    whole: dict[tuple[int, str], list[str]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            form = match["parts"] or match["id"] or ""
            whole.setdefault((int(match["version"]), form), []).append(name)
    complete = [
        Checkpoint(version, tuple(sorted(some)))
        for (version, form), some in whole.items()
        if not form.isdigit() or len(some) == int(form)
    ]
    return sorted(complete, key=lambda each: each.version)


async def last(store: Store, root: str) -> int:
    """The version of the checkpoint that the log's own note names, -1 without one. It may be an old one."""
    try:
        return _noted(await store.get(f"{root}/{LOG_FOLDER}/{LAST}"))
    except NotFound:
        return -1


def _noted(note: StoredObject) -> int:
    try:
        return int(msgspec.json.decode(note.data)["version"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return -1  # only a hint: the listing shows what is there


async def content(store: Store, root: str, chosen: Checkpoint, *, removes: bool = False) -> CheckpointContent:
    """What it says; with `removes`, also the files that it remembers as removed. Raises Corrupt, or NotFound when a
    part is gone.
    """
    whole = CheckpointContent()
    for name, data in (await objects(store, root, chosen.names)).items():
        whole.add(await _apart(len(data), _decoded, name, data, removes))
    for name, data in (await objects(store, root, _sidecars(whole.actions))).items():
        whole.add(await _apart(len(data), _decoded, name, data, removes))
    # The protocol first: it says whether the rest can be read.
    whole.actions.sort(key=lambda action: "protocol" not in action)
    return whole


async def objects(store: Store, root: str, names: Sequence[str]) -> dict[str, bytes]:
    """Objects of the log's folder, by name. Raises NotFound."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(name: str) -> bytes:
        async with gate:
            return (await store.get(f"{root}/{LOG_FOLDER}/{name}")).data

    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def due(state: Snapshot) -> bool:
    """Whether the log since the last known checkpoint is long enough for the next."""
    return state.version - state.checkpoint >= every(state) or state.tail_bytes >= TAIL_BYTES


def turn(state: Snapshot) -> bool:
    """Whether the writer of this version looks after it: one in so many, so that not all try one that fails."""
    return due(state) and ((state.version - state.checkpoint) % every(state) == 0 or state.tail_bytes >= TAIL_BYTES)


def every(state: Snapshot) -> int:
    text = state.properties.get("delta.checkpointInterval", "")
    return int(text) if text.isdigit() and int(text) else EVERY


async def write(store: Store, root: str, version: int, names: Sequence[str]) -> None:
    """Makes the checkpoint of this version from these objects of the log: a checkpoint, if there is one, and the
    entries after it. Idempotent; another writer's checkpoint of the same version is as good.
    """
    held = await objects(store, root, names)
    for name in [name for name in names if _NAME.fullmatch(name)]:
        inside = await _apart(len(held[name]), _decoded, name, held[name], False)
        held |= await objects(store, root, _sidecars(inside.actions))
    made = await _apart(sum(map(len, held.values())), _made, held, version)
    for name, data in made.items():
        if name == LAST:
            await _point(store, root, version, data)
            continue
        try:
            await store.create(f"{root}/{LOG_FOLDER}/{name}", data)
        except AlreadyExists:
            continue


async def _point(store: Store, root: str, version: int, data: bytes) -> None:
    """Names the newest checkpoint; never moves back. What was compared and what is replaced come from one read."""
    key = f"{root}/{LOG_FOLDER}/{LAST}"
    with suppress(AlreadyExists, Stale):  # another writer names its own: the listing shows both
        try:
            noted = await store.get(key)
        except NotFound:
            await store.create(key, data)
            return
        if _noted(noted) < version:
            await store.replace(key, data, noted.etag)


async def _apart(size: int, work: Callable[..., R], *args: Any) -> R:
    """Small work is done at once; large work in a thread, so that the loop goes on."""
    return work(*args) if size < INLINE_BYTES else await asyncio.to_thread(work, *args)


def _made(held: dict[str, bytes], version: int) -> dict[str, bytes]:
    """What delta-rs makes of these objects: the checkpoint's files, and last the note that names it."""
    from deltalake import DeltaTable

    with tempfile.TemporaryDirectory(prefix="lakebed-checkpoint-") as folder:
        log = Path(folder) / LOG_FOLDER
        (log / SIDECARS).mkdir(parents=True)
        for name, data in held.items():
            (log / name).write_bytes(data)
        DeltaTable(folder, version=version).create_checkpoint()
        made = {path.relative_to(log).as_posix(): path for path in log.rglob("*") if path.is_file()}
        names = sorted(set(made) - set(held), key=lambda name: (name == LAST, name))
        return {
            name: _forgetting(made[name].read_bytes(), version)
            if name.endswith(".parquet")
            else made[name].read_bytes()
            for name in names
        }


def _forgetting(data: bytes, version: int) -> bytes:
    """Without the applications that wrote once, long ago: one a tick would make checkpoints grow for ever."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if version <= ONCE_WINDOW:
        return data
    table = pq.read_table(io.BytesIO(data))
    if "txn" not in table.column_names:
        return data
    app = pc.struct_field(table.column("txn"), "appId")
    at = pc.struct_field(table.column("txn"), "version")
    old = pc.and_kleene(pc.starts_with(app, ONCE), pc.less_equal(at, version - ONCE_WINDOW))
    kept = table.filter(pc.invert(pc.fill_null(old, False)))
    if kept.num_rows == table.num_rows:
        return data
    sink = io.BytesIO()
    pq.write_table(kept, sink, compression="zstd")
    return sink.getvalue()


def _sidecars(read: Iterable[dict[str, Any]]) -> list[str]:
    """Names below the log's folder. A sidecar elsewhere is of no use: its key would leave the table."""
    found = [action["sidecar"]["path"] for action in read if action.get("sidecar")]
    for path in found:
        if "/" in path or path.startswith("."):
            raise Corrupt(f"the sidecar {path!r} of a checkpoint is not in {LOG_FOLDER}/{SIDECARS}", path=path)
    return [f"{SIDECARS}/{path}" for path in found]


def _decoded(name: str, data: bytes, removes: bool) -> CheckpointContent:
    if name.endswith(".json"):
        return CheckpointContent(actions=decode(data, name))
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(data))
        table = file.read(columns=_columns(file.schema_arrow, removes))
        others = [name for name in table.column_names if name not in ("add", "txn")]
        rest = [{kind: _plain(value)} for kind in others for value in table.column(kind).drop_null().to_pylist()]
        return CheckpointContent(_files(table), _applied(table), rest)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"{name!r} is no checkpoint of Delta: {error}", key=name) from error


def _columns(schema: pa.Schema, removes: bool) -> list[str]:
    """The leaves to read. Statistics as structs are large: they are read only where there are none as text."""
    wanted = [name for name in _KINDS if name in schema.names]
    if "add" in schema.names:
        inner = {field.name for field in schema.field("add").type}
        wanted += [f"add.{name}" for name in _ADD if name in inner]
        wanted += ["add.stats_parsed"] if "stats_parsed" in inner and "stats" not in inner else []
    if removes and "remove" in schema.names:
        inner = {field.name for field in schema.field("remove").type}
        wanted += [f"remove.{name}" for name in _REMOVE if name in inner]
    return wanted


def _applied(table: pa.Table) -> dict[str, int]:
    if "txn" not in table.column_names:
        return {}
    txn = table.column("txn").drop_null().combine_chunks()
    return dict(zip(txn.field("appId").to_pylist(), txn.field("version").to_pylist(), strict=True))


def _files(table: pa.Table) -> list[DataFile]:
    """Column by column: a table may have many thousands of files."""
    if "add" not in table.column_names:
        return []
    adds = table.column("add").drop_null().combine_chunks()
    have = {field.name for field in adds.type}
    nothing = [None] * len(adds)

    def values(name: str) -> list[Any]:
        column = adds.field(name) if name in have else None
        return nothing if column is None or column.null_count == len(column) else column.to_pylist()

    parsed = [msgspec.json.encode(_jsonable(each)).decode() if each else "" for each in values("stats_parsed")]
    stats = values("stats") if "stats" in have else parsed
    columns = (values(name) for name in ("path", "size", "partitionValues", "tags", "deletionVector"))
    return [
        file_with(path, size, text, dict(partition or ()), dict(tags or ()), vector or {})
        for path, size, partition, tags, vector, text in zip(*columns, stats, strict=True)
    ]


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """A struct of Parquet as the log's JSON has it: maps as objects, absent fields absent."""
    plain = {name: each for name, each in value.items() if each is not None}
    plain |= {name: dict(plain[name]) for name in _MAPS if name in plain}
    return plain | ({"format": _plain(plain["format"])} if "format" in plain else {})


def _jsonable(value: Any) -> Any:
    """Statistics that were structs: what has no exact form in JSON is left out."""
    if isinstance(value, dict):
        inner = {name: _jsonable(each) for name, each in value.items()}
        return {name: each for name, each in inner.items() if each is not None}
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, (bool, int, float, str)) else None
