"""SQL of somebody else: it reads the named tables within its limits, and reaches nothing besides them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet
import pytest

from lakebed.core.errors import Denied, Invalid, LakebedError, NotFound
from lakebed.pipeline.tables import explore
from lakebed.pipeline.tables.explore import Filter, QueryRows, TableExplorer, browse_sql, encoded, profile_sql, shown
from lakebed.pipeline.tables.query import (
    NAME_CHARS_MAX,
    QueryLimits,
    QueryResult,
    QueryTooSlow,
    resolve,
    run,
    sql_name,
    tables_of,
)
from support.tick_fixtures import context_of

ORDERS = pa.table({"id": list(range(120)), "city": ["Basel", "Bern", None] * 40, "it's": ['a"b'] * 120})
SECRET = "correct-horse-battery"
LIMITS = QueryLimits(seconds=10, rows=50)


def opened(path: str) -> Any:
    if path != "gold/acme/shop/orders":
        raise NotFound(f"there is no table {path}")
    return ds.dataset(ORDERS)


def ask(text: str, limits: QueryLimits = LIMITS) -> QueryResult:
    return run(text, opened, limits)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Files of the machine, in every form that DuckDB reads."""
    (tmp_path / "secret.csv").write_text(f"word\n{SECRET}\n")
    (tmp_path / "secret.json").write_text(f'{{"word": "{SECRET}"}}')
    pyarrow.parquet.write_table(pa.table({"word": [SECRET]}), tmp_path / "secret.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_csv('{dir}/secret.csv')",
        "select * from read_csv_auto('{dir}/secret.csv')",
        "select * from read_text('{dir}/secret.csv')",
        "select * from read_blob('{dir}/secret.csv')",
        "select * from read_json('{dir}/secret.json')",
        "select * from read_json_auto('{dir}/secret.json')",
        "select * from read_ndjson('{dir}/secret.json')",
        "select * from read_parquet('{dir}/secret.parquet')",
        "select * from parquet_scan('{dir}/secret.parquet')",
        "select * from parquet_metadata('{dir}/secret.parquet')",
        "select * from parquet_kv_metadata('{dir}/secret.parquet')",
        "select * from sniff_csv('{dir}/secret.csv')",
        "select * from glob('{dir}/*')",
        "select * from '{dir}/secret.csv'",
        'select * from "{dir}/secret.parquet"',
        "select * from '{dir}/*.parquet'",
        "select (select content from read_text('{dir}/secret.csv')) as word",
        "with x as (from '{dir}/secret.csv') select * from x",
        "from query('select * from read_csv(''{dir}/secret.csv'')')",
        "from query('from gold.acme.shop.orders')",
        "from query_table('{dir}/secret.csv')",
        "select * from read_duckdb('{dir}/x.db')",
        "select * from arrow_scan(0, 0, 0)",
        "select * from arrow_scan_dumb(1::pointer, 1::pointer, 1::pointer)",
        "select * from pandas_scan(1)",
        "select * from python_map_function()",
        "select * from duckdb_secrets()",
        "select * from duckdb_settings()",
        "copy (select 1) to '{dir}/out.csv'",
        "copy gold.acme.shop.orders to '{dir}/out.parquet'",
        "export database '{dir}/out'",
        "attach '{dir}/new.db' as other",
        "install httpfs",
        "load httpfs",
        "load '{dir}/evil.duckdb_extension'",
        "set enable_external_access = true",
        "set lock_configuration = false",
        "set memory_limit = '64GB'",
        "pragma database_list",
        "create table t as select 1",
        "create macro f() as 1",
        "insert into gold.acme.shop.orders values (1)",
        "delete from gold.acme.shop.orders",
        "call pragma_version()",
        "explain analyze select 1",
        "select 1; copy (select 1) to '{dir}/out.csv'",
        "select getenv('HOME')",
        "select * from opened",
        "select * from temp.main.rows_0",
        "select * from information_schema.tables",
    ],
)
def test_nothing_outside_the_named_tables_is_reached(text: str, secret: Path) -> None:
    """Files, other statements, settings, memory of the process: refused, nothing is written, no word gets out."""
    before = sorted(path.name for path in secret.iterdir())

    with pytest.raises(LakebedError) as refused:
        ask(text.replace("{dir}", str(secret)))

    assert SECRET not in str(refused.value)
    assert before == sorted(path.name for path in secret.iterdir())


