"""Which steps a silver job makes, of which versions, and what it does when others write too. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Overloaded, Stale
from lakebed.delta.model import Snapshot, VersionChange
from lakebed.pipeline.silver import job as module
from lakebed.pipeline.silver import source as source_module
from lakebed.pipeline.silver.contract import BadContract, Contract, read_contract
from lakebed.pipeline.silver.job import APPLICATION, RACES_MAX, Silver, SilverReport
from lakebed.pipeline.silver.source import SilverSource
from lakebed.pipeline.tables.compaction import RETENTION
from lakebed.store.memory import MemoryStore
from support.fake_tables import FakeFrame, FakeTable
from support.runtimes import runtime_on

ORDERS = read_contract("table: orders\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n", "orders.yaml")
SALES = read_contract(
    "table: sales\nsource: raw_sales\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n", "sales.yaml"
)

Step = tuple[Any, ...]


class Job(Silver):
    """Silver whose tables are fakes and whose steps are noted; a step moves both tables to its version."""

    def __init__(self, *contracts: Contract, written: int = -1, quarantined: int = -1, note: str = "") -> None:
        clock = ManualClock()
        super().__init__(None, contracts, runtime_on(MemoryStore(clock=clock), clock), location=None)  # type: ignore[arg-type]
        self.done: list[Step] = []
        self.silver = self._made("silver", written, note or contracts[0].digest)
        self.bad = self._made("quarantine", quarantined, "")
        self.steps: list[Step] = []
        self.stale = 0
        self.newest, self.log_begins = -1, 0  # with a newest version, files of all others were swept

    def _made(self, name: str, at: int, note: str) -> FakeTable:
        applied = {APPLICATION: at} if at >= 0 else {}
        return FakeTable(name, self.done, state=Snapshot(version=len(applied) - 1, applied=applied, note=note))

    def table(self, contract: Contract, org_id: str, project_id: str) -> Any:
        return self.silver

    def quarantine(self, contract: Contract, org_id: str, project_id: str) -> Any:
        return self.bad

    def _reach(self, contract: Contract, org_id: str, project_id: str, after: int, until: int) -> int | None:
        if after < 0 or self.newest < 0:
            return max(until, self.newest)
        return self.newest if after >= self.log_begins else None

    def _step(
        self, contract: Contract, org_id: str, project_id: str, after: int, until: int, quarantined_at: int
    ) -> SilverReport:
        return self._noted(contract, ("step", after, until, quarantined_at), until)

    def _anew(
        self, contract: Contract, org_id: str, project_id: str, written: int, quarantined_at: int, at: int
    ) -> SilverReport:
        return self._noted(contract, ("anew", written, quarantined_at, at), at)

    def _noted(self, contract: Contract, step: Step, until: int) -> SilverReport:
        self.steps.append(step)
        if self.stale:
            self.stale -= 1
            raise Stale("another job was first")
        return SilverReport(contract.table, step[1], until, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("written", "quarantined", "log_begins", "expected"),
    [
        (3, 3, 0, [("step", 3, 90, 3)]),
        (-1, -1, 0, [("step", -1, 90, -1)]),
        (3, 5, 0, [("anew", 3, 5, 90)]),
        (3, 3, 50, [("anew", 3, 3, 90)]),
    ],
)
def test_a_job_whose_files_were_swept_goes_on_at_the_newest_version(
    written: int, quarantined: int, log_begins: int, expected: list[Step]
) -> None:
    """From its own version where the log reaches back to it, else from the whole of bronze; never stuck."""
    job = Job(ORDERS, written=written, quarantined=quarantined)
    job.newest, job.log_begins = 90, log_begins

    job.run("acme", "p1", {"orders": 7})

    assert expected == job.steps


def test_a_half_done_step_that_cannot_be_finished_is_made_anew_at_no_older_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An older tick is replayed: behind its own quarantine silver would be made anew by every later job."""
    job = Job(ORDERS, written=3, quarantined=5)
    monkeypatch.setattr(job, "_reach", lambda *given: given[-1] if given[-2] < 0 else None)

    job.run("o", "p", {"orders": 4})

    assert [("anew", 3, 5, 5)] == job.steps


@pytest.mark.parametrize(
    ("written", "quarantined", "until", "expected"),
    [
        (-1, -1, 3, [("step", -1, 3, -1)]),
        (0, 0, 0, []),
        (0, 0, 1, [("step", 0, 1, 0)]),
        (3, 3, 3, []),
        (3, 3, 2, []),
        (3, 3, 5, [("step", 3, 5, 3)]),
        (3, 5, 5, [("step", 3, 5, 5)]),
        (3, 5, 4, [("step", 3, 5, 5)]),
        (3, 5, 7, [("step", 3, 5, 5), ("step", 5, 7, 5)]),
        (-1, 2, 4, [("step", -1, 2, 2), ("step", 2, 4, 2)]),
    ],
)
def test_a_job_finishes_the_one_that_died_and_then_goes_on(
    written: int, quarantined: int, until: int, expected: list[Step]
) -> None:
    """A version whose rows are quarantined and not in silver is finished alone; what silver has is not read again."""
    job = Job(ORDERS, written=written, quarantined=quarantined)

    job.run("o", "p", {"orders": until})

    assert expected == job.steps


