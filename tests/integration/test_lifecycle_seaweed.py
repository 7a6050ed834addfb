"""Lifecycle on the real embedded bucket, with a day of three seconds: put a rule, and the object expires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from lakebed.core.clock import SystemClock
from lakebed.core.errors import NotFound, Stale
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import Degraded, DeleteOutcome, Mode, Rule, Verb
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import render_xml, rules_of
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.seaweed.store import SeaweedLake
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LedgerRow, LifecycleState
from lakebed.store.admin import client
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

DAY_S = 3.0
DEADLINE_S = 100.0
SETTINGS = LifecycleSettings(
    day_s=DAY_S, rounding="exact", small_delay_s=0.2, flush_lag_s=0.1, lookback_s=3.0, poll_s=0.3, policy_fresh_s=0.0
)


class Site:
    """One bucket of the embedded server with a worker on it, and boto3 as everybody else's client."""

    def __init__(self, weed: BucketEndpoints, store: Store) -> None:
        self.clock, self.ids, self.store = SystemClock(), Ids(), store
        self.name = f"lc-{self.ids.token()}"
        self.s3: Any = client(weed.store_settings())
        self.s3.create_bucket(Bucket=self.name)
        runtime = StoreRuntime(clock=self.clock, ids=self.ids, metrics=Metrics(), store=store)
        self.filer = FilerClient([weed.filer_grpc], runtime)
        self.lake = SeaweedLake(self.filer, runtime)
        self.reserved = ReservedKeys.of(weed.store_settings())
        self.registers = LifecycleState(runtime)
        self.seams = Seams(self.lake, self.lake, Only(self.lake, self.name))
        self.worker = Enforcer(self.lake, self.seams, self.registers, SETTINGS, node="test", reserved=self.reserved)

    def worker_with(self, **changed: Any) -> Enforcer:
        settings = msgspec.structs.replace(SETTINGS, **changed)
        return Enforcer(self.lake, self.seams, self.registers, settings, node="other", reserved=self.reserved)

    async def rules(self, *rules: Rule) -> None:
        await self.lake.put(self.name, render_xml(rules))

    async def put_aged(self, key: str, age_s: float) -> None:
        """An object that was put so long ago: nobody has to wait for its age, nor to hurry for a younger one's."""
        at_ns = self.clock.now_ns() - round(age_s * 1e9)
        entry = FilerEntry(
            key, attributes=Attributes(file_size=1, mtime_ns=at_ns, crtime_ns=at_ns, mode=0o660), content=b"x"
        )
        folder = s3.bucket_path(self.name)
        put = Mutation(MutationKind.PUT, folder, key, entry)
        await self.filer.transact(Transaction(folder, (Clause(ConditionKind.EXISTS),), (put,)))

    def put(self, key: str, **options: Any) -> None:
        self.s3.put_object(Bucket=self.name, Key=key, Body=options.pop("Body", b"x"), **options)

    def keys(self) -> list[str]:
        return sorted(one["Key"] for one in self.s3.list_objects_v2(Bucket=self.name).get("Contents", []))

    def versions(self) -> list[str]:
        found = self.s3.list_object_versions(Bucket=self.name)
        return [v["VersionId"] for v in found.get("Versions", [])] + ["marker" for _ in found.get("DeleteMarkers", [])]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Ticks until it holds."""
        began = self.clock.monotonic_s()
        while self.clock.monotonic_s() - began < DEADLINE_S:
            await self.worker.run_round()
            if await asyncio.to_thread(holds):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {DEADLINE_S} s: {self.keys()} {await self.registers.blockers.read()}")

    async def rows(self, key: str) -> list[LedgerRow]:
        return [row async for row in DeletionLedger(self.registers.runtime).rows(self.name, key=key)]

    async def why(self, key: str) -> list[str]:
        return [row.outcome for row in await self.rows(key)]


class Only:
    """The policies of one bucket alone: other tests share the server."""

    def __init__(self, lake: SeaweedLake, bucket: str) -> None:
        self._lake, self._bucket = lake, bucket
        self.get: Callable[[str], Awaitable[Any]] = lake.get
        self.put: Callable[[str, bytes], Awaitable[None]] = lake.put

    async def all(self) -> list[Any]:
        return [policy for policy in await self._lake.all() if policy.bucket == self._bucket]


@pytest_asyncio.fixture
async def site(weed: BucketEndpoints, bucket: Store) -> AsyncIterator[Site]:
    made = await asyncio.to_thread(Site, weed, bucket)
    yield made
    await made.lake.close()


@pytest.mark.parametrize("rounding", ["exact", "midnight"])
async def test_an_object_expires_by_its_rule_and_the_ledger_says_why(site: Site, rounding: str) -> None:
    """Put a rule, put objects: the one it names goes after its days and not before, the other stays."""
    site.worker = site.worker_with(rounding=rounding)
    await site.rules(Rule("tmp", prefix="tmp/", expiration_days=1))
    await site.worker.run_round()
    began_ns = site.clock.now_ns()
    site.put("tmp/a/b.txt")
    site.put("kept.txt")

    await site.until(lambda: site.keys() == ["kept.txt"])

    planned, verdict = await site.rows("tmp/a/b.txt")
    assert ("", DeleteOutcome.DELETED) == (planned.outcome, verdict.outcome)
    assert planned.at_ns - began_ns > (DAY_S - 1) * 10**9, "before its time"  # a store may tell whole seconds
    assert planned.at_ns >= planned.due_at_ns
    assert rounding == "exact" or planned.due_at_ns % round(DAY_S * 10**9) == 0
    assert [] == await site.why("kept.txt")


async def test_a_policy_put_with_boto3_is_enforced_and_reads_back_verbatim(site: Site) -> None:
    """What an S3 client puts is what the worker runs; what Lakebed puts is what S3 gives back."""
    site.worker = site.worker_with(day_s=100.0)
    await site.put_aged("old", 140.0)
    site.put("young")
    policy = {"Rules": [{"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}]}
    site.s3.put_bucket_lifecycle_configuration(Bucket=site.name, LifecycleConfiguration=policy)

    await site.worker.run_round()
    assert ["young"] == site.keys()
    state = (await site.registers.bucket(site.name).read()).value
    assert [Mode.EVENT_DRIVEN] == [action.mode for action in state.actions.values()]
    text = render_xml((Rule("mine", prefix="x", expiration_days=123),))
    await site.lake.put(site.name, text)
    read = await site.lake.get(site.name)
    assert read is not None and text == read.text
    assert 123 == site.s3.get_bucket_lifecycle_configuration(Bucket=site.name)["Rules"][0]["Expiration"]["Days"]


@pytest.mark.full
async def test_tags_sizes_and_a_late_tag(site: Site) -> None:
    """A tag put on later counts from the object's own age; sizes are strict."""
    await site.rules(
        Rule("t", prefix="t/", tags=(("tmp", "1"),), expiration_days=1),
        Rule("s", prefix="s/", size_greater_than=5, expiration_days=1),
    )
    await site.worker.run_round()
    for key, body in (("t/late", b"x"), ("t/never", b"x"), ("s/big", b"123456"), ("s/small", b"12345")):
        site.put(key, Body=body)
    await asyncio.sleep(DAY_S * 1.2)
    await site.worker.run_round()
    assert ["s/small", "t/late", "t/never"] == site.keys()
    tagged_ns = site.clock.now_ns()
    site.s3.put_object_tagging(Bucket=site.name, Key="t/late", Tagging={"TagSet": [{"Key": "tmp", "Value": "1"}]})

    await site.until(lambda: site.keys() == ["s/small", "t/never"])

    assert all(row.due_at_ns < tagged_ns for row in await site.rows("t/late")), "it was due before it was tagged"


