"""Audits as joins: every kind of damage is named with its key, and repaired as the reconciler would."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.index import decode_segment, single_objects
from lakebed.batches.model import AcceptedBatch, BatchIdentity
from lakebed.batches.packer import write_blob
from lakebed.batches.retention import BatchRetention
from lakebed.delta.model import TableSpec
from lakebed.pipeline.audit import keys
from lakebed.pipeline.audit.stored import last_audit
from lakebed.pipeline.tables.table import Table
from lakebed.rollups.paths import ROLLER_STATE
from lakebed.spark.location import Location
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.audited_batches import AuditYard, found
from support.bad_batches import BLOBS, entry_key, spoil
from support.batch_frames import frame_of, submit
from support.counting_proxy import CountingProxy
from support.rollup_fixtures import make_roller
from support.runtimes import runtime_of

pytestmark = pytest.mark.timeout(600)  # an audit is many Spark jobs: slow where many share two cores


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> AuditYard:
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
    segment = paths.segment_key(at_ns, at_ns, sha256)
    every = [*wanted, paths.quarantine_key(identity, sha256), paths.repair_key(identity), segment]
    every.append(paths.pack_key(sha256))
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


@pytest.mark.full
def test_a_sound_bucket_has_no_findings_and_nothing_of_it_is_read(env: AuditYard) -> None:
    """Counted on the wire: a quick audit fetches no object of a batch, and then exactly the manifests in doubt."""
    fleet = env.fleet()
    with CountingProxy(env.settings.endpoint.removeprefix("http://")) as proxy:
        settings = msgspec.structs.replace(env.settings, endpoint=proxy.endpoint)
        watched = AuditYard(env.spark, connected(settings), settings)

        record = watched.audit()
        sound = proxy.gets()
        env.delete(paths.accepted_by_blob_key(fleet[2].frame_sha256, fleet[2].identity))
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
    assert doubtful == asyncio.run(last_audit(env.context))


def connected(settings: StoreSettings) -> Store:
    return connect(settings, runtime_of())


def lie(env: AuditYard, batch: AcceptedBatch, sha256: str) -> tuple[str, str]:
    """Moves the reverse reference of a batch under the key of another blob: where it should be, and where it is."""
    true = paths.accepted_by_blob_key(batch.frame_sha256, batch.identity)
    wrong = paths.accepted_by_blob_key(sha256, batch.identity)
    env.overwrite(wrong, env.read(true))
    env.delete(true)
    return true, wrong


@pytest.mark.parametrize("verify", [False, True], ids=["quick", "full"])
@pytest.mark.full
def test_a_reverse_reference_that_lies_is_told_with_its_key(env: AuditYard, verify: bool) -> None:
    """It names the blob of another manifest, one whose own reference is gone, or a hash that nobody has: either audit
    reads the manifest, believes it, and misses the true reference; the reconciler repairs it."""
    first, second, third, fourth, fifth = env.fleet(agents=1, batches=5)
    wrong_answers = dict(
        lie(env, *of) for of in ((first, second.frame_sha256), (third, "ab" * 32), (fourth, fifth.frame_sha256))
    )
    gone = paths.accepted_by_blob_key(fifth.frame_sha256, fifth.identity)
    env.delete(gone)

    record = env.audit(verify=verify)
    asyncio.run(env.mender().repair())
    after = env.audit(verify=verify)

    assert {("orphaned", "accepted_by_blob", lie) for lie in wrong_answers.values()} | {
        ("unindexed", "accepted_by_blob", true) for true in (*wrong_answers, gone)
    } == found(record)
    assert not record.ok
    assert {"its manifest refers to another blob"} == {e.reason for e in record.findings if e.finding == "orphaned"}
    assert after.ok
    assert set(wrong_answers.values()) == {
        each.key for each in after.findings
    }  # what is orphaned waits, and harms nobody


@pytest.mark.full
def test_what_a_quick_audit_cannot_see_is_said_by_it_and_seen_by_the_full_one(env: AuditYard) -> None:
    """A reference under the key of a blob that was never accepted and was seen in the same hour looks as a true one."""
    (batch,) = env.fleet(agents=1, batches=1)
    never = submit(frame_of(900, 909, agent="nobody"))
    asyncio.run(write_blob(env.store, never))
    seen = acceptance.blob_seen(never.sha256, batch.accepted_at_unix_ns)
    env.overwrite(seen.key, seen.data)
    true, wrong = lie(env, batch, never.sha256)

    quick, full = env.audit(), env.audit(verify=True)

    assert {("orphaned", "raw_blob", batch.raw_blob_key)} == found(quick)
    assert any("reverse reference" in words for words in quick.unseen)
    assert {("orphaned", "accepted_by_blob", wrong), ("unindexed", "accepted_by_blob", true)} <= found(full)
    assert (full.ok, full.unseen) == (False, ())


@pytest.mark.full
def test_rows_of_the_index_are_audited_as_the_single_objects_they_stand_for(env: AuditYard) -> None:
    """A sound bucket of segments has no finding, also with every object read; a damaged segment is told, and its
    batches are indexed anew."""
    for n in range(3):
        env.accept(frame_of(n * 10, n * 10 + 9), derived="row")

    quick, whole = env.audit(), env.audit(verify=True)
    segment = sorted(env.keys(paths.ACCEPTED_INDEX))[0]
    env.overwrite(segment, b"half")
    damaged = env.audit(verify=True)
    report = asyncio.run(env.mender().repair())
    after = env.audit()

    assert (True, True) == (quick.ok, whole.ok), (quick.findings, whole.findings)
    assert ("corrupt", "accepted_index", segment) in found(damaged)
    assert {"unindexed"} == {each.finding for each in damaged.findings if each.kind != "accepted_index"}
    assert report is not None and {"indexed": 1, "rollup_work": 1} == report.repaired
    assert {("corrupt", "accepted_index", segment)} == found(after)


def test_what_retention_removed_is_no_loss(env: AuditYard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are explained, whether its hour is removed or only settled, and so are the chunks of its hour that
    the manifest of a later generation names; the rest is audited as ever."""
    monkeypatch.setattr("lakebed.batches.retention.WAIT_S", 0.0)
    now_ns = env.context.clock.now_ns()
    for n, days in enumerate((5, 3, 0)):
        frame = frame_of(n * 10, n * 10 + 9, at_ns=now_ns - days * 86_400 * 10**9)
        env.accept(frame, derived="row", ago_s=days * 86_400)
    asyncio.run(make_roller(env.store, env.context.clock).run())

    def retain(days: float) -> None:
        role = BatchRetention(env.context.on(env.store), retention_days=days, owner="r")
        asyncio.run(role.run())

    retain(4.0)
    retain(4.0)  # the first goes
    retain(2.0)  # the second is settled
    asyncio.run(make_roller(env.store, env.context.clock, retain_s=4.0 * 86_400).run())
    record = env.audit(verify=True)

    assert (2, 6) == (len(env.keys(paths.ACCEPTED)), len(env.keys("rollup/v1/")))
    assert record.ok, (record.findings, record.conservation)
    assert (20, 20) == (record.conservation.stages["accepted"], record.conservation.explained)