@pytest.mark.parametrize(
    ("written", "quarantined", "until", "expected"),
    [
        (0, 0, 0, ("anew", 0, 0, 0)),
        (3, 3, 2, ("anew", 3, 3, 3)),
        (3, 3, 6, ("anew", 3, 3, 6)),
        (3, 5, 4, ("anew", 3, 5, 5)),
        (-1, -1, 4, ("step", -1, 4, -1)),
    ],
)
@pytest.mark.parametrize("why", ["requested", "contract"])
def test_a_rebuild_never_takes_silver_back(
    written: int, quarantined: int, until: int, expected: Step, why: str
) -> None:
    """A replay of an old tick, or a changed contract, is made at the latest version that either table has seen."""
    note = "contract of before" if why == "contract" else ""
    job = Job(ORDERS, written=written, quarantined=quarantined, note=note)

    job.run("o", "p", {"orders": until}, anew={"orders"} if why == "requested" else ())

    assert [expected] == job.steps


@pytest.mark.parametrize(
    ("readable", "expected"),
    [({(3, 5)}, 5), ({(3, 9)}, 9), (set(), None), ({(-1, 5)}, None), ({(3, 5), (3, 9)}, 5)],
)
def test_a_step_reads_the_wanted_version_or_the_newest_that_its_own_leads_to(
    monkeypatch: pytest.MonkeyPatch, readable: set[tuple[int, int]], expected: int | None
) -> None:
    """Where log entries between are gone neither can be read, and silver is made anew."""
    job = Job(ORDERS, written=3)
    bronze = FakeTable("bronze", [], state=Snapshot(version=9))
    source = SimpleNamespace(table=bronze, readable=lambda after, until: (after, until) in readable)
    monkeypatch.setattr(job, "source", lambda *where: source)

    assert expected == Silver._reach(job, ORDERS, "o", "p", 3, 5)


class FakeBronze(FakeTable):
    """What silver asks a bronze table for."""

    def __init__(self, *changes: VersionChange) -> None:
        super().__init__("bronze", [])
        self.made, self.asked = changes, list[Any]()

    def changes(self, after: int, until: int) -> list[VersionChange]:
        return [each for each in self.made if after < each.version <= until]

    def added(self, after: int, until: int, **how: Any) -> Any:
        self.asked.append((after, until, how))
        return SimpleNamespace(filter=lambda ticks: ("rows of", ticks))

    def read(self, version: int | None = None, columns: Sequence[str] = ()) -> Any:
        return ("whole", version)

    def readable(self, after: int, until: int, *, joined: bool) -> bool:
        self.asked.append(("readable", after, until, joined))
        return True


def loaded(version: int, *applications: str, overwrites: bool = False) -> VersionChange:
    return VersionChange(version, "WRITE", overwrites, applications)


@pytest.mark.parametrize(
    ("after", "until", "expected"),
    [
        (-1, 0, (("whole", 0), True)),
        (0, 1, (("rows of", ["t1"]), False)),
        (0, 3, (("rows of", ["t1", "t3"]), False)),
        (3, 5, (("whole", 5), True)),
        (4, 5, (("rows of", ["t5"]), False)),
    ],
)
def test_silver_reads_the_ticks_since_its_version_or_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, after: int, until: int, expected: Any
) -> None:
    """The whole at first, and after a tick that made the table anew; otherwise only rows of the ticks in between,
    wherever compaction has put them: a whole table in place of an addition would replace what only silver has."""
    monkeypatch.setattr(source_module, "F", SimpleNamespace(col=lambda name: SimpleNamespace(isin=lambda ids: ids)))
    bronze = FakeBronze(
        loaded(0, "once:t0"),
        loaded(1, "once:t1"),
        loaded(2),
        loaded(3, "once:t3"),
        loaded(4, "once:t4", overwrites=True),
        loaded(5, "once:t5"),
    )
    source = SilverSource(bronze, appended=False)  # type: ignore[arg-type]

    assert expected == source.since(after, until)
    assert [(after, until, {"joined": True})] * (not expected[1]) == bronze.asked
    assert source.readable(after, until)
    assert ("readable", after, until, True) == bronze.asked[-1]


