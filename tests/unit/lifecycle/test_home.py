"""No rule ever takes what Lakebed itself lives from: two walls, each tried alone."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.settings import Contradiction
from lakebed.lifecycle import checks
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.model import DeleteOutcome
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.policy import as_xml, render_xml
from lakebed.lifecycle.reserved import ReachesReserved, ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import reserved_of
from lakebed.store.settings import StoreSettings
from support.gateway_fixtures import context_with
from support.lifecycle_harness import RESERVED, Harness
from support.lifecycle_makers import rule

WHOLE = ReservedKeys("lakebed")
FOLDER = ReservedKeys("lakebed", "own/")
SHARED = ReservedKeys("lakebed", "", ("tmp/", "exports/"))
OWN_KEYS = (
    "accepted/v1/agent=a/boot=b/1-2.json",
    "raw-blobs/v1/sha256/ab/cd",
    "llog/wal-shared/1",
    "ingest/manifest.json",
    "ticks/v1/commits/o/p/t.json",
    "tables/bronze/o/p/t/_delta_log/00000000000000000000.json",
    "lifecycle/v1/reader.json",
    "authority.json",
    "a-part/that-comes-later",
)


@pytest.mark.parametrize(
    ("reserved", "bucket", "prefix", "reached"),
    [
        (WHOLE, "lakebed", "", True),
        (WHOLE, "lakebed", "anything/", True),
        (WHOLE, "other", "", False),
        (FOLDER, "lakebed", "", True),
        (FOLDER, "lakebed", "ow", True),
        (FOLDER, "lakebed", "own/", True),
        (FOLDER, "lakebed", "own/accepted/", True),
        (FOLDER, "lakebed", "own-not/", False),
        (FOLDER, "lakebed", "tmp/", False),
        (SHARED, "lakebed", "tmp/", False),
        (SHARED, "lakebed", "tmp/deep/", False),
        (SHARED, "lakebed", "tm", True),
        (SHARED, "lakebed", "", True),
        (ReservedKeys(""), "", "", False),
    ],
)
def test_a_prefix_reaches_home_when_a_key_behind_it_could_be_there(
    reserved: ReservedKeys, bucket: str, prefix: str, reached: bool
) -> None:
    """By overlap in either direction, and never by a list of known folders."""
    assert reached is reserved.reached_by(bucket, prefix)


def test_every_key_is_reserved_unless_it_is_shared_or_outside() -> None:
    """A part that nobody has heard of yet is protected too."""
    assert all(WHOLE.holds("lakebed", key) for key in OWN_KEYS)
    assert all(FOLDER.holds("lakebed", f"own/{key}") for key in OWN_KEYS)
    assert not FOLDER.holds("lakebed", "tmp/a") and not WHOLE.holds("other", OWN_KEYS[0])
    assert SHARED.holds("lakebed", "tmp") and not SHARED.holds("lakebed", "tmp/a")


def test_a_home_is_what_the_store_settings_say() -> None:
    """Bucket and folder of the store; a store in memory has no bucket that rules could meet."""
    assert ReservedKeys("lake", "a/b/") == ReservedKeys.of(StoreSettings(url="s3://lake", prefix="/a/b/"))
    assert ReservedKeys("lake", "", ("tmp/",)) == ReservedKeys.of(StoreSettings(url="s3://lake"), ("tmp/",))
    assert ReservedKeys("") == ReservedKeys.of(StoreSettings(url="memory:"))
    assert ("tmp/", "x/") == LifecycleSettings(shared_prefixes="tmp/, x/").shared
    with pytest.raises(Contradiction):
        LifecycleSettings(shared_prefixes="tmp/,").check()


def test_a_policy_that_reaches_home_is_refused_when_it_is_put() -> None:
    """Also when the rule is disabled: enabling it later is one word."""
    reaching = render_xml((rule(rule_id="all", expiration_days=1, enabled=False),))

    with pytest.raises(ReachesReserved, match="rule all could delete Lakebed's own data"):
        as_xml(reaching, bucket="lakebed", reserved=FOLDER)
    assert reaching == as_xml(reaching, bucket="other", reserved=FOLDER)


async def test_a_policy_put_behind_our_back_takes_its_bucket_out_and_says_so() -> None:
    """The first wall, met by whoever speaks S3 to the store directly: nothing is compiled, other buckets go on."""
    world = Harness()
    world.lake.write("lakebed", "own/accepted/v1/x")
    world.lake.write("lakebed", "stray")
    world.lake.write("b", "a")
    await world.policy("lakebed", rule(expiration_days=1))
    await world.policy("b", rule(expiration_days=1))

    await world.run_round(2)

    assert (["own/accepted/v1/x", "stray"], []) == (world.left("lakebed"), world.left("b"))
    (told,) = await Operator(world.registers).status("lakebed")
    assert "could delete Lakebed's own data" in told["why"]


async def test_the_guarded_delete_refuses_a_reserved_key_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wall, with the first one gone: by walk, by event and by upload; skipped, counted and explained."""
    monkeypatch.setattr(ReservedKeys, "check", lambda *_: None)
    world = Harness()
    world.lake.write("lakebed", "own/old")
    world.lake.write("lakebed", "stray")
    upload = world.lake.begin_upload("lakebed", "own/big")
    await world.policy("lakebed", rule(expiration_days=1, abort_days=1))

    await world.run_round(2)
    world.lake.write("lakebed", "own/new")
    await world.run_round(2)

    assert ["own/new", "own/old"] == world.left("lakebed")
    assert upload in world.lake.uploads["lakebed"]
    for key in ("own/old", "own/new", "own/big"):
        assert DeleteOutcome.SKIPPED_RESERVED in [row.outcome for row in await world.ledger("lakebed", key)]
    skipped = world.metrics.counter("lakebed_lifecycle_verdicts_total").labels(
        bucket="lakebed", kind="EXPIRATION_DAYS", outcome="SKIPPED_RESERVED"
    )
    assert 2 <= skipped._value.get()
    assert RESERVED.holds("lakebed", "own/old")


