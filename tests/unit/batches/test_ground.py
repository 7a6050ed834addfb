"""Policy, doctor's checks, keys, matchers, live state from the bucket, and the part's commands."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.batches import acceptance, paths
from lakebed.batches import bucket as checks
from lakebed.batches.bucket import REQUIRED, bucket_policy, policy, replication
from lakebed.batches.conflicts import conflict_id, parse_id
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.matchers import Selector, parse
from lakebed.batches.model import LATE_NS, BatchIdentity
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.retention import BatchRetention
from lakebed.batches.segments import pack
from lakebed.batches.settings import ReconcilerSettings
from lakebed.batches.settled import WAIT_S
from lakebed.batches.workers import sweeper_store
from lakebed.cli.main import run
from lakebed.core import trail
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context, context_of
from lakebed.core.errors import Denied, Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction, Settings
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.admin import BucketConfiguration, LifecycleRule
from lakebed.store.guarded import ConditionsIgnored, GuardedStore
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.settings import StoreSettings
from support.batch_frames import START_NS, frame_of, submit
from support.batches_gateway import collector
from support.rollup_fixtures import make_roller
from support.runtimes import runtime_of, runtime_on

ROLES = {"collectors": ["arn:aws:iam::1:role/collector"], "sweepers": ["arn:aws:iam::1:role/gc"]}
GOLDEN = Path(__file__).parent / "golden"

identities = st.builds(
    lambda agent, boot, start, more: BatchIdentity(agent, boot, start, start + more),
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=30),
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=30),
    st.integers(0, 2**62),
    st.integers(0, 10**6),
)


@given(identity=identities)
def test_keys_say_whose_they_are(identity: BatchIdentity) -> None:
    """Accepted, reference and quarantine keys lead back to the identity, whatever its ids contain."""
    sha = "ab" * 32

    for key in (
        paths.accepted_key(identity),
        paths.accepted_by_blob_key(sha, identity),
        paths.quarantine_key(identity, sha),
    ):
        assert identity == paths.identity_of(key)
    assert (identity, sha) == parse_id(conflict_id(identity, sha))
    assert sha == paths.sha256_of_blob(paths.blob_key(sha))


def test_keys_sort_as_sequences_do() -> None:
    """Fixed-width numbers: the order of keys is the order of batches."""
    starts = [0, 9, 10, 99, 100, 2**62]

    keys = [paths.accepted_key(BatchIdentity("a", "b", start, start)) for start in starts]

    assert sorted(keys) == keys
    assert "accepted/v1/agent=61/boot=62/00000000000000000010-00000000000000000020.json" == paths.accepted_key(
        BatchIdentity("a", "b", 10, 20)
    )


@pytest.mark.parametrize("key", ["", "accepted/v1/x", "accepted/v1/agent=zz/boot=61/1-2.json", "a/agent=61/boot=62/x"])
def test_foreign_keys_are_refused(key: str) -> None:
    """What does not name a batch is Invalid, not a surprise."""
    for parser in (paths.identity_of, paths.sha256_of_blob, paths.parse_by_time, parse_id):
        with pytest.raises(Invalid):
            parser(key)


def test_the_policy_protects_the_acceptance_protocol() -> None:
    """Each requirement is a denial that no other permission can lift."""
    policy = bucket_policy("lake", prefix="metrics", encryption="aws:kms", conditional_blobs=True, **ROLES)

    by_sid = {statement["Sid"]: statement for statement in policy["Statement"]}
    accepted, blobs = (f"arn:aws:s3:::lake/metrics/{name}/v1/*" for name in ("accepted", "raw-blobs"))
    assert {"Deny"} == {statement["Effect"] for statement in policy["Statement"]}
    recorded = accepted.replace("accepted/v1/", trail.ROOT)
    assert [accepted, blobs, recorded] == by_sid["CreateOnlyIfAbsent"]["Resource"]
    assert recorded in by_sid["NothingAcceptedIsDeleted"]["Resource"]
    assert recorded in by_sid["NoCopyIntoAccepted"]["Resource"]
    assert not [one for one in by_sid["CollectorsStayAtHome"]["NotResource"] if "keys.json" in one]
    assert {"s3:if-none-match": "true"} == by_sid["CreateOnlyIfAbsent"]["Condition"]["Null"]
    assert accepted in by_sid["NothingAcceptedIsDeleted"]["Resource"]
    assert "Condition" not in by_sid["NothingAcceptedIsDeleted"]
    assert {"s3:DeleteObject", "s3:DeleteObjectVersion"} == set(by_sid["NothingAcceptedIsDeleted"]["Action"])
    assert {"s3:x-amz-copy-source": "false"} == by_sid["NoCopyIntoAccepted"]["Condition"]["Null"]
    assert ROLES["sweepers"] == by_sid["OnlyGarbageCollectionDeletes"]["Condition"]["ArnNotEquals"]["aws:PrincipalArn"]
    assert accepted in by_sid["CollectorsStayAtHome"]["NotResource"]
    assert recorded in by_sid["CollectorsStayAtHome"]["NotResource"]
    assert "Resource" not in by_sid["CollectorsStayAtHome"]
    assert "aws:kms" in str(by_sid["Encrypted"]["Condition"])


def is_denied(policy: dict[str, Any], who: str, action: str, key: str, **headers: str) -> bool:
    """Whether a statement denies this request: S3's rules for what these statements use."""
    have = {"aws:PrincipalArn": who, **{f"s3:{name.replace('_', '-')}": value for name, value in headers.items()}}
    conditions: dict[str, Callable[[str, Any], bool]] = {
        "Null": lambda name, wanted: (name not in have) == (wanted == "true"),
        "Bool": lambda name, wanted: have.get(name) == wanted,
        "ArnEquals": lambda name, wanted: have[name] in wanted,
        "ArnNotEquals": lambda name, wanted: have[name] not in wanted,
    }

    def applies(each: dict[str, Any]) -> bool:
        named = any(fnmatchcase(key, one) for one in each.get("Resource", each.get("NotResource")))
        tests = each.get("Condition", {}).items()
        return (
            ("Deny", "*") == (each["Effect"], each["Principal"])
            and action in each["Action"]
            and named == ("Resource" in each)
            and all(conditions[test](name, wanted) for test, fields in tests for name, wanted in fields.items())
        )

    return any(map(applies, policy["Statement"]))


