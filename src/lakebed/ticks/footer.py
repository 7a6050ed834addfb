"""Reads a part's Parquet footer from the bucket, without its rows: is it Parquet, how many rows, which columns.

Most of what can be wrong with a part is refused here, at the cost of one range read, before anything is started.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.store.protocol import Store
from lakebed.tick_manifest import BadManifest, Column, TickTable, type_of
from lakebed.tick_manifest import Part as Listed
from lakebed.ticks.model import Part

MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024  # most footers fit: one request
FOOTER_BYTES_MAX = 16 * 1024 * 1024


class Footer(msgspec.Struct, frozen=True):
    """Columns in the file's order; a type that has no word in a manifest is empty."""

    rows: int
    columns: tuple[Column, ...]


async def read(store: Store, part: Part) -> Footer:
    """The footer of a stored part. Raises BadManifest when the bytes are not Parquet, NotFound when they are gone."""
    length = min(TAIL_BYTES, part.size_bytes)
    if length < 12:
        raise _not_parquet("it is too short")
    tail = await store.get_range(part.key, part.size_bytes - length, length)
    if tail[-4:] != MAGIC:
        raise _not_parquet("it does not end as one")
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_bytes + 4 > part.size_bytes or footer_bytes > FOOTER_BYTES_MAX:
        raise _not_parquet(f"its footer claims {footer_bytes} bytes")
    if footer_bytes > length:
        tail = await store.get_range(part.key, part.size_bytes - footer_bytes, footer_bytes)
    return decode(tail[-footer_bytes:])


def decode(footer: bytes) -> Footer:
    """A footer's rows and columns. Raises BadManifest for anything that does not decode."""
    try:
        found = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        schema = found.schema.to_arrow_schema()
        return Footer(found.num_rows, tuple(Column(field.name, type_of(field.type) or "") for field in schema))
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise _not_parquet("its footer does not decode") from error


def check(footer: Footer, listed: Listed, table: TickTable) -> None:
    """Raises BadManifest unless the part has the rows and columns that its manifest says."""
    where = f"table {table.name!r}: part {listed.file_seq}:"
    if footer.rows != listed.rows:
        raise BadManifest("row_count_mismatch", f"{where} it has {footer.rows} rows, the manifest says {listed.rows}")
    have, want = [column.name for column in footer.columns], {column.name: column.type for column in table.schema}
    if len(set(have)) != len(have):
        raise BadManifest("duplicate_column", f"{where} a column comes twice in it")
    if missing := [name for name in want if name not in have]:
        raise BadManifest("missing_column", f"{where} it lacks column {missing[0]!r}")
    if more := [name for name in have if name not in want]:
        raise BadManifest("unknown_column", f"{where} it has column {more[0]!r}, which the manifest does not name")
    for column in footer.columns:
        if column.type not in (want[column.name], "null"):
            wanted, seen = want[column.name], column.type or "of no known type"
            raise BadManifest("wrong_type", f"{where} column {column.name!r} is {seen}, the manifest says {wanted}")


def _not_parquet(why: str) -> BadManifest:
    return BadManifest("not_parquet", f"it is no Parquet file: {why}")
