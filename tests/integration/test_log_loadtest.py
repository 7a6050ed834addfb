"""A load test, as a script runs it: real brokers, a folder that reports all, and a page to look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lakebed.core.settings import env_name
from lakebed.log.loadtest.summary import ARTIFACTS, LoadTestSummary
from lakebed.store.settings import StoreSettings
from support import oxia_server

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("scenario", "backend", "runs"),
    [
        ("smoke", "sqlite", 1),
        ("mixed-smoke", "sqlite", 1),
        ("mixed-smoke", "bucket", 1),
        *([("mixed-smoke", "oxia", 2)] if oxia_server.ADDRESS else []),
    ],
)
def test_a_load_test_leaves_a_folder_in_which_both_sides_agree(
    scenario: str, backend: str, runs: int, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Every artifact is there, brokers took what clients were acknowledged, consumers read it all without gaps.

    The history of the Kafka clients, producers and a group, has no anomaly; the totals have the stored bytes and what
    was compacted. A server that earlier runs have used is as good as a new one.
    """
    env = {
        **os.environ,
        env_name("store.url"): bucket_settings.url,
        env_name("store.endpoint"): bucket_settings.endpoint,
        env_name("store.access_key_id"): bucket_settings.access_key_id.reveal(),
        env_name("store.secret_access_key"): bucket_settings.secret_access_key.reveal(),
        env_name("meta.backend"): backend,
        env_name("meta.address"): oxia_server.ADDRESS,
    }

    for number in range(runs):
        out = tmp_path / str(number)
        done = subprocess.run(
            [sys.executable, "-m", "lakebed", "bench", "log", "--scenario", scenario, "--out", str(out), "-o", "json"],
            env=env,
            capture_output=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()

    summary = msgspec.json.decode(done.stdout, type=LoadTestSummary)
    (folder,) = out.iterdir()
    assert folder.name.endswith(f"-{scenario}")
    assert dict.fromkeys(ARTIFACTS, True) == summary.artifacts
    assert summary.acknowledged_records + summary.others.kafka_records == summary.accepted_records > 0
    assert scenario == "smoke" or summary.acknowledged_records == summary.others.consumed_records
    assert summary.brokers.s3_stored_bytes > summary.acknowledged_records * 1024
    assert scenario == "smoke" or min(summary.brokers.compacted_blobs, summary.brokers.compacted_bytes) > 0
    assert scenario == "smoke" or summary.others.kafka_records == summary.others.kafka_consumed > 0
    assert not summary.others.kafka_anomalies
    assert backend == msgspec.json.decode((folder / "stack.json").read_bytes())["meta"]
    assert [] == [warning for warning in summary.warnings if "bottleneck" not in warning]
    page = (folder / "report.html").read_text()
    assert page.count('<div class="chart"') >= 5
    assert "broker-0" in page
    assert b"lakebed_log_scenario_info" in (folder / "metrics-30s.jsonl").read_bytes()


def test_an_unknown_scenario_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """A name that is no scenario ends with Invalid and the list of names, before anything is written."""
    env = {**os.environ, env_name("store.url"): "memory://"}

    done = subprocess.run(
        [sys.executable, "-m", "lakebed", "bench", "log", "--scenario", "steddy", "--out", str(tmp_path / "runs")],
        env=env,
        capture_output=True,
        timeout=200,
        check=False,
    )

    assert done.returncode != 0
    assert b"steady, wide, kill, mixed, smoke" in done.stderr
    assert not (tmp_path / "runs").exists()