@pytest.mark.parametrize("who", [*ROLES["collectors"], *ROLES["sweepers"], "arn:aws:iam::1:user/admin"])
def test_nobody_deletes_or_replaces_an_entry_of_the_trail_and_everybody_appends(who: str) -> None:
    """As S3 reads the printed policy: for every role, with retention or without, below a prefix or not."""
    create = {"ObjectCreationOperation": "true"}
    for prefix, retention in product(("", "metrics/"), (False, True)):
        made = bucket_policy("lake", prefix=prefix, retention=retention, **ROLES)
        key = f"arn:aws:s3:::lake/{prefix}{trail.key_of(7)}"

        assert is_denied(made, who, "s3:DeleteObject", key) and is_denied(made, who, "s3:DeleteObjectVersion", key)
        assert is_denied(made, who, "s3:PutObject", key, **create)
        assert is_denied(made, who, "s3:PutObject", key, **create, if_none_match="*", x_amz_copy_source="lake/other")
        assert not is_denied(made, who, "s3:PutObject", key, **create, if_none_match="*")


def test_the_policy_allows_what_the_commands_need_and_no_more() -> None:
    """The garbage collection role may release a boot, and delete manifests where retention is set; nobody else may,
    and nobody deletes a conflict or a decision."""
    root = "arn:aws:s3:::lake/"
    plain, retaining = (bucket_policy("lake", retention=retention, **ROLES)["Statement"] for retention in (False, True))
    denied = [
        {statement["Sid"]: set(statement.get("Resource", ())) for statement in statements}
        for statements in (plain, retaining)
    ]

    held, accepted = f"{root}{paths.HELD_BOOTS}*", f"{root}{paths.ACCEPTED}*"
    for each in denied:
        assert held in each["OnlyGarbageCollectionDeletes"] and held not in each["NothingAcceptedIsDeleted"]
        assert {f"{root}{paths.QUARANTINE}*", f"{root}{paths.RESOLUTIONS}*"} <= each["NothingAcceptedIsDeleted"]
    assert accepted in denied[0]["NothingAcceptedIsDeleted"]
    assert accepted in denied[1]["OnlyGarbageCollectionDeletes"] - denied[1]["NothingAcceptedIsDeleted"]


PRINTED = tuple(bucket_policy("lake", prefix="prod/", **ROLES)["Statement"])


