"""No panel and no alert requests a number that nobody counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from lakebed.cli.main import run
from lakebed.console.dashboards import export
from lakebed.console.dashboards.alerts import ALERTS
from lakebed.console.dashboards.boards import BOARDS, board_of, boards
from lakebed.console.dashboards.export import RUNBOOK, anchor, rules
from lakebed.console.dashboards.model import Alert, Board, Panel
from lakebed.core.metrics import TABLE, Metric
from support.doc_commands import ROOT, misunderstood

SHOWING = ("dashboards", "demo", "console", "bench", "cli")  # they read numbers, at most
SHOWING_FILES = ("metrics.py", "demo.py", "bench.py", "page.py", "commands.py", "reference.py")
SOURCE = "\n".join(
    path.read_text()
    for path in sorted((ROOT / "src/lakebed").rglob("*.py"))
    if path.relative_to(ROOT / "src/lakebed").parts[0] not in SHOWING and path.name not in SHOWING_FILES
)
METRICS = {metric.name: metric for metric in TABLE}
SCRAPED = {"instance", "job", "le", "__name__"}  # labels that come with every scrape, and a histogram's own
PANELS = [pytest.param(panel, id=f"{board.name}: {panel.title}") for board in boards() for panel in board.panels]


def selectors(expr: str) -> list[Any]:
    """Every vector selector of an expression, by the official grammar. Raises on what is not PromQL."""
    found: list[Any] = []

    def walk(node: Any) -> None:
        kind = type(node).__name__
        if kind == "VectorSelector":
            found.append(node)
        elif kind == "MatrixSelector":
            walk(node.vector_selector)
        elif kind == "BinaryExpr":
            walk(node.lhs)
            walk(node.rhs)
        elif kind == "Call":
            for argument in node.args:
                walk(argument)
        elif kind in ("AggregateExpr", "ParenExpr", "UnaryExpr", "SubqueryExpr"):
            grouped.update(_labels(getattr(node, "modifier", None)))
            walk(node.expr)
        else:
            assert kind in ("NumberLiteral", "StringLiteral"), kind

    grouped: set[str] = set()
    walk(promql_parser.parse(expr.replace("$__rate_interval", "5m")))
    allowed = SCRAPED.union(*(metric_of(each).labels for each in found))
    assert grouped <= allowed, f"{grouped - allowed} are labels of nothing in {expr}"
    return found


def _labels(modifier: Any) -> set[str]:
    return set(modifier.labels) if modifier is not None else set()


def metric_of(selector: Any) -> Metric:
    """The metric of the table that a selector reads; only a histogram has buckets, a sum and a count."""
    name = selector.name
    if name in METRICS:
        assert METRICS[name].kind != "histogram", f"{name} is a histogram: ask for its buckets"
        return METRICS[name]
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    assert METRICS.get(base, METRICS["lakebed_build_info"]).kind == "histogram", f"nobody counts {name}"
    return METRICS[base]


def check(expr: str) -> None:
    found = selectors(expr)
    assert found, f"{expr} reads nothing"
    for selector in found:
        metric = metric_of(selector)
        for matcher in selector.matchers.matchers:
            assert matcher.name in {*metric.labels, *SCRAPED}, f"{metric.name} has no label {matcher.name}"


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_asks_for_metrics_and_labels_that_exist(panel: Panel) -> None:
    """Each query is PromQL, and each name and label in it is in the table."""
    assert panel.queries
    for query in panel.queries:
        check(query.expr)
        for label in re.findall(r"{{(\w+)}}", query.legend):
            assert label in query.expr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_asks_for_metrics_that_exist_and_says_what_to_do(alert: Alert) -> None:
    """Each rule is PromQL over known names and labels, and its label values are ones the code writes."""
    check(alert.expr)
    assert alert.do
    assert alert.part in BOARDS
    for value in re.findall(r'="([a-z_]+)"', alert.expr):
        assert f'"{value}"' in SOURCE, f"nothing ever writes {value}"
    for step in alert.do:
        if step.startswith("lakebed "):
            assert "" == misunderstood(step.partition(": ")[0])


@pytest.mark.parametrize(
    "expr",
    [
        "sum(lakebed_nonsense_total)",
        "sum by (nonsense) (lakebed_store_requests_total)",
        'lakebed_store_requests_total{nonsense="x"}',
        "lakebed_http_seconds",
    ],
)
def test_the_check_itself_finds_a_dead_panel(expr: str) -> None:
    """A wrong name, a wrong label and a histogram without its buckets are all found."""
    with pytest.raises(AssertionError):
        check(expr)


def test_every_metric_is_on_the_board_of_its_part() -> None:
    """Whatever is added to the table appears on a dashboard; a word no board has is an error."""
    shown = {panel.title for board in boards()[1:] for panel in board.panels}

    assert set(METRICS) == shown
    with pytest.raises(KeyError, match="lakebed_nonsense_total"):
        board_of(Metric("lakebed_nonsense_total", "counter", "?"))


def test_every_metric_is_fed_somewhere() -> None:
    """A metric in the table that no code touches would be a dead panel."""
    assert [] == [name for name in METRICS if f'"{name}"' not in SOURCE]


def test_the_committed_files_are_what_is_generated(tmp_path: Path) -> None:
    """`make docs` has been run: docs/dashboards holds exactly what the table gives."""
    committed = {file.name: file.read_text() for file in (ROOT / "docs/dashboards").iterdir()}

    assert export.files() == committed


def test_the_command_writes_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`lakebed dashboards export DIR` writes every file, and a dry run none."""
    assert 0 == run(["dashboards", "export", str(tmp_path / "dry"), "--dry-run"])
    assert 0 == run(["dashboards", "export", str(tmp_path / "out")])

    assert not (tmp_path / "dry").exists()
    assert export.files() == {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert str(tmp_path / "out" / "overview.json") in capsys.readouterr().out


@pytest.mark.parametrize("board", boards(), ids=lambda board: board.name)
def test_a_dashboard_can_be_imported(board: Board) -> None:
    """Ids are unique and fixed, no two panels overlap, and the data source is the user's choice."""
    tree = json.loads(export.files()[f"{board.name}.json"])

    assert f"lakebed-{board.name}" == tree["uid"]
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in tree["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        assert "${datasource}" == panel["datasource"]["uid"]
        taken |= cells


def test_the_rules_are_a_rules_file_with_a_runbook_for_each() -> None:
    """Prometheus' own shape, unique names, durations it reads, and every link ends at a heading."""
    tree = yaml.safe_load(rules())
    listed = [rule for group in tree["groups"] for rule in group["rules"]]
    headings = re.findall(r"^## (\w+)$", (ROOT / RUNBOOK).read_text(), flags=re.M)

    assert len({rule["alert"] for rule in listed}) == len(ALERTS) == len(listed)
    for rule in listed:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        assert re.fullmatch(r"\d+[smhd]", rule["for"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook"].split("#")[1] in [heading.lower() for heading in headings]
    assert [anchor(alert) for alert in ALERTS] == [heading.lower() for heading in headings]
