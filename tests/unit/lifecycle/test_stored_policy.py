"""A policy in force: what another S3 accepted is read as it reads it; a rule that cannot be read takes out itself."""

from __future__ import annotations

import pytest

from lakebed.lifecycle.model import DeleteOutcome, Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.stored_policy import StoredPolicy, stored_policy
from support.lifecycle_harness import Harness, failing
from support.lifecycle_makers import rule

DAYS = "<Expiration><Days>3</Days></Expiration>"
TRANSITION = "<Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition>"
TAG = "<Tag><Key>k</Key><Value>v</Value></Tag>"


def xml(*rules: str) -> bytes:
    inside = "".join(f"<Rule>{one}</Rule>" for one in rules)
    return f"<LifecycleConfiguration>{inside}</LifecycleConfiguration>".encode()


def enabled(inside: str) -> bytes:
    return xml(f"<ID>r</ID><Status>Enabled</Status>{inside}{DAYS}")


@pytest.mark.parametrize(
    ("inside", "wanted"),
    [
        ("", {}),
        ("<Filter/>", {}),
        ("<Prefix>a/</Prefix>", {"prefix": "a/"}),
        ("<Prefix>a/</Prefix><Filter/>", {"prefix": "a/"}),
        ("<Prefix></Prefix><Filter><Prefix>b/</Prefix></Filter>", {"prefix": "b/"}),
        ("<Prefix>a/</Prefix><Filter><Prefix>b/</Prefix></Filter>", {"prefix": "b/"}),
        (f"<Prefix>a/</Prefix><Filter>{TAG}</Filter>", {"prefix": "a/", "tags": (("k", "v"),)}),
        (f"<Filter><Prefix>a/</Prefix>{TAG}</Filter>", {"prefix": "a/", "tags": (("k", "v"),)}),
        (
            "<Filter><Prefix>a/</Prefix><ObjectSizeGreaterThan>5</ObjectSizeGreaterThan></Filter>",
            {"prefix": "a/", "size_greater_than": 5},
        ),
        ("<Filter><And><Prefix>a/</Prefix></And></Filter>", {"prefix": "a/"}),
    ],
)
def test_what_seaweedfs_and_ceph_accept_is_read(inside: str, wanted: dict[str, object]) -> None:
    """No Filter is the whole bucket; conditions without And all hold; the rule's Prefix counts beside a Filter."""
    assert StoredPolicy((Rule("r", expiration_days=3, **wanted),)) == stored_policy(enabled(inside))  # type: ignore[arg-type]


def test_a_disabled_rule_is_never_a_problem() -> None:
    """With a transition, or with anything else that cannot be run: it is not run."""
    text = xml(
        f"<ID>old</ID><Status>Disabled</Status><Prefix/>{TRANSITION}",
        f"<ID>odd</ID><Status>Disabled</Status><Prefix/><Frob/>{DAYS}",
        f"<ID>r</ID><Status>Enabled</Status><Prefix/>{DAYS}",
    )

    assert StoredPolicy((Rule("r", expiration_days=3),)) == stored_policy(text)


def test_a_rule_that_cannot_be_read_takes_out_itself_and_is_named() -> None:
    """By its id, or by its place where it has none, with the reason; the others are run."""
    text = xml(
        f"<ID>bad</ID><Status>Enabled</Status><Prefix/><Frob/>{DAYS}",
        "<Status>Enabled</Status><Prefix/><Expiration><Days>0</Days></Expiration>",
        f"<ID>cold</ID><Status>Enabled</Status><Prefix/>{TRANSITION}",
        f"<ID>both</ID><Status>Enabled</Status><Prefix/>{TRANSITION}{DAYS}",
        f"<ID>good</ID><Status>Enabled</Status><Prefix>x/</Prefix>{DAYS}",
    )

    found = stored_policy(text)

    assert ["both", "good"] == [one.rule_id for one in found.rules]
    assert ["rule 'bad'", "rule 2", "rule 'cold'", "rule 'both'"] == [one.split(":")[0] for one in found.problems]
    assert "its transitions are not run" in found.problems[3]


