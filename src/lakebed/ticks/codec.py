"""A tick's manifest: which tables it changes, how, and which Parquet parts hold their rows.

The service that takes parts and the pipeline that writes tables read the same manifest through this module alone, so
they cannot disagree. Reading is strict: an unknown or wrong value is refused with an `error_class` for programs and a
message for people. Pure: no store, no clock, no Spark.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from lakebed.delta import types
from lakebed.delta.types import is_type
from lakebed.ticks.model import MANIFEST_VERSION, BadManifest, Manifest, ManifestPart, TickTable

MANIFEST_BYTES_MAX = 8 * 1024 * 1024
TABLES_MAX = 256
COLUMNS_MAX = 2_000
PARTS_MAX = 2_000  # the register of a tick lists them all and is rewritten for each
KEYS_MAX = 16
LAYOUT_MAX = 4  # columns that files are partitioned or ordered by
FILE_SEQ_MAX = 999_999

MODES = ("delta", "full")  # delta = upsert by primary key, full = these rows are the whole table
UNORDERED = ("float", "double", "binary", "boolean")  # no column of these types identifies a row
RESERVED = "_"  # columns with a leading underscore are Lakebed's: lineage

TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
COLUMN_NAME = re.compile(r"[^\W\d]\w{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")
DAY = re.compile(r"\d{8}")


def read_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes, checked whole. Raises BadManifest."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise BadManifest("manifest_too_large", f"the manifest has more than {MANIFEST_BYTES_MAX} bytes")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.ValidationError as error:
        raise BadManifest("manifest_invalid", f"the manifest is invalid: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest("manifest_not_json", f"the manifest is not JSON: {error}") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raises BadManifest at the first error."""
    if manifest.schema_version != MANIFEST_VERSION:
        raise BadManifest(
            "unknown_version", f"manifest version {manifest.schema_version!r} is not {MANIFEST_VERSION!r}"
        )
    if not manifest.tables:
        raise BadManifest("no_tables", "the manifest names no table")
    if len(manifest.tables) > TABLES_MAX:
        raise BadManifest("too_many_tables", f"the manifest names more than {TABLES_MAX} tables")
    if manifest.dt and not DAY.fullmatch(manifest.dt):
        raise BadManifest("bad_day", f"dt {manifest.dt!r} is not a day", hint="eight digits: 20261115")
    for table in manifest.tables:
        check_table(table)
    _unique("duplicate_table", "table", [table.name.casefold() for table in manifest.tables])
    parts = [part.file_seq for part in manifest.parts]
    if len(parts) > PARTS_MAX:
        raise BadManifest("too_many_parts", f"the manifest names more than {PARTS_MAX} parts")
    _unique("duplicate_part", "part", parts)


def type_of(arrow: Any) -> str | None:
    """The manifest's name of an Arrow type: `null` for a column without values, None for a type that has no name.

    Representations of one type (large and dictionary-encoded strings, units of a timestamp) have one name; an unsigned
    number has that of the next larger signed one.
    """
    import pyarrow.types as t

    if t.is_dictionary(arrow):
        return type_of(arrow.value_type)
    if t.is_list(arrow) or t.is_large_list(arrow) or t.is_fixed_size_list(arrow):
        return _nested("array", [arrow.value_type])
    if t.is_map(arrow):
        return _nested("map", [arrow.key_type, arrow.item_type])
    if t.is_struct(arrow):
        fields = [(field.name, type_of(field.type)) for field in arrow]
        word = f"struct<{','.join(f'{name}:{inner}' for name, inner in fields)}>"
        return word if is_type(word) else None
    if t.is_decimal128(arrow):
        return f"decimal({arrow.precision},{arrow.scale})" if 0 <= arrow.scale <= arrow.precision else None
    words = {
        "null": t.is_null, "boolean": t.is_boolean, "byte": t.is_int8, "float": t.is_float32, "double": t.is_float64,
        "date": t.is_date32, "timestamp": t.is_timestamp, "decimal(20,0)": t.is_uint64,
        "short": lambda a: t.is_int16(a) or t.is_uint8(a),
        "integer": lambda a: t.is_int32(a) or t.is_uint16(a),
        "long": lambda a: t.is_int64(a) or t.is_uint32(a),
        "string": lambda a: t.is_string(a) or t.is_large_string(a) or t.is_string_view(a),
        "binary": lambda a: t.is_binary(a) or t.is_large_binary(a),
    }  # fmt: skip
    return next((word for word, fits in words.items() if fits(arrow)), None)


