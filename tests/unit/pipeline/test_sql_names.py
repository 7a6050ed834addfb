"""Tables by name in SQL: which names are tables, and what the statement becomes."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Invalid
from lakebed.pipeline.tables.sql_names import rewrite_names, table_of, used_columns

TABLES = (
    "silver/acme/shop/orders",
    "silver/acme/shop/customers",
    "gold/acme/shop/spent",
    "batches/samples",
    "bronze/ticks/acme/shop/raw",
)


def rewritten(text: str) -> str:
    return rewrite_names(text, lambda parts: table_of(parts, TABLES), lambda table: f"<{table.rsplit('/', 1)[-1]}>")


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("silver.acme.shop.orders", "silver/acme/shop/orders"),
        ("silver.shop.orders", "silver/acme/shop/orders"),
        ("SILVER.shop.Orders", "silver/acme/shop/orders"),
        ("batches.samples", "batches/samples"),
        ("bronze.ticks.acme.shop.raw", "bronze/ticks/acme/shop/raw"),
        ("bronze.acme.shop.raw", "bronze/ticks/acme/shop/raw"),
        ("bronze.shop.raw", "bronze/ticks/acme/shop/raw"),
        ("shop.orders", ""),
        ("silver.shop.nope", ""),
    ],
)
def test_a_name_is_a_path_with_or_without_its_org(name: str, table: str) -> None:
    """The org may be left out while only one has such a table."""
    assert table == table_of(name.split("."), TABLES)


def test_a_name_that_two_orgs_have_is_refused() -> None:
    """Nothing is guessed."""
    with pytest.raises(Invalid, match="several orgs"):
        table_of(["silver", "shop", "orders"], ["silver/a/shop/orders", "silver/b/shop/orders"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select 1 from silver.shop.orders", "select 1 from <orders> AS `orders`"),
        ("select o.x from silver.shop.orders o", "select o.x from <orders> o"),
        ("select 1 from silver.shop.orders as o where 1=1", "select 1 from <orders> as o where 1=1"),
        ("from `silver`.`shop`.`orders` where x", "from <orders> AS `orders` where x"),
        (
            "select silver.shop.orders.total, orders.id from silver.shop.orders",
            "select `orders`.`total`, orders.id from <orders> AS `orders`",
        ),
        (
            "select 1 from silver.shop.orders where silver.shop.orders.total > 1",
            "select 1 from <orders> AS `orders` where `orders`.`total` > 1",
        ),
        (
            "select 1 from silver.shop.orders a, silver.shop.customers b left join gold.shop.spent using (c)",
            "select 1 from <orders> a, <customers> b left join <spent> AS `spent` using (c)",
        ),
        ("select 'from batches.samples' -- from batches.samples\n",) * 2,
        ("select x from (select * from batches.samples) t", "select x from (select * from <samples> AS `samples`) t"),
        ("select batches.samples, f(a, b) from t as batches", "select batches.samples, f(a, b) from t as batches"),
        ("select 1 from other.db.t, batches.samples", "select 1 from other.db.t, <samples> AS `samples`"),
        ("with a as (from batches.samples) from a", "with a as (from <samples> AS `samples`) from a"),
        ("describe silver.shop.orders", "describe <orders>"),
    ],
)  # fmt: skip
def test_only_names_of_relations_are_replaced(text: str, expected: str) -> None:
    """Literals, comments, aliases and columns stay as they are."""
    assert expected == rewritten(text)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("select a, sum(B) from t where c > 1", "abc"),
        ("select count(*) from t", "a"),
        ("select a * 2 from t", "a"),
        ("select (a) * 2 from t", "a"),
        ("select * from t", "abcd"),
        ("select t.* from t", "abcd"),
        ("select a, * except (b) from t", "abcd"),
        ("select struct(*) from t", "abcd"),
        ("select a from t natural join u", "abcd"),
        ("from t", "abcd"),
        ("from t |> where a > 1", "abcd"),
        ("select 'b' from t where `d` is null -- c", "d"),
        ("select x from (select * from t)", "abcd"),
    ],
)
def test_the_columns_of_a_statement_are_never_too_few(text: str, columns: str) -> None:
    """Only what is named is read, and everything where a statement may mean everything."""
    assert list(columns) == used_columns(text, ["a", "b", "c", "d"])