def test_no_request_leaves_the_machine() -> None:
    """Addresses in every place where DuckDB takes one: the server that listens there hears nothing."""
    heard: list[str] = []

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    server = HTTPServer(("127.0.0.1", 0), Listening)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/x"
    try:
        for text in (
            f"select * from '{url}.parquet'",
            f"select * from '{url}.csv'",
            f"select * from read_parquet('{url}')",
            f"select * from read_text('{url}')",
            "select * from 's3://bucket/x.parquet'",
            f"attach '{url}.db'",
            f"install x from '{url}'",
        ):
            with pytest.raises(LakebedError):
                ask(text)
    finally:
        server.shutdown()
        server.server_close()

    assert [] == heard


@pytest.mark.parametrize(
    "text",
    [
        "select * from {}",
        "select * from gold.{}",
        "select {}()",
        "select {} from gold.acme.shop.orders",
        "select cast(1 as {})",
        "select 'a' collate {}",
    ],
)
def test_an_endless_name_is_refused_before_it_is_compared_with_others(text: str) -> None:
    """The engine looks for the nearest name, and its error would repeat this one; a long value is no name."""
    with pytest.raises(Invalid, match=r"a name of 58000 characters") as raised:
        ask(text.format("x" * 58_000))
    (row,) = ask(f"select length('{'x' * 58_000}') as long").table.to_pylist()

    assert len(raised.value.message) < 200
    assert {"long": 58_000} == row


def test_a_name_of_endless_parts_is_not_repeated_whole() -> None:
    """Each part is short; the error is too."""
    with pytest.raises(NotFound) as raised:
        run(f"select * from {'.'.join(['ab'] * 19_000)}", lambda path: resolve(path, ["gold/shop/orders"]), LIMITS)

    assert len(raised.value.message) < 2 * NAME_CHARS_MAX


def test_a_query_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(QueryTooSlow, match=r"stopped after 0\.3 s"):
        ask("select count(*) from range(100000000000) a, range(1000) b", QueryLimits(seconds=0.3))


def test_a_query_that_needs_too_much_memory_is_refused() -> None:
    """It is not written to disk either."""
    with pytest.raises(Invalid, match=r"(?i)memory"):
        ask("select count(distinct hash(range)) from range(50000000)", QueryLimits(seconds=60, memory_mb=32))


def test_a_result_is_cut_at_its_rows_and_says_so() -> None:
    found = ask("select * from range(100000)")
    whole = ask("select * from range(50)")

    assert (50, False) == (found.table.num_rows, found.complete)
    assert (50, True) == (whole.table.num_rows, whole.complete)


def test_a_result_is_cut_at_its_bytes() -> None:
    """Few rows may be large: reading stops, so the gateway does not hold them all."""
    limits = QueryLimits(rows=10**9, result_bytes=100_000)
    found = ask("select repeat('x', 10) as a from range(3000000)", limits)

    assert not found.complete
    assert found.table.num_rows < 100_000


def test_a_query_with_functions_that_read_nothing_is_allowed() -> None:
    text = "select * from range(3), unnest([1, 2]) u order by all"

    assert 6 == ask(text).table.num_rows


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        (Filter(page=1), list(range(50))),
        (Filter(page=3), list(range(100, 120))),
        (Filter("id", "ge", "117"), [117, 118, 119]),
        (Filter("city", "contains", "BER", "id", True, 1), list(range(118, 0, -3))),
        (Filter("city", "null", "", "id"), list(range(2, 120, 3))),
        (Filter("id", "eq", "5"), [5]),
        (Filter("it's", "eq", 'a"b', "id", True), list(range(119, 69, -1))),
    ],
)
def test_rows_are_filtered_ordered_and_paged(chosen: Filter, ids: list[int]) -> None:
    name = "gold/acme/shop/orders"
    found = ask(browse_sql(name, ORDERS.column_names, chosen), QueryLimits())

    assert ids == found.table["id"].to_pylist()[: explore.PAGE_ROWS]


