"""A merge file by file, in Arrow: which rows stay, in which order, with which columns. No Spark."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.pipeline.tables.files import fitted
from lakebed.pipeline.tables.merge import last_of_each, without

keys = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), max_size=12)


def rows(pairs: list[tuple[int, str]]) -> pa.Table:
    columns = {"id": pa.array([n for n, _ in pairs], pa.int64()), "kind": pa.array([k for _, k in pairs], pa.string())}
    return pa.table({**columns, "at": pa.array(range(len(pairs)), pa.int64())})


@given(keys, keys)
def test_what_stays_is_what_does_not_come(held: list[tuple[int, str]], coming: list[tuple[int, str]]) -> None:
    """As a loop over rows would do it, order included."""
    left = without(rows(held), rows(coming), ("id", "kind"))

    assert [n for n, pair in enumerate(held) if pair not in coming] == left["at"].to_pylist()


@given(keys)
def test_the_last_of_each_key_stays(pairs: list[tuple[int, str]]) -> None:
    """One row a key, in the order of what is left."""
    last = {pair: n for n, pair in enumerate(pairs)}

    assert sorted(last.values()) == last_of_each(rows(pairs), ("id", "kind"))["at"].to_pylist()


@pytest.mark.parametrize(
    "values",
    [
        pa.array([date(2026, 1, n) for n in (1, 2)]),
        pa.array([datetime(2026, 1, n, tzinfo=UTC) for n in (1, 2)], pa.timestamp("us", "UTC")),
        pa.array([Decimal("1.50"), Decimal("2.50")], pa.decimal128(12, 2)),
        pa.array(["é", ""]),
        pa.array([1, 2], pa.int8()),
    ],
    ids=str,
)
def test_every_type_that_may_be_a_key_is_compared(values: pa.Array) -> None:
    """What a manifest allows as a key can be merged by."""
    held = pa.table({"key": values, "note": ["a", "b"]})

    assert ["a"] == without(held, held.slice(1), ("key",))["note"].to_pylist()
    turned = pa.concat_tables([held, held.slice(1), held.slice(0, 1)])
    assert ["b", "a"] == last_of_each(turned, ("key",))["note"].to_pylist()


def test_rows_older_than_a_column_have_null_there() -> None:
    """Columns come in the table's order, and as the table keeps them."""
    schema = pa.schema([("at", pa.int64()), ("more", pa.string()), ("id", pa.int64())])

    grown = fitted(rows([(7, "a")]), schema)

    assert (schema, {"at": [0], "more": [None], "id": [7]}) == (grown.schema, grown.to_pydict())
