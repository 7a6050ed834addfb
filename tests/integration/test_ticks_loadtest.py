"""A load test of a fleet, as a script runs it: agents and gateways are killed, and everything is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings
from lakebed.ticks.loadtest import FleetSummary, FleetTick

pytestmark = pytest.mark.full


def test_a_fleet_that_is_killed_loses_and_doubles_nothing(bucket_settings: StoreSettings, tmp_path: Path) -> None:
    """Every tick and row is counted at the end; the folder has each tick's times, and a report with plots.

    The bar of p95 is not this test's: the machine may be busy.
    """
    named = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}
    command = [
        sys.executable,
        "-m",
        "lakebed",
        "bench",
        "ticks",
        "--scenario",
        "smoke",
        "--out",
        str(tmp_path),
        "-o",
        "json",
    ]

    done = subprocess.run(command, env={**os.environ, **named}, capture_output=True, timeout=800, check=False)

    summary = msgspec.json.decode(done.stdout, type=FleetSummary)
    assert [] == [claim for claim in summary.broken if not claim.startswith("p95")], done.stderr.decode()
    assert summary.ticks_sent == summary.ticks_committed == summary.ticks_in_silver >= 12
    assert summary.rows_sent == summary.rows_in_bronze == 20 * summary.ticks_sent
    assert summary.kills["agents"] >= 1 and summary.kills["gateways"] >= 1
    (folder,) = tmp_path.iterdir()
    lines = (folder / "sent-ticks.jsonl").read_bytes().splitlines()
    ticks = [msgspec.json.decode(line, type=FleetTick) for line in lines]
    assert len(ticks) == summary.ticks_sent and all(tick.ready_s < tick.committed_s for tick in ticks)
    page = (folder / "report.html").read_text()
    assert page.count('<div class="chart"') >= 1 and "every row is in bronze once" in page
