"""Bronze of topics, through real Spark: decoded by contract, quarantined with the reason, offsets in the commit."""

from __future__ import annotations

import io
from pathlib import Path

import fastavro
import pytest
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.bronze.payloads import read_topic_contract
from lakebed.pipeline.bronze.topics import TopicLoader
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.topic_records import LogYard

pytestmark = pytest.mark.timeout(600)

JSON = """
table: orders
keys: [id]
columns:
  id: {type: long, required: true}
  total: {type: "decimal(6,2)", from: amount}
  at: timestamp
checks:
  not_negative: total >= 0
"""
AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string"}]}


@pytest.fixture
def context(bucket_settings: StoreSettings, tmp_path: Path) -> Context:
    layer = {**bucket_settings.as_layer(), "meta.path": str(tmp_path / "meta.sqlite"), "log.compact_min_entries": 2}
    return make_context(load(sections(), stack=layer), role="test")


@pytest.fixture
def env(context: Context) -> LogYard:
    return LogYard(context)


def test_records_become_rows_or_have_a_reason(spark: SparkSession, context: Context, env: LogYard) -> None:
    """Every record is a row of the table or of the quarantine: in = good + quarantined, and again changes nothing."""
    env.append("orders", b'{"id": 1, "amount": 10.10, "at": "2026-01-02T03:04:05Z", "more": 1}', b"{half a rec")
    env.append("orders", b'{"amount": 1}', b'{"id": 2, "amount": 1.005}', b'{"id": 3, "amount": -1}', partition=1)
    topic = TopicLoader(spark, context, read_topic_contract(JSON, "orders.yaml"))

    report = topic.step(Limit())

    assert report is not None
    assert (5, 1, 4, 0) == (report.rows_in, report.good, report.quarantined, report.behind)
    rows = [(r["id"], str(r["total"]), r["_partition"], r["_offset"]) for r in topic.table.read().collect()]
    assert [(1, "10.10", 0, 1)] == rows
    quarantined_rows = {row["key"]: (row["reasons"], row["value"]) for row in topic.quarantine.read().collect()}
    assert "not JSON" in quarantined_rows["orders/0/2"][0][0]
    assert b"{half a rec" == bytes(quarantined_rows["orders/0/2"][1])
    assert ["id: required, and null"] == quarantined_rows["orders/1/1"][0]
    assert ["total: would be changed by reading it as decimal(6,2)"] == quarantined_rows["orders/1/2"][0]
    assert ["check not_negative"] == quarantined_rows["orders/1/3"][0]
    assert topic.step(Limit()) is None


def test_a_topic_goes_on_from_the_offsets_in_its_table(spark: SparkSession, context: Context, env: LogYard) -> None:
    """Steps of any size, compaction of the log in between, a new process: every record once."""
    made = read_topic_contract(JSON.replace("checks:\n  not_negative: total >= 0", ""), "orders.yaml")
    for n in range(4):
        env.append("orders", *(b'{"id": %d}' % (n * 3 + i) for i in range(3)))

    first = TopicLoader(spark, context, made).step(Limit(rows=5))
    env.compact("orders")
    second = TopicLoader(spark, context, made).step(Limit())

    assert first is not None
    assert second is not None
    assert ((5, 7), (7, 0)) == ((first.good, first.behind), (second.good, second.behind))
    topic = TopicLoader(spark, context, made)
    assert [(n, n + 1) for n in range(12)] == sorted((r["id"], r["_offset"]) for r in topic.table.read().collect())


def test_avro_payloads_are_judged_alike_and_damaged_slices_are_set_aside(
    spark: SparkSession, context: Context, env: LogYard
) -> None:
    """Avro by the contract's schema; a slice that cannot be read is in quarantine under its key, and counted."""
    text = "table: notes\nkeys: [id]\npayload: avro\ncolumns:\n  id: {type: long, required: true}\n  note: string\n"
    made = read_topic_contract(text + f"avro: {AVRO}", "notes.yaml")
    env.append("notes", avro(1, "one"), b"\xff", avro(2, "two"))
    topic = TopicLoader(spark, context, made)
    first = topic.step(Limit())
    env.append("notes", avro(3, "three"), avro(4, "four"))
    keys = env.damage_all("llog/wal-shared/")

    second = topic.step(Limit())

    assert first is not None
    assert second is not None
    assert (3, 2, 1) == (first.rows_in, first.good, first.quarantined)
    assert (2, 0, 2) == (second.rows_in, second.good, second.quarantined)
    assert any(second.unreadable[0].startswith(key) for key in keys)
    assert [(1, "one"), (2, "two")] == sorted((r["id"], r["note"]) for r in topic.table.read().collect())
    assert topic.step(Limit()) is None


def avro(id: int, note: str) -> bytes:
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, AVRO, {"id": id, "note": note})
    return sink.getvalue()
