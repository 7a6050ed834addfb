"""`lakebed bench`, as a script runs it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings

pytestmark = pytest.mark.full


def test_bench_store_prints_its_checks_and_ends_in_time(bucket_settings: StoreSettings, tmp_path: Path) -> None:
    """The quick bench takes under 45 seconds of a core, and prints named checks with value, unit, bar and verdict."""
    env = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}
    began_s = _cpu_s()

    ran = subprocess.run(
        [sys.executable, "-m", "lakebed", "bench", "store", "--quick", "-o", "json"],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        timeout=400,
    )

    assert _cpu_s() - began_s < 45
    report = json.loads(ran.stdout)
    assert "store" == report["name"]
    assert "plain HTTP with a static key pair" in report["note"]
    assert all({"name", "value", "unit", "bar", "pass"} <= set(check) for check in report["checks"])
    barred = [check for check in report["checks"] if check["bar"] is not None]
    assert len(barred) >= 3
    assert (0 if all(check["pass"] for check in barred) else 1) == ran.returncode


def _cpu_s() -> float:
    """What ended children have taken: what a busy machine does beside them does not count."""
    reported = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reported.ru_utime + reported.ru_stime


def test_an_unknown_bench_is_refused_with_the_known_ones(bucket_settings: StoreSettings, tmp_path: Path) -> None:
    """A name that is no bench ends with Invalid and the list of names."""
    env = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}

    ran = subprocess.run(
        [sys.executable, "-m", "lakebed", "bench", "stoer"],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
    )

    assert 3 == ran.returncode
    assert b"store" in ran.stderr
