"""TTL routes are changed beside those of others, and only where a rule in force expires the same keys."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Conflict, Corrupt, Invalid
from lakebed.filer import s3
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.seaweed.ttl import BucketTtl, TtlRoute
from support.lifecycle_filer import CONF, ScriptedFiler

RULES = (Rule("r", prefix="logs/", expiration_days=30),)
OTHERS = {"locationPrefix": "/buckets/other/", "collection": "other", "fsync": True, "ttl": "7d"}


class Filer(ScriptedFiler):
    """Applies what is put, after others changed it `races` times."""

    races = 0

    async def transact(self, transaction: Any) -> None:
        if self.races:
            self.races -= 1
            self.put(CONF, content=self.entries[CONF].content + b" ")
        await super().transact(transaction)
        (change,) = transaction.mutations
        self.put(f"{change.directory}/{change.name}", content=change.entry.content)


def filer(conf: dict[str, Any] | None, **bucket: bytes) -> Filer:
    made = Filer()
    made.put("/buckets/b", is_directory=True, extended=bucket)
    if conf is not None:
        made.put(CONF, content=msgspec.json.encode(conf))
    return made


async def test_a_route_is_set_and_cleared_beside_those_of_others() -> None:
    """What others wrote stays as it is, also when they write at the same time."""
    made = filer({"version": 1, "locations": [OTHERS], "later": 1})
    made.races = 2
    ttl = BucketTtl(made, "b")  # type: ignore[arg-type]

    await ttl.set(60, RULES, "logs/")

    assert [TtlRoute("logs/", "60d")] == await ttl.routes()
    conf = msgspec.json.decode(made.entries[CONF].content)
    assert {
        "version": 1,
        "later": 1,
        "locations": [OTHERS, {"locationPrefix": "/buckets/b/logs/", "ttl": "60d"}],
    } == conf
    await ttl.clear("logs/")
    assert [OTHERS] == msgspec.json.decode(made.entries[CONF].content)["locations"]


async def test_a_collection_of_the_same_place_outlives_its_ttl() -> None:
    """Only the TTL is taken away."""
    mine = {"location_prefix": "/buckets/b/", "collection": "b", "ttl": "7d"}
    made = filer({"locations": [mine]})

    await BucketTtl(made, "b").clear()  # type: ignore[arg-type]

    kept = {"location_prefix": "/buckets/b/", "collection": "b"}
    assert [kept] == msgspec.json.decode(made.entries[CONF].content)["locations"]


@pytest.mark.parametrize(
    ("days", "prefix", "rules"),
    [
        (29, "logs/", RULES),
        (60, "", RULES),
        (60, "logs/", ()),
        (60, "logs/", (Rule("off", enabled=False, expiration_days=1),)),
        (60, "logs/", (Rule("tags", tags=(("k", "v"),), expiration_days=1),)),
        (60, "logs/", (Rule("old", noncurrent_days=1),)),
    ],
)
async def test_a_ttl_that_no_rule_stands_for_is_refused(days: int, prefix: str, rules: tuple[Rule, ...]) -> None:
    """Shorter than the rule, wider than its prefix, or narrower than what a TTL takes: nothing is changed."""
    made = filer(None)
    with pytest.raises(Invalid):
        await BucketTtl(made, "b").set(days, rules, prefix)  # type: ignore[arg-type]
    assert [] == made.done


async def test_a_bucket_with_versions_has_no_ttl_and_a_dry_run_changes_nothing() -> None:
    """A TTL takes no notice of versions."""
    versioned = filer(None, **{s3.VERSIONING: b"Enabled"})
    with pytest.raises(Conflict):
        await BucketTtl(versioned, "b").set(60, RULES, "logs/")  # type: ignore[arg-type]
    plain = filer(None)
    await BucketTtl(plain, "b").set(60, RULES, "logs/", dry_run=True)  # type: ignore[arg-type]
    assert [] == versioned.done == plain.done


async def test_a_configuration_that_cannot_be_read_is_not_replaced() -> None:
    """Corrupt, and nothing is written."""
    made = filer(None)
    made.put(CONF, content=b"[1]")
    with pytest.raises(Corrupt):
        await BucketTtl(made, "b").set(60, RULES, "logs/")  # type: ignore[arg-type]
