"""Verifies a finalize: the manifest against its request, the uploaded parts, and each part's Parquet footer.

A footer is read from the bucket without the rows: is it Parquet, how many rows, which columns. Most errors of a part
are found here, at the cost of one range read, before anything is started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.core.errors import Invalid
from lakebed.delta.types import parse_type, word_of
from lakebed.store.protocol import Store
from lakebed.ticks.codec import SHA256, read_manifest, type_of
from lakebed.ticks.model import (
    BadManifest,
    CommitRecord,
    Manifest,
    ManifestPart,
    PartsDiffer,
    StoredPart,
    TickColumn,
    TickId,
    TickTable,
)


def decode_manifest(body: bytes, tick: TickId) -> Manifest:
    """The manifest of this tick, checked by itself. Raises BadManifest, whose `error_class` names the error."""
    found = read_manifest(body)
    for name in ("tick_id", "project_id"):
        if getattr(found, name) not in ("", getattr(tick, name)):
            raise BadManifest("wrong_tick", f"the manifest has another {name} than the request")
    return found


def parsed(body: bytes) -> Any:
    """The manifest as it was sent, to compare with a repeat; None when it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None


def digest_of(body: bytes) -> str:
    """The hash of a manifest's content: the same for every spacing and order of the same JSON; empty for no JSON."""
    found = parsed(body)
    return hashlib.sha256(msgspec.json.encode(found, order="deterministic")).hexdigest() if found is not None else ""


def is_of_record(body: bytes, record: CommitRecord) -> bool:
    """Whether these bytes are the manifest that was committed. A record without a digest is compared by its parts."""
    if record.manifest_digest:
        return digest_of(body) == record.manifest_digest
    if hashlib.sha256(body).hexdigest() == record.manifest_sha256:
        return True
    try:
        return lists_parts(read_manifest(body), record.parts)
    except BadManifest:
        return False


def lists_parts(manifest: Manifest, parts: Mapping[str, str]) -> bool:
    """Whether the manifest has exactly these parts, each with its hash."""
    return parts == {str(part.file_seq): part.sha256 for part in manifest.parts}


def compare_parts(manifest: Manifest, parts: Mapping[str, StoredPart]) -> None:
    """Raises PartsDiffer unless exactly the listed parts were uploaded, each with its hash."""
    wanted = {part.file_seq: part.sha256 for part in manifest.parts}
    have = {int(seq): part.sha256 for seq, part in parts.items()}
    missing = [seq for seq in wanted if seq not in have]
    mismatched = [seq for seq, sha256 in wanted.items() if seq in have and have[seq] != sha256]
    unlisted = [seq for seq in have if seq not in wanted]
    if missing or mismatched or unlisted:
        raise PartsDiffer(missing, mismatched, unlisted)


def check_sha(text: str | None) -> str:
    """The header X-Sha256, in lower case. Raises Invalid."""
    if text is None or not SHA256.fullmatch(text.lower()):
        raise Invalid("X-Sha256 is missing or not 64 hex digits", hint="send the SHA-256 of the part's bytes")
    return text.lower()


MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024  # most footers fit: one request
FOOTER_BYTES_MAX = 16 * 1024 * 1024


class ParquetFooter(msgspec.Struct, frozen=True):
    """Columns in the file's order; a type without a name in manifests is empty."""

    rows: int
    columns: tuple[TickColumn, ...]


async def read_footer(store: Store, part: StoredPart) -> ParquetFooter:
    """The footer of a stored part. Raises BadManifest when the bytes are not Parquet, NotFound when they are gone."""
    length = min(TAIL_BYTES, part.size_bytes)
    if length < 12:
        raise _not_parquet("it is too short")
    tail = await store.get_range(part.key, part.size_bytes - length, length)
    if tail[-4:] != MAGIC:
        raise _not_parquet("its end is not that of one")
    footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_bytes + 4 > part.size_bytes or footer_bytes > FOOTER_BYTES_MAX:
        raise _not_parquet(f"its footer claims {footer_bytes} bytes")
    if footer_bytes > length:
        tail = await store.get_range(part.key, part.size_bytes - footer_bytes, footer_bytes)
    return decode_footer(tail[-footer_bytes:])


def decode_footer(footer: bytes) -> ParquetFooter:
    """A footer's rows and columns. Raises BadManifest for anything that does not decode."""
    try:
        found = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        schema = found.schema.to_arrow_schema()
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
        return ParquetFooter(
            max(found.num_rows, sum(group.num_rows for group in groups)),
            tuple(TickColumn(field.name, type_of(field.type) or "") for field in schema),
        )
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise _not_parquet("its footer does not decode") from error


def check_footer(footer: ParquetFooter, listed: ManifestPart, table: TickTable, rows_max: int) -> None:
    """Raises BadManifest unless the part has the rows and columns of its manifest, and not more than a job can hold.

    A column of one value costs a few bytes for any number of rows: the size of a part does not bound its rows.
    """
    where = f"table {table.name!r}: part {listed.file_seq}:"
    if footer.rows > rows_max:
        raise BadManifest("part_too_large", f"{where} it has {footer.rows} rows, more than ticks.part_rows_max")
    if footer.rows != listed.rows:
        raise BadManifest("row_count_mismatch", f"{where} it has {footer.rows} rows, the manifest says {listed.rows}")
    have = [column.name for column in footer.columns]
    want = {column.name: word_of(parse_type(column.type)) for column in table.schema}
    if len(set(have)) != len(have):
        raise BadManifest("duplicate_column", f"{where} it has a column twice")
    if missing := [name for name in want if name not in have]:
        raise BadManifest("missing_column", f"{where} it lacks column {missing[0]!r}")
    if more := [name for name in have if name not in want]:
        raise BadManifest("unknown_column", f"{where} it has column {more[0]!r}, which the manifest does not name")
    for column in footer.columns:
        if column.type not in (want[column.name], "null"):
            wanted, seen = want[column.name], column.type or "of an unknown type"
            raise BadManifest("wrong_type", f"{where} column {column.name!r} is {seen}, the manifest says {wanted}")


def _not_parquet(why: str) -> BadManifest:
    return BadManifest("not_parquet", f"it is not a Parquet file: {why}")
