"""Drift: the table in the module's docstring, row by row."""

from __future__ import annotations

import pytest

from lakebed.pipeline.bronze.drift import Drift, fit
from lakebed.ticks.model import BadManifest

HELD = {"id": "long", "note": "string"}
WIDER = {"id": "long", "note": "string", "more": "double"}
NARROW = {"id": "long"}


def test_evolve_adds_new_columns_and_fills_missing_ones() -> None:
    """The table grows at its end and never shrinks."""
    assert (("more",), ()) == (fit("t", HELD, WIDER, "evolve").added, fit("t", HELD, WIDER, "evolve").missing)
    assert WIDER == fit("t", HELD, WIDER, "evolve").columns
    assert (HELD, ("note",)) == (fit("t", HELD, NARROW, "evolve").columns, fit("t", HELD, NARROW, "evolve").missing)


def test_discard_leaves_new_columns_out_and_names_them() -> None:
    """Nothing is dropped without a record."""
    fitted = fit("t", HELD, WIDER, "discard")

    assert (HELD, ("more",), ()) == (fitted.columns, fitted.discarded, fitted.added)


@pytest.mark.parametrize("coming", [WIDER, NARROW])
def test_freeze_refuses_any_difference(coming: dict[str, str]) -> None:
    """A frozen table takes exactly its own columns."""
    with pytest.raises(BadManifest, match="frozen"):
        fit("t", HELD, coming, "freeze")
    assert HELD == fit("t", HELD, HELD, "freeze").columns


@pytest.mark.parametrize("drift", ["evolve", "freeze", "discard"])
@pytest.mark.parametrize("coming", [{"id": "string", "note": "string"}, {"ID": "long", "note": "string"}])
def test_a_column_never_changes_its_type_or_the_case_of_its_name(drift: Drift, coming: dict[str, str]) -> None:
    """Whatever the policy: such rows are refused."""
    with pytest.raises(BadManifest) as refused:
        fit("t", HELD, coming, drift)

    assert refused.value.detail["error_class"] == "schema_conflict"


def test_a_new_table_takes_what_comes() -> None:
    """The first rows make the columns."""
    assert WIDER == fit("t", {}, WIDER, "freeze").columns


def test_a_safe_widening_is_taken_and_a_narrower_type_is_no_difference() -> None:
    """An integer fits a long column under every policy; a long widens an integer column only where tables evolve."""
    held = {"id": "integer", "price": "decimal(10,2)", "tags": {"type": "array", "elementType": "string"}}
    wide = {"id": "long", "price": "decimal(12,2)", "tags": {"type": "array", "elementType": "string"}}

    fitted = fit("t", held, wide, "evolve")

    assert (wide, ("id", "price")) == (fitted.columns, fitted.widened)
    for drift in ("evolve", "freeze", "discard"):
        assert (wide, ()) == ((one := fit("t", wide, held, drift)).columns, one.widened)  # type: ignore[arg-type]
    for refused in ("freeze", "discard"):
        with pytest.raises(BadManifest, match="is long, but the table has 'id' as integer"):
            fit("t", held, wide, refused)  # type: ignore[arg-type]
