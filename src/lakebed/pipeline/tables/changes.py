"""What each version of a table changed, row by row, from the files that it added and removed. No change feed is needed.

An upsert or a delete writes files again, so most of their rows are only copied: those are not changes. Rows are paired
by the table's keys. Names are those of Delta's change data feed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lakebed.core.errors import Invalid, NotFound
from lakebed.delta.log import decode, file_of, log_key
from lakebed.delta.model import DataFile, name_of
from lakebed.delta.types import arrow_type
from lakebed.pipeline.tables.scan import FileScan
from lakebed.store.protocol import Store

TYPE, VERSION = "_change_type", "_commit_version"
INSERT, DELETE, BEFORE, AFTER = "insert", "delete", "update_preimage", "update_postimage"
COLUMNS = {TYPE: "string", VERSION: "long"}
PARALLEL = 16  # log entries that are read at once
_LEFT, _RIGHT = "_before", "_after"


class FileChanges(msgspec.Struct, frozen=True):
    """The files of one version whose rows it changed; a compaction has none."""

    version: int
    adds: tuple[DataFile, ...] = ()
    removes: tuple[DataFile, ...] = ()


async def file_changes(store: Store, root: str, after: int, until: int) -> list[FileChanges]:
    """The versions after `after` up to `until`. Raises NotFound, with a hint, for one whose log entry is gone."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(version: int) -> FileChanges:
        async with gate:
            return await _of(store, root, version)

    return list(await asyncio.gather(*map(one, range(after + 1, until + 1))))


async def _of(store: Store, root: str, version: int) -> FileChanges:
    key = log_key(root, version)
    try:
        actions = decode((await store.get(key)).data, key)
    except NotFound:
        raise NotFound(
            f"{root} has no log entry of version {version} (any more)",
            hint="read the table itself, then changes from its version on",
        ) from None
    adds = {name_of(a["path"]): file_of(a) for each in actions if (a := each.get("add")) and a.get("dataChange", True)}
    removes = [r for each in actions if (r := each.get("remove")) and r.get("dataChange", True)]
    gone = tuple(map(_removed, removes))
    if any(file.vector for file in (*gone, *adds.values())):
        raise Invalid(f"version {version} of {root} has deletion vectors: its changes cannot be read")
    return FileChanges(version, tuple(adds.values()), gone)


def _removed(remove: dict[str, Any]) -> DataFile:
    partition, vector = dict(remove.get("partitionValues") or {}), remove.get("deletionVector") or {}
    return DataFile(remove["path"], remove.get("size") or 0, -1, partition, vector=vector)


def changed(scan: FileScan, change: FileChanges, keys: Sequence[str], filesystem: Any) -> Iterator[Any]:
    """The rows that this version inserted, updated and deleted, with the columns of COLUMNS after the scan's.

    Raises Invalid for a version that wrote files again in a table without keys.
    """
    if not change.removes or not change.adds:
        kind = DELETE if change.removes else INSERT
        for file in (*change.adds, *change.removes):
            for rows in scan.batches(file, filesystem):
                yield _marked(rows, kind, change.version)
        return
    if not keys:
        raise Invalid(f"version {change.version} of {scan.root} wrote rows again; without keys they cannot be paired")
    wide = msgspec.structs.replace(scan, types=_with_keys(scan, keys))
    before, after = (_all(wide, files, filesystem) for files in (change.removes, change.adds))
    for kind, rows in paired(before, after, keys):
        for batch in rows.select(list(scan.types)).to_batches():
            yield _marked(batch, kind, change.version)


def paired(before: Any, after: Any, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What became of rows, by their keys: those that are equal on both sides did not change."""
    import pyarrow as pa
    import pyarrow.compute as pc

    left, right = _numbered(before, after, keys)
    both = left.append_column(_LEFT, pa.arange(0, before.num_rows)).join(
        right.append_column(_RIGHT, pa.arange(0, after.num_rows)), keys=left.column_names, join_type="full outer"
    )
    both = both.sort_by([(_LEFT, "ascending"), (_RIGHT, "ascending")])
    new = both.filter(pc.is_null(both.column(_LEFT))).column(_RIGHT)
    gone = both.filter(pc.is_null(both.column(_RIGHT))).column(_LEFT)
    kept = both.filter(pc.and_(pc.is_valid(both.column(_LEFT)), pc.is_valid(both.column(_RIGHT))))
    was, now = before.take(kept.column(_LEFT)), after.take(kept.column(_RIGHT))
    differs = _differs(was, now)
    yield DELETE, before.take(gone)
    yield BEFORE, was.filter(differs)
    yield AFTER, now.filter(differs)
    yield INSERT, after.take(new)


def _numbered(before: Any, after: Any, keys: Sequence[str]) -> tuple[Any, Any]:
    """Each row's key as a number, and which row of that key it is on its side: keys may be null, or come twice."""
    import numpy as np
    import pyarrow as pa

    size = before.num_rows
    group = np.zeros(size + after.num_rows, np.int64)
    for name in keys:
        column = pa.chunked_array([*before.column(name).chunks, *after.column(name).chunks], before.column(name).type)
        codes = column.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
        group = np.unique(group * (codes.max(initial=0) + 1) + codes, return_inverse=True)[1]

    def side(of: Any) -> Any:
        order, at = np.argsort(of, kind="stable"), np.arange(len(of))
        first = np.diff(of[order], prepend=-1) != 0
        turn = np.empty(len(of), np.int64)
        turn[order] = at - np.maximum.accumulate(np.where(first, at, 0))
        return pa.table({"_group": of, "_turn": turn})

    return side(group[:size]), side(group[size:])


def _differs(was: Any, now: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pa.repeat(pa.scalar(False), was.num_rows)
    for name in was.column_names:
        left, right = was.column(name).combine_chunks(), now.column(name).combine_chunks()
        if pa.types.is_nested(left.type):  # Arrow compares no nested columns
            same = pa.array([a == b for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True)], pa.bool_())
        else:
            same = pc.fill_null(pc.equal(left, right), False)
        same = pc.or_(same, pc.and_(pc.is_null(left), pc.is_null(right)))
        if pa.types.is_floating(left.type):
            same = pc.or_(same, pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False))
        found = pc.or_(found, pc.invert(same))
    return found


def _all(scan: FileScan, files: Sequence[DataFile], filesystem: Any) -> Any:
    import pyarrow as pa

    batches = [rows for file in files for rows in scan.batches(file, filesystem)]
    return pa.Table.from_batches(batches, pa.schema(list(scan.types.items())))


def _with_keys(scan: FileScan, keys: Sequence[str]) -> dict[str, Any]:
    missing: Mapping[str, Any] = {name: arrow_type(scan.kinds[name]) for name in keys if name not in scan.types}
    return {**scan.types, **missing}


def _marked(rows: Any, kind: str, version: int) -> Any:
    import pyarrow as pa

    more = [pa.repeat(pa.scalar(kind), rows.num_rows), pa.repeat(pa.scalar(version, pa.int64()), rows.num_rows)]
    return pa.RecordBatch.from_arrays([*rows.columns, *more], [*rows.schema.names, *COLUMNS])
