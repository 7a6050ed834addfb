"""What a report of forgetting says when a table did not take part."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.settings import Settings, load
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.delta.vacuum import RETENTION
from lakebed.pipeline.silver.contract import Contract, ContractColumn
from lakebed.pipeline.tables.forget import Forgetter, ForgottenTable
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import exists
from lakebed.wiring.parts import sections


@pytest.mark.parametrize(
    ("refuses", "read", "complete"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_forgetting_is_complete_only_when_no_table_refused_and_silver_has_read_all(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock, refuses: bool, read: bool, complete: bool
) -> None:
    """A table that Lakebed may not write keeps its rows: whoever asked must hear of it, and the others go on."""

    async def tables(self: Forgetter, project: str, only: str) -> list[tuple[str, str]]:
        return [("bronze", "theirs"), ("bronze", "ours")]

    def forget(self: Forgetter, layer: str, name: str, keys: Any, **_: Any) -> ForgottenTable:
        if name == "theirs" and refuses:
            raise Invalid("another engine's table")
        return ForgottenTable(name, rows=2, version=1)

    monkeypatch.setattr(Forgetter, "_tables", tables)
    monkeypatch.setattr(Forgetter, "_forget", forget)
    monkeypatch.setattr(Forgetter, "_complete", lambda *_: read)
    forgetter = object.__new__(Forgetter)
    forgetter._context = SimpleNamespace(settings=Settings({}, {}), clock=manual_clock)  # type: ignore[assignment]

    report = forgetter.run("acme/shop", {"customer": "c-1"})

    assert (complete, 2 if refuses else 4) == (report.complete, report.rows)
    assert [refuses, False] == [one.refused for one in report.tables]


@pytest.mark.parametrize(("named", "age_s"), [(False, 60), (True, 60), (False, 7200)])
def test_a_purge_is_not_complete_while_a_file_with_such_rows_may_still_be_committed(
    manual_clock: ManualClock, named: bool, age_s: int
) -> None:
    """Its writer brings the rows back: the file stays, and whoever asked is told to ask again. One that a version names
    already, or that is too old to be committed, goes at once."""
    store = MemoryStore(clock=manual_clock)

    async def listed() -> list[Any]:
        await store.create("tables/t/part-1.parquet", b"rows")
        if named:
            commit = Commit("WRITE", (DataFile("part-1.parquet", 4, 1),))
            await store.create(log_key("tables/t", 0), encode(commit, attempt_id="a", now_ms=0))
        await manual_clock.advance(age_s)
        return [info async for info in store.list("tables/t/") if info.key.endswith(".parquet")]

    found = asyncio.run(listed())
    forgetter = object.__new__(Forgetter)
    forgetter._context, forgetter._store = SimpleNamespace(clock=manual_clock), store  # type: ignore[assignment]

    report = forgetter._report(ForgottenTable("t", 2, 1, gone_by="later"), found, purge=True)

    kept = not named and age_s == 60
    assert (kept, "later" if kept else "") == (report.refused, report.gone_by)
    assert kept == asyncio.run(exists(store, "tables/t/part-1.parquet"))


@pytest.mark.parametrize(
    ("only", "complete"), [("", False), ("sales", False), ("raw_sales", False), ("customers", True)]
)
def test_what_silver_has_not_read_counts_under_either_name_of_a_table(
    manual_clock: ManualClock, only: str, complete: bool
) -> None:
    """A contract may give silver another name than bronze has; other tables than the named one do not matter."""
    store = MemoryStore(clock=manual_clock)
    spec = TableSpec("bronze/ticks/acme/shop/raw_sales", schema_json((("id", "long"),)))
    commit = Commit("WRITE", batch=WriteBatch.once("tick-1"), spec=spec, table_id="i")
    asyncio.run(store.create(log_key(spec.root, 0), encode(commit, attempt_id="a", now_ms=0)))
    forgetter = object.__new__(Forgetter)
    forgetter._store = store
    forgetter._contracts = [Contract("sales", {"id": ContractColumn("long")}, ("id",), source="raw_sales")]

    assert complete == forgetter._complete("acme/shop", only)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("only", "rows", "stays"),
    [("", 2, True), ("sales", 2, True), ("topic.orders", 2, True), ("", 0, False), ("other", 2, None)],
)
def test_rows_in_the_topic_that_silver_is_made_of_are_reported_and_not_removed(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock, only: str, rows: int, stays: bool | None, dry_run: bool
) -> None:
    """Silver made anew would bring them back: whoever asked is told which table holds them, and how to remove them."""
    store, asked = MemoryStore(clock=manual_clock), list[tuple[str, str, bool, bool]]()
    _tables_of_the_lake(store, read=0)

    def forget(self: Forgetter, layer: str, name: str, keys: Any, *, dry_run: bool, purge: bool) -> ForgottenTable:
        asked.append((layer, name, dry_run, purge))
        return ForgottenTable(name, rows=rows, version=1)

    monkeypatch.setattr(Forgetter, "_forget", forget)
    forgetter = object.__new__(Forgetter)
    forgetter._context = SimpleNamespace(settings=Settings({}, {}), clock=manual_clock)  # type: ignore[assignment]
    forgetter._store, forgetter._contracts = store, [_of_topic()]

    if stays is None:
        with pytest.raises(NotFound):
            forgetter.run("lake/main", {"customer": "c-1"}, only=only, dry_run=dry_run, purge=True)
        return
    report = forgetter.run("lake/main", {"customer": "c-1"}, only=only, dry_run=dry_run, purge=True)

    (source, *_), topic = report.tables, "bronze/topics/lake/orders"
    assert (topic, 0, stays) == (source.table, source.rows, source.refused)
    assert not stays or f"such rows stay (2): lakebed tables delete {topic}" in source.note
    assert ("bronze", topic, True, False) == asked[0]
    assert report.complete != stays


@pytest.mark.parametrize(("read", "complete"), [(0, True), (-1, False)])
def test_a_topic_that_silver_has_not_read_to_its_end_may_bring_rows_back(
    manual_clock: ManualClock, read: int, complete: bool
) -> None:
    """Its loads are counted by versions, not by ticks."""
    store = MemoryStore(clock=manual_clock)
    _tables_of_the_lake(store, read=read)
    forgetter = object.__new__(Forgetter)
    forgetter._store, forgetter._contracts = store, [_of_topic()]

    assert complete == forgetter._complete("lake/main", "")
    assert forgetter._complete("acme/shop", "")  # the word means a table of ticks there


def _of_topic() -> Contract:
    return Contract("sales", {"id": ContractColumn("long")}, ("id",), source="topic.orders")


def _tables_of_the_lake(store: MemoryStore, *, read: int) -> None:
    """A topic's bronze at version 0, and silver that has read it up to a version."""
    schema = schema_json((("id", "long"),))
    for name, batch in (
        ("bronze/topics/lake/orders", WriteBatch("lakebed.topic", 0)),
        ("silver/lake/main/sales", None),
    ):
        spec = TableSpec(name, schema)
        done = batch or (WriteBatch("silver", read) if read >= 0 else None)
        commit = Commit("WRITE", batch=done, spec=spec, table_id="i")
        asyncio.run(store.create(log_key(spec.root, 0), encode(commit, attempt_id="a", now_ms=0)))


