"""`lakebed pipeline`, `rollup` and `audit`: the exit code tells whether all is well, the data is whole, the trail kept.

The jobs themselves are fakes: they run on Spark, in tests/spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.core.errors import Invalid, NotFound, Unavailable
from lakebed.pipeline.audit.conservation import DroppedSamples
from lakebed.pipeline.audit.model import AuditFinding, AuditRecord, Conservation, ConservationRow
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.models.plan import Window
from lakebed.pipeline.models.runs import ModelReport
from lakebed.pipeline.runner import PipelineRunner
from lakebed.rollups.roller import RollupReport
from support.audit_record import RECORD
from support.shell import Shell

SOUND = IngestReport("batches/samples", version=4, objects=2, rows_in=20, good=18, duplicates=2, through="t", lag_s=1.5)
EMPTY = IngestReport("topics/clicks", steps=0)
QUARANTINED = IngestReport("topics/clicks", version=1, objects=1, rows_in=5, good=4, quarantined=1)
UNREADABLE = IngestReport("batches/samples", version=1, objects=1, unreadable=("raw/k1", "raw/k2"))


class Loads:
    """Stands for the loads into bronze: gives the reports of each run in turn, and raises at the end."""

    runs: list[list[IngestReport] | Exception] = []
    retried: list[bool] = []

    def __init__(self, context: Any) -> None:
        Loads.retried = []

    def run(self, on_step: Callable[[IngestReport], None], *, retry: bool = False) -> list[IngestReport]:
        Loads.retried.append(retry)
        found = Loads.runs.pop(0)
        if isinstance(found, Exception):
            raise found
        for report in found:
            on_step(report)
        return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> type[Loads]:
    monkeypatch.setattr("lakebed.pipeline.bronze.ingestion.Ingestion", Loads)
    return Loads


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([], exits.OK),
        ([SOUND, EMPTY], exits.OK),
        ([SOUND, QUARANTINED], exits.FAILED),
        ([UNREADABLE, EMPTY], exits.FAILED),
    ],
)
def test_a_load_fails_when_something_was_quarantined(
    shell: Shell, loads: type[Loads], reports: list[IngestReport], code: int
) -> None:
    """Every table has its row with all counts, every unreadable object its line; the run is on the trail."""
    loads.runs = [reports]

    found, out, err = shell("pipeline", "run", "-o", "json")

    assert code == found
    wanted = ("table", "version", "rows_in", "good", "quarantined", "duplicates", "lag_s", "behind", "through")
    plain = [msgspec.to_builtins(report) for report in reports]
    assert [{name: row[name] for name in wanted} for row in plain] == [
        {name: row[name] for name in wanted} for row in json.loads(out)
    ]
    assert [key for report in reports for key in report.unreadable] == [
        line.removeprefix("quarantined: ") for line in err.splitlines() if line.startswith("quarantined: ")
    ]
    ((what, subject, _, outcome, _),) = shell.deeds()
    assert ("pipeline.run", {"follow": "no", "retry": "no"}, "done") == (what, subject, outcome)


def test_a_load_that_fails_is_on_the_trail_as_failed(shell: Shell, loads: type[Loads]) -> None:
    """With its own exit code; `--retry` is given on."""
    loads.runs = [Unavailable("Spark could not finish the run")]

    code, out, _ = shell("pipeline", "run", "--retry")

    assert (exits.code_for(Unavailable("")), "", [True]) == (code, out, loads.retried)
    ((what, subject, _, outcome, detail),) = shell.deeds()
    assert ("pipeline.run", {"follow": "no", "retry": "yes"}) == (what, subject)
    assert "done" != outcome and "Spark could not finish" in outcome + detail


def test_a_load_that_follows_shows_only_runs_that_found_something(shell: Shell, loads: type[Loads]) -> None:
    """One line of JSON for each table; it runs until it is stopped."""
    loads.runs = [[SOUND], [EMPTY], [QUARANTINED], Unavailable("stopped")]

    code, out, _ = shell("pipeline", "run", "--follow", "--every-s", "0", "-o", "json")

    assert exits.code_for(Unavailable("")) == code
    assert ["batches/samples", "topics/clicks"] == [json.loads(line)["table"] for line in out.splitlines()]


class Maintenance:
    asked: list[tuple[str, str, bool]] = []

    def __init__(self, context: Any) -> None: ...

    def compact(self, only: str = "", *, dry_run: bool = False) -> list[dict[str, Any]]:
        Maintenance.asked.append(("compact", only, dry_run))
        return [{"table": only or "all", "files": 3}]

    def vacuum(self, only: str = "", *, dry_run: bool = False) -> list[dict[str, Any]]:
        Maintenance.asked.append(("vacuum", only, dry_run))
        return [{"table": only or "all", "files": 5}]


@pytest.mark.parametrize("verb", ["compact", "vacuum"])
def test_tables_are_maintained_all_or_one_and_a_dry_run_leaves_no_trace(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The flags are given on as they are; only what changes tables is on the trail, with its table."""
    monkeypatch.setattr("lakebed.pipeline.tables.maintenance.TableMaintenance", Maintenance)
    Maintenance.asked = []

    dry = shell.data("pipeline", verb, "--table", "bronze/o/p/t", "--dry-run")
    none = shell.deeds()
    one = shell.data("pipeline", verb, "--table", "bronze/o/p/t")
    every = shell.data("pipeline", verb)

    assert [(verb, "bronze/o/p/t", True), (verb, "bronze/o/p/t", False), (verb, "", False)] == Maintenance.asked
    assert ["bronze/o/p/t", "bronze/o/p/t", "all"] == [rows[0]["table"] for rows in (dry, one, every)]
    assert [] == none
    assert [(f"pipeline.{verb}", {"table": "all"}), (f"pipeline.{verb}", {"table": "bronze/o/p/t"})] == [
        deed[:2] for deed in shell.deeds()
    ]


