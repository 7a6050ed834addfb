"""What the pipeline of a process asks of bronze, silver and gold, and which settings it obeys. No Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.logs import configure
from lakebed.core.runs import RunReader
from lakebed.core.settings import load
from lakebed.delta import vacuum
from lakebed.delta.model import Snapshot
from lakebed.pipeline.bronze.places import LAYERS, table_name
from lakebed.pipeline.models.folder import sql_model
from lakebed.pipeline.models.graph import Graph
from lakebed.pipeline.models.runs import ModelReport, ModelState, failed, runs
from lakebed.pipeline.runner import PipelineRunner, vacuum_tables
from lakebed.pipeline.silver.contract import Contract
from lakebed.pipeline.silver.job import SilverReport
from lakebed.store.protocol import exists
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import DISPATCHED, LOG
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.model import TickId, TickMessage
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from lakebed.wiring.ticks import SparkFlow, SparkSilver
from support.fake_tables import FakeTable

ORDERS = "table: orders\nsource: raw_orders\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n"
ERRORS = {"failed": "it failed"}
SALES = "table: sales\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n"


class Bronze:
    def __init__(self) -> None:
        self.tables = {"raw_orders": 4, "sales": 7, "notes": 9}

    def names(self, org_id: str, project_id: str) -> list[str]:
        return list(self.tables)

    def table(self, org_id: str, project_id: str, name: str) -> FakeTable:
        return FakeTable(name, [], state=Snapshot(version=self.tables[name]))


class Silver:
    def __init__(self, contracts: list[Contract]) -> None:
        self.contracts = contracts
        self.error: Exception | None = None
        self.runs: list[tuple[dict[str, int], set[str]]] = []

    def run(
        self, org_id: str, project_id: str, versions: Mapping[str, int], *, anew: Collection[str] = ()
    ) -> list[SilverReport]:
        self.runs.append((dict(versions), set(anew)))
        if self.error is not None:
            raise self.error
        known = [each for each in self.contracts if each.bronze in versions]
        return [SilverReport(each.table, 0, versions[each.bronze], 1, 10, 7, 2, 1) for each in known]

    def table(self, contract: Contract, org_id: str, project_id: str) -> FakeTable:
        return FakeTable(contract.table, [])


class Gold:
    """Makes the first model that it is asked for; the second is unchanged, the third fails until it is mended, and the
    fourth is skipped as long."""

    mended = False

    def __init__(self, *models: str) -> None:
        made = [sql_model(each.rstrip("!*~"), _header(each) + "select * from silver.orders") for each in models]
        self.graph = Graph({each.name: each for each in made})
        self.given: list[str] = []

    def table(self, org_id: str, project_id: str, source: str) -> FakeTable:
        return FakeTable(source.replace(".", "/"), [])

    def run(self, org_id: str, project_id: str, names: Collection[str], **_: Any) -> tuple[list[ModelReport], Any]:
        self.given = list(names)
        states: tuple[ModelState, ...] = ("made", "unchanged", "failed", "skipped")
        states = (*states[:2], "made", "made") if self.mended else states
        reports = [
            ModelReport(
                name, states[n], version=1, rows=5, sources={"silver.orders": 1}, error=ERRORS.get(states[n], "")
            )
            for n, name in enumerate(names)
        ]
        return reports, Corrupt("it failed") if failed(reports) else None


def _header(name: str) -> str:
    return {"!": "-- on: manual\n", "*": "-- every: 1h\n", "~": "-- lag: topic.orders | 10\n"}.get(name[-1], "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("orders", ORDERS), ("sales", SALES)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def context_of(**flags: object) -> Context:
    return make_context(load(sections(), flags={"store.url": "memory:", **flags}), role="test")


class Yard:
    def __init__(self, folder: Path | None, *models: str, **flags: object) -> None:
        given = {"pipeline.contracts": str(folder)} if folder else {}
        self.context = context_of(**given, **flags)
        self.runner = PipelineRunner(self.context)
        self.bronze, self.gold = Bronze(), Gold(*models)
        self.silver = Silver(self.runner._contracts)
        self.runner._built = (self.bronze, self.silver, self.gold)  # type: ignore[assignment]

    def counted(self, name: str, **labels: str) -> float:
        return self.context.metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_job_reports_what_each_layer_did_and_counts_it(folder: Path) -> None:
    """Tables without a contract are named; models without a schedule of their own run; each outcome is counted."""
    yard = Yard(folder, "a", "b", "c!", "d*", "e~")

    report = yard.runner.run_silver("o", "p", ["t1", "t2"], {"raw_orders": 4, "notes": 1, "events": 2})

    assert (("t1", "t2"), ("events", "notes")) == (report.ticks, report.without_contract)
    assert (["orders"], ["a", "b"]) == ([each.table for each in report.silver], [each.table for each in report.gold])
    assert [({"raw_orders": 4, "notes": 1, "events": 2}, set())] == yard.silver.runs
    assert ["a", "b"] == yard.gold.given
    assert (7, 2, 1) == tuple(
        yard.counted("lakebed_silver_rows_total", outcome=each) for each in ("good", "quarantined", "duplicate")
    )
    assert (1, 1) == tuple(yard.counted("lakebed_gold_tables_total", outcome=each) for each in ("made", "unchanged"))


def test_without_contracts_everything_stays_in_bronze() -> None:
    """No Spark is started for it, and every table is named."""
    yard = Yard(None)
    yard.runner._built = None

    report = yard.runner.run_silver("o", "p", ["t"], {"b": 2, "a": 1})

    assert (("a", "b"), None) == (report.without_contract, yard.runner._built)


def test_a_rebuild_is_of_the_named_tables_or_of_all_that_bronze_has(folder: Path) -> None:
    """By silver's names, from bronze's tables at their present versions; a table that bronze lacks is left out."""
    yard = Yard(folder)

    yard.runner.rebuild("o", "p", ["orders"])
    yard.runner.rebuild("o", "p")
    del yard.bronze.tables["sales"]
    yard.runner.rebuild("o", "p")
    with pytest.raises(NotFound, match="'raw_orders'"):
        yard.runner.rebuild("o", "p", ["raw_orders"])

    assert [
        ({"raw_orders": 4}, {"raw_orders"}),
        ({"raw_orders": 4, "sales": 7}, {"raw_orders", "sales"}),
        ({"raw_orders": 4}, {"raw_orders"}),
    ] == yard.silver.runs
    run = asyncio.run(RunReader(yard.context, "tables").latest(9))[1]
    assert ("silver", "o/p", 20, 14) == (run.kind, run.subject, run.rows_in, run.rows_out)
    assert "orders: 2 quarantined, sales: 2 quarantined" == run.reason


async def fill(context: Context, *keys: str) -> None:
    for key in keys:
        await context.store.create(key, b"x")


@pytest.mark.parametrize(("kept_s", "expected_s"), [(1, vacuum.KEEP_S), (30 * 86_400, 30 * 86_400)])
async def test_vacuum_keeps_versions_as_long_as_the_settings_say_and_never_less_than_a_week(
    monkeypatch: pytest.MonkeyPatch, kept_s: int, expected_s: float
) -> None:
    """Every table of every layer; one that cannot be vacuumed is passed over, and others are not left out for it."""
    context = context_of(**{"bronze.keep_versions_s": kept_s})
    swept: list[tuple[str, float]] = []
    await fill(
        context, *(f"tables/{table_name(layer, 'o', 'p', name)}/_delta_log/0" for layer in LAYERS for name in "ab")
    )
    await fill(context, "tables/gold/o/p/b/_lakebed/1.json")

    async def sweep(store: Any, root: str, *, clock: Any, keep_s: float) -> int:
        swept.append((root, keep_s))
        if root.endswith("silver/o/p/a"):
            raise Corrupt("its log is damaged")
        return 2 if root.endswith("/b") else 0

    monkeypatch.setattr(vacuum, "sweep", sweep)

    deleted = await vacuum_tables(context)

    assert {table_name(layer, "o", "p", "b"): 2 for layer in LAYERS} == deleted
    assert (8, {expected_s}) == (len(swept), {keep_s for _, keep_s in swept})
    assert not await exists(context.store, "tables/gold/o/p/b/_lakebed/1.json")


@pytest.mark.parametrize("setting", ["pipeline.contracts", "pipeline.gold"])
def test_a_folder_that_is_not_there_stops_the_process_at_its_start(tmp_path: Path, setting: str) -> None:
    """Before a tick is taken, with the folder in the message."""
    with pytest.raises(NotFound, match="nowhere"):
        PipelineRunner(context_of(**{"pipeline.contracts": str(tmp_path), setting: str(tmp_path / "nowhere")}))


def test_models_run_in_the_projects_that_have_what_they_read(folder: Path, tmp_path: Path) -> None:
    """A project with bronze alone has nothing for a model of silver."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "a.sql").write_text("select * from silver.orders")
    yard = Yard(folder, **{"pipeline.gold": str(models)})
    asyncio.run(
        fill(yard.context, *(f"tables/{each}/orders/x" for each in ("bronze/o1/p1", "silver/o2/p2", "gold/o3/p3")))
    )

    assert [("o2", "p2"), ("o3", "p3")] == yard.runner.projects()