@pytest.mark.parametrize(
    "chosen",
    [
        Filter("nothing", "eq", "1"),
        Filter("id", "drop", "1"),
        Filter(sort="id; drop table x"),
        Filter('id"', "eq", "1"),
    ],
)
def test_a_column_or_operator_that_does_not_exist_is_refused(chosen: Filter) -> None:
    with pytest.raises(Invalid):
        browse_sql("gold/acme/shop/orders", ORDERS.column_names, chosen)


@pytest.mark.parametrize(
    ("page", "offset"), [(-3, 0), (0, 0), (1, 0), (2, 50), (200, 9950), (201, 9950), (10**9, 9950)]
)
def test_a_page_is_one_of_those_that_can_be_asked_for(page: int, offset: int) -> None:
    """One far behind costs a scan of all rows before it: it is the last that may be asked for."""
    text = browse_sql("gold/acme/shop/orders", ORDERS.column_names, Filter(sort="id", page=page))

    assert text.endswith(f" limit 51 offset {offset}")


def test_a_value_is_a_value_whatever_it_says() -> None:
    text = browse_sql("gold/acme/shop/orders", ORDERS.column_names, Filter("city", "eq", "x' or 1=1 --"))

    assert 0 == ask(text).table.num_rows


def test_a_profile_has_the_numbers_of_every_column() -> None:
    found = ask(profile_sql("gold/acme/shop/orders", ORDERS.column_names)).table.to_pylist()[0]

    assert (120, 120, 80, "0", "119") == (
        found["rows"], found["known_0"], found["known_1"], found["smallest_0"], found["largest_0"],
    )  # fmt: skip
    assert 2 == found["distinct_1"]


def test_a_table_is_named_in_a_query_as_it_is_found_again() -> None:
    for path in ("gold/acme/shop/orders", "batches/samples", "bronze/a/b", 'odd/na"me/x'):
        (name,) = tables_of(f"select * from {sql_name(path)}")
        assert path == "/".join(part.replace(".", "/") for part in name if part)


def test_every_table_of_a_query_needs_its_right() -> None:
    """One that may not be read is named; none is opened before."""
    explorer, asked = TableExplorer(context_of()), list[str]()

    def demand(right: str) -> None:
        asked.append(right)
        if "gold" in right:
            raise Denied(f"may not {right}")

    known = ["silver/acme/shop/orders", "gold/acme/shop/orders"]
    text = "select * from silver.shop.orders join gold.shop.orders using (id)"

    with pytest.raises(Denied, match="tables:read:gold/acme/shop/orders"):
        explorer.paths(text, known, demand)
    assert {"tables:read:gold/acme/shop/orders", "tables:read:silver/acme/shop/orders"} >= set(asked)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_export_holds_the_rows(form: Any) -> None:
    """Lists and structs are JSON in CSV, which has no types of its own."""
    table = pa.table({"a": [1, 2], "b": [[1, 2], None], "c": ["x", "y,z"]})
    data = encoded(table, form)

    read = pyarrow.parquet.read_table(pa.BufferReader(data)) if form == "parquet" else None
    again = read if read is not None else pyarrow.csv.read_csv(pa.BufferReader(data))
    assert ([1, 2], ["x", "y,z"]) == (again["a"].to_pylist(), again["c"].to_pylist())
    assert ([[1, 2], None] if form == "parquet" else ["[1,2]", ""]) == again["b"].to_pylist()


def test_columns_of_one_name_are_all_shown() -> None:
    found = shown(ask("select 1 as a, 2 as a"))

    assert QueryRows(["a", "a"], ["int32", "int32"], [["1", "2"]], True) == found
