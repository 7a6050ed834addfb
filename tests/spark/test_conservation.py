"""Conservation: a loss, a double and a changed value are named at each stage, by agent and hour, as exact numbers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakebed.batches import paths
from lakebed.core.clock import ManualClock
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.audit.conservation import DroppedSamples
from lakebed.pipeline.audit.job import BucketAuditor
from lakebed.pipeline.audit.model import AuditRecord, ConservationRow
from lakebed.pipeline.bronze.samples import SampleLoader
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.rollups.codec.chunk import batch_schema, encode_index, encode_rollup, rollup_schema, series_schema
from lakebed.spark.listing import list_bucket
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections
from support.audited_batches import AuditYard
from support.batch_frames import START_NS, frame_of
from support.rollup_fixtures import make_roller

HOUR = paths.hour_of(START_NS)


pytestmark = pytest.mark.timeout(600)  # an audit is many Spark jobs: slow where many share two cores


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> AuditYard:
    return AuditYard(spark, bucket, bucket_settings)


def to_bronze(env: AuditYard) -> SampleLoader:
    samples = SampleLoader(env.spark, env.context)
    while samples.step(Limit()) is not None:
        pass
    return samples


def rewrite(samples: SampleLoader, change: Any) -> None:
    """What a broken job, a restore or a person does to a table."""
    rows = samples.table.read().localCheckpoint()
    samples.table.replace(change(rows), note=samples.table.snapshot().note)


def rows_of(record: AuditRecord) -> dict[str, ConservationRow]:
    return {row.agent_id: row for row in record.conservation.rows}


def named(found: dict[str, int]) -> dict[str, int]:
    return {stage: count for stage, count in found.items() if count}


@pytest.mark.full
def test_what_is_whole_is_conserved_and_every_stage_is_told(env: AuditYard) -> None:
    """Sent, accepted, bronze and the roller's own chunks agree; batches that neither has come to are not lost, and what
    was rolled up since the listing was taken is not held against it."""
    env.fleet(agents=2, batches=3)
    to_bronze(env)
    asyncio.run(make_roller(env.store, env.context.clock).run())
    env.accept(frame_of(30, 39, agent="agent-0"))
    listing = list_bucket(env.spark, env.settings, clock=env.context.clock)
    time.sleep(1.1)  # the store tells whole seconds
    later = ManualClock(env.context.clock.now_ns() + 7_200_000_000_000)
    assert 10 == asyncio.run(make_roller(env.store, later).run()).samples  # and everything is settled by now

    record = BucketAuditor(env.spark, env.context).run(horizon_s=0.0, verify=True, listing=listing)

    kept = record.conservation
    assert (record.ok, kept.rows, kept.wrong) == (True, (), False)
    assert kept.stages == {"sent": 70, "accepted": 70, "bronze": 60, "rollup": 60, "rollup_due": 60}
    assert kept.waiting == 10


def test_loss_double_and_change_are_named_at_every_stage(env: AuditYard) -> None:
    """One fault in each place at once: each is the number that it is, at its stage, for its agent and hour."""
    for agent in ("whole", "gap", "overlap", "unreadable", "lossy", "doubled", "changed", "moved"):
        for n in range(3):
            if (agent, n) != ("gap", 1):
                env.accept(frame_of(n * 10, n * 10 + 9, agent=agent))
    env.accept(frame_of(25, 34, agent="overlap"))
    for n in (0, 2):
        env.accept(frame_of(n * 10, n * 10 + 9, agent="frugal"))
    samples = to_bronze(env)
    bad = env.accept(frame_of(30, 39, agent="unreadable"))
    env.overwrite(bad.raw_blob_key, b"x" * 200)

    def harm(rows: Any) -> Any:
        agent, seq = F.col("agent_id"), F.col("seq")
        kept = rows.filter(~((agent == "lossy") & seq.isin(3, 4, 25)))
        kept = kept.withColumn("value", F.when((agent == "changed") & (seq == 7), 99.0).otherwise(F.col("value")))
        later = F.col("time_ns") + 7_200_000_000_000
        kept = kept.withColumn("time_ns", F.when((agent == "moved") & (seq == 8), later).otherwise(F.col("time_ns")))
        return kept.unionByName(rows.filter((agent == "doubled") & seq.isin(5, 6)))

    rewrite(samples, harm)

    record = BucketAuditor(env.spark, env.context).run(
        horizon_s=0.0, verify=True, dropped=[DroppedSamples("frugal", "boot-1", 10, 19)]
    )

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
    reported = record.conservation
    assert reported.explained == 10  # the agent said that it gave these up: no gap
    assert named(reported.lost) == {"accepted": 10, "raw": 10, "bronze": 3}
    assert named(reported.doubled) == {"accepted": 5, "bronze": 2}
    assert named(reported.changed) == {"bronze": 2}


def rolled_up(env: AuditYard, accepted: list[Any], rows: dict[str, tuple[int, float, float]]) -> None:
    """A committed generation as the roller leaves it, of one chunk: each agent's count, sum and greatest value."""
    ids = sorted(paths.manifest_id(each.identity, each.accepted_at_unix_ns) for each in accepted)
    schema = rollup_schema()
    start_ns = START_NS // 60_000_000_000 * 60_000_000_000
    made: list[dict[str, Any]] = [
        {"agent_id": agent, "labels": [], "start_ns": start_ns, "count": count, "sum": total, "min": 1.0}
        | {"max": greatest, "last_ns": START_NS, "last": greatest, "nan_count": 0, "sample_kind": 1}
        for agent, (count, total, greatest) in rows.items()
    ]
    arrays = [pa.array([row.get(field.name, []) for row in made], field.type) for field in schema]
    chunk = encode_rollup(pa.Table.from_arrays(arrays, schema=schema))
    generation = f"{1:012d}-{'0' * 32}"
    sizes = {"rows": 0, "samples": 0}  # not looked at by an audit
    name = f"rollup/v1/window=60s/{HOUR}/metric=cpu/{generation}-000.lmrollup.zst"
    chunks = [{"key": name, "window_s": 60, "size": len(chunk), **sizes}]
    listed = encode_index(batch_schema().empty_table(), series_schema().empty_table())
    name = f"index/v1/{HOUR}/{generation}-000.lmindex.zst"
    index = [{"key": name, "window_s": 0, "size": len(listed), **sizes}]
    env.overwrite(str(chunks[0]["key"]), chunk)
    env.overwrite(str(index[0]["key"]), listed)
    made_of = {"sequence": 1, "digest": "0" * 32, "first_at_ns": 0, "last_at_ns": 0}
    manifest = {"schema": "lightmetrics.rollup_manifest.v1", "covers": ids, "chunks": chunks, "index": index}
    manifest |= {"generation": made_of, "windows_s": [60, 300], "samples": 0}
    env.overwrite(f"manifests/v1/{HOUR}/{generation}.json", json.dumps(manifest).encode())
    state = {"committed": 1, "settled_ns": 0, "windows_s": [60, 300], "abandoned": []}
    env.overwrite("roller/v1/state.json", json.dumps(state).encode())