def _nested(name: str, inner: list[Any]) -> str | None:
    word = f"{name}<{','.join(type_of(one) or '' for one in inner)}>"
    return word if is_type(word) else None


def check_table(table: TickTable) -> None:
    """Raises BadManifest at the first error in the table."""
    where = f"table {table.name!r}"
    if not TABLE_NAME.fullmatch(table.name) or ".." in table.name:
        raise BadManifest("bad_table_name", f"{where}: invalid name", hint="letters, digits, _ . and -, no slashes")
    if table.mode not in MODES:
        raise BadManifest("unknown_mode", f"{where}: mode {table.mode!r}", hint="delta or full")
    _check_columns(table, where)
    _check_keys(table, where)
    _check_layout(table, where)
    for part in table.parquets:
        _check_part(part, where)
    total = sum(part.rows for part in table.parquets)
    if total != table.row_count:
        raise BadManifest("row_count_mismatch", f"{where}: row_count {table.row_count}, but its parts have {total}")


def _check_columns(table: TickTable, where: str) -> None:
    if not table.schema or len(table.schema) > COLUMNS_MAX:
        raise BadManifest("bad_schema", f"{where}: between 1 and {COLUMNS_MAX} columns, not {len(table.schema)}")
    for column in table.schema:
        if column.name.startswith(RESERVED):
            raise BadManifest("reserved_column", f"{where}: column {column.name!r}: a leading _ is reserved")
        if not COLUMN_NAME.fullmatch(column.name):
            raise BadManifest("bad_column_name", f"{where}: column {column.name!r}: letters, digits and _ only")
        if not is_type(column.type):
            raise BadManifest(
                "unknown_type", f"{where}: column {column.name!r} has type {column.type!r}", hint=types.HINT
            )
    _unique("duplicate_column", f"{where}: column", [column.name.casefold() for column in table.schema])


def _check_keys(table: TickTable, where: str) -> None:
    kinds = {column.name: column.type for column in table.schema}
    for key in table.primary_keys:
        if key not in kinds:
            raise BadManifest("key_not_a_column", f"{where}: primary key {key!r} is not in its schema")
        if kinds[key] in UNORDERED or "<" in kinds[key]:
            raise BadManifest("unfit_key", f"{where}: primary key {key!r} is {kinds[key]}, which cannot identify a row")
    _unique("duplicate_key", f"{where}: primary key", table.primary_keys)
    if len(table.primary_keys) > KEYS_MAX:
        raise BadManifest("too_many_keys", f"{where}: more than {KEYS_MAX} primary keys")
    if table.mode == "delta" and not table.primary_keys:
        raise BadManifest("keys_missing", f"{where}: mode delta needs primary keys", hint="give keys, or use mode full")


def _check_layout(table: TickTable, where: str) -> None:
    kinds = {column.name: column.type for column in table.schema}
    for role, names in (("partition_by", table.partition_by), ("cluster_by", table.cluster_by)):
        for name in names:
            if name not in kinds:
                raise BadManifest("layout_not_a_column", f"{where}: {role} {name!r} is not in its schema")
            if "<" in kinds[name] or (role == "partition_by" and kinds[name] in UNORDERED[:3]):
                raise BadManifest("unfit_layout", f"{where}: {role} {name!r} is {kinds[name]}, which has no order")
        _unique("duplicate_layout", f"{where}: {role}", names)
        if len(names) > LAYOUT_MAX:
            raise BadManifest("too_many_layout_columns", f"{where}: {role} names more than {LAYOUT_MAX} columns")


def _check_part(part: ManifestPart, where: str) -> None:
    if not 0 <= part.file_seq <= FILE_SEQ_MAX:
        raise BadManifest("bad_file_seq", f"{where}: file_seq {part.file_seq} is not within 0 and {FILE_SEQ_MAX}")
    if not SHA256.fullmatch(part.sha256):
        raise BadManifest("bad_sha256", f"{where}: part {part.file_seq}: sha256 is not 64 lowercase hex digits")
    if part.rows < 0 or part.size < 0:
        raise BadManifest("negative_count", f"{where}: part {part.file_seq} has a negative number of rows or bytes")


def _unique(error_class: str, what: str, names: Any) -> None:
    seen: set[Any] = set()
    for name in names:
        if name in seen:
            raise BadManifest(error_class, f"{what} {name!r} is listed twice")
        seen.add(name)