@pytest.mark.parametrize("unreadable", [(), (("k1", "damaged"), ("k2", "gone"))])
@pytest.mark.parametrize("cold", [False, True])
def test_a_rollup_fails_when_batches_could_not_be_read(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, unreadable: tuple[tuple[str, str], ...], cold: bool
) -> None:
    """They are named by key and problem, and are in the data too; what was rolled up is on the trail."""
    asked: list[tuple[bool, str]] = []
    bad: Any = [{"key": key, "problem": problem} for key, problem in unreadable]
    kind = RollupReport.__annotations__ and msgspec.convert({"generations": 2, "unreadable": bad}, RollupReport)

    class Roller:
        def __init__(self, context: Any) -> None:
            from lakebed.rollups.settings import RollupSettings

            self.engine = context.settings.of(RollupSettings).engine

        async def run(self, *, cold: bool = False) -> RollupReport:
            asked.append((cold, self.engine))
            return kind

    monkeypatch.setattr("lakebed.rollups.workers.roller", Roller)
    flags = ("--cold",) if cold else ()
    code, out, err = shell("pipeline", "rollup", "--engine", "local", *flags)

    assert (exits.FAILED if unreadable else exits.OK, [(cold, "local")]) == (code, asked)
    assert [f"skipped: {key} ({problem})" for key, problem in unreadable] == err.splitlines()
    assert (2, [key for key, _ in unreadable]) == (
        json.loads(out)["generations"],
        [each["key"] for each in json.loads(out)["unreadable"]],
    )
    assert ("pipeline.rollup", {"of": "all" if cold else "late"}) == shell.deeds()[0][:2]


class Audits:
    """Stands for the audit: gives one record and keeps how it was asked."""

    record: AuditRecord = RECORD
    asked: dict[str, Any] = {}

    def __init__(self, spark: Any, context: Any) -> None: ...

    def run(self, **how: Any) -> AuditRecord:
        Audits.asked = how
        return Audits.record


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> type[Audits]:
    monkeypatch.setattr("lakebed.pipeline.audit.job.BucketAuditor", Audits)
    monkeypatch.setattr("lakebed.spark.session.open_session", lambda settings: None)
    return Audits


GOOD = msgspec.structs.replace(RECORD, ok=True, totals=(), conservation=Conservation(checked=True, agents=2, hours=9))


@pytest.mark.parametrize(("record", "code"), [(RECORD, exits.FAILED), (GOOD, exits.OK)])
@pytest.mark.parametrize("output", ["table", "json"])
def test_an_audit_exits_1_exactly_when_something_is_wrong(
    shell: Shell, audits: type[Audits], record: AuditRecord, code: int, output: str
) -> None:
    """In every format; the last one is shown with the same exit code, and without one there is nothing to show."""
    audits.record = record

    found, out, err = shell("audit", "-o", output)

    assert code == found
    if output == "json":
        assert record == msgspec.json.decode(out, type=AuditRecord)
    else:
        assert f"{'ok' if record.ok else 'WRONG'}: 3 objects, audit {record.audit_id}" in err
        assert ("nothing lost, doubled or changed in 9 hours of 2 agents" in err) == record.ok
    assert exits.code_for(NotFound("")) == shell("audit", "--last")[0]


def test_the_last_audit_is_shown_as_it_was_stored(shell: Shell) -> None:
    """Without Spark, with the exit code of that audit."""
    import asyncio

    from lakebed.pipeline.audit.stored import publish

    shell("trail")
    asyncio.run(publish(shell.contexts[-1], RECORD))

    code, out, _ = shell("audit", "--last", "-o", "json")

    assert (exits.FAILED, RECORD) == (code, msgspec.json.decode(out, type=AuditRecord))


