"""`lakebed bench`, as a script runs it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lakebed.batches.bench import Frames, gateway
from lakebed.bench.harness import BenchEnvironment
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name, load
from lakebed.embedded.ports import HeldPorts
from lakebed.log.bench_peers import peer_checks
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections

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


async def test_a_bench_of_uploads_is_served_by_a_gateway_without_keys(bucket_settings: StoreSettings) -> None:
    """The bench's own client names this machine as its host: the gateway accepts its batch, and answers metrics."""
    settings = load(sections(), stack=bucket_settings.as_layer())
    environment = BenchEnvironment(settings, True, print)

    async with gateway(environment) as served:
        await served.upload(Frames(Ids()).next())
        await served.settled()


async def test_a_peer_that_does_not_start_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed server of another version may refuse an option: the bench says why, and measures the rest."""
    for binary in ("redis-server", "nats-server"):
        (tmp_path / binary).write_text("#!/bin/sh\necho unknown field >&2\nexit 1\n")
        (tmp_path / binary).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said: list[str] = []

    async def rate() -> float:
        return 1.0

    with HeldPorts(Ids()) as ports:
        environment = BenchEnvironment(load(sections()), True, said.append)
        checks = await peer_checks(environment, tmp_path, ports.take, lambda _: rate)

    assert ["100 records of 1 KiB a request, 8 lanes: ours"] == [check.name for check in checks]
    assert 2 == sum("is not measured: " in line and "did not start: unknown field" in line for line in said)
