"""What a table is: a spec of its columns, and snapshots of its files."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

import msgspec

from lakebed.core.errors import Corrupt, Invalid

ONCE = "once:"  # how an application that writes once is marked in the log
ONCE_WINDOW = 10_000  # versions: a tick a minute for a week, half a megabyte in a kept snapshot
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|/")
_DOTTED = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
NAME = re.compile(r"[a-z0-9][a-z0-9_.=-]{0,127}(/[a-z0-9][a-z0-9_.=-]{0,127}){0,7}", re.IGNORECASE)


class TableSpec(msgspec.Struct, frozen=True):
    """A table's contract. `schema_json` is Spark's StructType as JSON, which is also Delta's schema string.

    `keys` make rows unique for upserts; `partition_by` lays files out in folders; `stats` are the columns whose range
    is kept per file (keys always are), so that a read or an upsert opens only files that can matter.
    """

    name: str
    schema_json: str
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or ".." in self.name:
            raise Invalid(f"{self.name!r} is no table name", hint="letters, digits, _ . = - and up to 7 slashes")
        columns = set(self.columns)
        for role in ("keys", "partition_by", "stats"):
            missing = [name for name in getattr(self, role) if name not in columns]
            if missing:
                raise Invalid(f"table {self.name}: {role} names {missing[0]!r}, which is no column")

    @property
    def columns(self) -> list[str]:
        return [field["name"] for field in msgspec.json.decode(self.schema_json)["fields"]]

    @property
    def root(self) -> str:
        return f"tables/{self.name}"


class DataFile(msgspec.Struct, frozen=True):
    """One Parquet file of a table. `low` and `high` bound the stats columns; a column without bounds is absent."""

    path: str
    size: int
    rows: int
    partition: dict[str, str | None] = {}
    low: dict[str, bool | int | float | str] = {}
    high: dict[str, bool | int | float | str] = {}
    nulls: dict[str, int] = {}


def path_of(name: str) -> str:
    """The log's path of a file with this key below the table's root: Delta URL-encodes it."""
    return quote(name, safe="/=")


def name_of(path: str) -> str:
    """The decoded path. Engines encode the same key differently, so paths are compared decoded.

    Raises Corrupt for a path that no key can have.
    """
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{path!r} is not the URL-encoded path of a file", path=path) from error


def key_of(root: str, path: str) -> str:
    """The store's key of a file, from its path in the log. Raises Invalid for a file outside the table's folder."""
    name = name_of(path)
    if _ABSOLUTE.match(path) or _DOTTED.search(name):
        raise Invalid(
            f"the log of {root} refers to {path!r}, which is not in the table's folder",
            hint="a shallow clone reads files of another table: copy them with the engine that made the clone",
        )
    return f"{root}/{name}"


class Snapshot(msgspec.Struct, frozen=True):
    """A table at one version; -1 is a table that does not exist yet. `applied` is each application's last batch.

    `keys` are those its last spec named, `note` is what its last version records of where its rows come from.
    """

    version: int = -1
    schema_json: str = ""
    partition_by: tuple[str, ...] = ()
    files: tuple[DataFile, ...] = ()
    applied: dict[str, int] = {}
    table_id: str = ""
    keys: tuple[str, ...] = ()
    note: str = ""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class WriteBatch(msgspec.Struct, frozen=True):
    """What makes a write idempotent: the application that writes, and which of its batches this is, counting up.

    An application that writes once in its life has no number: the version it made is used instead, so a repeat finds
    that version and what it changed. Such applications are forgotten after ONCE_WINDOW further versions.
    `after` is the batch that must be the last one applied (-1: none); another one there makes the write Stale.
    """

    application: str
    number: int | None
    after: int | None = None

    @classmethod
    def once(cls, application: str) -> WriteBatch:
        return cls(f"{ONCE}{application}", None)


class CommitResult(msgspec.Struct, frozen=True):
    """A write's result. `repeated` means that this batch had been applied before and nothing was changed now."""

    version: int
    rows_inserted: int = 0
    rows_replaced: int = 0
    files_added: int = 0
    files_removed: int = 0
    repeated: bool = False
    rows_removed: int = 0


class VersionChange(msgspec.Struct, frozen=True):
    """What one version did: `overwrites` means that nothing older is left in the table."""

    version: int
    operation: str
    overwrites: bool
    applications: tuple[str, ...]
    rows_inserted: int = 0
    rows_replaced: int = 0