@pytest.mark.full
async def test_versions_and_markers(site: Site) -> None:
    """Current versions get a marker, noncurrent ones go, and the lone marker goes last."""
    site.s3.put_bucket_versioning(Bucket=site.name, VersioningConfiguration={"Status": "Enabled"})
    await site.rules(Rule("v", expiration_days=1, noncurrent_days=1))
    await site.worker.run_round()
    site.put("a")

    await site.until(lambda: site.versions() == [])

    done = [row for row in await site.rows("a") if row.outcome == DeleteOutcome.DELETED]
    assert [Verb.CURRENT, Verb.VERSION, Verb.DELETE_MARKER] == [Verb(row.verb) for row in done]
    assert done[1].at_ns - done[0].at_ns > (DAY_S - 1) * 10**9, "a day after it was noncurrent"


@pytest.mark.full
async def test_an_upload_left_open_is_aborted(site: Site) -> None:
    """After its days, and only under its prefix."""
    await site.rules(Rule("u", prefix="in/", abort_days=1))
    await site.worker.run_round()
    for key in ("in/a", "out/a"):
        site.s3.create_multipart_upload(Bucket=site.name, Key=key)

    def open_uploads() -> list[str]:
        return [one["Key"] for one in site.s3.list_multipart_uploads(Bucket=site.name).get("Uploads", [])]

    await site.until(lambda: open_uploads() == ["out/a"])


