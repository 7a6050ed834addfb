"""What is told of tables, from their logs."""

from __future__ import annotations

import pytest

from lakebed.clock import ManualClock
from lakebed.context import Context
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
