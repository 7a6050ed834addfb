# ruff: noqa: UP037, F821 (names of tables in annotations are text)
"""Models: what a file says, what it reads, the order they run in, and what is refused before a run. No Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lakebed import pipeline as lp
from lakebed.core.errors import Invalid
from lakebed.pipeline.models import folder as folder_module
from lakebed.pipeline.models.definition import BadModel, Model, ModelInput, model_of
from lakebed.pipeline.models.folder import python_models, read_models, sql_model, with_views
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.settings import PipelineSettings

PYTHON = '''
"""Two models and a helper."""
from __future__ import annotations
from typing import TYPE_CHECKING
from lakebed import pipeline as lp
if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RATE = 2

def doubled(rows):
    return rows * RATE

@lp.table(keys=["id"], incremental="merge", every="5m")
def first(orders: lp.Changes["silver.orders"]) -> DataFrame:
    return doubled(orders)

@lp.table
def second(rows: lp.Table[first], feed: lp.Table["bronze/acme/shop/raw"]) -> DataFrame:
    return rows
'''


def model(name: str, *refs: str) -> Model:
    return sql_model(name, "select 1 from " + ", ".join(f"{{{{ ref('{ref}') }}}}" for ref in refs))


def test_a_python_model_is_a_function_that_says_what_it_reads_and_how_it_is_kept() -> None:
    """Annotations name sources; options are typed; the function itself can still be called."""

    @lp.table(keys=["id"], incremental="merge", expect={"total >= 0": "fail"}, cluster_by=["id"])
    def spent(orders: lp.Changes["silver.orders"], people: lp.Table["silver.people"]) -> Any:  # type: ignore[valid-type]
        return (orders, people)

    found = model_of(spent)

    reads = (ModelInput("silver.orders", "changes", "orders"), ModelInput("silver.people", "table", "people"))
    assert ("spent", reads) == (found.name, found.inputs)
    assert (("id",), "merge", {"total >= 0": "fail"}) == (
        found.options.keys,
        found.options.incremental,
        found.options.expect,
    )
    assert (1, 2) == spent(1, 2)
    assert ("silver.orders",) == found.drivers


def test_importing_the_api_loads_no_spark() -> None:
    """A light install, and the command line, read models without it."""
    text = (
        "import sys; from lakebed import pipeline as lp; lp.table; lp.Changes; lp.run_model;"
        "sys.exit(any(name.partition('.')[0] in ('pyspark', 'pyarrow') for name in sys.modules))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", text], timeout=60).returncode


def test_a_file_of_python_may_hold_several_models_and_helpers(tmp_path: Path) -> None:
    """A change of the helper changes both; a change of one model, of a comment or of a schedule changes no other."""
    path = tmp_path / "sales.py"

    def hashes(text: str) -> dict[str, str]:
        path.write_text(text)
        return {one.name: one.sha256 for one in python_models(path)}

    before = hashes(PYTHON)
    assert ["first", "second"] == list(before)
    assert before == hashes(PYTHON.replace("every=", "time='at', every=") + "\n# a comment\n")
    helper, one = (
        hashes(PYTHON.replace("RATE = 2", "RATE = 3")),
        hashes(PYTHON.replace("return rows\n", "return None\n")),
    )
    assert [True, True] == [helper[name] != before[name] for name in before]
    assert [False, True] == [one[name] != before[name] for name in before]


def test_sql_says_its_options_in_lines_of_comment() -> None:
    """The same options; other comments are none; a name that is nearly one is refused with it."""
    text = (
        "-- What customers spent. Note: nightly.\n-- keys: id, day\n-- incremental: merge\n-- partition_by: day\n"
        "-- expect: total >= 0 | quarantine\n-- expect: id is not null | fail\n-- cron: 0 3 * * *\n"
        "select * from {{ changes('orders') }} -- keys: other\n"
    )

    found = sql_model("spent", text)

    assert (("id", "day"), ("day",), "0 3 * * *") == (
        found.options.keys,
        found.options.partitions,
        found.options.cron,
    )
    assert {"total >= 0": "quarantine", "id is not null": "fail"} == found.options.expect
    assert (ModelInput("orders", "changes"),) == found.inputs
    with pytest.raises(BadModel, match="no option 'partitons'"):
        sql_model("spent", "-- partitons: day\nselect 1 from silver.orders")


def test_a_python_model_has_the_same_options_as_a_sql_one() -> None:
    """Each action of an expectation among them; a run reads nothing but these options, whatever the language."""
    actions = {"total >= 0": "fail", "day <> 'x'": "drop", "email like '%@%'": "quarantine", "id < 9": "warn"}

    @lp.table(keys=["id"], incremental="merge", partitions=["day"], expect=actions, cron="0 3 * * *", time="at")  # type: ignore[arg-type]
    def spent(orders: lp.Changes["silver.orders"]) -> Any: ...  # type: ignore[valid-type]

    header = "".join(f"-- expect: {condition} | {action}\n" for condition, action in actions.items())
    header += "-- keys: id\n-- incremental: merge\n-- partitions: day\n-- cron: 0 3 * * *\n-- time: at\n"
    in_sql = sql_model("spent", f"{header}select * from {{{{ changes('silver.orders') }}}}")

    assert actions == model_of(spent).options.expect
    assert in_sql.options == model_of(spent).options


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"expect": {"total >= 0": "shout"}}, "shout"),
        ({"incremental": "merge"}, "needs keys"),
        ({"every": "5m", "cron": "* * * * *"}, "both every and cron"),
        ({"cron": "61 * * * *"}, "minute between 0 and 59"),
    ],
)
def test_options_of_a_python_model_are_refused_as_those_of_a_sql_one(options: dict[str, Any], reported: str) -> None:
    """With the name of the model."""
    with pytest.raises(BadModel, match=reported):

        @lp.table(**options)
        def spent(orders: lp.Table["silver.orders"]) -> Any: ...  # type: ignore[valid-type]

        model_of(spent).check()


def test_a_circle_through_both_languages_is_refused() -> None:
    """The graph knows no language."""

    @lp.table
    def a(rows: lp.Table["gold.b"]) -> Any: ...  # type: ignore[valid-type]

    with pytest.raises(BadModel, match="in a circle"):
        graph_of([model_of(a), model("b", "gold.a")], {"orders"})


def test_statements_of_sparks_declarative_pipelines_are_models_as_they_are() -> None:
    """A materialized view is replaced whole; a streaming table gets the changes of the streams it reads."""
    view = sql_model(
        "a", "create or refresh materialized view a as\nselect * from silver.orders join gold.b using (id);"
    )
    table = sql_model(
        "b", "CREATE STREAMING TABLE b COMMENT 'new ones' PARTITIONED BY (day) AS SELECT * FROM STREAM(silver.orders) o"
    )

    assert (ModelInput("silver.orders"), ModelInput("gold.b")) == view.inputs
    assert ("append", ("day",), "new ones") == (
        table.options.incremental,
        table.options.partitions,
        table.options.comment,
    )
    assert (ModelInput("silver.orders", "changes"),) == table.inputs
    assert "SELECT * FROM `v1` o" == with_views(table.sql, {("silver.orders", "changes"): "v1"})
    with pytest.raises(BadModel, match="creates 'other'"):
        sql_model("a", "create materialized view other as select * from silver.orders")


def test_marks_and_plain_names_become_views() -> None:
    """Spaces and both quotes are fine in a mark; columns qualified by a plain name follow it."""
    text = "select silver.z.id from {{ref(\"x\")}} join {{ changes( 'y' ) }} join silver.z using (id)"
    one = sql_model("a", f"-- incremental: append\n{text}")

    shown = with_views(one.sql, {("x", "table"): "v1", ("y", "changes"): "v2", ("silver.z", "table"): "v3"})

    assert "select `z`.`id` from `v1` join `v2` join `v3` AS `z` using (id)" == shown


def test_models_run_after_what_they_read() -> None:
    """The order follows the refs, not the names or the language; sources are named in full."""
    made = graph_of([model("a", "z", "orders"), model("m", "silver.orders"), model("z", "gold.m")], {"orders"})

    assert ["m", "z", "a"] == list(made.models)
    assert ("gold.z", "silver.orders") == made.models["a"].sources
    assert "select 1 from {{ ref('gold.z') }}, {{ ref('silver.orders') }}" == made.models["a"].sql


def test_a_selection_takes_what_is_below_and_above() -> None:
    """`name+`, `+name` and both; an unknown name is refused with the nearest."""
    made = graph_of([model("a", "orders"), model("b", "a"), model("c", "b"), model("d", "orders")], {"orders"})

    chosen = {pattern: made.chosen(pattern.split()) for pattern in ("", "b", "b+", "+b", "+b+", "a d")}

    assert ["b"] == chosen["b"]
    assert (["b", "c"], ["a", "b"], ["a", "b", "c"]) == (chosen["b+"], chosen["+b"], chosen["+b+"])
    assert ({"a", "d"}, {"a", "b", "c", "d"}) == (set(chosen["a d"]), set(chosen[""]))
    with pytest.raises(BadModel, match="no model 'e'"):
        made.chosen(["e"])


@pytest.mark.parametrize(
    ("models", "reported"),
    [
        ([model("a", "b"), model("b", "c"), model("c", "a")], "in a circle: [abc] → [abc] → [abc] → [abc]"),
        ([model("a", "a")], "in a circle"),
        ([model("a", "nothing")], "no table of silver or gold"),
        ([model("a", "silver.oders")], "'silver.oders'"),
        ([model("a", "sliver.orders")], "no layer 'sliver'"),
        ([model("orders", "silver.orders")], "name of a silver table"),
    ],
)
def test_models_that_cannot_run_are_refused_before_any_runs(models: list[Model], reported: str) -> None:
    """Circles, unknown tables and clashing names are found from the text alone."""
    with pytest.raises(BadModel, match=reported):
        graph_of(models, {"orders"})


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """Of tables, of layers and of options."""
    for wrong, near in (("silver.oders", "silver.orders"), ("sliver.orders", "silver")):
        with pytest.raises(BadModel) as refused:
            graph_of([model("a", wrong)], {"orders"})
        assert near in refused.value.hint


@pytest.mark.parametrize(
    ("header", "reported"),
    [
        ("-- incremental: merge\n", "needs keys"),
        ("-- incremental: replace\n", "needs partitions"),
        ("-- incremental: sometimes\n", "sometimes"),
        ("-- every: 5m\n-- cron: * * * * *\n", "both every and cron"),
        ("-- every: soon\n", "no interval"),
        ("-- cron: 61 * * * *\n", "minute between 0 and 59"),
        ("-- cron: 0 0 30 2 *\n", "matches no moment"),
        ("-- expect: total >= 0\n", "no expectation"),
        ("-- expect: total >= 0 | shout\n", "shout"),
    ],
)
def test_options_that_contradict_are_refused_with_the_file(header: str, reported: str) -> None:
    """Before Spark starts."""
    with pytest.raises(BadModel, match=reported):
        sql_model("a", f"{header}select * from silver.orders")


def test_sql_that_names_no_table_is_refused() -> None:
    """It would replace a table by something that never changes with its sources."""
    with pytest.raises(BadModel, match="reads nothing"):
        sql_model("a", "select 1")


def test_a_full_model_cannot_read_changes_and_only_an_incremental_one_itself() -> None:
    """What reads itself has a schema, for the time before its first version."""
    reads = "select * from {{ changes('orders') }} join {{ ref('a') }} using (id)"

    with pytest.raises(BadModel, match="replaces its table whole"):
        sql_model("b", reads)
    with pytest.raises(BadModel, match="needs a schema"):
        graph_of([sql_model("a", f"-- keys: id\n-- incremental: merge\n{reads}")], {"orders"})
    made = graph_of([sql_model("a", f"-- keys: id\n-- incremental: merge\n-- schema: id long\n{reads}")], {"orders"})
    assert ("silver.orders",) == made.models["a"].sources


def test_a_parameter_without_a_table_and_a_file_that_fails_are_named(tmp_path: Path) -> None:
    """With what to write, and with the file's own error."""

    @lp.table
    def spent(orders: Any) -> Any: ...

    with pytest.raises(BadModel, match="'orders' names no table"):
        model_of(spent)
    (tmp_path / "bad.py").write_text("import nothing_of_the_kind")
    with pytest.raises(BadModel, match=r"bad\.py cannot be loaded: ModuleNotFoundError"):
        read_models(tmp_path)
    with pytest.raises(Invalid, match="no option 'spnt'"):
        folder_module.options_of({"spnt": 1}, "spent")