async def test_a_delete_of_an_overwritten_object_does_nothing(site: Site) -> None:
    """The store itself checks the identity: what was judged is what is deleted."""
    site.put("a", Body=b"one")
    (judged,) = (await site.lake.look(site.name, "a")).entries
    site.put("a", Body=b"two")

    with pytest.raises(Stale):
        await site.lake.delete(judged, Verb.CURRENT)
    assert b"two" == site.s3.get_object(Bucket=site.name, Key="a")["Body"].read()
    (fresh,) = (await site.lake.look(site.name, "a")).entries
    await site.lake.delete(fresh, Verb.CURRENT)
    with pytest.raises(NotFound):
        await site.lake.delete(fresh, Verb.CURRENT)


async def test_a_walk_goes_on_behind_any_token(site: Site) -> None:
    """Every key once, and from each token exactly the rest."""
    site.s3.create_multipart_upload(Bucket=site.name, Key="up")
    for key in ("a", "b/c", "b/d/e", "b/d/f", "b-x", "z"):
        site.put(key)
    families = [family async for family in site.lake.scan(site.name)]

    assert ["a", "b-x", "b/c", "b/d/e", "b/d/f", "up", "z"] == sorted(family.key for family in families)
    for place, family in enumerate(families):
        rest = [one.token async for one in site.lake.scan(site.name, family.token)]
        assert [one.token for one in families[place + 1 :]] == rest


async def test_a_date_that_has_passed_takes_what_is_there_and_what_comes(site: Site) -> None:
    """At once, and on the daily scan; other prefixes stay."""
    site.put("x/a")
    site.put("y/a")
    await site.rules(Rule("d", prefix="x/", expiration_date_ns=18262 * 86_400 * 10**9))
    await site.worker.run_round()
    assert ["y/a"] == site.keys()
    site.put("x/later")

    await site.until(lambda: site.keys() == ["y/a"])


@pytest.mark.full
async def test_an_object_under_legal_hold_stays_until_it_is_let_go(site: Site, weed: BucketEndpoints) -> None:
    """Never bypassed: skipped, with the verdict in the ledger; the next scan after the release takes it."""
    site.name = f"lock-{site.ids.token()}"
    site.seams = Seams(site.lake, site.lake, Only(site.lake, site.name))
    site.worker = Enforcer(site.lake, site.seams, site.registers, SETTINGS, node="test", reserved=site.reserved)
    site.s3.create_bucket(Bucket=site.name, ObjectLockEnabledForBucket=True)
    await site.rules(Rule("n", noncurrent_days=1))
    await site.worker.run_round()
    site.put("a", ObjectLockLegalHoldStatus="ON")
    held = site.versions()[0]
    site.put("a")
    deadline = site.clock.monotonic_s() + DEADLINE_S
    while DeleteOutcome.SKIPPED_OBJECT_LOCK not in await site.why("a") and site.clock.monotonic_s() < deadline:
        await site.worker.run_round()
        await asyncio.sleep(0.2)
    assert DeleteOutcome.SKIPPED_OBJECT_LOCK in await site.why("a")
    assert held in site.versions()

    site.s3.put_object_legal_hold(Bucket=site.name, Key="a", VersionId=held, LegalHold={"Status": "OFF"})
    await Operator(site.registers).rebootstrap(site.name)
    await site.until(lambda: held not in site.versions())
    assert 1 == len(site.versions())


async def test_too_short_a_log_means_scans_alone(site: Site) -> None:
    """The action says so, no event deletes anything, and a scan does, when the object is due."""
    site.worker = site.worker_with(retention_s=2.0)
    await site.rules(Rule("s", expiration_days=1))
    await site.worker.run_round()
    (action,) = (await site.registers.bucket(site.name).read()).value.actions.values()
    assert (Mode.SCAN_ONLY, Degraded.RETENTION_BELOW_HORIZON) == (action.mode, action.degraded)
    site.put("a")

    await site.until(lambda: not site.keys())

    assert {"BOOTSTRAP"} == {row.stream.partition(":")[0] for row in await site.rows("a")}


@pytest.mark.full
async def test_an_edit_takes_back_what_the_old_policy_wanted(site: Site) -> None:
    """Shortly before an object is due its rule is given more days: it stays."""
    await site.rules(Rule("e", expiration_days=1))
    await site.worker.run_round()
    site.put("a")
    await asyncio.sleep(DAY_S * 0.6)
    await site.rules(Rule("e", expiration_days=100))

    await asyncio.sleep(DAY_S)
    await site.worker.run_round()

    assert ["a"] == site.keys()
    assert [] == await site.why("a")


