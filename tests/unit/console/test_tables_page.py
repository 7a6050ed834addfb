"""Questions to tables from the page: run once for all viewers, with the rights of the caller, and exported whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.delta.log import Commit
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.pipeline.tables import query
from lakebed.pipeline.tables.page import opened_first, reasons_first
from lakebed.pipeline.tables.view import TableRow, TableSample, _cell
from lakebed.store.memory import MemoryStore
from support.console_site import OPERATOR, Site, site
from support.runtimes import runtime_on

ROWS = pa.table({"id": list(range(60))})
READER = "0123456789abcdef-reader"
SHORT = "0123456789abcdef-short"
KEYS = [
    {"name": "reader", "secret": READER, "rights": ["console:read", "tables:read", "tables:read:gold/*"]},
    {"name": "short", "secret": SHORT, "rights": ["console:read", "tables:read", "tables:read:silver/orders"]},
]
TENANTS = {who: f"0123456789abcdef-{who}" for who in ("acme", "rival")}
ASKED: list[str] = []


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Two tables; DuckDB reads rows of this test instead of an S3 server."""
    ASKED.clear()

    def opened(context: Any, name: str, version: int | None = None) -> Any:
        ASKED.append(name)
        return SimpleNamespace(to_pyarrow_dataset=lambda: ds.dataset(ROWS))

    monkeypatch.setattr(query, "delta_table", opened)
    store = MemoryStore(clock=SystemClock())
    async with site(store, keys=KEYS) as made:
        for name in ("gold/shop/orders", "silver/shop/orders"):
            spec = TableSpec(name, schema_json((("id", "long"),)))
            table = PlainTable(runtime_on(store, made.context.clock, Ids.seeded(1)), spec)
            file = await table.write(ROWS)
            await table.commit(lambda _, file=file: Commit("WRITE", (file,), rows_inserted=60))
        await made.browser.sign_in(READER)
        yield made


async def twin(here: Site, **params: str) -> Any:
    return (await here.browser.client.get("/tables.json", params=params)).json()


async def test_a_query_is_answered_once_for_all_who_ask_it(here: Site) -> None:
    """A hundred viewers of one query cost one run."""
    text = "select count(*) as n, max(id) as m from gold.shop.orders"

    found = await asyncio.gather(*(twin(here, sql=text) for _ in range(20)))
    page = await here.browser.client.get("/tables", params={"sql": text}, headers={"accept": "text/html"})

    assert [["60", "59"]] * 20 == [one["query"]["rows"][0] for one in found]
    assert ["gold/shop/orders"] == ASKED
    assert '<td class="nowrap">59</td>' in page.text


async def test_a_table_that_may_not_be_read_is_not_read_by_sql_either(here: Site) -> None:
    """Alone, in a join, in a subquery: the right is named, and no file is opened."""
    for text in (
        "select * from silver.shop.orders",
        "select * from gold.shop.orders join silver.shop.orders using (id)",
        "select (select max(id) from silver.shop.orders)",
    ):
        found = await twin(here, sql=text)
        assert "tables:read:silver/shop/orders" in found["troubles"]["query"]["message"]
    refused = await here.browser.client.get("/tables/export", params={"table": "silver/shop/orders"})

    assert 403 == refused.status_code
    assert [] == ASKED


async def test_a_short_name_is_judged_by_the_table_that_it_means(here: Site) -> None:
    """The right to a folder of that name opens no table, and a right to the table itself is enough."""
    allowed = await twin(here, sql="select max(id) from gold.orders")
    asked = list(ASKED)
    await here.browser.sign_in(SHORT)
    refused = await twin(here, sql="select max(id) from silver.orders")
    exported = await here.browser.client.get("/tables/export", params={"sql": "select max(id) from silver.orders"})

    assert ([["59"]], ["gold/shop/orders"]) == (allowed["query"]["rows"], asked)
    assert "tables:read:silver/shop/orders" in refused["troubles"]["query"]["message"]
    assert (403, asked) == (exported.status_code, ASKED)