def test_the_flags_of_an_audit_choose_how_it_is_made(
    shell: Shell, audits: type[Audits], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Quick reads nothing; what agents gave up and the horizon of garbage collection are given on."""
    monkeypatch.setenv("LAKEBED_RECONCILER_GC_HORIZON_S", "777000")
    given_up = [DroppedSamples("a", "b", 3, 9)]
    monkeypatch.setattr("lakebed.agent.codec.accounts", lambda folder: given_up if folder == tmp_path else [])
    audits.record = GOOD

    shell("audit", "--quick")
    quick = audits.asked
    shell("audit", "--agent-queue", str(tmp_path), "--agent-queue", "elsewhere")

    assert (False, [], 777000.0, None) == (quick["verify"], quick["dropped"], quick["horizon_s"], quick["listing"])
    assert (True, given_up) == (audits.asked["verify"], audits.asked["dropped"])


def test_findings_and_losses_are_named_line_by_line(shell: Shell, audits: type[Audits]) -> None:
    """Orphans are expected and only counted; what waits, what expired and what was not looked at is said."""
    row = ConservationRow(
        "agent-1", "date=2026-11-17/hour=04", lost={"bronze": 2, "raw": 0}, doubled={"rollup": 1}, changed={}
    )
    audits.record = msgspec.structs.replace(
        RECORD,
        findings=(
            AuditFinding("missing", "raw_blob", "k1", reason="an accepted batch lacks it"),
            AuditFinding("orphaned", "raw_blob", "k2"),
        ),
        conservation=Conservation(
            checked=True,
            stages={"sent": 5, "bronze": 3},
            waiting=4,
            expired=6,
            kept_since_unix_ns=1_760_000_000 * 10**9,
            lost={"bronze": 2},
            rows=(row,),
        ),
        unseen=("what is inside",),
    )

    _, out, err = shell("audit")

    assert "missing\traw_blob\t1\t10 B\tyes" in out
    assert [
        "missing raw_blob: k1 (an accepted batch lacks it)",
        "conservation: sent 5 → bronze 3",
        "  4 samples are not in bronze yet: lakebed pipeline run",
        "  bronze is kept since 2025-10-09 08:53:20 UTC: 6 samples accepted before are not in it",
        "  agent-1 date=2026-11-17/hour=04: 2 lost at bronze, 1 doubled at rollup",
        "not checked by a quick audit: what is inside",
        f"WRONG: 3 objects, audit {RECORD.audit_id}",
    ] == err.splitlines()


def test_contracts_are_checked_without_spark_and_without_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file has a line; one that is wrong, or names a table again, fails the command with its reason."""
    good = "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n"
    files = {
        "a.yaml": good,
        "b.yaml": good,
        "c.yaml": good.replace("[id]", "[nr]").replace("orders", "c"),
        "d.yaml": "{",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    fine = run(["contract", "check", str(tmp_path / "a.yaml"), "-o", "json"])
    (row,) = json.loads(capsys.readouterr().out)
    wrong = run(["contract", "check", str(tmp_path), "-o", "json"])
    read = capsys.readouterr()
    rows = {Path(each["file"]).name: each["error"] for each in json.loads(read.out)}
    none = run(["contract", "check", str(tmp_path / "nosuch.yaml")])

    assert (exits.OK, "orders", 1, "id", "") == (fine, row["table"], row["columns"], row["keys"], row["error"])
    assert (exits.FAILED, exits.code_for(Invalid(""))) == (wrong, none)
    assert "" == rows["a.yaml"] and "is of table 'orders' already" in rows["b.yaml"]
    assert "nr" in rows["c.yaml"] and "is not YAML" in rows["d.yaml"] and "1 of 4 contracts are valid" in read.err


class Ran:
    """Stands for runs of models: gives these reports for each project, and keeps what it was asked for."""

    reports: list[ModelReport] = []
    asked: list[dict[str, Any]] = []

    def __call__(self, runner: Any, org: str, project: str, names: Any = None, **options: Any) -> list[ModelReport]:
        options.pop("shown", None)
        Ran.asked.append({"project": f"{org}/{project}", "names": list(names or ()), **options})
        return Ran.reports


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    made = Ran()
    Ran.asked = []
    monkeypatch.setenv("LAKEBED_PIPELINE_CONTRACTS", "examples")
    monkeypatch.setenv("LAKEBED_PIPELINE_GOLD", "examples")
    monkeypatch.setattr(PipelineRunner, "run_models", lambda *args, **kw: made(*args, **kw))
    monkeypatch.setattr(PipelineRunner, "projects", lambda self: [("acme", "shop"), ("zoo", "shop")])
    return made


@pytest.mark.parametrize(
    ("state", "code"), [("made", exits.OK), ("waiting", exits.OK), ("failed", exits.FAILED), ("refused", exits.FAILED)]
)
def test_a_run_of_models_ends_with_what_it_did_and_fails_when_one_did(
    shell: Shell, ran: Ran, state: Any, code: int
) -> None:
    """Names with `+`, the window and the refresh reach the run; each project has its rows; the run is on the trail."""
    Ran.reports = [ModelReport("spent_by_customer", state, "increment", "why", 3, 7)]

    found, out, _ = shell("pipeline", "run", "spent_by_customer+", "--org", "acme", "--reason", "so", "-o", "json")
    table = shell("pipeline", "run", "spent_by_country", "--full-refresh", "--project", "shop")

    assert (code, code) == (found, table[0])
    (row,) = json.loads(out)
    assert ("acme/shop", "spent_by_customer", state, 7) == tuple(
        row[name] for name in ("project", "table", "state", "rows")
    )
    assert "spent_by_customer" in table[1]
    assert [["spent_by_customer", "spent_by_country"], ["spent_by_country"], ["spent_by_country"]] == [
        each["names"] for each in Ran.asked
    ]
    assert [False, True, True] == [each["full_refresh"] for each in Ran.asked]
    trail = json.loads(shell("trail", "-o", "json")[1])
    assert {"pipeline.run"} == {each["what"] for each in trail}


def test_a_window_is_a_window_and_an_unknown_model_is_refused_with_the_nearest(shell: Shell, ran: Ran) -> None:
    """Nothing runs for a name or a moment that is wrong."""
    Ran.reports = []

    assert exits.OK == shell("pipeline", "run", "spent_by_customer", "--from", "2026-11-01", "--to", "2026-11-02")[0]
    wrong = shell("pipeline", "run", "spent_by_custmer")
    moment = shell("pipeline", "run", "spent_by_customer", "--from", "soon")

    assert [Window("2026-11-01", "2026-11-02")] * 2 == [each["window"] for each in Ran.asked]
    assert (True, True) == ("spent_by_customer" in wrong[2], "no moment" in moment[2])
    assert exits.OK not in (wrong[0], moment[0])


@pytest.mark.parametrize("named", ["spent_by_customer", "spent_by_customer+", "gold.spent_by_customer+"])
def test_a_window_is_for_the_model_however_it_is_named(shell: Shell, ran: Ran, named: str) -> None:
    """With its layer too: otherwise the run would say that nothing moved, and the window would not be made again."""
    Ran.reports = []

    shell("pipeline", "run", named, "--from", "2026-11-01", "--org", "acme")

    assert [["spent_by_customer"]] == [each["filled"] for each in Ran.asked]


def test_a_load_runs_all_models_after_it(shell: Shell, loads: type[Loads], ran: Ran) -> None:
    """One document has both; a model that failed fails the command."""
    loads.runs, Ran.reports = [[SOUND], [SOUND]], [ModelReport("spent_by_customer", "made")]

    code, out, _ = shell("pipeline", "run", "-o", "json")
    Ran.reports = [ModelReport("spent_by_customer", "failed", error="it broke")]
    failed = shell("pipeline", "run", "-o", "json")

    found = json.loads(out)
    assert (exits.OK, exits.FAILED) == (code, failed[0])
    assert (["batches/samples"], ["spent_by_customer"] * 2) == (
        [each["table"] for each in found["bronze"]],
        [each["table"] for each in found["models"]],
    )
    assert "it broke" in failed[1]


def test_a_plan_and_a_page_of_models_start_no_spark(
    shell: Shell, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without its sources waits; the page is written where it is asked for; no run is listed yet."""
    monkeypatch.setattr("lakebed.pipeline.runner.open_session", None)

    code, out, _ = shell("pipeline", "plan", "--org", "acme", "-o", "json")
    assert (code, out) == shell("gold", "dry-run", "--org", "acme", "-o", "json")[:2]
    page = shell("pipeline", "docs", "--to", str(tmp_path / "models.md"))
    none = shell("pipeline", "runs", "-o", "json")
    nobody = shell("pipeline", "plan", "--org", "nobody")

    assert exits.OK == code == page[0] == none[0]
    assert [("spent_by_customer", "wait"), ("spent_by_country", "wait")] == [
        (each["table"], each["action"]) for each in json.loads(out)
    ]
    assert "# Models" in (tmp_path / "models.md").read_text()
    assert ([], True) == (json.loads(none[1]), "no project nobody" in nobody[2])


def test_without_models_the_command_says_which_setting_names_them(shell: Shell) -> None:
    """Of a run by name, a plan and a page."""
    for words in (("run", "spent"), ("plan",), ("docs",), ("test",)):
        code, _, err = shell("pipeline", *words)
        assert (exits.OK != code, True) == (True, "pipeline.gold" in err), words