@pytest.mark.full
def test_what_retention_removed_or_nobody_came_to_is_not_lost_and_what_was_passed_by_is_named(env: AuditYard) -> None:
    """Old rows are expired, late batches wait; a number that came twice hours apart is doubled in bronze too, and a
    settled batch that no rollup covers is reported with its key."""
    day_s, hour_s = 86_400.0, 3_600.0
    samples = SampleLoader(env.spark, env.context)
    steps = [  # each a commit of bronze, which remembers the numbers of the last ones only
        [("old", 0, 100 * day_s), ("again", 0, 100 * day_s)],
        [("again", 5, 10 * hour_s), ("twice", 0, 10 * hour_s)],
        [("whole", 0, 5 * hour_s)],
        [("whole", 10, 2.0)],
        [("twice", 5, 1.0)],
    ]
    for step in steps:
        for agent, first, ago_s in step:
            env.accept(frame_of(first, first + 9, agent=agent), ago_s=ago_s)
        assert samples.step(Limit()) is not None
    kept = load(sections(), flags={"bronze.retention_days": 30} | env.settings.as_layer())
    (removed,) = TableMaintenance(msgspec.structs.replace(env.context, settings=kept), lambda: env.spark).expire()
    asyncio.run(make_roller(env.store, env.context.clock).run())
    time.sleep(1.1)  # the store tells whole seconds: what comes now comes after bronze has looked
    env.accept(frame_of(0, 9, agent="late"), ago_s=50 * hour_s, noted=True)
    passed = env.accept(frame_of(0, 9, agent="passed"), ago_s=2 * hour_s)

    record = env.audit(verify=True)

    entry = paths.accepted_by_time_key(passed.identity, passed.accepted_at_unix_ns)
    assert {("unindexed", "rollup", entry)} == {(each.finding, each.kind, each.key) for each in record.findings}
    reported = rows_of(record)
    assert {"again", "twice", "passed"} == set(reported)
    assert (named(reported["passed"].lost), named(reported["passed"].doubled)) == ({"rollup": 10}, {})
    assert (named(reported["twice"].lost), named(reported["twice"].doubled)) == ({}, {"accepted": 5, "bronze": 5})
    assert (named(reported["again"].lost), named(reported["again"].doubled)) == ({}, {"accepted": 5})
    account = record.conservation
    assert (20, 20, 10 + 10 + 5) == (removed.rows_removed, account.waiting, account.expired)
    assert 1 == round((record.began_at_unix_ns - account.kept_since_unix_ns) / 1e9 / day_s / 30, 2)
    assert account.stages["bronze"] + account.waiting + account.expired == account.stages["accepted"]


