"""Tables over HTTP: rows, history and SQL as Arrow streams, with rights and limits."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from lakebed.core.auth import Principal
from lakebed.core.errors import LakebedError, Overloaded
from lakebed.pipeline.tables import routes
from lakebed.pipeline.tables.query import QueryLimits, QuerySlots
from lakebed.pipeline.tables.view import TableRow

ROWS = pa.table({"id": [1, 2, 3], "spent": [1.5, 2.5, 3.5]})
RIGHTS, TENANT = ["tables:read"], [""]


class Opened:
    def __init__(self, version: int | None) -> None:
        self.version = version

    def to_pyarrow_dataset(self) -> Any:
        return ds.dataset(ROWS if self.version is None else ROWS.slice(0, self.version))

    def history(self, limit: int) -> list[dict[str, Any]]:
        return [{"version": number} for number in (1, 0)][:limit]


def refusal(request: Any, error: Any) -> PlainTextResponse:
    return PlainTextResponse(f"{type(error).__name__}: {error.message} {error.hint}", status_code=400)


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> httpx2.AsyncClient:
    async def every(self: Any) -> list[TableRow]:
        return [TableRow("gold/acme/shop/by_customer", "gold", 1, 3, 1, 10)]

    async def names(self: Any) -> list[str]:
        return [row.name for row in await every(self)]

    monkeypatch.setattr(routes.Tables, "all", every)
    monkeypatch.setattr(routes.Tables, "names", names)
    monkeypatch.setattr(routes, "delta_table", lambda context, name, version=None: Opened(version))
    monkeypatch.setattr(routes, "ROWS_MAX", 3)
    part = routes.TableRoutes(SimpleNamespace(store=None))  # type: ignore[arg-type]
    app = Starlette(routes=part.reads, exception_handlers={LakebedError: refusal})

    async def with_person(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["principal"] = Principal("someone", tuple(RIGHTS), TENANT[0])
        await app(scope, receive, send)

    return httpx2.AsyncClient(transport=httpx2.ASGITransport(with_person), base_url="http://t")


def rows(answer: httpx2.Response) -> Any:
    return pa.ipc.open_stream(answer.content).read_all().to_pylist()


async def test_rows_come_as_an_arrow_stream_by_column_limit_and_version(http: httpx2.AsyncClient) -> None:
    """The organisation may be left out of the name; an unknown column or table is an error."""
    path = "/v1/tables/rows/gold.shop.by_customer"
    whole = await http.get(path)
    few = await http.get(path, params={"column": "id", "limit": "2"})
    older = await http.get(path, params={"version": "1"})
    wrong = await http.get(path, params={"column": "x"})
    history = await http.get("/v1/tables/history/gold/acme/shop/by_customer", params={"limit": "1"})

    assert (routes.ARROW, ROWS.to_pylist()) == (whole.headers["content-type"], rows(whole))
    assert ([{"id": 1}, {"id": 2}], [{"id": 1, "spent": 1.5}]) == (rows(few), rows(older))
    assert "has no column 'x'" in wrong.text and [{"version": 1}] == history.json()
    assert "NotFound" in (await http.get("/v1/tables/rows/gold/none")).text
    assert "is not a number" in (await http.get(path, params={"limit": "-1"})).text


async def test_sql_reads_and_needs_the_right(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that changes something is refused; without the right nothing is read."""
    ask = {"query": "select sum(spent) as total from gold.shop.by_customer"}
    found = await http.post("/v1/sql", json=ask)
    changes = await http.post("/v1/sql", json={"query": "drop table gold.shop.by_customer"})
    RIGHTS.clear()
    try:
        denied = [(await http.get("/v1/tables")).text, (await http.post("/v1/sql", json=ask)).text]
    finally:
        RIGHTS.append("tables:read")

    assert [{"total": 7.5}] == rows(found)
    assert changes.text.startswith("Invalid: not a query") and {"Denied: someone may not tables:read"} == {
        text.partition(" use ")[0] for text in denied
    }


@pytest.mark.parametrize(
    ("rights", "tenant", "reads"),
    [
        ("*", "acme", True),
        ("tables:read", "", True),
        ("tables:read:gold/acme/*", "", True),
        ("tables:read:gold/rival/*", "", False),
        ("*", "rival", False),
        ("*", "shop", False),
        ("*", "by", False),  # the name with its folders left out, gold/by_customer, would be this tenant's own
    ],
)
async def test_a_name_means_only_tables_that_its_caller_may_read(
    http: httpx2.AsyncClient, rights: str, tenant: str, reads: bool
) -> None:
    """By path, by a part of it, and in SQL; no error names a table of another tenant."""
    before = (list(RIGHTS), list(TENANT))
    RIGHTS[:], TENANT[:] = [rights], [tenant]
    try:
        answers = [
            await http.get("/v1/tables/rows/gold/acme/shop/by_customer"),
            await http.get("/v1/tables/history/gold/acme/shop/by_customer"),
        ]
        others = [
            await http.get(f"/v1/tables/rows/{name}") for name in ("gold/by_customer", "gold/acme/shop/by_custom")
        ]
        for name in ("gold.acme.shop.by_customer", "gold.shop.by_customer", "gold.by_customer", "gold.by_custom"):
            others.append(await http.post("/v1/sql", json={"query": f"select * from {name}"}))
    finally:
        RIGHTS[:], TENANT[:] = before

    assert {reads} == {answer.status_code == 200 for answer in answers}
    if not reads:
        assert not [answer for answer in others if answer.status_code == 200]
        assert not [answer.text for answer in (*answers, *others) if "gold/acme/shop/by_customer?" in answer.text]


async def test_more_rows_than_the_limit_are_refused(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is too long is read with a limit."""
    monkeypatch.setattr(routes, "ROWS_MAX", 2)
    path = "/v1/tables/rows/gold/acme/shop/by_customer"
    whole, few = await http.get(path), await http.get(path, params={"limit": "9"})

    assert "has more than 2 rows" in whole.text and 2 == len(rows(few))


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
async def test_a_third_query_at_once_is_refused_also_when_nobody_waits_for_the_first(wait_s: float) -> None:
    """Its thread runs on and costs as much as before: clients that give up make room for no others."""
    slots, ends = QuerySlots(2, wait_s=wait_s), [threading.Event(), threading.Event()]
    first, second = (asyncio.ensure_future(slots.run(end.wait)) for end in ends)
    await asyncio.sleep(0)
    try:
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(Overloaded, match="2 queries already run"):
            await slots.run(lambda: 3)
    finally:
        for end in ends:
            end.set()
    assert await second
    while slots._free.locked():
        await asyncio.sleep(0.001)

    assert 4 == await slots.run(lambda: 4)
    with pytest.raises(ZeroDivisionError):
        await slots.run(lambda: 1 // 0)
    assert 5 == await slots.run(lambda: 5)


async def test_a_query_ends_at_its_limits(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the limit and time beyond the limit are errors that name it; exactly the limit is answered."""
    monkeypatch.setattr(routes, "LIMITS", QueryLimits(rows=5, seconds=0.3))
    many = await http.post("/v1/sql", json={"query": "select * from range(6)"})
    slow = await http.post("/v1/sql", json={"query": "select count(*) from range(100000000000) t(a)"})
    enough = await http.post("/v1/sql", json={"query": "select * from range(5)"})

    assert many.text.startswith("Invalid: the result has more than 5 rows") and "QueryTooSlow" in slow.text
    assert 5 == len(rows(enough))
