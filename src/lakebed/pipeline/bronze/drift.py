"""What happens when rows have other columns than their table: one policy, for bronze and silver.

| | a new column | a missing column | a wider type | another type |
|---|---|---|---|---|
| evolve | is added, nullable | is null | the table's column gets it | refused |
| freeze | refused | refused | refused | refused |
| discard | is left out, and recorded | is null | refused | refused |

A narrower type (an integer for a long column) is always taken: its values are values of the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lakebed.delta.types import widens, word_of
from lakebed.ticks.model import BadManifest

Drift = Literal["evolve", "freeze", "discard"]


class Fit(msgspec.Struct, frozen=True):
    """The table's columns after a write, and which columns its rows add or lack."""

    columns: dict[str, Any]
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()


def fit(name: str, held: Mapping[str, Any], coming: Mapping[str, Any], drift: Drift) -> Fit:
    """How rows with the columns `coming` go into a table that has `held` (empty: a new table). Raises BadManifest."""
    if not held:
        return Fit(dict(coming))
    known = {column.casefold(): column for column in held}
    wider = {}
    for column, kind in coming.items():
        same = known.get(column.casefold())
        if same is None or (same == column and (word_of(held[same]) == word_of(kind) or widens(kind, held[same]))):
            continue
        if same == column and drift == "evolve" and widens(held[same], kind):
            wider[column] = kind
            continue
        raise BadManifest(
            "schema_conflict",
            f"table {name!r}: column {column!r} is {word_of(kind)}, but the table has {same!r} as "
            f"{word_of(held[same])}",
            hint="rename the column, or drop the table",
        )
    new = tuple(column for column in coming if column not in held)
    missing = tuple(column for column in held if column not in coming)
    if drift == "freeze" and (new or missing):
        raise BadManifest(
            "schema_frozen",
            f"table {name!r} is frozen: "
            + "; ".join([f"{c!r} is new" for c in new] + [f"{c!r} is missing" for c in missing]),
        )
    if drift == "discard":
        return Fit(dict(held), missing=missing, discarded=new)
    columns = {**held, **wider, **{column: coming[column] for column in new}}
    return Fit(columns, added=new, missing=missing, widened=tuple(wider))
