"""What a table is: a spec of its columns, and snapshots of its files."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from lakebed.core.errors import Corrupt, Invalid

CLUSTER = "lakebed.cluster_by"  # in the table's configuration: the columns that order rows in files
ONCE = "once:"  # how an application that writes once is marked in the log
ONCE_WINDOW = 10_000  # versions: a tick a minute for a week, half a megabyte in a kept snapshot
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|/")
_DOTTED = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
NAME = re.compile(r"[a-z0-9][a-z0-9_.=-]{0,127}(/[a-z0-9][a-z0-9_.=-]{0,127}){0,7}", re.IGNORECASE)


class TableSpec(msgspec.Struct, frozen=True):
    """A table's contract. `schema_json` is Spark's StructType as JSON, which is also Delta's schema string.

    `keys` make rows unique for upserts; `partition_by` lays files out in folders; `stats` are the columns whose range
    is kept per file (keys always are), so that a read or an upsert opens only files that can matter; `cluster_by`
    orders the rows in files, by one column or along a curve through several.
    """

    name: str
    schema_json: str
    keys: tuple[str, ...] = ()
    partition_by: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or ".." in self.name:
            raise Invalid(f"{self.name!r} is no table name", hint="letters, digits, _ . = - and up to 7 slashes")
        columns = set(self.columns)
        for role in ("keys", "partition_by", "stats", "cluster_by"):
            missing = [name for name in getattr(self, role) if name not in columns]
            if missing:
                raise Invalid(f"table {self.name}: {role} names {missing[0]!r}, which is no column")

    @property
    def columns(self) -> list[str]:
        return [field["name"] for field in msgspec.json.decode(self.schema_json)["fields"]]

    @property
    def required(self) -> list[str]:
        """The columns that may not be null."""
        fields = msgspec.json.decode(self.schema_json)["fields"]
        return [field["name"] for field in fields if not field.get("nullable", True)]

    @property
    def root(self) -> str:
        return f"tables/{self.name}"


class DataFile(msgspec.Struct, frozen=True, gc=False):
    """One Parquet file of a table. `low` and `high` bound columns; a column without bounds is absent.

    `rows` leaves out the rows that a deletion vector marks; `vector` is that vector as the log describes it.
    `stats` is what a writer has the log record of the columns, as JSON; bounds are read from it. `copied` means that
    an upsert wrote the file with rows of the table as they were.
    """

    path: str
    size: int
    rows: int
    partition: dict[str, str | None] = {}
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    stats: str = ""
    vector: dict[str, Any] = {}
    copied: bool = False


class TableProtocol(msgspec.Struct, frozen=True):
    """What readers and writers of a table must know, as its log demands it."""

    reader: int = 1
    writer: int = 2
    reader_features: tuple[str, ...] = ()
    writer_features: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.reader_features, *self.writer_features)))


def path_of(name: str) -> str:
    """The log's path of a file with this key below the table's root: Delta URL-encodes it."""
    return quote(name, safe="/=")


def name_of(path: str) -> str:
    """The decoded path. Engines encode the same key differently, so paths are compared decoded.

    Raises Corrupt for a path that no key can have.
    """
    if "%" not in path:
        return path
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{path!r} is not the URL-encoded path of a file", path=path) from error


def identity_of(path: str, vector: dict[str, Any] | None) -> str:
    """What makes a file of the log the same one: its decoded path, and its deletion vector where it has one."""
    name = name_of(path)
    if not vector:
        return name
    return f"{name}\0{vector.get('storageType')}{vector.get('pathOrInlineDv')}@{vector.get('offset')}"


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
    `metadata` is the log's `metaData` as its last writer left it. `checkpoint` is the last one that is known of, and
    `tail_bytes` the size of the log entries since.
    """

    version: int = -1
    schema_json: str = ""
    partition_by: tuple[str, ...] = ()
    files: tuple[DataFile, ...] = ()
    applied: dict[str, int] = {}
    table_id: str = ""
    keys: tuple[str, ...] = ()
    note: str = ""
    protocol: TableProtocol = TableProtocol()
    metadata: dict[str, Any] = {}
    checkpoint: int = -1
    tail_bytes: int = 0

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties: Delta's own (`delta.…`), ours and those of its users."""
        return self.metadata.get("configuration") or {}

    @property
    def cluster_by(self) -> tuple[str, ...]:
        """The columns that order the rows in files."""
        return tuple(filter(None, self.properties.get(CLUSTER, "").split(",")))


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
