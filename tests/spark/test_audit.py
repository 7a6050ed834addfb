"""Audits as joins: every kind of damage is named with its key, and mended as the reconciler would."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import write_blob
from lakebed.batches.model import AcceptedBatch, BatchIdentity
from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.delta.model import TableSpec
from lakebed.pipeline.audit import keys
from lakebed.pipeline.audit.stored import last_audit
from lakebed.pipeline.tables.table import Table
from lakebed.rollups.paths import ROLLER_STATE, ROLLUP_WORK
from lakebed.spark.location import Location
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.audited_batches import AuditYard, found
from support.bad_batches import BLOBS, entry_key, spoil
from support.batch_frames import frame_of, submit
from support.counting_proxy import CountingProxy

pytestmark = pytest.mark.timeout(600)  # an audit is many Spark jobs: slow where many share two cores


@pytest.fixture
def yard(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> AuditYard:
    return AuditYard(spark, bucket, bucket_settings)


@pytest.mark.parametrize("at_ns", [1_760_000_399_999_999_999, 1_760_000_400_000_000_000])
def test_the_layout_in_spark_is_the_layout_of_batches(spark: SparkSession, at_ns: int) -> None:
    """Every key that batches writes is built and taken apart alike on both sides, also at the edge of an hour."""
    identity, sha256 = BatchIdentity("agent ü/1", "boot-1", 7, 2**63 - 1), "ab12" * 16
    place = paths.accepted_key(identity).removeprefix(paths.ACCEPTED).removesuffix(".json")
    row = spark.createDataFrame([(place, sha256, at_ns)], "place string, sha256 string, at_ns bigint")
    accepted = keys.accepted_key("place")

    built = row.selectExpr(
        accepted,
        keys.by_time_key(accepted, "at_ns"),
        keys.by_blob_key("sha256", "place"),
        keys.by_blob_key("sha256", "place", prefix=paths.QUARANTINE_BY_BLOB),
        keys.blob_key("sha256"),
        keys.blob_by_time_key("sha256", keys.hour_of("at_ns")),
    ).first()

    wanted = [
        paths.accepted_key(identity),
        paths.accepted_by_time_key(identity, at_ns),
        paths.accepted_by_blob_key(sha256, identity),
        paths.quarantine_by_blob_key(sha256, identity),
        paths.blob_key(sha256),
        paths.blob_by_time_key(sha256, at_ns),
    ]
    assert wanted == list(built or ())
    every = [*wanted, paths.quarantine_key(identity, sha256), paths.repair_key(identity)]
    listing = spark.createDataFrame([(key, 1, 1, True, False) for key in every], LISTED)
    rows = {row["kind"]: row for row in keys.objects(listing, tuple(keys.LAYOUT)).collect()}
    assert set(keys.LAYOUT) == set(rows)
    assert {"accepted", "accepted_by_blob", "quarantine", "quarantine_by_blob", "repair"} == {
        kind for kind, found in rows.items() if found["place"] == place
    }
    assert {sha256, None} == {found["sha256"] for found in rows.values()}
    assert {paths.hour_of(at_ns), None} == {found["hour"] for found in rows.values()}
    assert rows["accepted_by_time"]["at_ns"] == at_ns
    assert rows["accepted"]["digest"] == rows["accepted_by_time"]["digest"] == rows["repair"]["digest"]
    assert keys.foreign(listing).count() == 0


LISTED = "key string, size_bytes bigint, modified_ns bigint, is_latest boolean, is_delete_marker boolean"


def test_a_sound_bucket_has_no_findings_and_nothing_of_it_is_read(yard: AuditYard) -> None:
    """Counted on the wire: a quick audit fetches no object of a batch, and then exactly the manifests in doubt."""
    fleet = yard.fleet()
    with CountingProxy(yard.settings.endpoint.removeprefix("http://")) as proxy:
        settings = msgspec.structs.replace(yard.settings, endpoint=proxy.endpoint)
        watched = AuditYard(yard.spark, connected(settings), settings)

        record = watched.audit()
        sound = proxy.gets()
        yard.delete(paths.accepted_by_blob_key(fleet[2].frame_sha256, fleet[2].identity))
        doubtful = watched.audit()
        fetched = proxy.gets()[len(sound) :]

    assert (record.ok, record.totals, record.work) == (True, (), ())
    assert (record.proof.accepted, record.proof.whole) == (6, True)
    assert any(method == "GET" and "list-type=2" in path for method, path in proxy.seen)  # it did look
    own = f"{settings.url.removeprefix('s3://')}/{settings.prefix}/"
    assert {key.removeprefix(own).split("/")[0] for key in sound} <= {"audit", "tables"}
    assert not doubtful.ok
    assert [paths.accepted_key(fleet[2].identity)] == [
        key.removeprefix(own) for key in fetched if key.removeprefix(own).split("/")[0] not in ("audit", "tables")
    ]
    assert doubtful == asyncio.run(last_audit(yard.context))


def connected(settings: StoreSettings) -> Store:
    return connect(settings, clock=SystemClock(), ids=Ids(), metrics=Metrics())


def lie(yard: AuditYard, batch: AcceptedBatch, sha256: str) -> tuple[str, str]:
    """Moves the reverse reference of a batch under the key of another blob: where it should be, and where it is."""
    true = paths.accepted_by_blob_key(batch.frame_sha256, batch.identity)
    wrong = paths.accepted_by_blob_key(sha256, batch.identity)
    yard.overwrite(wrong, yard.read(true))
    yard.delete(true)
    return true, wrong


@pytest.mark.parametrize("verify", [False, True], ids=["quick", "full"])
def test_a_reverse_reference_that_lies_is_told_with_its_key(yard: AuditYard, verify: bool) -> None:
    """It names the blob of another manifest, one whose own reference is gone, or a hash that nobody has: either audit
    reads the manifest, believes it, and misses the true reference; the reconciler mends it."""
    first, second, third, fourth, fifth = yard.fleet(agents=1, batches=5)
    lies = dict(
        lie(yard, *of) for of in ((first, second.frame_sha256), (third, "ab" * 32), (fourth, fifth.frame_sha256))
    )
    gone = paths.accepted_by_blob_key(fifth.frame_sha256, fifth.identity)
    yard.delete(gone)

    record = yard.audit(verify=verify)
    asyncio.run(yard.mender().repair())
    after = yard.audit(verify=verify)

    assert {("orphaned", "accepted_by_blob", lie) for lie in lies.values()} | {
        ("unindexed", "accepted_by_blob", true) for true in (*lies, gone)
    } == found(record)
    assert not record.ok
    assert {"its manifest refers to another blob"} == {e.reason for e in record.findings if e.finding == "orphaned"}
    assert after.ok
    assert set(lies.values()) == {each.key for each in after.findings}  # what is orphaned waits, and harms nobody


def test_what_a_quick_audit_cannot_see_is_said_by_it_and_seen_by_the_full_one(yard: AuditYard) -> None:
    """A reference under the key of a blob that was never accepted and was seen in the same hour looks as a true one."""
    (batch,) = yard.fleet(agents=1, batches=1)
    never = submit(frame_of(900, 909, agent="nobody"))
    asyncio.run(write_blob(yard.store, never))
    seen = acceptance.blob_seen(never.sha256, batch.accepted_at_unix_ns)
    yard.overwrite(seen.key, seen.data)
    true, wrong = lie(yard, batch, never.sha256)

    quick, full = yard.audit(), yard.audit(verify=True)

    assert {("orphaned", "raw_blob", batch.raw_blob_key)} == found(quick)
    assert any("reverse reference" in words for words in quick.unseen)
    assert {("orphaned", "accepted_by_blob", wrong), ("unindexed", "accepted_by_blob", true)} <= found(full)
    assert (full.ok, full.unseen) == (False, ())


def test_every_kind_of_damage_is_named_with_its_key_and_size(yard: AuditYard, spark: SparkSession) -> None:
    """Missing, corrupt, unindexed, orphaned and foreign, in one audit, in the record and in the table."""
    good, lost, empty, unindexed = yard.fleet(agents=1, batches=4)
    yard.delete(lost.raw_blob_key)
    yard.overwrite(empty.raw_blob_key, b"")
    for key in (
        paths.accepted_by_time_key(unindexed.identity, unindexed.accepted_at_unix_ns),
        paths.accepted_by_blob_key(unindexed.frame_sha256, unindexed.identity),
        paths.blob_by_time_key(unindexed.frame_sha256, unindexed.accepted_at_unix_ns),
    ):
        yard.delete(key)
    orphan = submit(frame_of(900, 909, agent="nobody"))
    asyncio.run(write_blob(yard.store, orphan))
    conflict = yard.conflict(good, frame_of(0, 9, agent="agent-0", value=5.0), referred=False)
    yard.overwrite("accepted/v1/readme.txt", b"hello")

    record = yard.audit()

    assert not record.ok
    reference = paths.quarantine_by_blob_key(conflict.rsplit("/", 1)[-1].removesuffix(".json"), good.identity)
    assert {
        ("missing", "raw_blob", lost.raw_blob_key),
        ("corrupt", "raw_blob", empty.raw_blob_key),
        (
            "unindexed",
            "accepted_by_time",
            paths.accepted_by_time_key(unindexed.identity, unindexed.accepted_at_unix_ns),
        ),
        ("unindexed", "accepted_by_blob", paths.accepted_by_blob_key(unindexed.frame_sha256, unindexed.identity)),
        (
            "unindexed",
            "raw_blob_by_time",
            paths.blob_by_time_key(unindexed.frame_sha256, unindexed.accepted_at_unix_ns),
        ),
        ("unindexed", "quarantine_by_blob", reference),
        ("orphaned", "raw_blob", orphan.blob_key),
        ("orphaned", "raw_blob_by_time", paths.blob_by_time_key(lost.frame_sha256, lost.accepted_at_unix_ns)),
        ("foreign", "unknown", "accepted/v1/readme.txt"),
    } == found(record)
    totals = {(total.finding, total.kind): (total.objects, total.size_bytes, total.wrong) for total in record.totals}
    assert totals["orphaned", "raw_blob"] == (1, len(orphan.frame), False)
    assert totals["unindexed", "accepted_by_time"] == (1, unindexed.frame_bytes, True)
    spec = TableSpec("audit/findings", '{"fields":[]}')
    table = Table(spark, spec, yard.context.on(yard.store), location=Location.of(yard.settings))
    assert found(record) == {(row["finding"], row["kind"], row["key"]) for row in table.read().collect()}


def test_an_entry_by_time_that_is_missing_extra_or_damaged_is_told_with_its_key_and_mended(yard: AuditYard) -> None:
    """The full audit reads every entry. What can be derived is written anew; what is extra, foreign or of a later
    schema is named and left to a person."""
    good, gone, torn, other, moved, later = yard.fleet(agents=1, batches=6)
    at = {batch.identity: entry_key(batch) for batch in (good, gone, torn, other, moved, later)}
    yard.delete(at[gone.identity])
    for batch, how in ((torn, "half-written entry"), (later, "later entry")):
        asyncio.run(spoil(yard.store, batch, how))
    said = json.loads(yard.read(at[other.identity]))
    yard.overwrite(at[other.identity], json.dumps(said | {"samples": said["samples"] + 1}).encode())
    wrong = paths.accepted_by_time_key(moved.identity, moved.accepted_at_unix_ns + 1)
    yard.overwrite(wrong, yard.read(at[moved.identity]))
    yard.delete(at[moved.identity])
    nobody = paths.accepted_by_time_key(BatchIdentity("nobody", "boot-1", 0, 9), good.accepted_at_unix_ns)
    yard.overwrite(nobody, yard.read(at[good.identity]))
    astray = re.sub(r"hour=\d\d", lambda hour: f"hour={(int(hour[0][-2:]) + 5) % 24:02d}", at[good.identity])
    yard.overwrite(astray, yard.read(at[good.identity]))

    record = yard.audit(verify=True)
    report = asyncio.run(yard.mender().repair())
    after = yard.audit(verify=True)

    left = {
        ("corrupt", "accepted_by_time", at[later.identity]),
        ("orphaned", "accepted_by_time", wrong),
        ("orphaned", "accepted_by_time", nobody),
        ("foreign", "unknown", astray),
    }
    assert found(record) == left | {
        ("unindexed", "accepted_by_time", at[gone.identity]),
        ("unindexed", "accepted_by_time", at[moved.identity]),
        ("corrupt", "accepted_by_time", at[torn.identity]),
        ("corrupt", "accepted_by_time", at[other.identity]),
    }
    says = {each.key: each.reason for each in record.findings}
    assert "does not decode" in says[at[torn.identity]]
    assert "other samples or times" in says[at[other.identity]]
    assert "v2' is not known here" in says[at[later.identity]]
    assert "accepted at another time" in says[wrong]
    assert report is not None
    assert {"by_time": 2, "rebuilt_by_time": 2, "rollup_work": 4} == report.repaired
    assert found(after) == left


def test_findings_are_what_the_reconciler_would_mend(yard: AuditYard) -> None:
    """On the same bucket, the objects that an audit misses are exactly those that a cold reconciliation creates."""
    for n, derived in enumerate(
        [(), ("by_time",), ("by_blob",), ("seen",), ("by_time", "seen"), ("by_time", "by_blob")]
    ):
        yard.accept(frame_of(n * 10, n * 10 + 9), derived=derived)
    whole = yard.accept(frame_of(100, 109))
    yard.conflict(whole, frame_of(100, 109, value=3.0), referred=False)
    gone = yard.accept(frame_of(200, 209), derived=())
    yard.delete(gone.raw_blob_key)
    changed = yard.accept(frame_of(300, 309), derived=("by_time",))
    yard.overwrite(changed.raw_blob_key, frame_of(300, 309, value=9.0))

    record = yard.audit(verify=True)
    before = yard.keys()
    asyncio.run(yard.reconciler().audit())

    created = yard.keys() - before - {paths.AUDIT}
    # Beside the missing entries, the reconciler marks bad blobs and asks for rollups of what was indexed late.
    marks = {paths.repair_key(batch.identity) for batch in (gone, changed)}
    work = {key.replace(paths.ACCEPTED_BY_TIME, ROLLUP_WORK) for key in created if "accepted-by-time" in key}
    missing = {each.key for each in record.findings if each.finding == "unindexed"}
    assert missing == created - marks - work
    assert marks <= created
    bad = {(each.finding, each.key) for each in record.findings if each.kind == "raw_blob"}
    assert {("missing", gone.raw_blob_key), ("corrupt", changed.raw_blob_key)} == bad
    assert {total for total in yard.audit(verify=True).totals if total.finding == "unindexed"} == set()


def test_the_reconciler_takes_the_findings_as_work(yard: AuditYard) -> None:
    """What is mended from an audit's files is what a cold pass would mend; done once, and it proves the audit."""
    yard.fleet(agents=1, batches=2)
    late = yard.accept(frame_of(70, 79), derived=())
    yard.conflict(late, frame_of(70, 79, value=3.0), referred=False)
    record = yard.audit()
    mender = yard.mender()

    report = asyncio.run(mender.repair())

    assert report is not None
    assert report.repaired == {
        "by_time": 1, "by_blob": 1, "blob_by_time": 1, "rollup_work": 1, "quarantine_by_blob": 1,
    }  # fmt: skip
    assert asyncio.run(yard.mender().repair()) is None
    proven = asyncio.run(yard.reconciler().audits.read()).value
    assert (proven.audited_through_ns, proven.accepted) == (record.proof.through_ns, 3)
    assert yard.audit().ok


