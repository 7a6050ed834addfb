"""What a run reports of itself, which tables maintenance finds, and which audit is the last."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.batches.model import LatestAudit
from lakebed.batches.paths import audit_record_key
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runs import ActiveRun, RunReader
from lakebed.core.runtime import Runtime
from lakebed.core.settings import load
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import CommitResult, DataFile, TableSpec
from lakebed.delta.plain import schema_json
from lakebed.pipeline.audit import paths
from lakebed.pipeline.audit.model import Conservation, ConservationRow, FindingTotal
from lakebed.pipeline.audit.stored import last_audit, last_register, publish, report_to
from lakebed.pipeline.bronze.ingestion import Ingestion, _contracts, _trace
from lakebed.pipeline.bronze.places import every_table
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.models import runs as models_runs
from lakebed.pipeline.models.runs import (
    COMPACTION,
    RETENTION,
    VACUUM,
    ModelReport,
    PipelineRun,
    expire_runs,
    runs,
    write_run,
)
from lakebed.pipeline.tables.maintenance import MaintenanceReport, TableMaintenance
from lakebed.spark.lineage import Dataset, Lineage, Run
from lakebed.spark.progress import JobProgress, StageCounter
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject
from lakebed.wiring.parts import sections
from support.audit_record import RECORD
from support.tick_fixtures import context_of

SPEC = TableSpec("t", schema_json((("seq", "long"),)), stats=("seq",))

RUN = ActiveRun("tables", "bronze load", "t", {})


# Runs.


class Runs(Ingestion):
    def __init__(self, metrics: Metrics) -> None:
        self._context: Any = SimpleNamespace(metrics=metrics)
        self._settings: Any = SimpleNamespace(limit="limit")


def test_a_run_drains_a_table_step_by_step_and_counts_once(metrics: Metrics) -> None:
    """Until nothing is left: then nothing waits, whatever the last step reported; each step is reported."""
    steps = [
        IngestReport("t", 1, rows_in=10, good=6, quarantined=3, duplicates=1, unreadable=("k",), lag_s=9.0, behind=5),
        IngestReport("t", 2, rows_in=4, good=4, lag_s=3.0, behind=2),
    ]
    reported: list[IngestReport] = []
    waiting: list[IngestReport | None] = [*steps, None]
    total = Runs(metrics)._drain("t", lambda limit: waiting.pop(0) if limit == "limit" else None, reported.append, RUN)

    assert (2, 14, 10, 3, 1, 0.0, 0, 2) == (
        total.steps,
        total.rows_in,
        total.good,
        total.quarantined,
        total.duplicates,
        total.lag_s,
        total.behind,
        total.version,
    )
    assert steps == reported
    rows = {name: metrics.value("lakebed_bronze_rows_total", table="t", outcome=name) for name in
            ("good", "quarantined", "duplicate")}  # fmt: skip
    assert {"good": 10, "quarantined": 3, "duplicate": 1} == rows
    assert 1 == metrics.value("lakebed_bronze_unreadable_total", table="t")
    assert (0, 0) == tuple(metrics.value(f"lakebed_bronze_{one}", table="t") for one in ("behind", "lag_seconds"))


def test_a_run_that_has_too_many_steps_says_what_is_left(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gauges are those of the last step."""
    monkeypatch.setattr("lakebed.pipeline.bronze.ingestion.STEPS_MAX", 2)
    total = Runs(metrics)._drain("t", lambda _: IngestReport("t", 1, good=1, lag_s=3.0, behind=7), lambda _: None, RUN)

    assert (2, 7, 3.0) == (total.steps, total.behind, total.lag_s)
    assert (7, 3.0) == (
        metrics.value("lakebed_bronze_behind", table="t"),
        metrics.value("lakebed_bronze_lag_seconds", table="t"),
    )


def test_lineage_is_told_only_of_runs_that_moved_something(tmp_path: Path) -> None:
    """What was read counts every row, what was written the good ones; a missing folder of contracts is named."""
    idle, busy = Run((), ()), Run((), ())
    _trace(idle, RUN, "s", IngestReport("t", steps=0))
    _trace(busy, RUN, "s", IngestReport("t", 4, rows_in=9, good=7))

    assert ({}, {}) == (idle.inputs, idle.outputs)
    assert ({"s": Dataset("s", None, 9)}, {"tables/t": Dataset("tables/t", 4, 7)}) == (busy.inputs, busy.outputs)
    assert [] == _contracts(None)
    with pytest.raises(NotFound, match="there is no folder"):
        _contracts(tmp_path / "missing")


