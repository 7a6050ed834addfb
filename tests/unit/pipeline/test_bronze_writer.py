"""What a tick's table must be to go into bronze, and in which state it is opened. No Spark."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakebed.core.clock import ManualClock
from lakebed.delta.model import Snapshot
from lakebed.pipeline.bronze.parts import check_columns
from lakebed.pipeline.bronze.ticks import LINEAGE, BronzeWriter
from lakebed.store.memory import MemoryStore
from lakebed.ticks.codec import read_manifest
from lakebed.ticks.model import BadManifest, BronzeTick, TickColumn, TickTable
from support.runtimes import runtime_on


class Writer(BronzeWriter):
    """A writer over one stored table."""

    def __init__(self, held: Snapshot, drift: Any = "evolve") -> None:
        clock = ManualClock()
        super().__init__(None, runtime_on(MemoryStore(clock=clock), clock), location=None, drift=drift)  # type: ignore[arg-type]
        self._state = held

    def _held(self, name: str) -> Snapshot:
        return self._state

    def _open(self, name: str, columns: dict[str, str], keys: Any = (), layout: Any = ()) -> Any:
        return name, list(columns), tuple(keys)


def stored(keys: tuple[str, ...], **columns: str) -> Snapshot:
    kinds = {**columns, **LINEAGE}
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in kinds.items()]
    text = msgspec.json.encode({"type": "struct", "fields": fields}).decode()
    return Snapshot(version=3, schema_json=text, keys=keys)


def table(keys: tuple[str, ...], mode: str = "delta", **columns: str) -> TickTable:
    made = {
        "schema_version": "1.0",
        "tick_id": "t",
        "project_id": "p",
        "dt": "20261117",
        "tables": [
            {
                "name": "orders",
                "mode": mode,
                "schema": [{"name": name, "type": kind} for name, kind in columns.items()],
                "primary_keys": list(keys),
                "row_count": 1,
                "parquets": [{"file_seq": 0, "sha256": "0" * 64, "rows": 1, "bytes": 9, "file": "f"}],
            }
        ],
    }
    return read_manifest(msgspec.json.encode(made)).tables[0]


TICK = BronzeTick("o", "p", "t", "20261117", (), {}, 1)


def test_a_delta_must_have_the_keys_of_its_table() -> None:
    """Merged by other keys rows would double; a full table may bring new ones, and a new table any."""
    writer = Writer(stored(("id",), id="long", name="string"))

    with pytest.raises(BadManifest) as caught:
        writer._fit(TICK, table(("name",), id="long", name="string"))
    _, full = writer._fit(TICK, table(("name",), "full", id="long", name="string"))
    _, same = writer._fit(TICK, table(("id",), id="long", name="string"))
    _, new = Writer(Snapshot())._fit(TICK, table(("name",), id="long", name="string"))

    assert "keys_changed" == caught.value.detail["error_class"]
    assert [("name",), ("id",), ("name",)] == [each[2] for each in (full, same, new)]  # type: ignore[index]


def test_columns_keep_their_order_and_new_ones_come_last() -> None:
    """Lineage is not the sender's; a key that drift would discard is refused."""
    held = stored(("id",), id="long", name="string")

    fitted, opened = Writer(held)._fit(TICK, table(("id",), more="double", id="long"))
    left, _ = Writer(held, "discard")._fit(TICK, table(("id",), more="double", id="long"))

    assert (("more",), ("name",)) == (fitted.added, fitted.missing)
    assert ["id", "name", *LINEAGE, "more"] == opened[1]  # type: ignore[index]
    assert ("more",) == left.discarded
    with pytest.raises(BadManifest):
        Writer(held, "discard")._fit(TICK, table(("more",), "full", more="double", id="long"))


def test_a_part_with_a_column_twice_is_refused() -> None:
    """Which of the two was meant nobody can say."""
    twice = pa.schema([("id", pa.int64()), ("id", pa.int64())])

    with pytest.raises(BadManifest) as caught:
        check_columns(twice, [TickColumn("id", "long")])

    assert "duplicate_column" == caught.value.detail["error_class"]


def test_the_lakes_own_project_has_the_tables_of_every_source() -> None:
    """Ticks of that project, samples, topics and queues by a contract's word; older places count."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for name in (
        "bronze/lake/main/orders", "bronze/batches/lake/samples", "batches/quarantine", "topics/old",
        "bronze/topics/lake/clicks",
        "bronze/queues/lake/work", "quarantine/topics/lake/clicks", "bronze/acme/shop/orders",
    ):  # fmt: skip
        asyncio.run(store.create(f"tables/{name}/_delta_log/00000000000000000000.json", b"{}"))
    writer = BronzeWriter(None, runtime_on(store, clock), location=None)  # type: ignore[arg-type]

    assert ["orders", "batches.samples", "topic.clicks", "topic.old", "queue.work"] == writer.names("lake", "main")
    assert ["orders"] == writer.names("acme", "shop")
