"""`lakebed lifecycle` against the real embedded bucket: put a rule, see what it would do, let it, ask why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.cli.main import run
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.ids import Ids
from lakebed.settings import env_name
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
    client(weed.store_settings()).create_bucket(Bucket=bucket)
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
    assert "could delete what Lakebed itself keeps" in capsys.readouterr().err
    assert 0 == run(["lifecycle", "rules", "put", weed.bucket, "tmp.xml", "--dry-run"])
    assert 0 == run(["lifecycle", "rules", "put", name, "all.xml", "--dry-run"])
