"""Lineage of columns: what an event says of where each column of a written table comes from."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.core.clock import ManualClock
from lakebed.spark.lineage import Lineage
from support.runtimes import runtime_of


class Sender:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, *events: bytes) -> None:
        self.events += [msgspec.json.decode(event) for event in events]


def test_a_table_that_is_written_names_the_columns_that_each_of_its_columns_is_made_of() -> None:
    """As OpenLineage's column lineage facet; a table without such knowledge has none."""
    sender = Sender()
    lineage = Lineage(sender, runtime_of(ManualClock()), namespace="n", bucket="s3://b", prefix="p")  # type: ignore[arg-type]

    with lineage.job("gold/acme/shop") as run:
        run.wrote(
            "tables/gold/x", version=3, columns={"spent": (("tables/silver/o", "total"), ("tables/silver/c", "id"))}
        )
        run.wrote("tables/gold/y", version=1)

    with_columns, without = sender.events[-1]["outputs"]
    facet = with_columns["facets"]["columnLineage"]
    assert [("s3://b", "p/tables/silver/o", "total"), ("s3://b", "p/tables/silver/c", "id")] == [
        (each["namespace"], each["name"], each["field"]) for each in facet["fields"]["spent"]["inputFields"]
    ]
    assert facet["_schemaURL"].endswith("1-2-0/ColumnLineageDatasetFacet.json")
    assert ["version"] == list(without["facets"])