def test_a_run_is_recorded_and_its_error_raised_after_all_models(folder: Path) -> None:
    """Also when one failed; a caller may have the reports instead."""
    yard = Yard(folder, "a", "b", "c")

    with pytest.raises(Corrupt, match="it failed"):
        yard.runner.run_models("o", "p", ["a", "b", "c"], trigger="command", reason="to see it")
    reports = yard.runner.run_models("o", "p", ["a"], trigger="change", raises=False)
    yard.runner.run_models("o", "p", [], trigger="change")
    last, first = asyncio.run(runs(yard.context.store))

    assert (["a"], "done", "change") == ([each.table for each in reports], last.state, last.trigger)
    assert ("failed", "command", "to see it", "o", "p") == (
        first.state,
        first.trigger,
        first.reason,
        first.org_id,
        first.project_id,
    )
    assert ["made", "unchanged", "failed"] == [each.state for each in first.models]
    assert 0 <= first.seconds < 60
    found = asyncio.run(RunReader(yard.context, "tables").latest(9))
    assert [("models", "o/p", "done", 5), ("models", "o/p", "failed", 15)] == [
        (run.kind, run.subject, run.state, run.rows_out) for run in found
    ]
    assert {"org": "o", "project": "p", "models": "a b c"} == found[1].fields and "it failed" == found[1].reason


