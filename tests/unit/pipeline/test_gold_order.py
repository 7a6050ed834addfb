"""Gold models: the order they run in, and when a table needs no new version. No Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.pipeline.gold.models import BadModel, Model, Origin, in_order, read_models
from lakebed.pipeline.settings import PipelineSettings


def model(name: str, *refs: str) -> Model:
    return Model(name, "select 1 from " + ", ".join(f"{{{{ ref('{ref}') }}}}" for ref in refs))


def test_models_run_after_what_they_read() -> None:
    """The order follows the refs, not the names."""
    models = [model("a", "z", "orders"), model("m", "orders"), model("z", "m")]

    assert ["m", "z", "a"] == [one.name for one in in_order(models, {"orders"})]


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ([model("a", "b"), model("b", "a")], "in a circle"),
        ([model("a", "a")], "in a circle"),
        ([model("a", "nothing")], "no table of silver or gold"),
        ([model("orders", "orders")], "name of a silver table"),
        ([Model("a", "select 1")], "reads nothing"),
    ],
)
def test_models_that_cannot_run_are_refused_before_any_runs(models: list[Model], told: str) -> None:
    """Circles, unknown tables and clashing names are found from the text alone."""
    with pytest.raises(BadModel, match=told):
        in_order(models, {"orders"})


def test_marks_become_views() -> None:
    """Spaces and both quotes are fine in a mark."""
    one = Model("a", "select * from {{ref(\"x\")}} join {{ ref( 'y' ) }}")

    assert one.with_views({"x": "v1", "y": "v2"}) == "select * from `v1` join `v2`"


def test_a_table_is_covered_by_the_same_or_later_sources_only() -> None:
    """Other SQL, other sources or an older one need a new version."""
    held = Origin({"a": 3, "b": 5}, "s")

    assert held.covers(Origin({"a": 3, "b": 5}, "s"))
    assert held.covers(Origin({"a": 2, "b": 5}, "s"))
    assert not held.covers(Origin({"a": 4, "b": 5}, "s"))
    assert not held.covers(Origin({"a": 3, "b": 5}, "other"))
    assert not held.covers(Origin({"a": 3}, "s"))


def test_the_examples_can_run(tmp_path: Path) -> None:
    """What Lakebed ships is in order, and a bad file name is refused."""
    folder = PipelineSettings(contracts="examples", gold="examples").gold_folder
    assert folder is not None
    (tmp_path / "Bad Name.sql").write_text("select 1")

    made = in_order(read_models(folder), {"orders", "customers"})

    assert ["spent_by_customer", "spent_by_country"] == [one.name for one in made]
    with pytest.raises(BadModel, match="no table name"):
        read_models(tmp_path)
