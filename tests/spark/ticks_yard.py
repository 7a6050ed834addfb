"""Ticks for the tests of bronze, silver and gold: parts in the bucket, and the manifest's tables that name them."""

from __future__ import annotations

import asyncio
import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from lakebed.clock import ManualClock
from lakebed.ids import Ids
from lakebed.pipeline.bronze import Bronze, Tick
from lakebed.pipeline.drift import Drift
from lakebed.pipeline.tables.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.tick_manifest import Column, Part, TickTable, type_of


class Yard:
    """Uploads parts and finalizes ticks, as the service does."""

    def __init__(self, spark: SparkSession, store: Store, settings: StoreSettings) -> None:
        self.clock = ManualClock()
        self.spark, self.store, self.location = spark, store, Location.of(settings)

    def bronze(self, drift: Drift = "evolve", store: Store | None = None) -> Bronze:
        return Bronze(
            self.spark,
            store=store or self.store,
            location=self.location,
            clock=self.clock,
            ids=Ids(),
            drift=drift,
        )

    def tick(self, tick_id: str, *tables: tuple[TickTable, list[bytes]]) -> Tick:
        keys = {}
        for table, bodies in tables:
            for part, body in zip(table.parquets, bodies, strict=True):
                keys[part.file_seq] = f"parts/{tick_id}/{part.file_seq}"
                asyncio.run(self.store.create(keys[part.file_seq], body))
        return Tick("acme", "p1", tick_id, tuple(table for table, _ in tables), keys)

    def rows(self, name: str = "orders", columns: tuple[str, ...] = ("id", "note")) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.bronze().table("acme", "p1", name).read(columns=columns).collect())

    def versions(self, name: str = "orders") -> int:
        return self.bronze().table("acme", "p1", name).snapshot().version


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def table(
    *bodies: bytes, name: str = "orders", mode: str = "delta", first_seq: int = 0, **changed: Any
) -> tuple[TickTable, list[bytes]]:
    files = [pq.ParquetFile(io.BytesIO(body)) for body in bodies if body.endswith(b"PAR1")]
    schema = tuple(Column(field.name, type_of(field.type) or "") for field in (files[0].schema_arrow if files else []))
    rows = [file.metadata.num_rows for file in files]
    told = tuple(
        Part(first_seq + n, hashlib.sha256(body).hexdigest(), rows[n] if n < len(rows) else 1, len(body))
        for n, body in enumerate(bodies)
    )
    known: dict[str, Any] = {
        "name": name,
        "mode": mode,
        "schema": schema,
        "primary_keys": ("id",),
        "row_count": sum(part.rows for part in told),
        "parquets": told,
    }
    return TickTable(**(known | changed)), list(bodies)