FAULTS = {  # what rollups say of an agent whose 20 samples are 1 to 20, and what the audit must say of it
    "whole": (20, 210.0, 20.0, {}),
    "lost": (17, 210.0, 20.0, {"lost": 3}),
    "doubled": (24, 210.0, 20.0, {"doubled": 4}),
    "sum": (20, 211.0, 20.0, {"changed": 1}),
    "greatest": (20, 210.0, 21.0, {"changed": 1}),
}


@pytest.mark.full
def test_rollups_are_held_against_what_they_cover(env: AuditYard) -> None:
    """Samples that rollups lost or counted twice, and hours that came to other values, are reported by agent."""
    batches = [env.accept(frame_of(n * 10, n * 10 + 9, agent=agent)) for agent in FAULTS for n in range(2)]
    rolled_up(env, batches, {agent: (count, total, top) for agent, (count, total, top, _) in FAULTS.items()})

    record = env.audit(verify=True)

    reported = {
        row.agent_id: {what: n for what in ("lost", "doubled", "changed") if (n := getattr(row, what).get("rollup"))}
        for row in record.conservation.rows
    }
    assert reported == {agent: reports for agent, (_, _, _, reports) in FAULTS.items() if reports}
    assert (record.conservation.stages["rollup_due"], record.conservation.stages["rollup"]) == (100, 101)
    assert record.totals == ()


@pytest.mark.full
def test_what_cannot_be_read_of_rollups_is_told_with_its_key(env: AuditYard) -> None:
    """Chunks of every window and of the index, half-written, missing or of other bytes, and a manifest to come: they
    are reported, the samples are lost to rollups, and the rest is compared."""
    batches = [env.accept(frame_of(n * 10, n * 10 + 9, agent="a")) for n in range(2)]
    rolled_up(env, batches, {"a": (20, 210.0, 20.0)})
    (key,), (index,) = env.keys("rollup/v1/"), env.keys("index/v1/")
    wide = key.replace("window=60s", "window=300s")
    spare = index.replace("-000.", "-001.")
    to_come = f"manifests/v1/{HOUR}/{1:012d}-{'f' * 32}.json"
    env.overwrite(wide, env.read(key)[:-1] + b"?")
    env.overwrite(spare, b"half of an ind")
    env.overwrite(key, env.read(key)[:-9])
    env.overwrite(to_come, b'{"schema": "lightmetrics.rollup_manifest.v2", "covers": []}')
    env.delete(index)

    record = env.audit(verify=True)

    bad = {("corrupt", "rollup", each) for each in (key, wide, spare, to_come)}
    assert bad | {("corrupt", "rollup_chunk", key), ("missing", "index_chunk", index)} == {
        (each.finding, each.kind, each.key) for each in record.findings
    }
    assert named(record.conservation.lost) == {"rollup": 20}
