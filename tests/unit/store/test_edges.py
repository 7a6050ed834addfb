"""Keys, settings, leases and prices of the store, exactly at their limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from botocore.exceptions import ClientError

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Corrupt, Denied, Fenced, Invalid, LakebedError, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction
from lakebed.store import admin, authority, prices
from lakebed.store.admin import BucketConfiguration, LifecycleRule, _denials, _replicas, _rule
from lakebed.store.authority import AUTHORITY_KEY, Authority
from lakebed.store.connect import PrefixedStore, connect
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.store.memory import MemoryStore
from lakebed.store.model import KEY_BYTES_MAX, Version, check_key, check_prefix
from lakebed.store.register import WRITERS_MAX, RegisterState
from lakebed.store.runtime import StoreRuntime
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of, runtime_on


@pytest.mark.parametrize(
    "key", ["", "x" * 1025, "é" * 513, "/a", "a/", "a//b", "a/../b", "./a", "a\\b", "a\nb", "a\x7f"]
)
def test_a_key_that_some_store_would_change_is_refused(key: str) -> None:
    """Empty, too long, empty or dotted segments, backslashes and control characters."""
    with pytest.raises(Invalid):
        check_key(key)
    assert KEY_BYTES_MAX == len(check_key("x" * KEY_BYTES_MAX)) and "a.b/..c" == check_key("a.b/..c")


@pytest.mark.parametrize("prefix", ["a", "a/b", "/", "a//", "../"])
def test_a_prefix_is_a_whole_folder(prefix: str) -> None:
    """Half a segment would match on some stores and not on others."""
    with pytest.raises(Invalid):
        check_prefix(prefix)
    assert ("", "a/b/") == (check_prefix(""), check_prefix("a/b/"))


@pytest.mark.parametrize(
    "values",
    [
        {"access_key_id": "a"},
        {"secret_access_key": "a"},
        {"url": "memory:", "endpoint": "http://x"},
        {"url": "file:///tmp"},
        {"url": "bucket"},
    ],
)
def test_settings_of_a_store_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    """Half a credential, an endpoint in memory, an unknown kind."""
    with pytest.raises(Contradiction):
        StoreSettings.of(values)
    for url in ("s3://b", "gs://b", "az://b", "memory:"):
        StoreSettings.of({"url": url})


def test_requests_have_the_price_of_their_verb() -> None:
    """Writes and lists cost more than reads; deletes nothing."""
    assert pytest.approx(4 * 5e-6) == prices.dollars({"create": 1, "replace": 1, "upload": 1, "list": 1})
    assert pytest.approx(3 * 4e-7) == prices.dollars({"get": 1, "get_range": 1, "head": 1, "delete": 1000})


async def test_a_store_in_memory_is_seen_below_its_prefix(manual_clock: ManualClock) -> None:
    """Range, upload and children as well; without a prefix the keys are as they are."""
    store = connect(StoreSettings(url="memory:", prefix="p/"), runtime_of(manual_clock, Ids.seeded(1)))
    assert isinstance(store, PrefixedStore)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    made = await store.upload("x/y", chunks())
    assert ("x/y", 4) == (made.key, made.size)
    assert b"bc" == await store.get_range("x/y", 1, 2)
    assert ["x"] == list(await store.children(""))
    with pytest.raises(Corrupt):
        await store.get_range("x/y", 3, 2)
    plain = connect(StoreSettings(url="memory:"), runtime_of(manual_clock, Ids.seeded(1)))
    assert isinstance(plain, MemoryStore)


def lease(store: MemoryStore, clock: ManualClock, owner: str) -> Lease:
    return Lease(
        StoreRuntime(clock=clock, ids=Ids(), metrics=Metrics(), store=store), "l.json", owner=owner, lease_s=10.0
    )


async def test_a_lease_says_who_holds_it_and_for_how_long(manual_clock: ManualClock) -> None:
    """The default room for clocks is a second; a renewal counts from now; only its holder gives it back."""
    store = MemoryStore(clock=manual_clock)
    one, two = lease(store, manual_clock, "one"), lease(store, manual_clock, "two")
    now = manual_clock.now_ns() // 1_000_000
    held = await one.acquire()
    assert HeldLease("one", 1, now + 10_000) == held
    await manual_clock.advance(4.0)
    with pytest.raises(HeldByAnother, match=r"held by one for another 7\.0 s") as refused:
        await two.acquire()
    assert "one" == refused.value.detail["owner"]
    renewed = await one.renew(held)
    assert (now + 14_000, 1) == (renewed.expires_at_ms, renewed.epoch)
    await two.release(HeldLease("two", 1, 0))
    await one.release(HeldLease("one", 2, 0))
    assert "one" == (await two.holder()).owner
    await one.release(renewed)
    assert ("", 1) == ((await two.holder()).owner, (await two.holder()).term)
    assert 2 == (await two.acquire()).epoch
    with pytest.raises(Fenced, match="its holder is two"):
        await one.renew(renewed)


async def test_the_authority_of_a_bucket_is_made_once(manual_clock: ManualClock) -> None:
    """The expected one where it is named, else a fresh one; another is refused; damage is not overwritten."""
    store, ids = MemoryStore(clock=manual_clock), Ids.seeded(1)
    made = await authority.claim(runtime_on(store, manual_clock, ids), expected="")
    assert made == await authority.claim(runtime_on(store, manual_clock, ids), expected="")
    assert made == await authority.claim(runtime_on(store, manual_clock, ids), expected=made.authority_id)
    with pytest.raises(Conflict) as refused:
        await authority.claim(runtime_on(store, manual_clock, ids), expected="other")
    assert (made.authority_id, "other") == (refused.value.detail["found"], refused.value.detail["expected"])
    fresh = MemoryStore(clock=manual_clock)
    named = await authority.claim(runtime_on(fresh, manual_clock, ids), expected="mine")
    assert Authority("lakebed.authority.v1", "mine", manual_clock.now_ns() // 1_000_000) == named
    await fresh.delete(AUTHORITY_KEY)
    await fresh.create(AUTHORITY_KEY, b"{}")
    with pytest.raises(Corrupt):
        await authority.claim(runtime_on(fresh, manual_clock, ids), expected="")


def test_a_write_is_known_while_its_writer_is_remembered() -> None:
    """Present: it took place. Absent: it did not, unless so many others wrote that the object cannot distinguish."""
    few = RegisterState(None, 0, Version("e"), ("a-1", "b-7"))
    full = RegisterState(None, 0, Version("e"), tuple(f"w{n}-1" for n in range(WRITERS_MAX)))

    assert [True, False, False] == [few.holds(each) for each in ("b-7", "b-8", "c-1")]
    assert [True, False, None] == [full.holds(each) for each in ("w3-1", "w3-2", "c-1")]
    later = RegisterState(None, 0, Version("e"), full.attempts, 100)
    bases = (0, 100 - WRITERS_MAX, 101 - WRITERS_MAX, 100, 101)
    assert [None, None, False, False, None] == [later.holds("c-1", base) for base in bases]


@pytest.mark.parametrize(
    ("rule", "read"),
    [
        ({"ID": "a", "Status": "Enabled", "Filter": {"Prefix": "p/"}, "Expiration": {}}, ("a", "p/", True, True)),
        ({"Status": "Disabled", "Prefix": "q/", "NoncurrentVersionExpiration": {}}, ("", "q/", False, True)),
        ({"Status": "Enabled", "Filter": {"And": {"Prefix": "r/"}}, "Transitions": []}, ("", "r/", True, False)),
        ({"Status": "Enabled", "Filter": {}, "Expiration": {}}, ("", "", True, True)),
    ],
)
def test_a_lifecycle_rule_is_read_in_each_of_its_forms(rule: dict[str, Any], read: tuple[Any, ...]) -> None:
    """The prefix may be in a filter, in its conjunction or beside; only expiry expires."""
    assert LifecycleRule(*read) == _rule(rule)


async def test_every_page_of_versions_is_read_for_delete_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under each prefix, to its last page; a marker that a later version covers hides nothing."""
    asked: list[str] = []

    class Versions:
        def get_bucket_versioning(self, **_: Any) -> dict[str, str]:
            return {"Status": "Suspended"}

        def get_bucket_lifecycle_configuration(self, **_: Any) -> dict[str, Any]:
            return {}

        def get_bucket_policy(self, **_: Any) -> dict[str, str]:
            return {"Policy": "{}"}

        def get_bucket_replication(self, **_: Any) -> dict[str, Any]:
            return {}

        def get_paginator(self, name: str) -> Versions:
            assert "list_object_versions" == name
            return self

        def paginate(self, *, Bucket: str, Prefix: str) -> Any:
            asked.append(f"{Bucket}/{Prefix}")
            for page in range(3):
                yield {"DeleteMarkers": [{"Key": f"{Prefix}{page}", "IsLatest": page == 2}], "Versions": []}

        def close(self) -> None:
            return

    monkeypatch.setattr(admin, "client", lambda _: Versions())

    found = await admin.bucket_state(StoreSettings.of({"url": "s3://lake"}), ["a/", "b/"])

    assert (True, ("a/2", "b/2")) == (found.versioned, found.delete_markers)
    assert ["lake/a/", "lake/b/"] == asked