def test_silver_reads_what_the_loads_of_a_source_brought_and_nothing_of_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention writes files again, with rows that silver has."""
    monkeypatch.setattr(SilverSource, "_with_lineage", lambda self, rows: rows)
    bronze = FakeBronze(
        loaded(1, "lakebed.topic"), loaded(2, RETENTION), loaded(3), loaded(4, "lakebed.batches"), loaded(5, "theirs")
    )
    source = SilverSource(bronze, appended=True)  # type: ignore[arg-type]

    _, whole = source.since(0, 5)
    source.readable(0, 5)

    assert not whole
    assert [(0, 5, {"versions": {1, 4}}), ("readable", 0, 5, False)] == bronze.asked


def test_each_contract_reads_its_own_bronze_table() -> None:
    """By the source it names; a contract without a version of its source does nothing, and others are not rebuilt."""
    job = Job(ORDERS, SALES, written=1, quarantined=1)
    job.silver.state = Snapshot(applied={APPLICATION: 1}, note=SALES.digest)

    one = [report.table for report in job.run("o", "p", {"raw_sales": 4, "orders_of_others": 9})]
    steps, job.steps = job.steps, []
    job.run("o", "p", {"raw_sales": 4}, anew={"sales"})

    assert (["sales"], [("step", 1, 4, 1)]) == (one, steps)
    assert [("step", 1, 4, 1)] == job.steps  # `anew` names bronze tables, not silver's


@pytest.mark.parametrize("races", [0, 1, RACES_MAX - 1, RACES_MAX])
def test_a_job_that_was_overtaken_looks_again_and_gives_up_at_last(races: int) -> None:
    """Overloaded, which is retried, never a report of a step that did not happen."""
    job = Job(ORDERS)
    job.stale = races

    if races == RACES_MAX:
        with pytest.raises(Overloaded):
            job.run("o", "p", {"orders": 2})
    else:
        assert 1 == len(job.run("o", "p", {"orders": 2}))

    assert min(races + 1, RACES_MAX) == len(job.steps)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms that hand their frame on."""
    for name in ("quarantined", "latest", "good"):
        monkeypatch.setattr(module.silver, name, lambda rows, *given: rows)


@pytest.mark.usefixtures("passing")
def test_bad_rows_are_quarantined_once_and_counted() -> None:
    """Not when the quarantine has that version already; a count that differs is Corrupt, unless another job did it."""
    job = Job(ORDERS, written=3, quarantined=3)
    frame = FakeFrame([], "rows")

    job._quarantine_bad(ORDERS, "o", "p", frame, 3, 3, 7)  # type: ignore[arg-type]
    job.bad.rows_inserted = 2
    job._quarantine_bad(ORDERS, "o", "p", frame, 5, 3, 2)  # type: ignore[arg-type]
    job._quarantine_bad(ORDERS, "o", "p", frame, 4, 3, 9)  # type: ignore[arg-type]
    with pytest.raises(Corrupt, match="3 rows have a reason, but 2"):
        job._quarantine_bad(ORDERS, "o", "p", frame, 6, 5, 3)  # type: ignore[arg-type]

    assert [("append", "quarantine", 5, ""), ("append", "quarantine", 6, "")] == job.done


@pytest.mark.usefixtures("passing")
def test_a_whole_read_replaces_silver_and_a_step_upserts_it() -> None:
    """Both under the version's number, after the one before; only a replacement says by which contract."""
    job = Job(ORDERS, written=3)
    frame: Any = FakeFrame([], "rows")

    job._write(ORDERS, job.silver, frame, 3, 4, False)  # type: ignore[arg-type]
    job._write(ORDERS, job.silver, frame, 4, 6, True)  # type: ignore[arg-type]
    again = job._write(ORDERS, job.silver, frame, 4, 6, True)  # type: ignore[arg-type]
    with pytest.raises(Stale):
        job._write(ORDERS, job.silver, frame, 4, 8, False)  # type: ignore[arg-type]

    assert [("upsert", "silver", 4, ""), ("replace", "silver", 6, ORDERS.digest)] == job.done
    assert again.repeated


def test_a_rebuild_that_was_overtaken_replaces_nothing() -> None:
    """At a new version under its number, at the same one without; a table that moved meanwhile is Stale."""
    job = Job(ORDERS, written=3)
    frame: Any = FakeFrame([], "rows")

    job._replace(job.silver, frame, 3, 5, ORDERS)  # type: ignore[arg-type]
    job._replace(job.silver, frame, 5, 5, ORDERS)  # type: ignore[arg-type]

    def rival() -> None:
        job.silver.state = Snapshot(version=9, applied={APPLICATION: 6})

    job.silver.before = rival
    with pytest.raises(Stale, match="another job"):
        job._replace(job.silver, frame, 5, 5, ORDERS)  # type: ignore[arg-type]

    assert [("replace", "silver", 5, ORDERS.digest), ("replace", "silver", None, ORDERS.digest)] == job.done


def schema(**columns: str) -> str:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return msgspec.json.encode({"type": "struct", "fields": fields}).decode()


def test_silver_keeps_the_columns_that_earlier_ticks_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when this step's rows lack them; a column of another type is refused with both types."""
    job = Job(ORDERS)
    job.silver.state = Snapshot(version=1, schema_json=schema(id="long", extra="string", _tick_id="string"))
    monkeypatch.setattr(job, "_of", lambda spec: spec)

    target: Any = job._target(ORDERS, "o", "p", {"id": "long", "more": "double"})

    assert ["id", "extra", "_tick_id", "more"] == target.columns[:4]
    assert ("id",) == target.keys
    with pytest.raises(BadContract, match="'extra' is long, but the silver table has it as string"):
        job._target(ORDERS, "o", "p", {"id": "long", "extra": "long"})
