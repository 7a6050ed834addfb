"""Index segments to bytes and back: what a collector accepted between two flushes, in one immutable object.

A segment's key contains the hash of its bytes, and a reader compares them: rows are what their collector wrote, or the
segment is Corrupt. Each row has everything that the three single objects of a batch have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import AcceptedByTime, BlobReference, BlobSeen, write_record
from lakebed.core.compression import compress, decompress
from lakebed.core.errors import Corrupt, Invalid

ROWS_MAX = 5_000  # of one segment: some 2 MB before compression
SEGMENT_BYTES_MAX = 64 * 1024 * 1024  # after decompression
ZSTD_LEVEL = 1


class OrphanRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A blob that a collector stored without a decision about its batch: garbage collection looks at it.

    `pack` is the key of the pack that the frame is in; empty: the frame is a blob of its own.
    """

    sha256: str
    at_unix_ns: int
    pack: str = ""

    @property
    def key(self) -> str:
        return self.pack or paths.blob_key(self.sha256)


class IndexSegment(msgspec.Struct, frozen=True):
    """All rows have their times in one hour."""

    schema: Literal["lightmetrics.accepted_index.v1"]
    writer: str
    rows: tuple[AcceptedByTime, ...] = ()
    orphans: tuple[OrphanRow, ...] = ()


def encode_segment(writer: str, rows: Sequence[AcceptedByTime], orphans: Sequence[OrphanRow] = ()) -> tuple[str, bytes]:
    """The key and the bytes of a segment. Its times must be in one hour."""
    segment = IndexSegment("lightmetrics.accepted_index.v1", writer, tuple(rows), tuple(orphans))
    times = [row.accepted_at_unix_ns for row in rows] + [orphan.at_unix_ns for orphan in orphans]
    data = compress(write_record(segment), level=ZSTD_LEVEL)
    return paths.segment_key(min(times), max(times), hashlib.sha256(data).hexdigest()), data


def decode_segment(key: str, data: bytes) -> IndexSegment:
    """The segment at this key. Raises Corrupt."""
    try:
        if paths.parse_segment(key)[2] != hashlib.sha256(data).hexdigest()[: paths.SEGMENT_DIGEST]:
            raise Invalid("its bytes have another hash than its key")
        plain = decompress(data, SEGMENT_BYTES_MAX, what="index segment")
        return msgspec.json.decode(plain, type=IndexSegment)
    except (Invalid, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"index segment {key!r} cannot be read: {error}", hint="lakebed batches reconcile --cold", key=key
        ) from error


def manifest_id_of(row: AcceptedByTime) -> str:
    return paths.manifest_id(paths.identity_of(row.accepted_manifest_key), row.accepted_at_unix_ns)


def single_objects(row: AcceptedByTime) -> tuple[tuple[str, bytes], ...]:
    """The same as the three objects of the single layout: key and bytes."""
    identity = paths.identity_of(row.accepted_manifest_key)
    reference = BlobReference("lightmetrics.blob_reference.v1", row.frame_sha256, row.accepted_manifest_key)
    seen = BlobSeen("lightmetrics.blob_seen.v1", row.frame_sha256, row.raw_blob_key)
    return (
        (paths.accepted_by_time_key(identity, row.accepted_at_unix_ns), write_record(row)),
        (paths.accepted_by_blob_key(row.frame_sha256, identity), write_record(reference)),
        (paths.blob_by_time_key(row.frame_sha256, row.accepted_at_unix_ns), write_record(seen)),
    )