def test_every_kind_of_damage_is_named_with_its_key_and_size(env: AuditYard, spark: SparkSession) -> None:
    """Missing, corrupt, unindexed, orphaned and foreign, in one audit, in the record and in the table."""
    good, lost, empty, unindexed = env.fleet(agents=1, batches=4)
    env.delete(lost.raw_blob_key)
    env.overwrite(empty.raw_blob_key, b"")
    for key in (
        paths.accepted_by_time_key(unindexed.identity, unindexed.accepted_at_unix_ns),
        paths.accepted_by_blob_key(unindexed.frame_sha256, unindexed.identity),
        paths.blob_by_time_key(unindexed.frame_sha256, unindexed.accepted_at_unix_ns),
    ):
        env.delete(key)
    orphan = submit(frame_of(900, 909, agent="nobody"))
    asyncio.run(write_blob(env.store, orphan))
    conflict = env.conflict(good, frame_of(0, 9, agent="agent-0", value=5.0), referred=False)
    env.overwrite("accepted/v1/readme.txt", b"hello")

    record = env.audit()

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
    table = Table(spark, spec, env.context.on(env.store), location=Location.of(env.settings))
    assert found(record) == {(row["finding"], row["kind"], row["key"]) for row in table.read().collect()}


@pytest.mark.full
def test_an_entry_by_time_that_is_missing_extra_or_damaged_is_told_with_its_key_and_mended(env: AuditYard) -> None:
    """The full audit reads every entry. What can be derived is written anew; what is extra, foreign or of a later
    schema is named and left to a person."""
    good, gone, torn, other, moved, later = env.fleet(agents=1, batches=6)
    at = {batch.identity: entry_key(batch) for batch in (good, gone, torn, other, moved, later)}
    env.delete(at[gone.identity])
    for batch, how in ((torn, "half-written entry"), (later, "later entry")):
        asyncio.run(spoil(env.store, batch, how))
    output = json.loads(env.read(at[other.identity]))
    env.overwrite(at[other.identity], json.dumps(output | {"samples": output["samples"] + 1}).encode())
    wrong = paths.accepted_by_time_key(moved.identity, moved.accepted_at_unix_ns + 1)
    env.overwrite(wrong, env.read(at[moved.identity]))
    env.delete(at[moved.identity])
    nobody = paths.accepted_by_time_key(BatchIdentity("nobody", "boot-1", 0, 9), good.accepted_at_unix_ns)
    env.overwrite(nobody, env.read(at[good.identity]))
    astray = re.sub(r"hour=\d\d", lambda hour: f"hour={(int(hour[0][-2:]) + 5) % 24:02d}", at[good.identity])
    env.overwrite(astray, env.read(at[good.identity]))

    record = env.audit(verify=True)
    report = asyncio.run(env.mender().repair())
    after = env.audit(verify=True)

    left = {
        ("orphaned", "accepted_by_time", wrong),
        ("orphaned", "accepted_by_time", nobody),
        ("foreign", "unknown", astray),
    }
    assert found(record) == left | {
        ("corrupt", "accepted_by_time", at[later.identity]),
        ("unindexed", "accepted_by_time", at[gone.identity]),
        ("unindexed", "accepted_by_time", at[moved.identity]),
        ("corrupt", "accepted_by_time", at[torn.identity]),
        ("corrupt", "accepted_by_time", at[other.identity]),
    }
    reports = {each.key: each.reason for each in record.findings}
    assert "does not decode" in reports[at[torn.identity]]
    assert "other samples or times" in reports[at[other.identity]]
    assert "v2' is not known here" in reports[at[later.identity]]
    assert "accepted at another time" in reports[wrong]
    assert report is not None
    assert {"indexed": 5, "rollup_work": 5} == report.repaired
    assert found(after) == left