DENIAL = {"Effect": "Deny", "Action": "s3:DeleteObject"}
POLICY = msgspec.json.encode({"Statement": [{"Effect": "Allow", "Action": "*"}, DENIAL]}).decode()
RULES = [{"Status": status, "Destination": {"Bucket": status}} for status in ("Enabled", "Disabled", "Enabled")]


def no(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "asked")


class Configured:
    """A bucket whose policy and replication are these, or cannot be read."""

    def __init__(self, policy: Any, replication: Any) -> None:
        self._policy, self._replication = policy, replication

    def get_bucket_policy(self, **_: Any) -> Any:
        return self._answer(self._policy)

    def get_bucket_replication(self, **_: Any) -> Any:
        return self._answer(self._replication)

    def _answer(self, found: Any) -> Any:
        if isinstance(found, ClientError):
            raise found
        return found


@pytest.mark.parametrize(
    ("policy", "denials"),
    [
        ({"Policy": POLICY}, (DENIAL,)),
        ({"Policy": "{}"}, ()),
        (no("NoSuchBucketPolicy"), ()),
        (no("AccessDenied"), None),
        (no("NotImplemented"), None),
        ({"Policy": "no JSON"}, None),
        ({}, None),
    ],
)
def test_only_what_a_policy_denies_is_told_and_unknown_is_not_none(policy: Any, denials: Any) -> None:
    """A store that does not answer may deny anything: that is not the same as a policy without denials."""
    assert denials == _denials(Configured(policy, {}), "lake")