@pytest.mark.parametrize(
    ("denials", "verdict", "seen"),
    [
        (PRINTED, "pass", "in force"),
        (PRINTED[1:], "warn", "not in force: CreateOnlyIfAbsent"),
        ((), "warn", "not in force"),
        (None, "warn", "does not show"),
        (tuple(bucket_policy("lake", **ROLES)["Statement"]), "warn", "not in force: CreateOnlyIfAbsent"),
        (tuple(bucket_policy("lake", prefix="prod/", retention=True, **ROLES)["Statement"]), "warn", "AcceptedIsDel"),
        (tuple(each | {"Principal": {"AWS": "arn:x"}} for each in PRINTED), "warn", "not in force: CreateOnly"),
        (tuple(each | {"Condition": {"Bool": {"aws:x": "true"}}} for each in PRINTED), "warn", "CreateOnlyIfAbsent"),
        (tuple(each | {"Action": "s3:PutObject"} for each in PRINTED), "warn", "not in force: NothingAcceptedIsDel"),
    ],
    ids=[
        "whole",
        "lacks one",
        "none",
        "unknown",
        "other prefix",
        "with retention",
        "one role",
        "narrowed",
        "no deletes",
    ],
)
def test_doctor_says_whether_the_policy_is_in_force(
    denials: tuple[dict[str, Any], ...] | None, verdict: str, seen: str
) -> None:
    """The printed policy has every statement that is looked for; one of the same names that protects less is not it."""
    wanted = bucket_policy("lake", prefix="prod/", collectors=["arn:"], sweepers=["arn:"])["Statement"]

    found = policy(BucketConfiguration(False, (), (), denials), wanted)

    assert (verdict, True) == (found.verdict, seen in found.seen), found
    assert set(REQUIRED) <= {each["Sid"] for each in PRINTED}


def test_doctor_names_the_buckets_that_this_one_is_replicated_to() -> None:
    """A replica must not have collectors."""
    assert "pass" == replication(BucketConfiguration(False, (), ())).verdict
    told = replication(BucketConfiguration(False, (), (), (), ("arn:aws:s3:::other",)))
    assert ("warn", True) == (told.verdict, "arn:aws:s3:::other" in told.seen)


def test_a_policy_without_roles_is_refused() -> None:
    """A policy that nobody could delete under, or anybody, is not printed."""
    for wrong in ({"collectors": []}, {"sweepers": ["gc"]}, {"encryption": "rot13"}):
        with pytest.raises(Invalid):
            bucket_policy("lake", **ROLES | wrong)  # type: ignore[arg-type]


