"""What is told of tables, from their logs."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.delta.log import Commit
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.errors import NotFound
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from lakebed.views.tables import Tables


@pytest.mark.parametrize("name", ["silver/orders", "../secrets", ""])
async def test_a_table_that_is_not_there_is_not_told_about(name: str) -> None:
    """Columns, rows and lines to copy of a table that does not exist are NotFound, with where to look."""
    clock = ManualClock()
    tables = Tables(Context("n", load(sections()), MemoryStore(clock=clock), clock, Ids.seeded(1), Metrics()))

    for asked in (tables.show, tables.sample, tables.how):
        with pytest.raises(NotFound) as refused:
            await asked(name)
        assert refused.value.hint == "lakebed tables ls"


SPEC = TableSpec("silver/orders", schema_json((("id", "long"), ("name", "string"))), keys=("id",))


async def written(table: PlainTable, *ids: int) -> None:
    file = await table.write(pa.table({"id": list(ids), "name": [f"n{one}" for one in ids]}))
    await table.commit(lambda _: Commit("WRITE", (file,), rows_inserted=len(ids)))


async def test_a_table_is_shown_as_it_is_now() -> None:
    """A second look sees what was committed since the first, in every number and in the rows."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    tables = Tables(Context("n", load(sections()), store, clock, Ids.seeded(1), Metrics()))
    table = PlainTable(store, SPEC, clock=clock, ids=Ids.seeded(2))
    await written(table, 1, 2)
    first, sampled = await tables.show("silver/orders"), await tables.sample("silver/orders")
    await clock.advance(5.0)
    await written(table, 3)

    second, (row,) = await tables.show("silver/orders"), await tables.all()
    again = await tables.sample("silver/orders")

    assert (0, 2, 1) == (first.version, first.rows, first.files)
    assert (1, 3, 2) == (second.version, second.rows, second.files)
    assert (1, 3, 2, second.bytes, "silver") == (row.version, row.rows, row.files, row.bytes, row.layer)
    assert [(1, 1), (0, 2)] == [(one.version, one.rows_inserted) for one in second.versions]
    assert 5000 == second.versions[0].at_ms - second.versions[1].at_ms
    assert [("id", "key"), ("name", "")] == [(column.name, column.role) for column in second.columns]
    assert [["1", "n1"], ["2", "n2"]] == sampled.rows
    assert [["3", "n3"]] == again.rows  # of the newest file


async def test_a_table_whose_log_cannot_be_read_says_why_and_hides_no_other() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await written(PlainTable(store, SPEC, clock=clock, ids=Ids.seeded(2)), 1)
    await store.create("tables/bad/_delta_log/00000000000000000000.json", b"{")
    tables = Tables(Context("n", load(sections()), store, clock, Ids.seeded(1), Metrics()))

    bad, good = await tables.all()

    assert ("bad", -1, True) == (bad.name, bad.version, bool(bad.problem))
    assert ("silver/orders", 1, "") == (good.name, good.rows, good.problem)