@pytest.mark.parametrize(
    ("bucket", "allowed", "acts"),
    [
        ("landing", (), True),
        ("landing", ("landing",), True),
        ("landing-eu", ("landing-*",), True),
        ("other", ("landing", "landing-*"), False),
        ("landing2", ("landing",), False),
    ],
)
def test_with_an_allow_list_no_other_bucket_is_touched(bucket: str, allowed: tuple[str, ...], acts: bool) -> None:
    """Neither is a policy of another bucket taken, nor an object in it deleted."""
    reserved = ReservedKeys("lakebed", allowed=allowed)
    rules = (rule(prefix="a/"),)

    assert acts == reserved.allows(bucket)
    assert acts != reserved.holds(bucket, "a/key")
    if acts:
        reserved.check(bucket, rules)
    else:
        with pytest.raises(ReachesReserved, match=bucket):
            reserved.check(bucket, rules)


async def test_a_worker_with_an_allow_list_deletes_only_there_and_doctor_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `lifecycle.buckets` is set; also with the check of policies gone, the guarded delete refuses by itself."""
    context = context_with()
    context = msgspec.structs.replace(
        context, settings=context.settings.having(LifecycleSettings.of({"buckets": ["landing"]}))
    )
    for check in (ReservedKeys.check, lambda *_: None):
        monkeypatch.setattr(ReservedKeys, "check", check)
        world = Harness()
        lake = world.lake
        world.worker = Enforcer(
            lake, Seams(lake, lake, lake), world.registers, world.settings, node="test", reserved=reserved_of(context)
        )
        for bucket in ("landing", "other"):
            lake.write(bucket, "old")
            await world.policy(bucket, rule(expiration_days=1))

        await world.run_round(2)
        await world.run_round(2)

        assert ([], ["old"]) == (world.left("landing"), world.left("other"))
    assert "deletes only from landing" == checks.allowed(context.settings.of(LifecycleSettings).buckets).seen
    assert "every bucket" in checks.allowed(()).seen