def test_candidates_of_garbage_come_with_the_proof_and_are_judged_again(yard: AuditYard) -> None:
    """A blob whose identity was accepted with other bytes goes; one that was accepted since the listing stays."""
    accepted = yard.accept(frame_of(0, 9))
    loser = submit(frame_of(0, 9, value=7.0))
    slow = submit(frame_of(10, 19))
    for submitted in (loser, slow):
        asyncio.run(write_blob(yard.store, submitted))
    record = yard.audit()
    assert {(file.do, file.lines) for file in record.work} == {("judge", 2)}
    yard.accept(slow.frame)  # the slow writer comes after the audit

    report = asyncio.run(yard.sweeper().sweep(dry_run=False, source="audit"))

    assert {"delete": 1, "keep": 1} == report.counts
    assert {accepted.raw_blob_key, slow.blob_key} == yard.keys(paths.RAW_BLOBS)
    after = yard.audit(verify=True)
    assert (after.ok, after.conservation.stages) == (True, {"sent": 20, "accepted": 20})  # what was swept is no loss


def test_without_the_work_done_no_candidate_is_deleted(yard: AuditYard) -> None:
    """The four conditions stay the last wall: a blob that passed the horizon after the proof is kept."""
    yard.accept(frame_of(0, 9))
    loser = submit(frame_of(0, 9, value=7.0))
    asyncio.run(write_blob(yard.store, loser))
    yard.audit(horizon_s=0.0)

    report = asyncio.run(yard.sweeper(horizon_s=3600.0).sweep(dry_run=False, source="audit"))

    assert {"keep": 1} == report.counts
    assert loser.blob_key in yard.keys(paths.RAW_BLOBS)