@pytest.mark.full
def test_findings_are_what_the_reconciler_would_mend(env: AuditYard) -> None:
    """On the same bucket, the entries that an audit misses are in the rows that a cold reconciliation writes."""
    for n, derived in enumerate(
        [(), ("by_time",), ("by_blob",), ("seen",), ("by_time", "seen"), ("by_time", "by_blob")]
    ):
        env.accept(frame_of(n * 10, n * 10 + 9), derived=derived)
    whole = env.accept(frame_of(100, 109))
    env.conflict(whole, frame_of(100, 109, value=3.0), referred=False)
    gone = env.accept(frame_of(200, 209), derived=())
    env.delete(gone.raw_blob_key)
    changed = env.accept(frame_of(300, 309), derived=("by_time",))
    env.overwrite(changed.raw_blob_key, frame_of(300, 309, value=9.0))

    record = env.audit(verify=True)
    before = env.keys()
    asyncio.run(env.reconciler().audit())

    created = env.keys() - before - {paths.AUDIT}
    # Beside the missing entries, the reconciler marks bad blobs and asks for rollups of what was indexed late.
    marks = {paths.repair_key(batch.identity) for batch in (gone, changed)}
    rows = {
        key
        for segment in created
        if segment.startswith(paths.ACCEPTED_INDEX)
        for row in decode_segment(segment, env.read(segment)).rows
        for key, _ in single_objects(row)
    }
    unreadable = {batch.identity for batch in (gone, changed)}  # without its blob a batch has no row
    missing = {
        each.key
        for each in record.findings
        if each.finding == "unindexed" and paths.identity_of(each.referrer or each.key) not in unreadable
    }
    assert missing <= rows | created
    assert marks <= created
    bad = {(each.finding, each.key) for each in record.findings if each.kind == "raw_blob"}
    assert {("missing", gone.raw_blob_key), ("corrupt", changed.raw_blob_key)} == bad
    after = env.audit(verify=True).findings
    assert unreadable >= {paths.identity_of(each.referrer) for each in after if each.finding == "unindexed"}


