"""Packs Parquet files as a tick: numbers them, hashes them, and writes their manifest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from lakebed.core.errors import Invalid
from lakebed.ticks.codec import PARTS_MAX, read_manifest, type_of
from lakebed.ticks.model import MANIFEST_VERSION

MANIFEST_FILE = "_manifest.json"
READY_FILE = "_ready"
CHUNK_BYTES = 1024 * 1024
PAGED = re.compile(r"(?P<stem>.+?)_seq=(?P<seq>\d+)\.parquet")


class PackedTick(msgspec.Struct, frozen=True):
    """A tick ready to be sent: the bytes of its manifest, and the path of each part."""

    tick_id: str
    project_id: str
    manifest: str
    files: dict[int, str]


def is_ready(folder: Path) -> bool:
    """Whether the folder is complete: its writer created one of the marker files."""
    if folder.name.startswith(".") or not folder.is_dir():
        return False
    return any((folder / name).is_file() for name in (MANIFEST_FILE, READY_FILE))


def find(where: Sequence[Path], endings: Collection[str] = (".parquet",)) -> list[Path]:
    """The given files, and those in the given folders that end so. Raises Invalid when there are none."""
    found = [file for path in where for file in (_inside(path, endings) if path.is_dir() else [path])]
    if not found or len(found) > PARTS_MAX:
        kinds = ", ".join(endings)
        raise Invalid(f"{len(found)} files: a tick has from 1 to {PARTS_MAX}", hint=f"files that end in {kinds}")
    if missing := [file for file in found if not file.is_file()]:
        raise Invalid(f"{missing[0]} does not exist")
    return found


def _inside(folder: Path, endings: Collection[str]) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in endings and file.name != MANIFEST_FILE)


def as_parquet(file: Path, folder: Path) -> Path:
    """The file itself if it is Parquet or a folder; a CSV, JSON or JSON Lines file is converted into `folder`.

    Raises Invalid for a file that does not have the form its name says.
    """
    kind = file.suffix.lower()
    if kind not in READERS or not file.is_file():
        return file
    try:
        table = READERS[kind](file)
    except (pa.ArrowException, OSError, ValueError, msgspec.DecodeError) as error:
        raise Invalid(f"{file} cannot be read as {kind[1:].upper()}: {error}") from error
    made = folder / f"{file.stem}.parquet"
    if made.exists():
        raise Invalid(f"several files are called {file.stem}", hint="one file a table, or TABLE_seq=NNN for its pages")
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(_typed(table), made)
    return made


def _typed(table: Any) -> Any:
    """A column in which nothing has a value is text: manifests have no type for it."""
    fields = [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields))


def _json(file: Path) -> Any:
    rows = msgspec.json.decode(file.read_bytes())
    return pa.Table.from_pylist(rows if isinstance(rows, list) else [rows])


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": lambda file: pa.csv.read_csv(file),
    ".tsv": lambda file: pa.csv.read_csv(file, parse_options=pa.csv.ParseOptions(delimiter="\t")),
    ".json": _json,
    ".jsonl": lambda file: pa.json.read_json(file),
    ".ndjson": lambda file: pa.json.read_json(file),
}
ENDINGS = (".parquet", *READERS)  # of files that can be pushed


def pack(
    files: Sequence[Path],
    *,
    project_id: str,
    tick_id: str,
    dt: str,
    keys: Mapping[str, Sequence[str]],
    mode: str = "delta",
) -> PackedTick:
    """A tick of these files. `<table>_seq=NNN.parquet` are pages of one table, any other file is a table of its own.

    `keys` gives the primary keys by table; "" is for all other tables. With an empty `mode`, a table with a key is
    upserted (delta) and one without is replaced (full). Raises Invalid or BadManifest.
    """
    tables: dict[str, dict[str, Any]] = {}
    numbered = dict(enumerate(files))
    for seq, file in numbered.items():
        paged = PAGED.fullmatch(file.name)
        name = paged["stem"] if paged else file.stem
        metadata, schema = _read(file)
        primary_keys = list(keys.get(name, keys.get("", ())))
        table = tables.setdefault(
            name,
            {
                "name": name,
                "mode": mode or ("delta" if primary_keys else "full"),
                "schema": _columns(file, schema),
                "primary_keys": primary_keys,
                "row_count": 0,
                "parquets": [],
            },
        )
        table["row_count"] += metadata.num_rows
        table["parquets"].append(
            {
                "file_seq": seq,
                "sha256": sha256_of(file),
                "rows": metadata.num_rows,
                "bytes": file.stat().st_size,
                "file": file.name,
            }
        )
    manifest = {
        "schema_version": MANIFEST_VERSION,
        "tick_id": tick_id,
        "project_id": project_id,
        "dt": dt,
        "tables": list(tables.values()),
    }
    body = msgspec.json.encode(manifest)
    read_manifest(body)  # what the service would refuse is refused here, before anything is sent
    return PackedTick(tick_id, project_id, body.decode(), {seq: str(file.resolve()) for seq, file in numbered.items()})


def pack_from_manifest(folder: Path, *, project_id: str) -> PackedTick:
    """The tick of the folder's own manifest, which is sent unchanged; its parts are found by their file names."""
    body = (folder / MANIFEST_FILE).read_bytes()
    manifest = read_manifest(body)
    if manifest.project_id not in ("", project_id) or not manifest.tick_id:
        raise Invalid(f"{folder / MANIFEST_FILE} is of another project, or has no tick_id")
    files: dict[int, str] = {}
    for part in manifest.parts:
        file = (folder / part.file).resolve()
        if not part.file or not file.is_relative_to(folder.resolve()) or not file.is_file():
            raise Invalid(f"part {part.file_seq}: there is no file {part.file!r} in {folder}")
        files[part.file_seq] = str(file)
    return PackedTick(manifest.tick_id, project_id, body.decode(), files)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read(file: Path) -> tuple[Any, Any]:
    try:
        with pq.ParquetFile(file) as opened:
            return opened.metadata, opened.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        hint = "" if file.suffix.lower() in ENDINGS else f"convert it to one of {', '.join(ENDINGS)}"
        raise Invalid(f"{file} is not a Parquet file: {error}", hint=hint) from error


def _columns(file: Path, schema: Any) -> list[dict[str, str]]:
    columns = [{"name": field.name, "type": type_of(field.type) or ""} for field in schema]
    for field, column in zip(schema, columns, strict=True):
        if column["type"] in ("", "null"):
            raise Invalid(f"{file}: column {field.name!r} is {field.type}, a type that manifests do not have")
    return columns