@pytest.mark.parametrize(
    ("replication", "replicas"),
    [
        ({"ReplicationConfiguration": {"Rules": RULES}}, ("Enabled", "Enabled")),
        ({"ReplicationConfiguration": {"Rules": []}}, ()),
        (no("ReplicationConfigurationNotFoundError"), ()),
        (no("AccessDenied"), None),
        ({}, None),
    ],
)
def test_only_rules_in_force_replicate_and_unknown_is_not_none(replication: Any, replicas: Any) -> None:
    """A rule that is disabled copies nothing; a store that does not answer may copy anywhere."""
    assert replicas == _replicas(Configured({}, replication), "lake")


@pytest.mark.parametrize(
    ("code", "kind"), [("AccessDenied", Denied), ("SlowDown", Unavailable), ("NoSuchBucket", Unavailable)]
)
async def test_a_configuration_that_cannot_be_read_is_an_error_and_not_an_empty_one(
    code: str, kind: type[LakebedError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of versions and of lifecycle rules alike; a bucket without rules has none."""

    class Partly(Configured):
        closed = 0

        def __init__(self, versioning: Any, lifecycle: Any) -> None:
            super().__init__(no("NoSuchBucketPolicy"), no("ReplicationConfigurationNotFoundError"))
            self._versioning, self._lifecycle = versioning, lifecycle

        def get_bucket_versioning(self, **_: Any) -> Any:
            return self._answer(self._versioning)

        def get_bucket_lifecycle_configuration(self, **_: Any) -> Any:
            return self._answer(self._lifecycle)

        def close(self) -> None:
            Partly.closed += 1

    settings = StoreSettings.of({"url": "s3://lake"})
    for unreadable in (Partly(no(code), {}), Partly({}, no(code))):
        monkeypatch.setattr(admin, "client", lambda _, made=unreadable: made)
        with pytest.raises(kind) as refused:
            await admin.bucket_state(settings, [])
        assert kind is type(refused.value)
    monkeypatch.setattr(admin, "client", lambda _: Partly({}, no("NoSuchLifecycleConfiguration")))

    assert BucketConfiguration(False, (), ()) == await admin.bucket_state(settings, [])
    assert 3 == Partly.closed
