"""Tables for commands and the console: found in the bucket, read from their logs, sampled from one file. No Spark."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from lakebed.core.auth import Shows, every_name
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.delta import history
from lakebed.delta.log import LOG_FOLDER, change_of, decode, fields_of, log_key
from lakebed.delta.model import NAME, DataFile, Snapshot, key_of
from lakebed.delta.predicate import Predicate, parse_predicate
from lakebed.pipeline.tables.columns import physical_names
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

ROOT = "tables/"
DEPTH_MAX = 6  # levels of folders below tables/ that are listed
TABLES_MAX = 10_000  # a name that is not among them is reported as not there
FOLDERS_MAX = 50_000  # folders listed to find them
LISTED_AT_ONCE = 32
FIRST_MAX = 200  # read for a page, and snapshots that are kept
VERSIONS_SHOWN = 15
SAMPLE_ROWS = 20
SAMPLE_FILE_BYTES_MAX = 16 * 1024 * 1024
CELL_CHARS_MAX = 200
FILES_TRIED = 3


class TableRow(msgspec.Struct, frozen=True):
    name: str
    layer: str
    version: int
    rows: int
    files: int
    bytes: int
    problem: str = ""


class TableColumn(msgspec.Struct, frozen=True):
    name: str
    type: str
    nullable: bool
    role: str = ""


class TableVersion(msgspec.Struct, frozen=True):
    version: int
    at_ms: int
    operation: str
    rows_inserted: int
    rows_replaced: int
    applications: tuple[str, ...]
    changed: str = ""  # files and columns, in words


class TableSample(msgspec.Struct, frozen=True):
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


class Snippet(msgspec.Struct, frozen=True):
    name: str
    text: str


class TableView(msgspec.Struct, frozen=True):
    name: str
    uri: str
    version: int
    rows: int
    files: int
    bytes: int
    columns: list[TableColumn]
    versions: list[TableVersion]
    note: str = ""


class Tables:
    """Keeps each table's last snapshot, so that the next read replays only what is new."""

    def __init__(self, context: Context) -> None:
        self._context, self._store = context, context.store
        self._known: dict[str, Snapshot] = {}

    async def names(self) -> list[str]:
        """Every table, by its folder under `tables/`."""
        return [folder.removeprefix(ROOT).rstrip("/") for folder in await _find(self._store)]

    async def all(self) -> list[TableRow]:
        """Every table as it is now; one whose log cannot be read has a `problem`."""
        return await self._rows(await self.names())

    async def first(self, *, shows: Shows = every_name) -> list[TableRow]:
        """The first tables by name, of those that it `shows`: what a page costs does not grow with the lake."""
        return await self._rows(list(filter(shows, await self.names()))[:FIRST_MAX])

    async def _rows(self, names: Sequence[str]) -> list[TableRow]:
        gate = asyncio.Semaphore(8)

        async def row(name: str) -> TableRow:
            layer = name.partition("/")[0]
            async with gate:
                try:
                    state = await self._snapshot(name)
                except (Corrupt, Invalid, NotFound) as error:
                    return TableRow(name, layer, -1, 0, 0, 0, error.message)
            return TableRow(name, layer, state.version, state.rows, len(state.files), _bytes(state))

        return list(await asyncio.gather(*map(row, names)))

    async def show(self, name: str) -> TableView:
        """One table: its columns and what its last versions did. Raises NotFound."""
        state = await self._existing(name)
        return TableView(
            name=name,
            uri=_uri(self._context, name),
            version=state.version,
            rows=state.rows,
            files=len(state.files),
            bytes=_bytes(state),
            columns=_columns(state),
            versions=await self.versions(name, VERSIONS_SHOWN),
            note=state.note,
        )

    async def versions(self, name: str, count: int) -> list[TableVersion]:
        """What the last versions did, newest first. Raises NotFound."""
        last = (await self._existing(name)).version
        numbers = range(last, max(-1, last - count), -1)
        found = await asyncio.gather(*(self._version(name, number) for number in numbers))
        return [version for version in found if version is not None]

    async def sample(self, name: str, *, count: int = SAMPLE_ROWS) -> TableSample:
        """A few rows of the table's newest small file. Raises NotFound."""
        state = await self._existing(name)
        names = list(fields_of(state.schema_json))
        whole = [file for file in reversed(state.files) if not file.vector]
        small = [file for file in whole if file.size <= SAMPLE_FILE_BYTES_MAX and file.rows != 0]
        for file in small[:FILES_TRIED]:
            try:
                data = (await self._store.get(key_of(f"{ROOT}{name}", file.path))).data
            except NotFound:
                continue  # deleted since by vacuum
            return await asyncio.to_thread(_sample, data, file, names, min(count, SAMPLE_ROWS), physical_names(state))
        note = "no rows" if not state.files else f"every file is over {SAMPLE_FILE_BYTES_MAX} bytes: use a query below"
        if state.files and not whole:
            note = "every file has a deletion vector: use a query below"
        return TableSample(names, [], note)

    async def read(
        self,
        name: str,
        condition: str = "",
        *,
        columns: Sequence[str] = (),
        limit: int = 0,
        version: int | None = None,
    ) -> list[dict[str, Any]]:
        """Rows that match, at a version or now. Raises NotFound, or Invalid for a wrong condition or column."""
        from lakebed.pipeline.tables.scan import scan

        state = await self._existing(name)
        if version is not None:
            state = await history.snapshot(self._store, f"{ROOT}{name}", version=version)
        predicate = parse_predicate(condition) if condition else Predicate()
        location = Location.of(self._context.settings.of(StoreSettings))
        found = await asyncio.to_thread(
            scan, location, f"{ROOT}{name}", state, columns=columns, predicate=predicate, limit=limit
        )
        return list(found.to_pylist())

    async def how(self, name: str) -> list[Snippet]:
        """Lines that read the table elsewhere. Raises NotFound."""
        await self._existing(name)
        return snippets(self._context, name)

    async def _existing(self, name: str) -> Snapshot:
        state = await self._snapshot(name)
        if state.version < 0:
            raise NotFound(f"there is no table {name}", hint="lakebed tables list")
        return state

    async def _snapshot(self, name: str) -> Snapshot:
        if not NAME.fullmatch(name) or ".." in name:
            raise NotFound(f"{name[:200]!r} is no table", hint="lakebed tables list")
        state = await history.snapshot(self._store, f"{ROOT}{name}", known=self._known.get(name))
        if len(self._known) >= FIRST_MAX:
            self._known.clear()
        self._known[name] = state
        return state

    async def _version(self, name: str, number: int) -> TableVersion | None:
        key = log_key(f"{ROOT}{name}", number)
        try:
            stored = await self._store.get(key)
        except NotFound:
            return None  # old log entries may have been deleted
        change = change_of(number, actions := decode(stored.data, key))
        info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        return TableVersion(
            number,
            int(info.get("timestamp") or stored.info.modified_ms),
            change.operation,
            change.rows_inserted,
            change.rows_replaced,
            change.applications,
            changed(actions),
        )


