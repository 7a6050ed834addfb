"""SQL by the names of tables: only reading, only the tables that are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from lakebed.cli.main import run
from lakebed.core.errors import Invalid, NotFound
from lakebed.pipeline.tables.query import query, resolve, tables_of

TABLES = {
    "gold/shop/by_customer": pa.table({"id": [1, 2, 3], "spent": [1.5, 2.5, 3.5]}),
    "batches/samples": pa.table({"id": [2, 3]}),
    "bronze/acme/shop/orders": pa.table({"id": [3]}),
}


class Opened:
    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, path: str) -> Any:
        self.paths.append(path)
        return ds.dataset(TABLES[path])


@pytest.mark.parametrize("orders", ["bronze.acme.shop.orders", 'bronze."acme.shop".orders'])
def test_tables_are_joined_by_their_names(orders: str) -> None:
    """Two, three and four parts, and a name of the query itself."""
    opened = Opened()
    text = f"""
        with few as (select 3 as id)
        select by_customer.id, spent from gold.shop.by_customer
        join batches.samples using (id) join {orders} using (id) join few using (id)
    """

    assert [{"id": 3, "spent": 3.5}] == query(text, opened).to_pylist()
    assert sorted(TABLES) == sorted(opened.paths)


def test_only_tables_that_are_named_are_opened() -> None:
    """A lake of thousands of tables costs a query nothing."""
    opened = Opened()

    assert [{"n": 2}] == query("select count(*) as n from gold.shop.by_customer where id > 1", opened).to_pylist()
    assert ["gold/shop/by_customer"] == opened.paths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "selec 1",
        "drop table gold.shop.by_customer",
        "select 1; select 2",
        "copy (select 1) to 'file.csv'",
        "attach 'x.db'",
        "select * from read_csv('/etc/hostname')",
        "select * from '/etc/hostname'",
        "select * from nothing",
        "select nothing from gold.shop.by_customer",
        "select * from opened",
    ],
)
def test_what_is_not_a_query_over_tables_is_refused(text: str) -> None:
    """Statements that change something, files, variables of the program and mistakes: each is Invalid."""
    opened = Opened()

    with pytest.raises(Invalid):
        query(text, opened)


def test_folders_in_the_middle_may_be_left_out() -> None:
    """The organisation is left out where only one has the table; otherwise the choices are named."""
    known = ["bronze/acme/shop/orders", "bronze/acme/shop/users", "bronze/zoo/shop/users", "gold/acme/shop/orders"]

    assert "bronze/acme/shop/orders" == resolve("bronze/shop/orders", known)
    assert "bronze/acme/shop/orders" == resolve("bronze/orders", known)
    assert "gold/acme/shop/orders" == resolve("gold/acme/shop/orders", known)
    with pytest.raises(NotFound) as several:
        resolve("bronze/shop/users", known)
    assert "bronze/zoo/shop/users" in several.value.hint
    with pytest.raises(NotFound) as near:
        resolve("bronze/acme/shop/ordres", known)
    assert "bronze/acme/shop/orders" in near.value.hint
    with pytest.raises(NotFound):
        resolve("bronze", known)


def test_a_query_can_run_on_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--engine spark` gives the statement to the session of the settings, and its rows come in the same formats."""
    asked: list[Any] = []

    class Session:
        def __init__(self, session: Any, settings: Any) -> None:
            asked.append(session)

        def install(self) -> Session:
            return self

        def sql(self, text: str) -> Session:
            asked.append(text)
            return self

        def toArrow(self) -> Any:
            return pa.table({"n": [1, 2]})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAKEBED_STORE_URL", "memory:")
    monkeypatch.setattr("lakebed.spark.session.open_session", lambda settings: settings.master)
    monkeypatch.setattr("lakebed.pipeline.tables.sql.SqlTables", Session)
    monkeypatch.setenv("LAKEBED_SPARK_MASTER", "spark://cluster:7077")

    code = run(["sql", "--engine", "spark", "select 1", "-o", "csv"])

    assert (0, '"n"\n1\n2\n') == (code, capsys.readouterr().out)
    assert ["spark://cluster:7077", "select 1"] == asked


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("select 1; select 2", "more than one statement"),
        ("drop table t", "only select statements"),
    ],
)
def test_what_is_no_query_is_refused_in_words(text: str, why: str) -> None:
    """The reason names what is wrong with the text, not how it is checked."""
    with pytest.raises(Invalid, match=f"not a query: {why}"):
        tables_of(text)


@pytest.mark.parametrize("text", ["show tables", "show all tables", "show schemas", "show databases"])
def test_a_query_that_lists_tables_names_the_command(text: str) -> None:
    """The engine knows only the tables that a query names, so it would answer that there are none."""
    with pytest.raises(Invalid, match="cannot list the tables") as refused:
        tables_of(text)

    assert "lakebed tables list" in refused.value.hint
    assert {("bronze", "shop", "orders")} == tables_of("describe bronze.shop.orders")