@pytest.mark.full
def test_the_reconciler_takes_the_findings_as_work(env: AuditYard) -> None:
    """What is repaired from an audit's files is what a cold pass would repair; done once, and it proves the audit."""
    env.fleet(agents=1, batches=2)
    late = env.accept(frame_of(70, 79), derived=())
    env.conflict(late, frame_of(70, 79, value=3.0), referred=False)
    record = env.audit()
    mender = env.mender()

    report = asyncio.run(mender.repair())

    assert report is not None
    assert report.repaired == {"indexed": 1, "rollup_work": 1, "quarantine_by_blob": 1}
    assert asyncio.run(env.mender().repair()) is None
    proven = asyncio.run(env.reconciler().audits.read()).value
    assert (proven.audited_through_ns, proven.accepted) == (record.proof.through_ns, 3)
    assert env.audit().ok


@pytest.mark.full
def test_candidates_of_garbage_come_with_the_proof_and_are_judged_again(env: AuditYard) -> None:
    """A blob whose identity was accepted with other bytes goes; one that was accepted since the listing stays."""
    accepted = env.accept(frame_of(0, 9))
    loser = submit(frame_of(0, 9, value=7.0))
    slow = submit(frame_of(10, 19))
    for submitted in (loser, slow):
        asyncio.run(write_blob(env.store, submitted))
    record = env.audit()
    assert {(file.do, file.lines) for file in record.work} == {("judge", 2)}
    env.accept(slow.frame)  # the slow writer comes after the audit

    report = asyncio.run(env.sweeper().sweep(dry_run=False, source="audit"))

    assert {"delete": 1, "keep": 1} == report.counts
    assert {accepted.raw_blob_key, slow.blob_key} == env.keys(paths.RAW_BLOBS)
    after = env.audit(verify=True)
    assert (after.ok, after.conservation.stages) == (True, {"sent": 20, "accepted": 20})  # what was swept is no loss


@pytest.mark.full
def test_without_the_work_done_no_candidate_is_deleted(env: AuditYard) -> None:
    """Age stays a condition: a blob that is younger than the horizon is kept."""
    env.accept(frame_of(0, 9))
    loser = submit(frame_of(0, 9, value=7.0))
    asyncio.run(write_blob(env.store, loser))
    env.audit(horizon_s=0.0)

    report = asyncio.run(env.sweeper(horizon_s=3600.0).sweep(dry_run=False, source="audit"))

    assert {"keep": 1} == report.counts
    assert loser.blob_key in env.keys(paths.RAW_BLOBS)


