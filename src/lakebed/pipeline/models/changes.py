"""The rows of a table that changed between two versions, as frames.

A version that only adds files brought exactly their rows. An upsert or a delete marks the files that it merely copied,
so the others have the rows that it wrote. Everything else is found by pairing the files of the two versions by key:
rows that are equal on both sides did not change. So compaction in between brings nothing, and only files that differ
are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from lakebed.core.errors import Corrupt, NotFound
from lakebed.delta.model import DataFile, Snapshot, identity_of, key_of
from lakebed.pipeline.tables.changes import AFTER, BEFORE, DELETE, INSERT, TYPE, FileChanges, file_changes
from lakebed.pipeline.tables.frames import quoted
from lakebed.pipeline.tables.table import Table
from lakebed.store.protocol import Store, exists

_BEFORE, _AFTER, _VERSION = "_lakebed_before", "_lakebed_after", "_lakebed_version"
PARALLEL = 16
BROADCAST_ROWS_MAX = 200_000  # keys of a change that every task holds


class ChangesGone(Exception):
    """The versions or files that would tell the changes were cleaned up, or do not tell them."""


def changed_rows(store: Store, table: Table, after: int, until: int, *, feed: bool) -> DataFrame:
    """Rows that were written after one version up to another, as they are then; with `feed`, every change of a row
    with its `_change_type`. Raises ChangesGone.
    """
    state = _at(table, until)
    try:
        versions = asyncio.run(file_changes(store, table.spec.root, after, until))
    except NotFound as error:
        raise ChangesGone(error.message) from error
    deletes = any(each.removes and all(file.copied for file in each.adds) for each in versions)
    written = None if feed and deletes else written_files(versions, lambda: _names(_at(table, after)))
    if written is not None and not (feed and any(each.removes for each in versions)):
        _check(store, table, [file for _, files in written for file in files])
        rows = _latest(table, written, state)
        return rows.withColumn(TYPE, F.lit(INSERT)) if feed else rows
    if not state.keys:
        raise ChangesGone(f"version {until} of {table.spec.name} wrote rows again, and it has no keys to pair them by")
    gone, new = apart(_at(table, after), state)
    _check(store, table, [*gone, *(new if written is None else (file for _, files in written for file in files))])
    old = table.rows_of(gone, table.columns_of(state), state)
    if written is not None:
        fresh = _latest(table, written, state)
        keys = fresh.select(*(quoted(key).alias(key) for key in state.keys))
        few = sum(file.rows for _, files in written for file in files) <= BROADCAST_ROWS_MAX
        old = old.join(F.broadcast(keys) if few else keys, on=list(state.keys), how="left_semi")
        return _paired(old, fresh, state.keys, feed=feed, copies=True)
    return _paired(old, table.rows_of(new, table.columns_of(state), state), state.keys, feed=feed, copies=False)


def apart_by_type(rows: DataFrame, keys: Sequence[str]) -> tuple[DataFrame, DataFrame]:
    """A model's rows that say by their `_change_type` what to do: those to write, and those whose keys to delete.

    `delete` deletes its key, unless another row writes it; `update_preimage` does nothing, so a feed may be passed on
    as it is; every other row is written.
    """
    kind = F.coalesce(F.col(TYPE), F.lit(INSERT))
    kept = rows.filter(~kind.isin(DELETE, BEFORE)).drop(TYPE)
    named = [quoted(key).alias(key) for key in keys]
    gone = (
        rows.filter(kind == DELETE).select(*named).distinct().join(kept.select(*named), on=list(keys), how="left_anti")
    )
    every = [quoted(f.name) if f.name in keys else F.lit(None).cast(f.dataType).alias(f.name) for f in kept.schema]
    return kept, gone.select(*every)


def written_files(
    versions: Sequence[FileChanges], held: Callable[[], Collection[str]]
) -> list[tuple[int, list[DataFile]]] | None:
    """The files of each version whose rows it wrote, less those that it copied. None: they cannot be told apart.

    A delete is no matter if all files that it took rows from were there before (`held`): no row of ours was in them.
    """
    found = []
    for each in versions:
        fresh = [file for file in each.adds if not file.copied]
        if each.removes and fresh and len(fresh) == len(each.adds):
            return None  # a replace, or another engine's
        if (
            each.removes
            and not fresh
            and not {identity_of(one.path, one.vector) for one in each.removes} <= set(held())
        ):
            return None
        found.append((each.version, fresh))
    return [(version, files) for version, files in found if files]


def _at(table: Table, version: int) -> Snapshot:
    try:
        return table.snapshot(version)
    except (NotFound, Corrupt) as error:
        raise ChangesGone(error.message) from error


def _names(state: Snapshot) -> set[str]:
    return {identity_of(file.path, file.vector) for file in state.files}


def apart(before: Snapshot, after: Snapshot) -> tuple[list[DataFile], list[DataFile]]:
    """The files that only one of two versions has."""
    left, right = _names(before), _names(after)
    gone = [file for file in before.files if identity_of(file.path, file.vector) not in right]
    return gone, [file for file in after.files if identity_of(file.path, file.vector) not in left]


def _latest(table: Table, written: Sequence[tuple[int, list[DataFile]]], state: Snapshot) -> DataFrame:
    """The rows of these files; of a key that several versions wrote, its last row."""
    columns = table.columns_of(state)
    if len(written) < 2 or not state.keys:
        return table.rows_of([file for _, files in written for file in files], columns, state)
    frames = [
        table.rows_of(files, columns, state).withColumn(_VERSION, F.lit(version).cast("long"))
        for version, files in written
    ]
    every = frames[0]
    for frame in frames[1:]:
        every = every.unionByName(frame)
    newest = Window.partitionBy(*map(quoted, state.keys)).orderBy(F.col(_VERSION).desc())
    ranked = every.withColumn(_AFTER, F.row_number().over(newest)).filter(F.col(_AFTER) == 1)
    return ranked.select(*map(quoted, columns))


def _paired(old: DataFrame, new: DataFrame, keys: Sequence[str], *, feed: bool, copies: bool) -> DataFrame:
    """What became of rows, by their keys. With `copies`, old rows without a new one were only copied elsewhere."""
    columns = new.columns
    left = old.select(*(quoted(key).alias(key) for key in keys), F.struct(*map(quoted, columns)).alias(_BEFORE))
    right = new.select(*(quoted(key).alias(key) for key in keys), F.struct(*map(quoted, columns)).alias(_AFTER))
    joined = right.join(left, on=list(keys), how="left" if copies else "full_outer")
    was, now = F.col(_BEFORE), F.col(_AFTER)
    differs = ~_same(new.schema, _BEFORE, _AFTER)
    both = was.isNotNull() & now.isNotNull()
    if not feed:
        return joined.filter(now.isNotNull() & (was.isNull() | differs)).select(f"{_AFTER}.*")
    marked = F.array(
        F.when(was.isNotNull() & now.isNull(), _change(DELETE, was)),
        F.when(both & differs, _change(BEFORE, was)),
        F.when(both & differs, _change(AFTER, now)),
        F.when(was.isNull() & now.isNotNull(), _change(INSERT, now)),
    )
    change = joined.select(F.explode(F.filter(marked, lambda one: one.isNotNull())).alias("c"))
    return change.select("c.row.*", F.col("c.kind").alias(TYPE))


def _change(kind: str, row: Column) -> Column:
    return F.struct(F.lit(kind).alias("kind"), row.alias("row"))


def _same(schema: StructType, left: str, right: str) -> Column:
    """Whether two rows are equal; nulls are equal, and maps are compared as JSON: Spark cannot compare them."""
    same = F.lit(True)
    for field in schema.fields:
        sides = [F.col(left).getField(field.name), F.col(right).getField(field.name)]
        if _has_map(field.dataType):
            sides = [F.to_json(F.struct(side)) for side in sides]
        same = same & sides[0].eqNullSafe(sides[1])
    return same


def _has_map(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType) or (isinstance(kind, ArrayType) and _has_map(kind.elementType))


def _check(store: Store, table: Table, files: Sequence[DataFile]) -> None:
    """Raises ChangesGone when vacuum has deleted one of these files: a read would fail in the middle."""

    async def missing() -> list[str]:
        gate = asyncio.Semaphore(PARALLEL)

        async def gone(file: DataFile) -> str:
            async with gate:
                key = key_of(table.spec.root, file.path)
                return "" if await exists(store, key) else key

        return [key for key in await asyncio.gather(*map(gone, files)) if key]

    if found := asyncio.run(missing()):
        raise ChangesGone(f"{found[0]} was deleted by vacuum")