class Listener:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, *events: bytes) -> None:
        self.events += [msgspec.json.decode(event) for event in events]


def lineage(listener: Listener | None) -> Lineage:
    return Lineage(
        listener,  # type: ignore[arg-type]
        Runtime(clock=ManualClock(1_760_000_000_123_000_000), ids=Ids.seeded(1), metrics=Metrics()),
        namespace="n",
        bucket="s3://lake",
        prefix="own",
    )


def test_a_job_is_told_from_its_start_to_its_end() -> None:
    """One run id; versions, rows and bytes as their facets; keys below the store's prefix."""
    listener = Listener()
    with lineage(listener).job("j", inputs=[Dataset("in", 3, rows=5, size_bytes=6)]) as run:
        run.read("late", version=1)
        run.wrote("out", version=7, rows=0)
    start, complete = listener.events

    assert [("START", "j", "n"), ("COMPLETE", "j", "n")] == [
        (one["eventType"], one["job"]["name"], one["job"]["namespace"]) for one in listener.events
    ]
    assert start["run"]["runId"] == complete["run"]["runId"]
    assert "2025-10-09T08:53:20.123+00:00" == start["eventTime"]
    first, late = complete["inputs"]
    assert ("s3://lake", "own/in", "3") == (
        first["namespace"],
        first["name"],
        first["facets"]["version"]["datasetVersion"],
    )
    counted = first["inputFacets"]["inputStatistics"]
    assert (5, 6, "own/late", False) == (counted["rowCount"], counted["size"], late["name"], "inputFacets" in late)
    (out,) = complete["outputs"]
    assert 0 == out["outputFacets"]["outputStatistics"]["rowCount"]
    assert [] == start["outputs"]


def test_a_job_that_fails_says_so_and_its_error_goes_on() -> None:
    """The message is bounded."""
    listener = Listener()
    with pytest.raises(Invalid), lineage(listener).job("j"):
        raise Invalid("x" * 5000)
    start, failed = listener.events

    reported = failed["run"]["facets"]["errorMessage"]["message"]
    assert ("START", "FAIL", 2000, True) == (
        start["eventType"],
        failed["eventType"],
        len(reported),
        reported.startswith("Invalid"),
    )


def test_a_job_that_polls_is_told_of_only_when_it_did_something() -> None:
    """Then as a whole, its start first; a failure counts; where nobody listens nothing is made."""
    listener = Listener()
    made = lineage(listener)
    with made.job("idle", polls=True):
        pass
    with made.job("busy", polls=True) as run:
        assert [] == listener.events
        run.wrote("out")
    with pytest.raises(Invalid), made.job("bad", polls=True):
        raise Invalid("x")
    with lineage(None).job("nobody") as run:
        run.wrote("out")

    assert [("busy", "START"), ("busy", "COMPLETE"), ("bad", "START"), ("bad", "FAIL")] == [
        (one["job"]["name"], one["eventType"]) for one in listener.events
    ]


def test_stages_that_are_over_count_as_done() -> None:
    """Spark forgets them; what was seen of them is kept."""
    stages = StageCounter()
    assert JobProgress("ready") == stages.look({}, 0)
    assert JobProgress("ready", 1, 10, 4, 2, 1) == stages.look({"a": (10, 4, 1)}, 2)
    assert JobProgress("ready", 2, 15, 12, 3, 1) == stages.look({"b": (5, 2, 0)}, 3)
    assert JobProgress("ready", 2, 15, 15, 0, 1) == stages.look({}, 0)


# Upkeep.


def table(context: Context, name: str) -> None:
    commit = Commit("WRITE", spec=TableSpec(name, SPEC.schema_json), table_id="i")
    asyncio.run(context.store.create(log_key(f"tables/{name}", 0), encode(commit, attempt_id="a", now_ms=0)))


