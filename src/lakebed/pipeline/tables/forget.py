"""Forgets a key: removes its rows from every table of a project, and from files of older versions.

Bronze goes first, so that a later silver step does not bring the rows back; then silver, quarantine (whose rows are
JSON) and gold. Each table is one ordinary delete. Files of older versions still hold the rows until vacuum deletes
them; `purge` deletes such files at once, and the versions that refer to them can no longer be read.
The values themselves are written nowhere: neither into the log nor into the audit trail. No Spark.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, LakebedError, NotFound
from lakebed.delta import history, vacuum
from lakebed.delta.log import decode, fields_of
from lakebed.delta.model import ONCE, DataFile, Snapshot, TableSpec, key_of, path_of
from lakebed.delta.predicate import Predicate, chosen, equal, parse_predicate
from lakebed.pipeline.bronze.places import LAKE, LAYERS, placed, source_of, table_name, tables_of
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings
from lakebed.pipeline.silver.contract import Contract, read_contracts
from lakebed.pipeline.tables import rewrite
from lakebed.pipeline.tables.files import NO_VALUE
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.store.model import ObjectInfo
from lakebed.store.settings import StoreSettings
from lakebed.ticks.settings import TicksSettings

ROW = "_row"  # quarantine's column: the bronze row as JSON
SOURCE = "source"  # in the place of a layer: bronze of a topic, a queue or samples, which others than ticks fill


class ForgottenTable(msgspec.Struct, frozen=True):
    """What was, or would be, removed from one table. `gone_by` is when the last copy will be deleted."""

    table: str
    rows: int = 0
    version: int = -1
    old_files: int = 0  # of older versions, that hold such rows (or were purged)
    gone_by: str = ""
    note: str = ""
    refused: bool = False  # rows may be left: `note` says why


class ForgetReport(msgspec.Struct, frozen=True):
    """`complete` is false while silver has bronze versions to read that may bring the rows back (run it again then),
    and when a table was refused, or is a topic's or another source's that has such rows.

    `parts_gone_by` is when the uploaded parts of the project's ticks will have been deleted.
    """

    project: str
    tables: tuple[ForgottenTable, ...]
    complete: bool
    parts_gone_by: str
    dry_run: bool = False

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)


def digest(keys: Mapping[str, str]) -> str:
    """Names the values in the audit trail without containing them."""
    return hashlib.sha256(msgspec.json.encode(dict(sorted(keys.items())))).hexdigest()


def open_table(context: Context, name: str, state: Snapshot) -> Table:
    """A table as its own log describes it, for commits without Spark."""
    bounded = {column for file in state.files for column in file.low}
    spec = TableSpec(
        name, state.schema_json, keys=state.keys, partition_by=state.partition_by, cluster_by=state.cluster_by
    )
    spec = msgspec.structs.replace(spec, stats=tuple(column for column in spec.columns if column in bounded))
    location = Location.of(context.settings.of(StoreSettings))
    return Table(None, spec, context, location=location, known=state)


class DeletedRows(msgspec.Struct, frozen=True):
    table: str
    rows: int
    version: int
    files_written: int = 0
    dry_run: bool = False


def delete_rows(context: Context, name: str, condition: str, *, dry_run: bool = False) -> DeletedRows:
    """Deletes the rows of one table that match, or counts them. Raises NotFound, or Invalid for a wrong condition."""
    state = asyncio.run(history.snapshot(context.store, f"tables/{name}"))
    if state.version < 0:
        raise NotFound(f"there is no table {name}", hint="lakebed tables list")
    rewrite.check_plain(state, name)
    predicate, table = parse_predicate(condition).typed(state.schema_json), open_table(context, name, state)
    if dry_run:
        hits = rewrite.count(table, rewrite.RowRemoval(predicate), chosen(state.files, predicate, state.schema_json))
        return DeletedRows(name, sum(hit.rows for hit in hits), state.version, dry_run=True)
    done = table.delete(predicate)
    return DeletedRows(name, done.rows_removed, done.version, done.files_added)


class Forgetter:
    """Synchronous: call it in a thread from a loop."""

    def __init__(self, context: Context) -> None:
        self._context, self._store = context, context.store
        folder = context.settings.of(PipelineSettings).contracts_folder
        self._contracts = read_contracts(folder) if folder is not None and folder.is_dir() else []

    def run(
        self, project: str, keys: Mapping[str, str], *, only: str = "", dry_run: bool = False, purge: bool = False
    ) -> ForgetReport:
        """Removes the rows of `project` (org/project) in which every key has its value. Idempotent.

        `keys` are bronze's columns; contracts tell how silver calls them. `only` is one table's name in all layers.
        Raises NotFound for a project without tables, Invalid when no table has these columns.
        """
        if project.count("/") != 1 or not keys:
            raise Invalid(f"{project!r} is no org/project, or no key was given", hint="acme/shop --key customer=c-17")
        found = asyncio.run(self._tables(project, only))
        if not found:
            raise NotFound(f"{project} has no tables{f' named {only}' if only else ''}", hint="lakebed tables list")
        done, covered = [], False
        for layer, name in found:
            try:
                if layer == SOURCE:
                    result = self._left(name, keys)
                else:
                    result = self._forget(layer, name, keys, dry_run=dry_run, purge=purge)
            except LakebedError as error:  # a table that Lakebed cannot read or may not write; the others go on
                result = ForgottenTable(name, note=error.message, refused=True)
            held = result.rows or result.old_files or (layer == SOURCE and result.refused)
            covered = covered or bool(held) or (layer != "quarantine" and not result.note)
            done.append(result)
        if not covered:
            raise Invalid(f"no table of {project} has the columns {', '.join(keys)}", hint="lakebed tables show NAME")
        parts_s = self._context.settings.of(TicksSettings).parts_retention_s
        complete = self._complete(project, only) and not any(one.refused for one in done)
        return ForgetReport(project, tuple(done), complete, self._after(parts_s), dry_run)

    async def _tables(self, project: str, only: str) -> list[tuple[str, str]]:
        found = []
        org_id, _, project_id = project.partition("/")
        if (org_id, project_id) == LAKE:
            wanted = [one for one in self._contracts if not only or only in (one.table, one.bronze)]
            for source in dict.fromkeys(filter(None, (source_of(one.bronze) for one in wanted))):
                place = await placed(self._store, source)
                if (await history.listing(self._store, f"tables/{place}")).newest >= 0:
                    found.append((SOURCE, place))
        for layer in LAYERS:
            for name, place in (await tables_of(self._store, layer, org_id, project_id)).items():
                if not only or name == only:
                    found.append((layer, place))
        return found

    def _left(self, name: str, keys: Mapping[str, str]) -> ForgottenTable:
        """Counts such rows in a source that silver is made of. They stay: the audit compares it with what was accepted,
        and what was accepted is not forgotten with them.
        """
        held = self._forget("bronze", name, keys, dry_run=True, purge=False)
        if not held.rows:
            return held
        note = f"such rows stay ({held.rows}): lakebed tables delete {name} removes them"
        return msgspec.structs.replace(held, rows=0, note=note, refused=True)

    def _forget(self, layer: str, name: str, keys: Mapping[str, str], *, dry_run: bool, purge: bool) -> ForgottenTable:
        state = asyncio.run(history.snapshot(self._store, f"tables/{name}"))
        if state.version < 0:
            return ForgottenTable(name, note="nothing was ever committed")
        rewrite.check_plain(state, name)
        wanted = {ROW: ""} if layer == "quarantine" else self._wanted(layer, name, keys)
        lost = [column for column in wanted if column not in fields_of(state.schema_json)]
        note = f"has no column {', '.join(lost)}" if lost else ""
        note += ": rebuilt from silver by the next run" if lost and layer == "gold" else ""
        known = _with_columns(state, lost)  # files of older versions may have them
        try:
            predicate = equal(wanted).typed(known.schema_json)
        except Invalid as error:
            return ForgottenTable(name, version=state.version, note=f"no row can have it: {error.message}")
        removal = rewrite.RowRemoval(predicate)
        if layer == "quarantine":
            removal = rewrite.RowRemoval(values=dict(keys), column=ROW)
        rows = 0
        if not lost and dry_run:
            table = open_table(self._context, name, state)
            rows = sum(hit.rows for hit in rewrite.count(table, removal, _candidates(state, removal)))
        elif not lost:
            table = open_table(self._context, name, state)
            rows = rewrite.remove(table, lambda now: (removal, _candidates(now, removal))).rows_removed
            state = known = table.snapshot()
        found = self._old(open_table(self._context, name, known), removal, state)
        done = ForgottenTable(name, rows, state.version, gone_by=self._gone_by(state), note=note)
        return self._report(done, found, purge=purge and not dry_run)

    def _report(self, done: ForgottenTable, found: list[ObjectInfo], *, purge: bool) -> ForgottenTable:
        """With the files of older versions, which are deleted now if they shall be purged.

        A file that no version names yet may be one that a writer is about to commit: it stays.
        """
        coming = asyncio.run(self._uncommitted(f"tables/{done.table}", found))
        if purge:
            asyncio.run(vacuum.delete(self._store, [info for info in found if info not in coming]))
        left = coming if purge else found
        note = f"{len(coming)} files that are not committed yet have such rows: run it again in an hour"
        return msgspec.structs.replace(
            done,
            old_files=len(found),
            gone_by=done.gone_by if left or (done.rows and not purge) else "",
            note=note if coming else done.note,
            refused=bool(coming),
        )

    async def _uncommitted(self, root: str, found: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Those that are so new that their writer may still commit them, and that no version names."""
        since_ms = now_ms(self._context.clock) - int(vacuum.KEEP_S_MIN * 1000)
        young = [info for info in found if info.modified_ms >= since_ms]
        if not young:
            return []
        there = await history.listing(self._store, root)
        named: set[str] = set()
        for entry in there.entries.values():
            if entry.modified_ms >= since_ms:  # an entry is younger than the files it adds
                named |= history.named(root, decode((await self._store.get(entry.key)).data, entry.key))
        return [info for info in young if info.key not in named]

    def _wanted(self, layer: str, name: str, keys: Mapping[str, str]) -> dict[str, str]:
        """The values by this table's own names of the columns."""
        renamed = self._renamed(name.rsplit("/", 1)[-1]) if layer == "silver" else {}
        return {renamed.get(column, column): value for column, value in keys.items()}

    def _renamed(self, table: str) -> dict[str, str]:
        """Bronze's names of columns, and what silver calls them."""
        contract: Contract | None = next((one for one in self._contracts if one.table == table), None)
        return {contract.source_of(column): column for column in contract.columns} if contract else {}

    def _old(self, table: Table, removal: rewrite.RowRemoval, state: Snapshot) -> list[ObjectInfo]:
        """The files outside the newest version that hold such a row: those of older versions, and orphans."""
        root = table.spec.root
        now = {key_of(root, file.path) for file in state.files}

        async def listed() -> list[ObjectInfo]:
            return [
                info
                async for info in self._store.list(f"{root}/")
                if info.key not in now and vacuum.is_data(info.key.removeprefix(f"{root}/"))
            ]

        found = asyncio.run(listed())
        by_path = {path_of(info.key.removeprefix(f"{root}/")): info for info in found}
        files = [
            DataFile(path, info.size, -1, _partition(info.key.removeprefix(f"{root}/")))
            for path, info in by_path.items()
        ]
        return [by_path[hit.path] for hit in rewrite.count(table, removal, files) if hit.rows]

    def _complete(self, project: str, only: str) -> bool:
        """Whether silver has read bronze as far as it is committed."""
        org_id, _, project_id = project.partition("/")
        for contract in self._contracts:
            if only and only not in (contract.table, contract.bronze):
                continue
            source = source_of(contract.bronze) if (org_id, project_id) == LAKE else ""
            bronze, silver = (
                asyncio.run(self._snapshot(name))
                for name in (
                    source or table_name("bronze", org_id, project_id, contract.bronze),
                    table_name("silver", org_id, project_id, contract.table),
                )
            )
            ticks = [at for application, at in bronze.applied.items() if application.startswith(ONCE)]
            if (bronze.version if source else max(ticks, default=-1)) > silver.applied.get("silver", -1):
                return False
        return True

    async def _snapshot(self, name: str) -> Snapshot:
        return await history.snapshot(self._store, f"tables/{await placed(self._store, name)}")

    def _gone_by(self, state: Snapshot) -> str:
        """When vacuum will have deleted what leaves this table now."""
        settings = self._context.settings
        bronze, pipeline = settings.of(BronzeSettings), settings.of(PipelineSettings)
        keep_s = vacuum.kept_s(state, max(vacuum.KEEP_S, bronze.keep_versions_s))
        if keep_s == float("inf"):
            return f"never: {vacuum.RETENTION} of the table is {state.properties[vacuum.RETENTION]!r}"
        return self._after(keep_s + pipeline.retention_interval_s)

    def _after(self, seconds: float) -> str:
        moment = datetime.fromtimestamp(self._context.clock.now_ns() / 1e9, UTC) + timedelta(seconds=seconds)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _candidates(state: Snapshot, removal: rewrite.RowRemoval) -> list[DataFile]:
    predicate: Predicate = removal.predicate
    return chosen(state.files, predicate, state.schema_json)


def _with_columns(state: Snapshot, names: Sequence[str]) -> Snapshot:
    """The table as if it had these columns too, as text."""
    schema = msgspec.json.decode(state.schema_json)
    schema["fields"] += [{"name": name, "type": "string", "nullable": True, "metadata": {}} for name in names]
    return msgspec.structs.replace(state, schema_json=msgspec.json.encode(schema).decode())


def _partition(name: str) -> dict[str, str | None]:
    """The partition values in a file's folders; the log has them exactly, but not of files that it no longer names."""
    pairs = [folder.split("=", 1) for folder in name.split("/")[:-1] if "=" in folder]
    return {unquote(column): None if text in ("", NO_VALUE) else unquote(text) for column, text in pairs}
