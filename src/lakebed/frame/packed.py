"""Arrow tables inside one zstd frame: how rollup and index chunks are stored. Imports pyarrow when called."""

from __future__ import annotations

import io
import sys
from typing import Any

from lakebed.errors import Invalid

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES_MAX = 64 * 1024 * 1024  # after decompression
WINDOW_LOG_MAX = 23


def pack(*tables: Any) -> bytes:
    """The tables as Arrow IPC streams end to end, compressed. The same tables give the same bytes on one version."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
    return zstd.compress(sink.getvalue().to_pybytes())


def unpack(what: str, data: bytes, count: int, bytes_max: int = CHUNK_BYTES_MAX) -> list[Any]:
    """`count` tables. Raises Invalid for anything else, in bounded memory."""
    import pyarrow as pa

    stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    try:
        plain = stream.decompress(data, max_length=bytes_max + 1)
        if len(plain) > bytes_max or not stream.eof or stream.unused_data:
            raise Invalid(f"{what} is cut off, has something behind it, or is larger than {bytes_max} bytes")
        source = io.BytesIO(plain)
        tables = [pa.ipc.open_stream(source).read_all() for _ in range(count)]
        if source.tell() != len(plain):
            raise Invalid(f"{what} has something behind its tables")
        for table in tables:
            table.validate(full=True)
    except (zstd.ZstdError, pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise Invalid(f"{what} does not decode: {error}") from error
    return tables


def check_schema(what: str, table: Any, wanted: Any) -> None:
    """Raises Invalid unless the table has exactly these columns, without nulls where none may be."""
    if not table.schema.equals(wanted):
        raise Invalid(f"{what} has other columns than {wanted.names}")
    for field in wanted:
        if not field.nullable and table[field.name].null_count:
            raise Invalid(f"{what} has nulls in {field.name}")
