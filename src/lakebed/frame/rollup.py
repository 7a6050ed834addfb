"""The `.lmrollup.zst` chunk: what samples of one metric came to, per series and window. Written by the pipeline.

An Arrow IPC stream inside one zstd frame. A chunk never changes; chunks of one window, hour and metric are made from
different batches, so a reader adds them up. Imports pyarrow when called.
"""

from __future__ import annotations

import sys
from typing import Any

from lakebed.errors import Invalid

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK_BYTES_MAX = 64 * 1024 * 1024  # after decompression
WINDOW_LOG_MAX = 23


def rollup_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("agent_id", pa.string(), nullable=False),
            pa.field("labels", pa.map_(pa.string(), pa.string()), nullable=False),
            pa.field("start_ns", pa.int64(), nullable=False),
            pa.field("count", pa.int64(), nullable=False),
            pa.field("sum", pa.float64(), nullable=False),
            pa.field("min", pa.float64(), nullable=False),
            pa.field("max", pa.float64(), nullable=False),
            pa.field("last_ns", pa.int64(), nullable=False),
            pa.field("last", pa.float64(), nullable=False),
        ],
        metadata={"schema": "lightmetrics.rollup.v1"},
    )


def encode_rollup(table: Any) -> bytes:
    """The bytes of a chunk. Raises Invalid unless the table has exactly the columns of `rollup_schema`."""
    import pyarrow as pa

    if not table.schema.equals(rollup_schema()):
        raise Invalid(f"a rollup chunk has other columns than {rollup_schema().names}")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rollup_schema()) as writer:
        writer.write_table(table.cast(rollup_schema()))
    return zstd.compress(sink.getvalue().to_pybytes())


def decode_rollup(data: bytes, bytes_max: int = CHUNK_BYTES_MAX) -> Any:
    """The chunk as an Arrow table. Raises Invalid for anything else, in bounded memory."""
    import pyarrow as pa

    stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    try:
        plain = stream.decompress(data, max_length=bytes_max + 1)
        if len(plain) > bytes_max or not stream.eof:
            raise Invalid(f"a rollup chunk is cut off or larger than {bytes_max} bytes")
        table = pa.ipc.open_stream(plain).read_all()
        table.validate(full=True)
    except (zstd.ZstdError, pa.ArrowException, OSError, EOFError) as error:
        raise Invalid(f"a rollup chunk does not decode: {error}") from error
    if not table.schema.equals(rollup_schema()):
        raise Invalid(f"a rollup chunk has other columns than {rollup_schema().names}")
    return table
