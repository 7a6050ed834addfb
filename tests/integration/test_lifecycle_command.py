"""`lakebed lifecycle` against the real embedded bucket: put a rule, see what it would do, let it, ask why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.cli.where import Where
from lakebed.core.errors import NotFound
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.blockers import Failure, block
from lakebed.lifecycle.cluster import lost
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.model import ActionKey, ActionKind, Degraded, Position, StreamKind
from lakebed.lifecycle.state import Stream, changed
from lakebed.lifecycle.workers import LifecycleServices, open_services
from lakebed.store.admin import client

DAY_S = 1.5
POLICY = b"""<LifecycleConfiguration>
  <Rule><ID>tmp</ID><Status>Enabled</Status><Filter><Prefix>tmp/</Prefix></Filter>
    <Expiration><Days>1</Days></Expiration></Rule>
</LifecycleConfiguration>
"""


@pytest.fixture
def name(weed: BucketEndpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket of its own, and a command line that finds the server."""
    told: dict[str, Any] = weed.as_settings() | {
        "store.prefix": f"lc-{Ids().token()}",
        "lifecycle.day_s": DAY_S,
        "lifecycle.rounding": "exact",
        "lifecycle.flush_lag_s": 0.1,
        "lifecycle.small_delay_s": 0.1,
        "lifecycle.lookback_s": 1.0,
    }
    for key, value in told.items():
        monkeypatch.setenv(env_name(key), str(value))
    monkeypatch.chdir(tmp_path)
    bucket = f"cmd-{Ids().token()}"
    assert 0 == run(["bucket", "create", f"{bucket}-not", "--dry-run"]) == run(["bucket", "create", bucket])
    made = [each["Name"] for each in client(weed.store_settings()).list_buckets()["Buckets"]]
    assert bucket in made and f"{bucket}-not" not in made
    return bucket


