"""Reads a part's Parquet footer from the bucket, without its rows: is it Parquet, how many rows, which columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.errors import Corrupt
from lakebed.store.protocol import Store
from lakebed.ticks.errors import Refused
from lakebed.ticks.model import Column, ManifestTable, Parquet, Part

MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024  # most footers fit: one request
FOOTER_BYTES_MAX = 16 * 1024 * 1024

_TYPES: tuple[tuple[Any, str], ...] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "byte"),
    (pa.types.is_int16, "short"),
    (pa.types.is_uint8, "short"),
    (pa.types.is_int32, "int"),
    (pa.types.is_uint16, "int"),
    (pa.types.is_int64, "long"),
    (pa.types.is_uint32, "long"),
    (pa.types.is_uint64, "decimal(20,0)"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_large_binary, "binary"),
    (pa.types.is_date32, "date"),
)


class Footer(msgspec.Struct, frozen=True):
    rows: int
    columns: dict[str, str]


async def read(store: Store, part: Part) -> Footer:
    """The footer of a stored part. Raises Corrupt when the bytes are not Parquet, NotFound when they are gone."""
    length = min(TAIL_BYTES, part.size_bytes)
    if length < 12:
        raise Corrupt("too short to be Parquet")
    tail = await store.get_range(part.key, part.size_bytes - length, length)
    if tail[-4:] != MAGIC:
        raise Corrupt("it does not end as Parquet does")
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_bytes + 4 > part.size_bytes or footer_bytes > FOOTER_BYTES_MAX:
        raise Corrupt(f"its footer claims {footer_bytes} bytes")
    if footer_bytes > length:
        tail = await store.get_range(part.key, part.size_bytes - footer_bytes, footer_bytes)
    return decode(tail[-footer_bytes:])


def decode(footer: bytes) -> Footer:
    """A footer's rows and columns. Raises Corrupt for anything that does not decode."""
    try:
        found = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        schema = found.schema.to_arrow_schema()
        return Footer(found.num_rows, {field.name: type_name(field.type) for field in schema})
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt("its footer does not decode") from error


def check(footer: Footer, parquet: Parquet, table: ManifestTable) -> None:
    """Raises Refused unless the part has the rows and columns that its manifest says."""
    where = f"part {parquet.file_seq} of table {table.name}"
    if footer.rows != parquet.row_count:
        raise Refused("row_count", f"{where} has {footer.rows} rows, its manifest says {parquet.row_count}")
    wanted = {column.name: column for column in table.schema}
    if extra := sorted(set(footer.columns) - set(wanted)):
        raise Refused("columns_differ", f"{where} has a column {extra[0][:80]!r} that its manifest does not list")
    if missing := sorted(set(wanted) - set(footer.columns)):
        raise Refused("columns_differ", f"{where} lacks the column {missing[0][:80]!r}")
    for name, column in wanted.items():
        if not fits(footer.columns[name], column):
            raise Refused(
                "columns_differ", f"{where}: column {name[:80]!r} is {footer.columns[name][:80]}, not {column.type}"
            )


def fits(stored: str, column: Column) -> bool:
    zoneless = {"timestamp", "timestamp_ntz"}
    return stored == column.type.replace(" ", "") or {stored, column.type} == zoneless


def type_name(kind: Any) -> str:
    """The Spark name of an Arrow type, as Spark reads it from Parquet."""
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{type_name(field.type)}' for field in kind)}>"
    return next((name for test, name in _TYPES if test(kind)), f"unknown({kind})")


def bronze_types(columns: Mapping[str, str]) -> tuple[Column, ...]:
    """The columns of a file as a manifest lists them: what `lakebed ticks push` writes."""
    return tuple(Column(name, kind) for name, kind in columns.items())