def test_garbage_is_collected_under_its_own_credentials_where_set(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """The sweeper deletes as the role that alone may; half a pair of credentials is refused."""
    keys = {"gc_access_key_id": "gc", "gc_secret_access_key": "secret"}
    sections = {ReconcilerSettings: ReconcilerSettings.of(keys), StoreSettings: StoreSettings.of({})}
    plain = Context(node="n", settings=Settings({}, {}), store=store, clock=manual_clock, ids=Ids(), metrics=metrics)
    own = Context(
        node="n", settings=Settings(sections, {}), store=store, clock=manual_clock, ids=Ids(), metrics=metrics
    )

    assert store is sweeper_store(plain)
    assert store is not sweeper_store(own)
    with pytest.raises(Contradiction):
        ReconcilerSettings.of({"gc_access_key_id": "gc"})
    with pytest.raises(Contradiction):
        ReconcilerSettings.of({"gc_horizon_s": 10, "overlap_s": 900})


async def test_garbage_is_not_collected_on_a_path_that_ignores_conditions(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks unreferenced may have been overwritten: the role that alone may delete waits for the check too."""
    runtime = runtime_of(manual_clock)
    guarded = GuardedStore(store, runtime)
    keys = ReconcilerSettings.of({"gc_access_key_id": "gc", "gc_secret_access_key": "secret"})
    settings = Settings({ReconcilerSettings: keys, StoreSettings: StoreSettings.of({})}, {})
    monkeypatch.setattr("lakebed.batches.workers.connect", lambda *_: store)
    own = sweeper_store(context_of(runtime, guarded, settings, node="n"))
    await own.create("a", b"1")

    async def ignored(key: str, data: bytes, etag: str) -> ObjectInfo:
        return store.bucket.overwrite(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "replace", ignored)
        await guarded.check()
    with pytest.raises(ConditionsIgnored):
        await own.delete("a")
    assert (await own.get("a")).data == b"1"

    await guarded.check()
    await own.delete("a")


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (LifecycleRule("all", "", True, True), "fail"),
        (LifecycleRule("accepted", "accepted/", True, True), "fail"),
        (LifecycleRule("deep", "raw-blobs/v1/sha256/ab/", True, True), "fail"),
        (LifecycleRule("trail", "trail/", True, True), "fail"),
        (LifecycleRule("off", "", False, True), "pass"),
        (LifecycleRule("uploads", "", True, False), "pass"),
        (LifecycleRule("elsewhere", "logs/", True, True), "pass"),
    ],
)
def test_lifecycle_rules_that_reach_accepted_batches_are_found(rule: LifecycleRule, verdict: str) -> None:
    """Only expiry that could touch accepted manifests, raw blobs or the audit trail is a problem."""
    assert verdict == checks.lifecycle(BucketConfiguration(False, (rule,), ())).verdict


def test_versioning_and_delete_markers_are_told() -> None:
    """Versioning is a warning, a delete marker on an acceptance key a failure, both with a fix."""
    versioned = BucketConfiguration(True, (), ("accepted/v1/x",))

    found = [checks.versioning(versioned), checks.delete_markers(versioned)]

    assert ["warn", "fail"] == [diagnosis.verdict for diagnosis in found]
    assert all(diagnosis.fix for diagnosis in found)
    assert "pass" == checks.versioning(BucketConfiguration(False, (), ())).verdict


@pytest.mark.parametrize(
    ("matcher", "taken"),
    [
        ("host=web-1", True),
        ("host=web", False),
        ("host!=web-1", False),
        ("host=~web-.*", True),
        ("host=~eb", False),
        ("host!~db.*", True),
        ("rack=", True),
        ("rack=~.+", False),
    ],
)
def test_matchers_take_whole_values_and_absent_is_empty(matcher: str, taken: bool) -> None:
    """As in the query languages people know."""
    assert taken == Selector("cpu", [parse(matcher)]).takes({"host": "web-1"})


async def test_a_rebuild_reads_the_newest_first_and_says_what_it_left_out(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """Live state that cannot hold the window holds its end, and knows from when on it is whole."""
    for n in range(40):
        submitted = submit(frame_of(n * 10, n * 10 + 9))
        await write_blob(store, submitted)
        accepted = acceptance.manifest(
            submitted, at_ns=manual_clock.now_ns() - (40 - n) * 10**9, collector_id="c", attempt_id="a"
        )
        entry = acceptance.by_time(accepted, acceptance.span_of(submitted.batch))
        await store.create(entry.key, entry.data)
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=30_000, window_s=3600)
    follower = Follower(RawBatches(store), live, window_s=3600, overlap_s=60, interval_s=2, clock=manual_clock)

    await follower.poll()

    assert BatchIdentity("agent-a", "boot-1", 390, 399) in live
    assert BatchIdentity("agent-a", "boot-1", 0, 9) not in live
    assert 0 < len(live) < 40
    assert 0 == await follower.poll()
    assert live.evicted_through_ns > manual_clock.now_ns() - 40 * 10**9


def test_a_dump_shows_what_a_frame_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """`lakebed batches dump FILE` needs nothing but the file."""
    code = run(["batches", "dump", str(GOLDEN / "v1-plain.lmbatch"), "--limit", "2"])

    shown = msgspec.json.decode(capsys.readouterr().out)
    assert 0 == code
    assert ("agent-a", "boot-1", 10, 15, "none") == tuple(
        shown[name] for name in ("agent_id", "boot_id", "seq_start", "seq_end", "compression")
    )
    assert [10, 11] == [sample["seq"] for sample in shown["samples"]]
    assert START_NS == shown["samples"][0]["time_ns"]


def test_a_dump_shows_what_a_spool_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every whole record of a segment is listed, without touching the file."""
    segment = pack(frame_of(), 7, "one") + pack(frame_of(10, 19), 8, "two") + b"LMSPOOL1torn"
    (tmp_path / "1.spool").write_bytes(segment)

    code = run(["batches", "dump", str(tmp_path / "1.spool")])

    shown = msgspec.json.decode(capsys.readouterr().out)
    assert 0 == code
    assert [(7, "one", 0), (8, "two", 10)] == [
        (row["accepted_at_unix_ns"], row["attempt_id"], row["seq_start"]) for row in shown
    ]
    assert segment == (tmp_path / "1.spool").read_bytes()


def test_a_dump_of_no_frame_fails_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage is an exit code and one line, not a trace."""
    (tmp_path / "x").write_bytes(b"nonsense" * 20)

    code = run(["batches", "dump", str(tmp_path / "x")])

    assert 3 == code
    assert "not an .lmbatch frame" in capsys.readouterr().err


def test_the_policy_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`lakebed bucket policy` is ready for `aws s3api put-bucket-policy`."""
    roles = ["--collector", ROLES["collectors"][0], "--gc", ROLES["sweepers"][0]]

    code = run(["bucket", "policy", "--bucket", "lake", *roles])

    assert 0 == code
    assert bucket_policy("lake", **ROLES) == msgspec.json.decode(capsys.readouterr().out)


def test_gc_without_a_reason_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Deleting by hand needs a reason; a dry run does not."""
    assert 3 == run(["batches", "gc"])
    assert "--reason" in capsys.readouterr().err


async def test_the_note_of_a_late_row_is_stored_before_the_row(manual_clock: ManualClock) -> None:
    """A crash between the two leaves a note too many; the other way round the batch would never be rolled up."""
    order: list[str] = []

    class Recording(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            order.append(key.split("/")[0])
            return await super().create(key, data)

    writes = DerivedWrites(runtime_on(Recording(clock=manual_clock), manual_clock), waiting_max=10)
    submitted = submit(frame_of())
    at_ns = manual_clock.now_ns() - 2 * LATE_NS
    accepted = acceptance.manifest(submitted, at_ns=at_ns, collector_id="c", attempt_id="a")
    writes.put(accepted, acceptance.span_of(submitted.batch))
    writes.start()
    await writes.drain()
    await writes.stop()

    assert [ROLLUP_WORK.split("/")[0], paths.ACCEPTED_INDEX.split("/")[0]] == order


class Guarded(MemoryStore):
    """A bucket in memory under the printed policy, for the role that asks."""

    def __init__(self, clock: ManualClock, made: dict[str, Any]) -> None:
        super().__init__(clock=clock)
        self.made, self.who = made, ROLES["collectors"][0]
        self.put, self.deleted = set[str](), set[str]()

    def ask(self, action: str, key: str, **headers: str) -> None:
        create = {"ObjectCreationOperation": "true"} if action == "s3:PutObject" else {}
        if is_denied(self.made, self.who, action, f"arn:aws:s3:::lake/{key}", **create, **headers):
            raise Denied(f"{self.who} {action} {key}")
        (self.put if create else self.deleted).add(key.split("/v1/")[0])

    async def create(self, key: str, data: bytes) -> Any:
        self.ask("s3:PutObject", key, if_none_match="*")
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: Any) -> Any:
        self.ask("s3:PutObject", key)
        return await super().replace(key, data, etag)

    async def delete(self, key: str) -> None:
        self.ask("s3:DeleteObject", key)
        await super().delete(key)


async def test_collectors_and_garbage_collection_do_their_work_under_the_printed_policy(
    manual_clock: ManualClock,
) -> None:
    """Accept, quarantine, hold, index, reconcile, roll up and merge as a collector; release and retention as the role
    that may delete. What a collector must not do is denied."""
    store = Guarded(manual_clock, bucket_policy("lake", retention=True, conditional_blobs=True, **ROLES))
    runtime = runtime_on(store, manual_clock)
    async with collector(store, clock=manual_clock) as (client, part):
        answers = [await client.post("/v1/batches", content=frame_of(value=value)) for value in (1.0, 1.0, 2.0)]
        (conflict,) = await part.review.list()
        await part.review.resolve(conflict.conflict_id, "quarantine_boot", "cloned", "ann")
        await part.derived_writes.drain()
        with pytest.raises(Denied, match="DeleteObject quarantine/v1/held/"):
            await part.review.release("agent-a", "boot-1")
        store.who = ROLES["sweepers"][0]
        await part.review.release("agent-a", "boot-1")
    store.who = ROLES["collectors"][0]
    for _ in range(3):
        await manual_clock.advance(40 * 86_400)
        await make_roller(store, manual_clock).run()
    store.who = ROLES["sweepers"][0]
    for _ in range(3):
        await BatchRetention(runtime, retention_days=10.0, owner="r").run()
        await manual_clock.advance(WAIT_S)

    assert [200, 200, 409] == [answer.status_code for answer in answers]
    assert {"accepted", "raw-blobs", "quarantine", "settled", "rollup", "rollup-merged"} <= store.put
    assert {"accepted", "raw-blobs", "quarantine"} <= store.deleted
    for key in (paths.ACCEPTED, paths.RAW_BLOBS, paths.QUARANTINE, "keys/v1/keys.json", "tables/x"):
        store.who = ROLES["collectors"][0]
        with pytest.raises(Denied):
            await store.delete(key)
