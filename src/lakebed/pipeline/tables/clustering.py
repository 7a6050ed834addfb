"""The order of rows inside files, so that ranges of columns are narrow and readers skip files and row groups. Pure.

One column is sorted. Several are laid along a Z-order curve: rows that are near in each of them are near in the file,
so that a condition on any of them skips about as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS_MAX = 4  # more would leave each of them with too few bits to matter
BITS = 16  # of each column's rank


def clustered(rows: Any, columns: Sequence[str]) -> Any:
    """The same rows, ordered by these columns; those that have no order, or are not there, are left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chosen = [name for name in columns if name in rows.column_names and _has_order(rows.schema.field(name).type)]
    if not chosen or rows.num_rows < 2:
        return rows
    if len(chosen) == 1:
        order = pc.sort_indices(rows.column(chosen[0]))
        return rows.take(order)
    curve = z_order([rows.column(name) for name in chosen[:COLUMNS_MAX]])
    return rows.take(pc.sort_indices(pa.table({"z": curve}), sort_keys=[("z", "ascending")]))


def z_order(columns: Sequence[Any]) -> Any:
    """Each row's place on the curve: the bits of its ranks in the columns, taken in turn, the highest first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    place = pa.repeat(pa.scalar(0, pa.uint64()), len(columns[0]))
    ranks = [_scaled(column) for column in columns]
    one = pa.scalar(1, pa.uint64())
    for bit in reversed(range(BITS)):
        for rank in ranks:
            digit = pc.bit_wise_and(pc.shift_right(rank, pa.scalar(bit, pa.uint64())), one)
            place = pc.bit_wise_or(pc.shift_left(place, one), digit)
    return place


def _scaled(column: Any) -> Any:
    """The ranks of values, spread over all bits: equal values have equal ranks, nulls the highest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ranks = pc.rank(column, sort_keys="ascending", tiebreaker="dense")
    highest = pc.max(ranks).as_py() or 1
    spread = pc.divide(pc.multiply(pc.cast(ranks, pa.float64()), float((1 << BITS) - 1)), float(highest))
    return pc.cast(pc.floor(spread), pa.uint64())


def _has_order(kind: Any) -> bool:
    import pyarrow.types as t

    return not (t.is_nested(kind) or t.is_null(kind))