def test_models_are_read_up_to_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; a name that is no table's, too large a file, two of one name and too many are refused with the file."""
    (tmp_path / "b.sql").write_text("select * from silver.x")
    (tmp_path / "a.sql").write_text("select * from silver.y")
    assert ["a", "b"] == [one.name for one in read_models(tmp_path)]
    monkeypatch.setattr(folder_module, "FILE_BYTES_MAX", 7)
    with pytest.raises(BadModel, match=r"a\.sql has more than 7 bytes"):
        read_models(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(folder_module, "MODELS_MAX", 1)
    with pytest.raises(BadModel, match="more than 1 models"):
        read_models(tmp_path)
    monkeypatch.undo()
    (tmp_path / "c.py").write_text(
        "from lakebed import pipeline as lp\n@lp.table\ndef a(x: lp.Table['silver.x']): ...\n"
    )
    with pytest.raises(BadModel, match=r"c\.py: a\.sql defines a model 'a' too"):
        read_models(tmp_path)
    (tmp_path / "c.py").rename(tmp_path / "Bad-Name.py")
    with pytest.raises(BadModel, match="'Bad-Name' is no module name"):
        read_models(tmp_path)


def test_the_examples_are_one_graph_of_python_and_sql() -> None:
    """What Lakebed ships can run."""
    folder = PipelineSettings(contracts="examples", gold="examples").gold_folder
    assert folder is not None

    made = graph_of(read_models(folder), {"orders", "customers"})

    assert ["spent_by_customer", "spent_by_country"] == list(made.models)
    assert [True, False] == [one.function is not None for one in made.models.values()]
