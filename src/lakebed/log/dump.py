"""What a stored blob of the log holds, for people: `lakebed topics dump`."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.errors import Corrupt
from lakebed.log import blob, codec

RECORDS_SHOWN = 5
BYTES_SHOWN = 60


def dumped(data: bytes) -> dict[str, Any]:
    """A shared blob or a batch body, by its magic. Raises Corrupt for anything else."""
    if data[:4] == blob.MAGIC:
        header, base = blob.decode_header(data)
        return {
            "format": "wal-shared",
            "version": header.version,
            "created_at_ms": header.created_at_ms,
            "partitions": [
                msgspec.to_builtins(part)
                | _batch(data[base + part.body_offset : base + part.body_offset + part.body_length])
                for part in header.partitions
            ],
        }
    if data[:4] == codec.MAGIC:
        return {"format": "bytes-batch-v1", **_batch(data)}
    raise Corrupt(f"{data[:4]!r} begins neither a shared blob nor a batch")


def _batch(body: bytes) -> dict[str, Any]:
    batch = codec.decode(body)
    first = batch.records.slice(0, min(RECORDS_SHOWN, batch.records.count))
    return {
        "records": batch.records.count,
        "bytes": batch.records.size,
        "segments": [msgspec.to_builtins(segment) for segment in batch.segments],
        "first": [record[:BYTES_SHOWN].decode(errors="backslashreplace") for record in first],
    }
