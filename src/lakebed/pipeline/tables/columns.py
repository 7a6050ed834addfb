"""How the columns of a file become the columns of its table, whoever wrote the file.

Engines store the same column differently: moments in nanoseconds or as INT96, structs with or without a field that came
later, fields that may or may not be null, narrower numbers, other names (column mapping), rows that a deletion vector
marks as deleted. Runs in executors: Arrow in, Arrow out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec

from lakebed.delta.model import Snapshot
from lakebed.delta.protocol import mapping
from lakebed.spark.location import Location

# A request costs more than some bytes: 1 MiB that nobody wants arrives before a second request would be answered.
HOLE_BYTES = 1024 * 1024
RANGE_BYTES = 32 * 1024 * 1024  # Arrow's own default
NAME, ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"


class ColumnMapping(msgspec.Struct, frozen=True):
    """Under which names a table's files have its columns; empty where they have the table's own.

    `names` are physical names, `ids` the Parquet field ids where columns are found by these, `types` the Arrow types
    with the physical names of inner fields.
    """

    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    types: dict[str, Any] = {}

    @classmethod
    def of(cls, state: Snapshot, types: dict[str, Any]) -> ColumnMapping:
        """For the wanted columns' Arrow types."""
        mode = mapping(state)
        if mode == "none":
            return cls()
        fields = {field["name"]: field for field in msgspec.json.decode(state.schema_json)["fields"]}
        wanted = {name: fields[name] for name in types if name in fields}
        return cls(
            physical_names(state),
            {name: field["metadata"][ID] for name, field in wanted.items()} if mode == "id" else {},
            {name: _physical(field["type"], types[name]) for name, field in wanted.items()},
        )

    def stored(self, name: str, schema: Any) -> str | None:
        """The column's name in a file with this Arrow schema; None when the file is older than the column."""
        if name in self.ids:
            wanted = str(self.ids[name]).encode()
            for field in schema:
                if (field.metadata or {}).get(b"PARQUET:field_id") == wanted:
                    return str(field.name)
        physical = self.names.get(name, name)
        return physical if physical in schema.names else None


def physical_names(state: Snapshot) -> dict[str, str]:
    """The names of the table's columns in its files, and in the log's partition values."""
    if mapping(state) == "none" or not state.schema_json:
        return {}
    fields = msgspec.json.decode(state.schema_json)["fields"]
    return {field["name"]: (field.get("metadata") or {}).get(NAME, field["name"]) for field in fields}


def opened(location: Location, filesystem: Any, key: str) -> Any:
    """The Parquet file. INT96 is read as microseconds: as nanoseconds it would end in the year 2262."""
    import pyarrow.parquet as pq

    path = location.path(key)
    return pq.ParquetFile(path, filesystem=filesystem, pre_buffer=True, coerce_int96_timestamp_unit="us")


def fragment_of(location: Location, filesystem: Any, key: str) -> Any:
    """The same file as Arrow's datasets read it. Its footer is fetched at first use."""
    import pyarrow.dataset as ds

    format = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    return format.make_fragment(location.path(key), filesystem=filesystem)


def fetching() -> Any:
    """How a fragment is fetched: all wanted columns are requested at once, near ones together."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    options = pa.CacheOptions(hole_size_limit=HOLE_BYTES, range_size_limit=RANGE_BYTES, lazy=False)
    return ds.ParquetFragmentScanOptions(pre_buffer=True, cache_options=options)


def relaxed(kind: Any) -> Any:
    """The type with inner fields that may be null: what Spark reads has no other."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, relaxed(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(relaxed(kind.key_type), relaxed(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, relaxed(kind.value_type)))
    return kind


def fit(column: Any, kind: Any, physical: Any = None) -> Any:
    """The column as this type. Fields it lacks are null; moments lose what is finer than microseconds."""
    import pyarrow.compute as pc

    stored = relaxed(physical if physical is not None else kind)
    if column.type != stored:
        column = pc.cast(column, options=pc.CastOptions(target_type=stored, allow_time_truncate=True))
    return column.view(relaxed(kind)) if physical is not None and stored != relaxed(kind) else column


@lru_cache(maxsize=4)
def kept_rows(location: Location, root: str, version: int) -> dict[str, Any]:
    """For each file with a deletion vector, by its key, which of its rows are left. Read by delta-rs.

    A vector may be shorter than its file: the rows after its end are left.
    """
    import pyarrow as pa
    from deltalake import DeltaTable

    table = DeltaTable(location.uri(root), version=version, storage_options=location.storage_options())
    found: dict[str, Any] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for uri, mask in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            name = unquote(uri)
            found[name[name.rindex(f"{root}/") :]] = mask.values
    return found


def only_kept(rows: Any, begin: int, mask: Any) -> Any:
    """The rows that are left of those from row `begin` of the file on."""
    import pyarrow as pa

    part = mask.slice(begin, rows.num_rows)
    if len(part) < rows.num_rows:
        rest = pa.array([True] * (rows.num_rows - len(part)), pa.bool_())
        part = pa.concat_arrays([part.cast(pa.bool_()), rest])
    return rows.filter(part)


def _physical(delta_type: Any, kind: Any) -> Any:
    """The Arrow type with the physical names of inner fields."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        names = [field["metadata"].get(NAME, field["name"]) for field in delta_type["fields"]]
        types = [_physical(field["type"], arrow.type) for field, arrow in zip(delta_type["fields"], kind, strict=True)]
        return pa.struct(list(zip(names, types, strict=True)))
    if pa.types.is_map(kind):
        return pa.map_(
            _physical(delta_type["keyType"], kind.key_type), _physical(delta_type["valueType"], kind.item_type)
        )
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _physical(delta_type["elementType"], kind.value_type)))
    return kind