@pytest.mark.full
def test_what_cannot_be_read_is_set_aside_with_its_key_and_the_rest_is_audited(env: AuditYard) -> None:
    """Missing, other bytes, half-written, a later format, in blobs and in manifests: the job goes on, the audit fails.
    What the roller's state says is unknown, when that cannot be read, and told."""
    good, torn, later, *rest = env.fleet(agents=1, batches=3 + len(BLOBS))
    bad = {how: asyncio.run(spoil(env.store, batch, how)) for how, batch in zip(BLOBS, rest, strict=True)}
    env.overwrite(paths.accepted_key(torn.identity), b'{"schema": "lightmetrics.accepted_batch.v1", "agent_id"')
    to_come = json.dumps({"schema": "lightmetrics.accepted_batch.v2", "who": "x"}).encode()
    env.overwrite(paths.accepted_key(later.identity), to_come)
    env.overwrite(ROLLER_STATE, b'{"committed": ')

    record = env.audit(verify=True)

    reports = {each.key: each.reason for each in record.findings if each.finding == "corrupt"}
    wanted = {batch.raw_blob_key: BLOBS[how] for how, batch in bad.items() if how != "missing"} | {
        paths.accepted_key(torn.identity): "does not decode",
        paths.accepted_key(later.identity): "v2' is not known here",
        ROLLER_STATE: "does not decode",
    }
    assert wanted.keys() == reports.keys()
    for key, words in wanted.items():
        assert words in reports[key]
    assert ("missing", "raw_blob", bad["missing"].raw_blob_key) in found(record)
    assert not record.ok
    # What an unreadable manifest refers to is unknown: its blob is no orphan.
    assert not {good.raw_blob_key, torn.raw_blob_key, later.raw_blob_key} & {each.key for each in record.findings}


@pytest.mark.full
def test_what_is_younger_than_the_grace_is_not_judged(env: AuditYard) -> None:
    """A collector between its manifest and its index entries is not damage."""
    env.accept(frame_of(), derived=())
    flags = {"audit.grace_s": 3600.0} | env.settings.as_layer()
    from lakebed.core.settings import load
    from lakebed.pipeline.audit.job import BucketAuditor
    from lakebed.wiring.parts import sections

    patient = msgspec.structs.replace(env.context, settings=load(sections(), flags=flags))

    record = BucketAuditor(env.spark, patient).run(horizon_s=0.0)

    assert (record.ok, record.findings) == (True, ())


@pytest.mark.full
def test_packed_batches_are_audited_like_any_other(env: AuditYard) -> None:
    """Sound packs have no findings; a lost pack, a damaged frame and a frame that nothing refers to are named."""
    env.pack([frame_of(agent=f"agent-{n}") for n in range(3)])
    sound = env.audit(), env.audit(verify=True)
    lost = env.pack([frame_of(agent=f"lost-{n}") for n in range(2)])
    torn = env.pack([frame_of(agent=f"torn-{n}") for n in range(2)])
    data = asyncio.run(env.store.get(torn[0].raw_blob_key)).data
    open_ = env.pack([frame_of(agent=f"open-{n}") for n in range(2)], accepted=1)
    env.delete(lost[0].raw_blob_key)
    env.overwrite(torn[0].raw_blob_key, data[:-1] + b"x")  # the last byte of the second frame

    record = env.audit(verify=True)

    assert [(True, ()), (True, ())] == [(each.ok, each.totals) for each in sound]
    assert {
        *(("missing", "raw_blob", paths.blob_key(each.frame_sha256)) for each in lost),
        ("corrupt", "raw_blob", torn[0].raw_blob_key),
        ("orphaned", "raw_blob", open_[0].raw_blob_key),
    } == {each for each in found(record) if each[1] != "raw_blob_by_time"}  # of the lost ones, as without packs


@pytest.mark.full
def test_a_batch_whose_pack_is_gone_is_named_although_its_frame_is_elsewhere(env: AuditYard) -> None:
    """The manifest names one place: a copy of the same frame in another blob does not make it readable."""
    frames = [frame_of(agent=f"agent-{n}") for n in range(2)]
    gone = env.pack(frames)
    for frame in frames:
        asyncio.run(write_blob(env.store, submit(frame)))
    env.delete(gone[0].raw_blob_key)

    record = env.audit()

    assert not record.ok
    assert {("missing", "raw_pack", gone[0].raw_blob_key)} == found(record)
