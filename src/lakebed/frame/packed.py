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
    import pyarrow as pa

    if not table.schema.equals(wanted):
        raise Invalid(f"{what} has other columns than {wanted.names}")
    for field in wanted:
        if not field.nullable and table[field.name].null_count:
            raise Invalid(f"{what} has nulls in {field.name}")
        if pa.types.is_list(field.type) and table[field.name].combine_chunks().flatten().null_count:
            raise Invalid(f"{what} has nulls inside {field.name}")


def ipc_bytes(table: Any) -> bytes:
    """A table on its way between tasks."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    data: bytes = sink.getvalue().to_pybytes()
    return data


def ipc_table(data: bytes) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(data).read_all()
