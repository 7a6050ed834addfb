"""What a manifest may say, and how it compares with what was uploaded. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from lakebed.errors import Invalid
from lakebed.ticks import paths
from lakebed.ticks.errors import PartsDiffer, Refused
from lakebed.ticks.model import Manifest, ManifestTable, Part, TickId

VERSIONS = ("1.0", "1")
TABLES_MAX = 500
COLUMNS_MAX = 2000
RESERVED = ("_tick", "_lakebed")  # columns that bronze adds begin like this

_SHA = re.compile(r"[0-9a-f]{64}")
_TABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_COLUMN = re.compile(r"[^\x00-\x20\x7f,;{}()=/\\`\"']{1,128}")
_FILE = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")
_TYPE = re.compile(
    r"(string|long|int|short|byte|double|float|boolean|date|timestamp|timestamp_ntz|binary"
    r"|decimal\(\d{1,2},\d{1,2}\)|(array|map|struct)<.{1,2000}>)"
)
ALIASES = {"bigint": "long", "integer": "int", "smallint": "short", "tinyint": "byte", "bool": "boolean"}


def decode(body: bytes, tick: TickId) -> Manifest:
    """The manifest of this tick, checked in itself. Raises Refused, whose `error_class` names what is wrong."""
    try:
        found = msgspec.json.decode(body, type=Manifest)
    except msgspec.ValidationError as error:
        kind = "unknown_mode" if "mode`" in str(error) else "manifest_invalid"
        raise Refused(kind, f"the manifest does not fit: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("manifest_unreadable", f"the manifest is not JSON: {error}") from error
    _check_head(found, tick)
    _check_parts(found)
    tables = tuple(_checked(table, found) for table in found.tables)
    return msgspec.structs.replace(found, tables=tables)


def listed(manifest: Manifest) -> dict[int, str]:
    """Every part that the manifest lists, with its hash."""
    return {parquet.file_seq: parquet.sha256 for table in manifest.tables for parquet in table.parquets}


def compare(manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Raises PartsDiffer unless exactly the listed parts were uploaded, each with its hash."""
    wanted = listed(manifest)
    have = {int(seq): part.sha256 for seq, part in parts.items()}
    missing = [seq for seq in wanted if seq not in have]
    mismatched = [seq for seq, sha256 in wanted.items() if seq in have and have[seq] != sha256]
    unlisted = [seq for seq in have if seq not in wanted]
    if missing or mismatched or unlisted:
        raise PartsDiffer(missing, mismatched, unlisted)


def _check_head(manifest: Manifest, tick: TickId) -> None:
    if manifest.schema_version not in VERSIONS:
        raise Refused("manifest_version", f"manifest version {manifest.schema_version[:20]!r} is not spoken here")
    if (manifest.tick_id, manifest.project_id) != (tick.tick_id, tick.project_id):
        raise Refused("wrong_tick", "the manifest names another tick or project than the address")
    if not re.fullmatch(r"\d{8}", manifest.dt):
        raise Refused("bad_date", f"dt {manifest.dt[:20]!r} is not YYYYMMDD")
    if not 0 < len(manifest.tables) <= TABLES_MAX:
        raise Refused("manifest_invalid", f"{len(manifest.tables)} tables are not between 1 and {TABLES_MAX}")
    names = [table.name.lower() for table in manifest.tables]
    if len(set(names)) != len(names):
        raise Refused("duplicate_table", "a table is listed twice")


def _check_parts(manifest: Manifest) -> None:
    seen: set[int] = set()
    for table in manifest.tables:
        for parquet in table.parquets:
            if not 0 <= parquet.file_seq <= paths.FILE_SEQ_MAX:
                raise Refused("bad_part", f"part {parquet.file_seq} is not from 0 to {paths.FILE_SEQ_MAX}")
            if parquet.file_seq in seen:
                raise Refused("duplicate_part", f"part {parquet.file_seq} is listed twice")
            if not _SHA.fullmatch(parquet.sha256):
                raise Refused("bad_part", f"part {parquet.file_seq}: sha256 is not 64 hex digits")
            if parquet.row_count < 0:
                raise Refused("bad_part", f"part {parquet.file_seq}: {parquet.row_count} rows")
            if parquet.file and (not _FILE.fullmatch(parquet.file) or ".." in parquet.file):
                raise Refused("bad_name", f"part {parquet.file_seq}: its file name cannot be used")
            seen.add(parquet.file_seq)


def _checked(table: ManifestTable, manifest: Manifest) -> ManifestTable:
    """The table with its mode and types settled."""
    if not _TABLE.fullmatch(table.name):
        raise Refused("bad_name", f"table {table.name[:80]!r} cannot be used", hint="letters, digits and _, up to 63")
    if not 0 < len(table.schema) <= COLUMNS_MAX:
        raise Refused("bad_schema", f"table {table.name}: {len(table.schema)} columns")
    columns = [column.name for column in table.schema]
    for name in columns:
        if not _COLUMN.fullmatch(name) or name.lower().startswith(RESERVED):
            raise Refused("bad_name", f"table {table.name}: column {name[:80]!r} cannot be used")
    if len({name.lower() for name in columns}) != len(columns):
        raise Refused("bad_schema", f"table {table.name}: a column is listed twice")
    schema = tuple(msgspec.structs.replace(c, type=ALIASES.get(c.type.lower(), c.type)) for c in table.schema)
    for column in schema:
        if not _TYPE.fullmatch(column.type):
            raise Refused("bad_schema", f"table {table.name}: {column.name} has no known type {column.type[:80]!r}")
    mode = table.mode or manifest.mode
    if unknown := [key for key in table.primary_keys if key not in columns]:
        raise Refused("bad_keys", f"table {table.name}: key {unknown[0][:80]!r} is no column")
    if len(set(table.primary_keys)) != len(table.primary_keys):
        raise Refused("bad_keys", f"table {table.name}: a key is listed twice")
    if mode == "delta" and not table.primary_keys:
        raise Refused("bad_keys", f"table {table.name}: delta upserts by key, and there is none")
    counted = sum(parquet.row_count for parquet in table.parquets)
    if table.row_count is not None and table.row_count != counted:
        raise Refused("row_count", f"table {table.name}: {table.row_count} rows in all, {counted} in its parts")
    return msgspec.structs.replace(table, schema=schema, mode=mode)


def check_sha(text: str | None) -> str:
    """The header X-Sha256, in lower case. Raises Invalid."""
    if text is None or not _SHA.fullmatch(text.lower()):
        raise Invalid("X-Sha256 is missing or not 64 hex digits", hint="send the SHA-256 of the part's bytes")
    return text.lower()