def test_a_rule_is_put_judged_run_and_explained(
    name: str, weed: BucketEndpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way of an operator, with the ledger's answer at its end."""
    s3 = client(weed.store_settings())
    (tmp_path / "policy.xml").write_bytes(POLICY)

    def said(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert code == run(["lifecycle", *words])
        return capsys.readouterr().out

    said("dry-run", f"{name}-not", "--rules", "policy.xml", code=exits.code_for(NotFound("")))
    said("rules", "put", name, "policy.xml")
    assert POLICY.decode() == said("rules", "get", name)
    assert 1 == s3.get_bucket_lifecycle_configuration(Bucket=name)["Rules"][0]["Expiration"]["Days"]
    for key in ("tmp/a", "kept"):
        s3.put_object(Bucket=name, Key=key, Body=b"123")
    ahead = msgspec.json.decode(said("dry-run", name, "--days-ahead", "2", "-o", "json"))
    assert (1, 3, "tmp/a") == (ahead["count"], ahead["bytes"], ahead["sample"][0]["key"])

    time.sleep(DAY_S + 1.0)
    said("run", "-o", "json")

    assert ["kept"] == [one["Key"] for one in s3.list_objects_v2(Bucket=name)["Contents"]]
    planned, verdict = msgspec.json.decode(said("why", name, "tmp/a", "-o", "json"))
    assert ("planned", "DELETED", "tmp") == (planned["outcome"], verdict["outcome"], verdict["rule"])
    said("why", name, "kept", code=4)
    (row,) = msgspec.json.decode(said("status", name, "-o", "json"))
    assert ("event_driven", "complete") == (row["mode"], row["bootstrap"])
    assert [] == msgspec.json.decode(said("blockers", "ls", "-o", "json"))
    said("pause", name)
    (row,) = msgspec.json.decode(said("status", name, "-o", "json"))
    assert ("disabled", "OPERATOR_PAUSED") == (row["mode"], row["degraded"])
    said("rules", "diff", name, "policy.xml")
    said("rules", "rm", name, "--reason", "the test is over")
    assert name not in said("rules", "ls", "-o", "jsonl")


def test_what_aws_refuses_is_refused_before_anything_is_put(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence is AWS's, the exit code says that the input is wrong, and no policy stands."""
    (tmp_path / "policy.xml").write_bytes(POLICY.replace(b"<Days>1<", b"<Days>0<"))

    assert 0 != run(["lifecycle", "rules", "put", name, "policy.xml"])
    assert "'Days' for Expiration action must be a positive integer" in capsys.readouterr().err
    assert 0 != run(["lifecycle", "rules", "get", name])


@pytest.mark.full
def test_policies_travel_and_actions_are_tuned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export and import give the same bytes back; a cadence is kept, and beginning anew walks again."""
    (tmp_path / "policy.xml").write_bytes(POLICY)

    def said(*words: str) -> str:
        capsys.readouterr()
        assert 0 == run(["lifecycle", *words])
        return capsys.readouterr().out

    said("rules", "put", name, "policy.xml")
    (line,) = [line for line in said("rules", "export").splitlines() if name in line]
    (tmp_path / "export.jsonl").write_text(line + "\n")
    said("rules", "rm", name, "--reason", "to bring it back")
    said("rules", "import", "export.jsonl")
    assert POLICY.decode() == said("rules", "get", name)

    said("run", "-o", "json")
    (row,) = msgspec.json.decode(said("status", name, "-o", "json"))
    said("cadence", name, row["action"], "3")
    (tuned,) = msgspec.json.decode(said("status", name, "-o", "json"))
    assert row["last_scan_ns"] + round(3 * DAY_S * 1e9) == tuned["next_scan_ns"]
    said("rebootstrap", name)
    (anew,) = msgspec.json.decode(said("status", name, "-o", "json"))
    assert "waiting" == anew["bootstrap"]
    said("run", "-o", "json")
    (done,) = msgspec.json.decode(said("status", name, "-o", "json"))
    assert "complete" == done["bootstrap"]


def test_a_policy_that_reaches_lakebeds_own_keys_is_not_put(
    name: str, weed: BucketEndpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the bucket Lakebed lives in, an empty prefix is refused; elsewhere, and beside its folder, it may stand."""
    (tmp_path / "all.xml").write_bytes(POLICY.replace(b"<Prefix>tmp/</Prefix>", b"<Prefix></Prefix>"))
    (tmp_path / "tmp.xml").write_bytes(POLICY)

    assert 0 != run(["lifecycle", "rules", "put", weed.bucket, "all.xml"])
    assert "could delete Lakebed's own data" in capsys.readouterr().err
    assert 0 == run(["lifecycle", "rules", "put", weed.bucket, "tmp.xml", "--dry-run"])
    assert 0 == run(["lifecycle", "rules", "put", name, "all.xml", "--dry-run"])


TAGGED = POLICY.replace(b"<Prefix>tmp/</Prefix>", b"<Tag><Key>k</Key><Value>v</Value></Tag>")


def inside(work: Callable[[LifecycleServices], Coroutine[Any, Any, None]]) -> None:
    """Does something behind the command line's back."""

    async def go() -> None:
        async with open_services(Where().context("test")) as site:
            await work(site)

    asyncio.run(go())


def demote(bucket: str, action: str, why: Degraded) -> None:
    rule_hash, _, kind = action.partition("/")
    ref = ActionRef(bucket, ActionKey(rule_hash, ActionKind(kind)))
    inside(lambda site: site.enforcer.resolver.demote(ref, why, "for the test"))


@pytest.mark.parametrize(
    ("policy", "words"), [(POLICY, ("--delay-days", "1")), (TAGGED, ("--predicate",))], ids=["delay", "predicate"]
)
@pytest.mark.full
def test_a_demoted_action_is_reseeded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: bytes, words: tuple[str, ...]
) -> None:
    """By its delay or by its predicates; rounds alone never bring it back, and neither is asked for is an error."""
    (tmp_path / "policy.xml").write_bytes(policy)

    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert code == run(["lifecycle", *words])
        told = capsys.readouterr()
        return told.out + told.err

    def mode() -> str:
        (row,) = msgspec.json.decode(said("status", name, "-o", "json"))
        return str(row["mode"])

    said("rules", "put", name, "policy.xml")
    said("run", "-o", "json")
    (row,) = msgspec.json.decode(said("status", name, "-o", "json"))
    demote(name, row["action"], Degraded.LAG_HIGH)
    said("run", "-o", "json")
    assert "scan_only" == mode()

    assert 0 != run(["lifecycle", "reseed"])
    assert 0 != run(["lifecycle", "reseed", "--delay-days", "77"])
    assert name in said("reseed", *words)
    said("run", "-o", "json")

    assert "event_driven" == mode()


@pytest.mark.full
def test_a_lost_log_is_recovered_from_by_the_next_rounds(name: str, tmp_path: Path) -> None:
    """Nobody acknowledges anything: the bucket is scanned again, and status says why until then."""
    (tmp_path / "policy.xml").write_bytes(POLICY)
    assert 0 == run(["lifecycle", "rules", "put", name, "policy.xml"])
    assert 0 == run(["lifecycle", "run", "-o", "json"])

    async def lose(site: LifecycleServices) -> None:
        await site.state.log.change(changed(lambda known: lost(known, "for the test", site.state.clock.now_ns())))
        await site.enforcer.compile()
        (row,) = await site.operator.status(name)
        assert ("LOST_LOG", "waiting") == (row["degraded"], row["bootstrap"])

    inside(lose)
    assert 0 == run(["lifecycle", "run", "-o", "json"])

    async def healthy(site: LifecycleServices) -> None:
        (row,) = await site.operator.status(name)
        assert ("event_driven", "NONE", "complete") == (row["mode"], row["degraded"], row["bootstrap"])

    inside(healthy)


def test_blockers_are_retried_resumed_and_given_up(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A retry that works lifts it; one that fails leaves it, exit code 1; resume and quarantine take it away."""
    places = {
        "gone": Stream(StreamKind.ORIGINAL, 5, Position(7, 0)),
        "later": Stream(StreamKind.PREDICATE, 0, Position(8, 0)),
        "bad": Stream(StreamKind.BOOTSTRAP, bucket=name, key="bad", upload_id="nameless"),
    }

    async def prepare(site: LifecycleServices) -> None:
        for key, stream in places.items():
            await site.state.blockers.change(
                changed(lambda known: block(known, [Failure(stream, name, key, key, "e")], 1, reason="r"))  # noqa: B023
            )
        context = Where().context("test")
        filer = FilerClient.of(context.settings.of(FilerSettings), context)
        async with filer:  # an upload that does not say its key: it cannot be understood
            folder, at_ns = f"/buckets/{name}/.uploads", context.clock.now_ns()
            upload = FilerEntry("nameless", is_directory=True, attributes=Attributes(0, at_ns, at_ns, 0o755 | 1 << 31))
            put = Mutation(MutationKind.PUT, folder, upload.name, upload)
            await filer.transact(Transaction(f"{folder}/nameless", (Clause(ConditionKind.NOT_EXISTS),), (put,)))

    def listed() -> dict[str, str]:
        capsys.readouterr()
        assert 0 == run(["lifecycle", "blockers", "ls", "-o", "json"])
        return {one["key"]: one["blocker_id"] for one in msgspec.json.decode(capsys.readouterr().out)}

    inside(prepare)
    idents = listed()
    assert set(places) == set(idents)

    assert 0 == run(["lifecycle", "blockers", "retry", idents["gone"]])
    assert "NOOP_RESOLVED" in capsys.readouterr().err
    assert 0 == run(["lifecycle", "blockers", "retry", idents["bad"]])  # it can never be read: isolated, on record
    capsys.readouterr()
    assert 0 == run(["lifecycle", "blockers", "isolated", "--bucket", name, "-o", "json"])
    assert ["bad"] == [one["key"] for one in msgspec.json.decode(capsys.readouterr().out)]
    assert {"later"} == set(listed())
    assert 0 != run(["lifecycle", "blockers", "quarantine", idents["later"], "--reason", " "])
    assert {"later"} == set(listed())
    assert 0 == run(["lifecycle", "blockers", "quarantine", "--bucket", name, "--reason", "known"])
    assert 0 != run(["lifecycle", "blockers", "resume", idents["later"]])
    assert {} == listed()
