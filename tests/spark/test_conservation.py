"""Conservation: a loss, a double and a changed value are named at each stage, by agent and hour, as exact numbers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pyarrow as pa
import pytest
from audit_yard import AuditYard
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from batches_frames import START_NS, frame_of
from lakebed.batches import paths
from lakebed.feed import Limit
from lakebed.frame.rollup import encode_rollup, rollup_schema
from lakebed.pipeline.audit.conserver import Dropped
from lakebed.pipeline.audit.job import Auditor
from lakebed.pipeline.audit.model import AuditRecord, Conserved
from lakebed.pipeline.samples import Samples
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

HOUR = paths.hour_of(START_NS)


@pytest.fixture
def yard(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> AuditYard:
    return AuditYard(spark, bucket, bucket_settings)


def to_bronze(yard: AuditYard) -> Samples:
    samples = Samples(yard.spark, yard.context)
    while samples.step(Limit()) is not None:
        pass
    return samples


def rewrite(samples: Samples, change: Any) -> None:
    """What a broken job, a restore or a person does to a table."""
    rows = samples.table.read().localCheckpoint()
    samples.table.replace(change(rows), note=samples.table.snapshot().note)


def rows_of(record: AuditRecord) -> dict[str, Conserved]:
    return {row.agent_id: row for row in record.conservation.rows}


def named(found: dict[str, int]) -> dict[str, int]:
    return {stage: count for stage, count in found.items() if count}


def test_what_is_whole_is_conserved_and_every_stage_is_told(yard: AuditYard) -> None:
    """Sent, accepted and bronze agree; batches that bronze has not come to wait, and are not lost."""
    yard.fleet(agents=2, batches=3)
    to_bronze(yard)
    yard.accept(frame_of(30, 39, agent="agent-0"))

    record = yard.audit(verify=True)

    kept = record.conservation
    assert (record.ok, kept.rows, kept.wrong) == (True, (), False)
    assert kept.stages == {"sent": 70, "accepted": 70, "bronze": 60}
    assert kept.waiting == 10


def test_loss_double_and_change_are_named_at_every_stage(yard: AuditYard) -> None:
    """One fault in each place at once: each is the number that it is, at its stage, for its agent and hour."""
    for agent in ("whole", "gap", "overlap", "unreadable", "lossy", "doubled", "changed", "moved"):
        for n in range(3):
            if (agent, n) != ("gap", 1):
                yard.accept(frame_of(n * 10, n * 10 + 9, agent=agent))
    yard.accept(frame_of(25, 34, agent="overlap"))
    samples = to_bronze(yard)
    bad = yard.accept(frame_of(30, 39, agent="unreadable"))
    yard.overwrite(bad.raw_blob_key, b"x" * 200)

    def harm(rows: Any) -> Any:
        agent, seq = F.col("agent_id"), F.col("seq")
        kept = rows.filter(~((agent == "lossy") & seq.isin(3, 4, 25)))
        kept = kept.withColumn("value", F.when((agent == "changed") & (seq == 7), 99.0).otherwise(F.col("value")))
        later = F.col("time_ns") + 7_200_000_000_000
        kept = kept.withColumn("time_ns", F.when((agent == "moved") & (seq == 8), later).otherwise(F.col("time_ns")))
        return kept.unionByName(rows.filter((agent == "doubled") & seq.isin(5, 6)))

    rewrite(samples, harm)

    record = yard.audit(verify=True)

    found = rows_of(record)
    assert not record.ok
    assert {"gap", "overlap", "unreadable", "lossy", "doubled", "changed", "moved"} == set(found)
    assert named(found["gap"].lost) == {"accepted": 10}
    assert (found["gap"].sent, found["gap"].accepted) == (30, 20)
    assert named(found["overlap"].doubled) == {"accepted": 5}
    assert named(found["overlap"].lost | found["overlap"].changed) == {}
    assert named(found["unreadable"].lost) == {"raw": 10}
    assert (named(found["lossy"].lost), named(found["lossy"].doubled)) == ({"bronze": 3}, {})
    assert (named(found["doubled"].doubled), named(found["doubled"].lost)) == ({"bronze": 2}, {})
    assert (named(found["changed"].changed), named(found["changed"].lost)) == ({"bronze": 1}, {})
    assert (named(found["moved"].changed), named(found["moved"].lost)) == ({"bronze": 1}, {})
    assert found["lossy"].hour == HOUR
    told = record.conservation
    assert named(told.lost) == {"accepted": 10, "raw": 10, "bronze": 3}
    assert named(told.doubled) == {"accepted": 5, "bronze": 2}
    assert named(told.changed) == {"bronze": 2}


def test_numbers_that_an_agent_accounts_for_are_not_lost(yard: AuditYard) -> None:
    """A drop that the agent recorded closes its gap, and is counted as explained."""
    for n in (0, 2):
        yard.accept(frame_of(n * 10, n * 10 + 9, agent="frugal"))

    record = Auditor(yard.spark, yard.context).run(
        horizon_s=0.0, verify=True, dropped=[Dropped("frugal", "boot-1", 10, 19)]
    )

    kept = record.conservation
    assert (record.ok, kept.explained, named(kept.lost)) == (True, 10, {})


def rolled_up(yard: AuditYard, accepted: list[Any], *, agent: str, count: int, total: float, greatest: float) -> None:
    """A committed generation as the roller leaves it, of one chunk."""
    ids = sorted(paths.manifest_id(each.identity, each.accepted_at_unix_ns) for each in accepted)
    values: dict[str, Any] = {
        "agent_id": agent, "labels": [], "start_ns": START_NS // 60_000_000_000 * 60_000_000_000, "count": count,
        "sum": total, "min": 1.0, "max": greatest, "last_ns": START_NS, "last": greatest, "nan_count": 0,
    }  # fmt: skip
    schema = rollup_schema()
    arrays = [pa.array([values.get(field.name, [])], field.type) for field in schema]
    chunk = encode_rollup(pa.Table.from_arrays(arrays, schema=schema))
    generation = f"{1:012d}-{'0' * 32}"
    yard.overwrite(f"rollup/v1/window=60s/{HOUR}/metric=cpu/{generation}-000.lmrollup.zst", chunk)
    manifest = {"schema": "lightmetrics.rollup_manifest.v1", "covers": ids}
    yard.overwrite(f"manifests/v1/{HOUR}/{generation}.json", json.dumps(manifest).encode())
    state = {"committed": 1, "settled_ns": 0, "windows_s": [60, 300], "abandoned": []}
    yard.overwrite("roller/v1/state.json", json.dumps(state).encode())


@pytest.mark.parametrize(
    ("count", "total", "greatest", "says"),
    [
        (20, 210.0, 20.0, {}),
        (17, 210.0, 20.0, {"lost": 3}),
        (24, 210.0, 20.0, {"doubled": 4}),
        (20, 211.0, 20.0, {"changed": 1}),
        (20, 210.0, 21.0, {"changed": 1}),
    ],
)
def test_rollups_are_held_against_what_they_cover(
    yard: AuditYard, count: int, total: float, greatest: float, says: dict[str, int]
) -> None:
    """Samples that rollups lost or counted twice, and hours that came to other values, are told."""
    batches = [yard.accept(frame_of(n * 10, n * 10 + 9, agent="a")) for n in range(2)]
    rolled_up(yard, batches, agent="a", count=count, total=total, greatest=greatest)

    kept = yard.audit(verify=True).conservation

    told = {what: getattr(kept, what).get("rollup", 0) for what in ("lost", "doubled", "changed")}
    assert {what: n for what, n in told.items() if n} == says


def test_a_rollup_chunk_that_cannot_be_read_is_told_with_its_key(yard: AuditYard) -> None:
    """It is set aside as corrupt; its samples are lost to rollups, and the rest is compared."""
    batches = [yard.accept(frame_of(n * 10, n * 10 + 9, agent="a")) for n in range(2)]
    rolled_up(yard, batches, agent="a", count=20, total=210.0, greatest=20.0)
    (key,) = yard.keys("rollup/v1/")
    yard.overwrite(key, yard.read(key)[:-9])

    record = yard.audit(verify=True)

    assert [("corrupt", "rollup", key)] == [(each.finding, each.kind, each.key) for each in record.findings]
    assert named(record.conservation.lost) == {"rollup": 20}


def test_the_gateway_serves_the_last_audit(yard: AuditYard) -> None:
    """GET /v1/audit answers the record as it is stored, and 404 before there is one."""
    import httpx2

    from lakebed.gateway.app import build
    from lakebed.pipeline.audit.routes import component

    async def ask() -> Any:
        transport = httpx2.ASGITransport(app=build(yard.context, [component(yard.context)]))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/v1/audit")

    before = asyncio.run(ask())
    yard.accept(frame_of())
    record = yard.audit()
    after = asyncio.run(ask())

    assert before.status_code == 404
    assert (after.status_code, after.json()["audit_id"], after.json()["ok"]) == (200, record.audit_id, True)
    assert after.json()["schema"] == "lakebed.audit.v1"