async def fill(site: Site, count: int) -> None:
    """So many objects, as entries of the filer, a thousand in a transaction: through S3 it would take minutes."""
    folder = s3.bucket_path(site.name)
    now_ns = site.clock.now_ns() // 1_000_000_000 * 1_000_000_000
    attributes = Attributes(file_size=1, mtime_ns=now_ns, crtime_ns=now_ns, mode=0o660)
    gate = asyncio.Semaphore(4)

    async def some(first: int) -> None:
        made = [
            FilerEntry(f"k{number:06d}", attributes=attributes, content=b"x")
            for number in range(first, min(first + 1000, count))
        ]
        puts = tuple(Mutation(MutationKind.PUT, folder, entry.name, entry) for entry in made)
        async with gate:
            await site.filer.transact(Transaction(folder, (Clause(ConditionKind.EXISTS),), puts))

    await asyncio.gather(*(some(first) for first in range(0, count, 1000)))


@pytest.mark.full
async def test_a_policy_put_on_sixty_thousand_objects_returns_in_under_a_second(site: Site) -> None:
    """Nothing is walked in the PUT, neither in ours nor in S3's own; both are seen by the next round."""
    await fill(site, 60_000)
    assert "k059999" == site.s3.list_objects_v2(Bucket=site.name, StartAfter="k059998")["Contents"][0]["Key"]

    rule = {"ID": "s3", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 100}}
    ours_s, theirs_s = [], []
    for days in range(100, 105):  # the quickest of some counts: a machine may pause, a walk is never quick
        began = site.clock.monotonic_s()
        await site.rules(Rule("ours", expiration_days=days))
        ours_s.append(site.clock.monotonic_s() - began)
        began = site.clock.monotonic_s()
        await asyncio.to_thread(
            site.s3.put_bucket_lifecycle_configuration, Bucket=site.name, LifecycleConfiguration={"Rules": [rule]}
        )
        theirs_s.append(site.clock.monotonic_s() - began)

    assert (min(ours_s) < 1.0, min(theirs_s) < 1.0) == (True, True), (ours_s, theirs_s)
    (policy,) = [one for one in await site.lake.all() if one.bucket == site.name]
    assert ["s3"] == [one.rule_id for one in rules_of(policy.text)]
    await site.lake.put(site.name, b"")  # so that no other test's worker walks it


async def test_a_policy_that_reaches_lakebeds_own_bucket_deletes_nothing(site: Site, weed: BucketEndpoints) -> None:
    """Put with boto3, so past our own refusal: an empty prefix on the very bucket that everything is kept in."""
    site.name, reserved = weed.bucket, weed.bucket
    site.seams = Seams(site.lake, site.lake, Only(site.lake, reserved))
    site.worker = Enforcer(site.lake, site.seams, site.registers, SETTINGS, node="test", reserved=site.reserved)
    await site.store.create("accepted/v1/one.json", b"{}")
    rule = {"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}
    site.s3.put_bucket_lifecycle_configuration(Bucket=reserved, LifecycleConfiguration={"Rules": [rule]})
    try:
        await asyncio.sleep(DAY_S + 1.5)
        await site.worker.run_round()
        (told,) = await Operator(site.registers).status(reserved)
    finally:
        site.s3.delete_bucket_lifecycle(Bucket=reserved)

    assert b"{}" == (await site.store.get("accepted/v1/one.json")).data
    assert "could delete Lakebed's own data" in told["why"]


@pytest.mark.full
async def test_an_object_whose_key_ends_in_a_slash_expires_when_it_holds_nothing(site: Site) -> None:
    """SeaweedFS keeps it as a folder: it goes by event and by walk, but never with what lies in it."""
    site.put("old/", Body=b"")
    site.put("full/", Body=b"")
    site.put("full/kept.txt")
    site.put("plain/kept.txt")
    await asyncio.sleep(DAY_S + 1.5)
    await site.rules(
        Rule("f", prefix="old/", expiration_days=1),
        Rule("g", prefix="full/", size_less_than=1, expiration_days=1),
        Rule("new", prefix="new/", expiration_days=1),
    )
    await site.worker.run_round()
    assert ["full/", "full/kept.txt", "plain/kept.txt"] == site.keys()

    site.put("new/", Body=b"")
    await site.until(lambda: "new/" not in set(site.keys()))

    assert DeleteOutcome.DELETED in await site.why("old/") and DeleteOutcome.DELETED in await site.why("new/")
    assert ["full/", "full/kept.txt", "plain/kept.txt"] == site.keys()


async def test_a_restarted_worker_goes_on_where_the_last_stood(site: Site) -> None:
    """Cursors and states are in the bucket: another worker needs no walk, and misses nothing."""
    await site.rules(Rule("r", expiration_days=1))
    await site.worker.run_round()
    site.put("a")
    site.worker = site.worker_with()

    run_round = await site.worker.run_round()
    assert () == run_round.scans
    await site.until(lambda: site.keys() == [])
