"""What happens when rows have other columns than their table: one policy, for bronze and silver.

| | a new column | a missing column | another type |
|---|---|---|---|
| evolve | is added, nullable | is null | refused |
| freeze | refused | refused | refused |
| discard | is left out, and recorded | is null | refused |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from lakebed.ticks.model import BadManifest

Drift = Literal["evolve", "freeze", "discard"]


class Fit(msgspec.Struct, frozen=True):
    """The table's columns after a write, and which columns its rows add or lack."""

    columns: dict[str, str]
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()


def fit(name: str, held: Mapping[str, str], coming: Mapping[str, str], drift: Drift) -> Fit:
    """How rows with the columns `coming` go into a table that has `held` (empty: a new table). Raises BadManifest."""
    if not held:
        return Fit(dict(coming))
    known = {column.casefold(): column for column in held}
    for column, kind in coming.items():
        same = known.get(column.casefold())
        if same is not None and (same != column or held[same] != kind):
            raise BadManifest(
                "schema_conflict",
                f"table {name!r}: column {column!r} is {kind}, but the table has {same!r} as {held[same]}",
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
    return Fit({**held, **{column: coming[column] for column in new}}, added=new, missing=missing)