async def test_one_query_of_two_tenants_is_answered_to_each_from_its_own_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short name means another table for each of them: neither gets the rows that were read for the other, by a
    query, a filter or a profile; the operator, for whom the name means several tables, is told so."""
    rows = {f"gold/{who}/orders": ds.dataset(pa.table({"owner": [who]})) for who in TENANTS}

    def opened(context: Any, name: str, version: int | None = None) -> Any:
        return SimpleNamespace(to_pyarrow_dataset=lambda: rows[name])

    monkeypatch.setattr(query, "delta_table", opened)
    keys = [
        {"name": who, "secret": secret, "rights": ["console:read", "tables:read*"], "tenant": who}
        for who, secret in TENANTS.items()
    ]
    keys.append({"name": "operator", "secret": OPERATOR, "rights": ["*"]})
    found: dict[str, list[Any]] = {}
    async with site(MemoryStore(clock=SystemClock()), keys=keys) as here:
        for name in rows:
            table = PlainTable(here.context, TableSpec(name, schema_json((("owner", "string"),))))
            await table.commit(lambda _: Commit("WRITE"))
        for who, secret in [*TENANTS.items(), *reversed(TENANTS.items())]:
            await here.browser.sign_in(secret)
            text = await twin(here, sql="select owner from gold.orders")
            more = await twin(here, table=f"gold/{who}/orders", column="owner", operator="set", profile="1")
            listed = [row["name"] for row in text["tables"]]
            shown = (text["query"]["rows"], more["found"]["rows"], more["profile"][0]["smallest"], listed)
            found.setdefault(who, []).append(shown)
        await here.browser.sign_in(OPERATOR)
        several = await twin(here, sql="select owner from gold.orders")

    assert {who: [([[who]], [[who]], who, [f"gold/{who}/orders"])] * 2 for who in TENANTS} == found
    assert "several tables are gold/orders" in several["troubles"]["query"]["message"]


@pytest.mark.parametrize("tenant", ["", "acme"])
async def test_who_may_not_list_the_tables_runs_no_query(here: Site, tenant: str) -> None:
    """Not even one that reads no table; nothing is opened, shown or exported."""
    secret = "0123456789abcdef-watcher"
    keys = [{"name": "watcher", "secret": secret, "rights": ["console:read", "queue:read*"], "tenant": tenant}]
    async with site(here.context.store, keys=keys) as other:
        await other.browser.sign_in(secret)
        for text in ("select 1", "select * from gold.shop.orders"):
            shown = await twin(other, sql=text)
            exported = await other.browser.client.get("/tables/export", params={"sql": text})
            assert ("query" in shown["troubles"], shown["query"], 403) == (True, None, exported.status_code)

    assert [] == ASKED


async def test_what_is_wrong_with_a_query_is_said_beside_it_and_the_page_stays(here: Site) -> None:
    page = await here.browser.client.get("/tables", params={"sql": "select * from read_text('/etc/hostname')"})

    assert page.status_code == 200
    assert 1 == page.text.count('role="alert"') and "read_text(…) is not allowed" in page.text
    assert "<h2>Columns</h2>" in page.text


async def test_rows_are_filtered_and_paged_by_address(here: Site) -> None:
    found = await twin(here, table="gold/shop/orders", column="id", operator="ge", value="7", sort="id", page="2")
    odd = await twin(here, table="gold/shop/orders", column="nothing", operator="eq", page="1")

    assert [["57"], ["58"], ["59"]] == found["found"]["rows"]
    assert "column 'nothing' does not exist" == odd["troubles"]["found"]["message"]


async def test_a_profile_is_made_on_request(here: Site) -> None:
    found = await twin(here, table="gold/shop/orders", profile="1")

    assert [("id", 60, 0, "0", "59")] == [
        (row["name"], row["rows"], row["nulls"], row["smallest"], row["largest"]) for row in found["profile"]
    ]
    assert "profile" not in await twin(here, table="gold/shop/orders")


@pytest.mark.parametrize(("form", "begins"), [("csv", b'"id"\n0\n1\n'), ("parquet", b"PAR1")])
async def test_a_table_and_a_result_are_exported(here: Site, form: str, begins: bytes) -> None:
    whole = await here.browser.client.get("/tables/export", params={"table": "gold/shop/orders", "format": form})
    some = await here.browser.client.get(
        "/tables/export", params={"sql": "select id from gold.shop.orders limit 2", "format": form}
    )

    assert (200, 200) == (whole.status_code, some.status_code)
    assert whole.content.startswith(begins) and some.content.startswith(begins)
    assert f'filename="gold-shop-orders.{form}"' in whole.headers["content-disposition"]
    assert len(some.content) < len(whole.content)


async def test_a_missing_table_is_said_once(here: Site) -> None:
    page = await here.browser.client.get("/tables", params={"table": "gold/nothing"})

    assert 1 == page.text.count("there is no table gold/nothing")


def test_the_first_table_shown_has_rows_and_is_near_the_end_of_the_flow() -> None:
    def row(name: str, rows: int) -> TableRow:
        return TableRow(name, name.partition("/")[0], 0, rows, 1, 1)

    rows = [row("batches/samples", 9), row("bronze/a", 5), row("gold/empty", 0), row("silver/b", 3)]

    assert "silver/b" == opened_first(rows)
    assert "" == opened_first([])


def test_the_reason_of_a_quarantined_row_comes_first() -> None:
    found = reasons_first(TableSample(["row", "_reasons"], [["{}", "total_not_negative"]]))

    assert (["_reasons", "row"], [["total_not_negative", "{}"]]) == (found.columns, found.rows)


@pytest.mark.parametrize(
    ("value", "shown"), [(["check a", "cast b"], "check a; cast b"), ([1, 2], "[1, 2]"), (None, ""), ([], "")]
)
def test_a_list_of_words_is_shown_as_words(value: object, shown: str) -> None:
    """The reasons of a quarantined row are read by people."""
    assert shown == _cell(value)