@pytest.mark.parametrize("text", [b"<Frob/>", b"not xml", b"[]", b"{}", b"\xff\xfe", xml()])
def test_a_text_that_is_no_policy_has_one_problem_and_no_rule(text: bytes) -> None:
    """Never an exception: the caller has other buckets to run."""
    found = stored_policy(text)

    assert () == found.rules
    assert 1 == len(found.problems)


def test_a_rule_that_reaches_lakebeds_own_keys_takes_out_itself() -> None:
    """The rules beside it are run."""
    text = render_xml((rule(rule_id="wide", expiration_days=1), rule(rule_id="x", prefix="x/", expiration_days=1)))

    found = stored_policy(text, "lakebed", ReservedKeys("lakebed", "own/"))

    assert ["x"] == [one.rule_id for one in found.rules]
    assert "rule 'wide'" in found.problems[0]


NESTED = "<And>" * 5000 + "</And>" * 5000


@pytest.mark.parametrize(
    "text",
    [
        xml(f"<ID>r</ID><Status>Enabled</Status><Filter>{NESTED}</Filter>{DAYS}"),
        b'{"Rules": [{"Status": "Enabled", "Filter": {"And": {"Tags": 5}}, "Expiration": {"Days": 1}}]}',
        b'{"Rules": [{"Status": "Enabled", "Filter": {"And": {"Tags": null}}, "Expiration": {"Days": 1}}]}',
    ],
    ids=["nested", "tags are a number", "tags are null"],
)
async def test_a_hostile_policy_of_one_bucket_stops_no_other(text: bytes) -> None:
    """Elements nested thousands deep, or lists that are none: the rule is named, and the worker runs the others."""
    world = Harness()
    await world.policy("good", rule(expiration_days=1))
    await world.lake.put("bad", text)
    await world.run_round()
    world.lake.write("good", "a")

    await world.run_round(1.01)

    assert [] == world.left("good")
    assert (await world.state("bad")).problem.startswith("rule 1: ")


async def test_one_bad_rule_is_shown_counted_and_leaves_the_others_running() -> None:
    """Status has the reason, the gauge counts it until it is repaired."""
    world = Harness()
    good, bad = (
        f"<ID>good</ID><Status>Enabled</Status><Prefix>x/</Prefix>{DAYS}",
        "<ID>bad</ID><Status>Enabled</Status>",
    )
    await world.lake.put("b", xml(good, bad))
    await world.run_round()
    world.lake.write("b", "x/a")

    await world.run_round(3.01)

    assert [] == world.left()
    assert "rule 'bad'" in (await world.state()).problem
    assert 1 == world.metrics.value("lakebed_lifecycle_policy_problems", bucket="b")
    await world.lake.put("b", xml(good))
    await world.run_round(0.1)
    assert ("", 0) == (
        (await world.state()).problem,
        world.metrics.value("lakebed_lifecycle_policy_problems", bucket="b"),
    )


async def test_a_policy_that_becomes_unreadable_before_the_delete_is_stale_and_blocks_nobody() -> None:
    """Another bucket with the same delay goes on, and nothing waits for an operator."""
    world, _ = failing()
    for bucket in ("bad", "good"):
        await world.policy(bucket, rule(expiration_days=1))
    await world.run_round()
    world.lake.write("bad", "a")
    world.lake.write("good", "a")
    get = world.lake.get

    async def damaged(bucket: str) -> object:
        found = await get(bucket)
        return type(found)(bucket, b"<Frob/>") if bucket == "bad" and found is not None else found

    world.lake.get = damaged  # type: ignore[method-assign, assignment]
    await world.run_round(1.01)

    assert ["a"] == world.left("bad")
    assert [] == world.left("good")
    assert {} == (await world.blockers()).blockers
    assert DeleteOutcome.STALE_POLICY == (await world.ledger("bad", "a"))[-1].outcome