def changed(actions: Sequence[dict[str, Any]]) -> str:
    """Pure: what a version added and removed, in words."""
    added = [action["add"] for action in actions if "add" in action]
    removed = sum("remove" in action for action in actions)
    size = sum(int(one.get("size", 0)) for one in added)
    found = [f"files added: {len(added)}, {size:,} bytes"] if added else []
    found += [f"files removed: {removed}"] if removed else []
    for action in actions:
        if schema := action.get("metaData", {}).get("schemaString"):
            found.append(f"columns: {', '.join(fields_of(schema))}"[:CELL_CHARS_MAX])
    return "; ".join(found)


def snippets(context: Context, name: str) -> list[Snippet]:
    """How to read the table elsewhere. Carries no secret: `lakebed env` exports what they need."""
    uri = _uri(context, name)
    env = 'eval "$(lakebed env)"   # address and credentials, as environment variables'
    return [
        Snippet("Polars", f'import polars as pl\n\npl.scan_delta("{uri}").head(10).collect()'),
        Snippet(
            "DuckDB",
            "import duckdb\nfrom deltalake import DeltaTable\n\n"
            f'rows = DeltaTable("{uri}").to_pyarrow_dataset()\n'
            'duckdb.sql("select count(*) from rows").show()',
        ),
        Snippet(
            "Spark",
            "import lakebed.spark\n\nlakebed.spark.register(spark)\n"
            f'spark.read.format("lakebed.table").load("{name}").show()\n'
            f'# with Delta\'s jars: spark.read.format("delta").load("{uri.replace("s3://", "s3a://")}")',
        ),
        Snippet("Shell", env),
    ]


async def _find(store: Store) -> list[str]:
    """Folders that hold a log, breadth first, so that one deep folder cannot hide the rest."""
    found: list[str] = []
    level, listed = [ROOT], 0
    for _ in range(DEPTH_MAX):
        deeper: list[str] = []
        for start in range(0, len(level), LISTED_AT_ONCE):
            some = level[start : start + LISTED_AT_ONCE]
            for folder, children in zip(some, await asyncio.gather(*map(store.children, some)), strict=True):
                listed += 1
                if LOG_FOLDER in children:
                    found.append(folder)
                else:
                    deeper += [f"{folder}{child}/" for child in children if not child.startswith("_")]
                if len(found) >= TABLES_MAX or listed >= FOLDERS_MAX:
                    return sorted(found)
        level = deeper
    return sorted(found)


def _columns(state: Snapshot) -> list[TableColumn]:
    if not state.schema_json:
        return []
    roles = dict.fromkeys(state.keys, "key") | dict.fromkeys(state.partition_by, "partition")
    return [
        TableColumn(
            field["name"],
            field["type"] if isinstance(field["type"], str) else msgspec.json.encode(field["type"]).decode()[:200],
            bool(field.get("nullable", True)),
            roles.get(field["name"], ""),
        )
        for field in msgspec.json.decode(state.schema_json)["fields"]
    ]


def _sample(
    data: bytes, file: DataFile, names: list[str], count: int, stored: dict[str, str] | None = None
) -> TableSample:
    """`stored`: the columns' names in the file, where they differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        batch = next(iter(pq.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=count)), None)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"{file.path} is no Parquet file", path=file.path) from error
    rows = batch.slice(0, count).to_pylist() if batch is not None else []
    values = [{**file.partition, **row} for row in rows]
    return TableSample(names, [[_cell(row.get((stored or {}).get(name, name))) for name in names] for row in values])


def _cell(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = "; ".join(value)  # such as the reasons of a quarantined row
    text = "" if value is None else str(value)
    return text if len(text) <= CELL_CHARS_MAX else f"{text[:CELL_CHARS_MAX]}…"


def _bytes(state: Snapshot) -> int:
    return sum(file.size for file in state.files)


def _uri(context: Context, name: str) -> str:
    settings = context.settings.of(StoreSettings)
    base = settings.url.rstrip("/") if "://" in settings.url else f"{settings.url}//"
    return "/".join(part for part in (base, settings.prefix.strip("/"), f"{ROOT}{name}") if part)