def test_what_cannot_be_read_is_set_aside_with_its_key_and_the_rest_is_audited(yard: AuditYard) -> None:
    """Missing, other bytes, half-written, a later format, in blobs and in manifests: the job goes on, the audit fails.
    What the roller's state says is unknown, when that cannot be read, and told."""
    good, torn, later, *rest = yard.fleet(agents=1, batches=3 + len(BLOBS))
    bad = {how: asyncio.run(spoil(yard.store, batch, how)) for how, batch in zip(BLOBS, rest, strict=True)}
    yard.overwrite(paths.accepted_key(torn.identity), b'{"schema": "lightmetrics.accepted_batch.v1", "agent_id"')
    to_come = json.dumps({"schema": "lightmetrics.accepted_batch.v2", "who": "x"}).encode()
    yard.overwrite(paths.accepted_key(later.identity), to_come)
    yard.overwrite(ROLLER_STATE, b'{"committed": ')

    record = yard.audit(verify=True)

    says = {each.key: each.reason for each in record.findings if each.finding == "corrupt"}
    wanted = {batch.raw_blob_key: BLOBS[how] for how, batch in bad.items() if how != "missing"} | {
        paths.accepted_key(torn.identity): "does not decode",
        paths.accepted_key(later.identity): "v2' is not known here",
        ROLLER_STATE: "does not decode",
    }
    assert wanted.keys() == says.keys()
    for key, words in wanted.items():
        assert words in says[key]
    assert ("missing", "raw_blob", bad["missing"].raw_blob_key) in found(record)
    assert not record.ok
    # What an unreadable manifest refers to is unknown: its blob is no orphan.
    assert not {good.raw_blob_key, torn.raw_blob_key, later.raw_blob_key} & {each.key for each in record.findings}


def test_what_is_younger_than_the_grace_is_not_judged(yard: AuditYard) -> None:
    """A collector between its manifest and its index entries is not damage."""
    yard.accept(frame_of(), derived=())
    flags = {"audit.grace_s": 3600.0} | yard.settings.as_layer()
    from lakebed.core.settings import load
    from lakebed.pipeline.audit.job import BucketAuditor
    from lakebed.wiring.parts import sections

    patient = msgspec.structs.replace(yard.context, settings=load(sections(), flags=flags))

    record = BucketAuditor(yard.spark, patient).run(horizon_s=0.0)

    assert (record.ok, record.findings) == (True, ())