def test_a_model_that_fails_with_a_tick_fails_alone(folder: Path) -> None:
    """Its run is recorded as failed; the job reports silver, and the model is late until a tick has made it, as is the
    one that reads it."""
    yard = Yard(folder, "a", "b", "c", "d")

    report = yard.runner.run_silver("o", "p", ["t"], {"raw_orders": 4}, raises=False)
    late = set(yard.runner.late)
    yard.gold.mended = True
    again = yard.runner.run_silver("o", "p", ["t2"], {"raw_orders": 5}, raises=False)

    assert (["orders"], ["made", "unchanged", "failed", "skipped"]) == (
        [each.table for each in report.silver],
        [each.state for each in report.gold],
    )
    assert ({("o", "p", "c"), ("o", "p", "d")}, "made", set()) == (late, again.gold[2].state, yard.runner.late)
    assert (14, 1) == (
        yard.counted("lakebed_silver_rows_total", outcome="good"),
        yard.counted("lakebed_gold_tables_total", outcome="failed"),
    )
    found = asyncio.run(RunReader(yard.context, "tables").latest(9))
    assert [("models", "done"), ("models", "failed")] == [(run.kind, run.state) for run in found]
    assert "c: it failed" in found[1].reason
    assert ["done", "failed"] == [each.state for each in asyncio.run(runs(yard.context.store))]


def test_a_silver_that_fails_fails_the_job_before_any_model(folder: Path) -> None:
    """The dispatcher counts it, up to a dead letter."""
    yard = Yard(folder, "a")
    yard.silver.error = Corrupt("its bronze is damaged")

    with pytest.raises(Corrupt, match="its bronze is damaged"):
        yard.runner.run_silver("o", "p", ["t"], {"raw_orders": 4}, raises=False)

    assert [] == yard.gold.given


async def test_the_message_of_a_tick_is_done_with_silver_whatever_its_models_do(folder: Path) -> None:
    """The tick's row has the reason of the model that failed; nothing of it is received again."""
    configure(as_json=True)
    yard = Yard(folder, "a", "b", "c", **{"ticks.batch_window_s": 0.001})
    flow = SparkFlow(yard.context)
    flow._opened = yard.runner
    queue, dispatched = open_queue(yard.context), open_audit(yard.context, DISPATCHED)
    dispatcher = Dispatcher(yard.context, queue=queue, dispatched=dispatched, job=SparkSilver(flow))
    await queue.send(TickMessage("o", "p", "t", "delta", "20261115", "", "raw_orders=4", ""))

    await dispatcher.round()

    row = await dispatched.get(TickId("o", "p", "t"))
    depth = await queue.depth()
    assert row is not None
    assert ("done", True, True) == (
        row.state,
        "it failed" in str(row.fields["detail"]),
        "a model was not made" in str(row.fields[LOG]),
    )
    assert (0, 0, 0) == (depth.waiting, depth.in_flight, depth.dead)
