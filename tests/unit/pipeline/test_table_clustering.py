"""The order of rows in files: nothing is lost, and ranges become narrow."""

from __future__ import annotations

import random

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakebed.pipeline.tables.clustering import clustered

values = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(-9, 9)), st.sampled_from(["a", "b", "ü", None])), max_size=30
)


@given(values, st.sampled_from([("n",), ("n", "s"), ("s", "n", "nope", "l")]))
def test_rows_stay_the_same_and_only_their_order_changes(
    pairs: list[tuple[int | None, str | None]], columns: tuple[str, ...]
) -> None:
    """Nulls, texts, columns that are not there and lists included."""
    rows = pa.table(
        {
            "n": pa.array([n for n, _ in pairs], pa.int64()),
            "s": pa.array([s for _, s in pairs], pa.string()),
            "l": pa.array([[n] for n, _ in pairs], pa.list_(pa.int64())),
        }
    )

    made = clustered(rows, columns)

    def listed(table: pa.Table) -> list[str]:
        return sorted(map(str, table.to_pylist()))

    assert listed(rows) == listed(made)
    if columns == ("n",):
        order = [99 if n is None else n for n in made["n"].to_pylist()]
        assert sorted(order) == order


def test_groups_of_rows_are_narrow_in_every_column_of_the_curve() -> None:
    """Of 16 groups, a value of either column is in about a quarter; sorted by one alone, the other would be in all."""
    rng = random.Random(7)
    rows = pa.table({name: pa.array([rng.randrange(10_000) for _ in range(4096)]) for name in ("x", "y")})

    made = clustered(rows, ["x", "y"])

    for name in ("x", "y"):
        groups = [made[name].slice(at, 256).to_pylist() for at in range(0, 4096, 256)]
        hit = [sum(min(group) <= wanted <= max(group) for group in groups) for wanted in range(0, 10_000, 500)]
        assert sum(hit) / len(hit) <= 7, hit  # sorted by x alone, y would be in all 16