EVERY = [
    "batches/quarantine",
    "batches/samples",
    "topics/orders",
    "topics-quarantine/orders",
    "bronze/batches/lake/samples",
    "bronze/o/p/t",
    "bronze/ticks/o/p/u",
    "silver/o/p/t",
    "quarantine/batches/lake/samples",
    "quarantine/o/p/t",
    "gold/o/p/t",
]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("bronze/ticks/o/p/t", "_ingested_at"),
        ("bronze/o/p/before", "_ingested_at"),
        ("bronze/batches/lake/samples", "accepted_at"),
        ("bronze/topics/lake/orders", "_time"),
        ("bronze/queues/lake/work", "_time"),
        ("topics/before", "_time"),
    ],
)
def test_one_retention_is_for_bronze_of_every_source(name: str, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time at which each source's rows came; silver and gold, and a setting of 0, lose nothing."""
    clock = ManualClock()
    asked: list[tuple[str, str, datetime]] = []

    class Aged:
        def __init__(self, name: str) -> None:
            self.name = name

        def remove_before(self, by: str, moment: datetime) -> CommitResult:
            asked.append((self.name, by, moment))
            return CommitResult(1, rows_removed=3)

    monkeypatch.setattr(TableMaintenance, "_table", lambda self, name, state: Aged(name))
    days = []
    for kept in (30, 0):
        settings = load(sections(), flags={"store.url": "memory:", "bronze.retention_days": kept})
        context = msgspec.structs.replace(context_of(clock=clock), settings=settings)
        for each in (name, "silver/o/p/t"):
            aged_table(context, each, column)
        days.append([(one.table, one.rows_removed) for one in TableMaintenance(context).expire()])

    moment = datetime.fromtimestamp(clock.now_ns() / 1e9, UTC) - timedelta(days=30)
    assert [[(name, 3)], []] == days
    assert [(name, column, moment)] == asked


def aged_table(context: Context, name: str, column: str) -> None:
    """A table whose rows have the time at which they came in this column."""
    commit = Commit("WRITE", spec=TableSpec(name, schema_json(((column, "timestamp"),))), table_id="i")
    entry = encode(commit, attempt_id="a", now_ms=0)
    asyncio.run(context.store.create(log_key(f"tables/{name}", 0), entry))


def test_every_table_with_a_log_is_found_and_only_appended_ones_are_joined() -> None:
    """Quarantines, silver and gold are few files; a folder without a log is no table."""
    context = context_of(clock=ManualClock())
    every = EVERY
    for name in every:
        table(context, name)
    asyncio.run(context.store.create("tables/bronze/o/p/nolog/x.parquet", b"x"))
    maintenance_ = TableMaintenance(context)

    assert every == asyncio.run(every_table(context.store))
    joined = ["batches/samples", "topics/orders", "bronze/batches/lake/samples", "bronze/o/p/t", "bronze/ticks/o/p/u"]
    assert joined == maintenance_._chosen("", compacted=True)
    assert every == maintenance_._chosen("", compacted=False)
    assert ["topics/orders"] == maintenance_._chosen("topics/orders", compacted=True)
    with pytest.raises(Invalid, match="no table 'x'"):
        maintenance_._chosen("x", compacted=False)


@pytest.mark.parametrize(("bronze", "batches", "kept"), [(0, 5.0, 5.0), (30, 5.0, 5.0), (3, 5.0, 3.0), (30, 0.0, 30.0)])
def test_samples_are_kept_no_longer_than_their_batches(
    bronze: int, batches: float, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batches.retention_days` reaches bronze; tables of other sources have bronze's own retention."""
    clock, removed = ManualClock(), dict[str, float]()
    context = context_of(clock=clock)
    for name in EVERY:
        aged_table(context, name, "accepted_at")
    flags = {"bronze.retention_days": bronze, "batches.retention_days": batches, "store.url": "memory:"}
    context = msgspec.structs.replace(context, settings=load(sections(), flags=flags))
    maintenance_ = TableMaintenance(context)

    class Aged:
        def __init__(self, name: str) -> None:
            self.name = name

        def remove_before(self, column: str, moment: datetime) -> Any:
            removed[self.name] = round(clock.now_ns() / 1e9 - moment.timestamp()) / 86_400
            return SimpleNamespace(rows_removed=0)

    monkeypatch.setattr(maintenance_, "_table", lambda name, state: Aged(name))
    maintenance_.expire()

    samples = dict.fromkeys(("batches/samples", "bronze/batches/lake/samples"), kept)
    others = dict.fromkeys(("topics/orders", "bronze/o/p/t", "bronze/ticks/o/p/u"), float(bronze))
    assert samples | (others if bronze else {}) == removed


def recorded(context: Context) -> list[tuple[str, str, int | None, int | None, str]]:
    found = asyncio.run(RunReader(context, "tables").latest(9))
    return [(run.kind, run.subject, run.rows_in, run.rows_out, run.reason) for run in found]


def test_a_compaction_is_counted_and_recorded_and_one_with_nothing_to_do_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the tables that are appended to, those with small files; one that Lakebed may not write is left, and said."""
    context = context_of(clock=ManualClock())
    names = ("bronze/o/p/few", "bronze/o/p/many", "bronze/o/p/raced", "bronze/o/p/theirs", "silver/o/p/t")
    for name in names:
        files = tuple(DataFile(f"{n}.parquet", 10, 5) for n in range(1 if name.endswith("few") else 3))
        commit = Commit("WRITE", files, spec=TableSpec(name, SPEC.schema_json), table_id="i")
        data = encode(commit, attempt_id="a", now_ms=0)
        if name.endswith("theirs"):
            data = data.replace(b'"configuration":{', b'"configuration":{"delta.constraints.c":"seq > 0"')
        asyncio.run(context.store.create(log_key(f"tables/{name}", 0), data))

    def opened(self: TableMaintenance, name: str, state: Any) -> Any:
        done = CommitResult(1, files_added=1, files_removed=3)
        return SimpleNamespace(compact=lambda **_: done if name.endswith("many") else CommitResult(1, repeated=True))

    monkeypatch.setattr(TableMaintenance, "_table", opened)
    upkeep = TableMaintenance(context)

    planned = upkeep.compact(dry_run=True)
    assert [] == recorded(context)
    done = upkeep.compact()

    assert [(3, 1), (3, 1), (0, 0)] == [(one.files_joined, one.files_made) for one in planned]
    assert [(names[1], 3, 1), (names[2], 0, 0), (names[3], 0, 0)] == [
        (one.table, one.files_joined, one.files_made) for one in done
    ]
    assert [False, False, True] == ["constraint" in one.problem for one in done]
    assert [(COMPACTION, names[1], 15, 15, "3 files into 1, version 1")] == recorded(context)
    value = context.metrics.registry.get_sample_value("lakebed_tables_files_joined_total", {"table": names[1]})
    assert 3 == value


def test_retention_is_recorded_where_rows_went_and_passes_tables_without_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table of rows whose time nobody knows keeps them."""
    context = context_of(clock=ManualClock())
    flags = {"store.url": "memory:", "bronze.retention_days": 3}
    context = msgspec.structs.replace(context, settings=load(sections(), flags=flags))
    table(context, "bronze/o/p/timeless")
    for name in ("old", "young"):
        aged_table(context, f"bronze/o/p/{name}", "_ingested_at")

    def opened(self: TableMaintenance, name: str, state: Any) -> Any:
        gone = 4 if name.endswith("old") else 0
        return SimpleNamespace(remove_before=lambda by, moment: CommitResult(1, rows_removed=gone))

    monkeypatch.setattr(TableMaintenance, "_table", opened)

    done = TableMaintenance(context).expire()

    assert [MaintenanceReport("bronze/o/p/old", rows_removed=4)] == done
    day = datetime.fromtimestamp(context.clock.now_ns() / 1e9, UTC) - timedelta(days=3)
    assert [(RETENTION, "bronze/o/p/old", None, 4, f"rows before {day:%Y-%m-%d} removed")] == recorded(context)


def test_vacuum_tells_files_and_bytes_by_table_and_a_dry_run_deletes_nothing() -> None:
    """A table that cannot be swept is reported with its problem; asked for by name, it raises."""
    clock = ManualClock()
    context = context_of(clock=clock)
    for name in ("batches/samples", "topics/orders"):
        table(context, name)
    asyncio.run(context.store.create("tables/batches/samples/o1.parquet", b"123"))
    asyncio.run(context.store.create("tables/batches/samples/o2.parquet", b"4567"))
    asyncio.run(context.store.create("tables/topics/orders/o.parquet", b"1"))
    asyncio.run(context.store.create(log_key("tables/topics/orders", 1), b"damaged"))
    asyncio.run(context.store.create("tables/batches/samples/_lakebed/1.json", b"{}"))
    asyncio.run(clock.advance(8 * 86_400.0))
    maintenance_ = TableMaintenance(context)

    dry = maintenance_.vacuum(dry_run=True)
    assert [] == [one for one in recorded(context) if one[1] == "batches/samples"]
    done = maintenance_.vacuum()
    swept = MaintenanceReport("batches/samples", files_swept=2, bytes_swept=7, log_entries_cleaned=1)
    assert [swept] == dry[:1] == done[:1]
    said = "2 files deleted, 1 entries of its log cleaned up"
    assert [(VACUUM, "batches/samples", None, None, said)] == [one for one in recorded(context) if "samples" in one[1]]
    assert [("topics/orders", True)] == [(report.table, bool(report.problem)) for report in done[1:]]
    assert ["topics/orders"] == [report.table for report in maintenance_.vacuum()]
    with pytest.raises(Corrupt):
        maintenance_.vacuum("topics/orders")


# Audits.


async def test_a_published_audit_is_the_last_one_unless_a_later_one_is() -> None:
    """By its id, which sorts by its beginning; a record that does not decode is Corrupt and names its key."""
    clock = ManualClock()
    context = context_of(MemoryStore(clock=clock), clock=clock)
    with pytest.raises(NotFound, match="no audit"):
        await last_audit(context)
    later = msgspec.structs.replace(RECORD, audit_id=paths.audit_id(99, "0" * 16), ok=True, completed_at_unix_ns=100)
    await publish(context, later)
    await publish(context, RECORD)

    assert later == await last_audit(context)
    assert LatestAudit(later.audit_id, 100, True) == (await last_register(context).read()).value
    key = audit_record_key(later.audit_id)
    await context.store.delete(key)
    await context.store.create(key, b"{")
    with pytest.raises(Corrupt, match=r"audit\.json"):
        await last_audit(context)
    assert "audit/v1/a/tasks/" == paths.work_folder("a")


@pytest.mark.parametrize(
    ("ok", "totals", "failed", "reason"),
    [
        (True, [("orphaned", 4, False)], False, "no loss"),
        (False, [("missing", 1, True), ("orphaned", 4, False)], True, "1 wrong objects"),
        (False, [("orphaned", 4, False)], True, "counts differ between stages"),
    ],
)
def test_an_audit_that_found_something_wrong_is_a_run_that_failed(
    ok: bool, totals: list[tuple[str, int, bool]], failed: bool, reason: str
) -> None:
    """The page of runs shows it beside every other failure, with what was found."""
    run = ActiveRun("audit", "audit", "", {})
    found = tuple(FindingTotal(finding, "raw_blob", count, 10, wrong) for finding, count, wrong in totals)

    report_to(run, msgspec.structs.replace(RECORD, ok=ok, totals=found))

    assert (failed, reason, 3, sum(count for _, count, _ in totals)) == (
        run.failed, run.reason, run.rows_in, run.rows_out,
    )  # fmt: skip
    assert [f"{finding} raw_blob" for finding, _, _ in totals] == [line.split(":")[0] for line in run.lines][:-1]


@pytest.mark.parametrize("name", ["lost", "doubled", "changed"])
def test_conservation_is_wrong_when_something_was_lost_doubled_or_changed(name: str) -> None:
    """What waits, is expired or explained is not wrong; neither is a count of 0."""
    for made in (Conservation, lambda **said: ConservationRow("a", "h", **said)):
        assert made(**{name: {"bronze": 1}}).wrong
        assert not made(**{name: {"bronze": 0}}).wrong
        assert not made(waiting=5, expired=5, explained=5).wrong


# Records of runs.


async def test_a_record_that_expires_while_runs_are_read_is_left_out(manual_clock: ManualClock) -> None:
    """The others are given, newest first."""
    store = MemoryStore(clock=manual_clock)
    for number in range(3):
        await write_run(store, recorded_run(number))

    class Expiring(MemoryStore):
        async def get(self, key: str) -> StoredObject:
            if "run-1" in key:
                raise NotFound("expired")
            return await store.get(key)

        def __getattribute__(self, name: str) -> Any:
            return getattr(store, name) if name in ("children", "list") else super().__getattribute__(name)

    assert ["run-2", "run-0"] == [each.run_id for each in await runs(Expiring(clock=manual_clock))]


async def test_a_search_for_rare_runs_ends(manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest records are looked at: others could be hundreds of thousands."""
    monkeypatch.setattr(models_runs, "LOOKED_MAX", 3)
    store = MemoryStore(clock=manual_clock)
    for number in range(6):
        await write_run(store, recorded_run(number, project="rare" if number in (0, 4) else "p"))

    assert ["run-4"] == [each.run_id for each in await runs(store, project_id="rare")]


async def test_records_are_kept_for_the_days_of_retention(manual_clock: ManualClock) -> None:
    """The day that is exactly so old stays: its runs of the same hour are not that old yet."""
    store = MemoryStore(clock=manual_clock)
    for day in range(4):
        await write_run(store, recorded_run(day, day=day))

    gone = await expire_runs(store, 3 * 86_400 * 10**9 + 43_200 * 10**9, days=2)

    assert 1 == gone
    assert ["run-3", "run-2", "run-1"] == [each.run_id for each in await runs(store)]


def recorded_run(number: int, *, project: str = "p", day: int = 0) -> PipelineRun:
    made = ModelReport("gold.orders", "made")
    return PipelineRun(f"run-{number}", "o", project, "tick", day * 86_400_000, 1.0, "done", (made,))