@pytest.mark.parametrize(
    ("kept_days", "every_s", "says", "days"),
    [
        (7, 86_400, None, 8.0),
        (1, 3600, None, 7 + 1 / 24),
        (30, 86_400, None, 31.0),
        (7, 86_400, "interval 60 days", 61.0),
        (7, 86_400, "interval 2 days", 8.0),
        (7, 86_400, "for a while", None),
    ],
)
def test_the_last_copy_is_gone_when_the_sweep_after_the_longest_retention_has_run(
    manual_clock: ManualClock, kept_days: int, every_s: int, says: str | None, days: float | None
) -> None:
    """Of the setting, of the table itself, and never less than a week; whoever asked may tell others this date. A table
    that keeps its files for ever says so."""
    flags = {
        "store.url": "memory:", "bronze.keep_versions_s": kept_days * 86_400, "pipeline.retention_interval_s": every_s,
    }  # fmt: skip
    forgetter = object.__new__(Forgetter)
    forgetter._context = SimpleNamespace(settings=load(sections(), flags=flags), clock=manual_clock)  # type: ignore[assignment]
    metadata = {"configuration": {RETENTION: says} if says else {}}

    found = forgetter._gone_by(Snapshot(metadata=metadata))

    now = datetime.fromtimestamp(manual_clock.now_ns() / 1e9, UTC)
    wanted = (
        f"{now + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}" if days else f"never: {RETENTION} of the table is {says!r}"
    )
    assert wanted == found
