"""Ticks for the tests of bronze, silver and gold: parts in the bucket, and the manifest's tables that name them."""

from __future__ import annotations

import asyncio
import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.pipeline.bronze.drift import Drift
from lakebed.pipeline.bronze.ticks import BronzeWriter
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.codec import type_of
from lakebed.ticks.model import BronzeTick, ManifestPart, TickColumn, TickTable
from support.runtimes import runtime_on


class Yard:
    """Uploads parts and finalizes ticks, as the service does."""

    def __init__(self, spark: SparkSession, store: Store, settings: StoreSettings) -> None:
        self.clock = ManualClock()
        self.spark, self.store, self.location = spark, store, Location.of(settings)

    def bronze(self, drift: Drift = "evolve", store: Store | None = None) -> BronzeWriter:
        return BronzeWriter(
            self.spark, runtime_on(store or self.store, self.clock, Ids()), location=self.location, drift=drift
        )

    def tick(self, tick_id: str, *tables: tuple[TickTable, list[bytes]]) -> BronzeTick:
        keys = {}
        for table, bodies in tables:
            for part, body in zip(table.parquets, bodies, strict=True):
                keys[part.file_seq] = f"parts/{tick_id}/{part.file_seq}"
                asyncio.run(self.store.create(keys[part.file_seq], body))
        return BronzeTick("acme", "p1", tick_id, "20261115", tuple(table for table, _ in tables), keys)

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
    schema = tuple(
        TickColumn(field.name, type_of(field.type) or "") for field in (files[0].schema_arrow if files else [])
    )
    rows = [file.metadata.num_rows for file in files]
    reported = tuple(
        ManifestPart(first_seq + n, hashlib.sha256(body).hexdigest(), rows[n] if n < len(rows) else 1, len(body))
        for n, body in enumerate(bodies)
    )
    known: dict[str, Any] = {
        "name": name,
        "mode": mode,
        "schema": schema,
        "primary_keys": ("id",),
        "row_count": sum(part.rows for part in reported),
        "parquets": reported,
    }
    return TickTable(**(known | changed)), list(bodies)
