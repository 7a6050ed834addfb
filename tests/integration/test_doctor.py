"""`lakebed doctor`, as a person runs it: on the embedded bucket, on a store that breaks its word, on none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.settings import env_name
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.store.settings import StoreSettings
from support.scripted_s3 import ScriptedS3

DEADLINE_S = 300


async def doctor(settings: StoreSettings, folder: Path, *flags: str, filers: str = "") -> tuple[int, dict[str, Any]]:
    env = {env_name(key): str(value) for key, value in settings.as_layer().items()}
    env |= {env_name("filer.grpc"): filers} if filers else {}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lakebed", "doctor", "-o", "json", *flags,
        env={**os.environ, **env}, cwd=folder, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, {row["name"]: row for row in json.loads(out)}


async def test_the_embedded_bucket_passes(bucket_settings: StoreSettings, tmp_path: Path) -> None:
    """Every check passes on the embedded bucket and the command ends with 0."""
    code, found = await doctor(bucket_settings, tmp_path)

    assert {name: row for name, row in found.items() if row["verdict"] == "fail"} == {}
    assert code == 0
    assert {"python", "java", "ports", "disk", "clock", "store prover"} <= set(found)


async def test_a_store_that_ignores_conditions_fails_with_a_fix(tmp_path: Path) -> None:
    """A server that answers 200 to every conditional PUT is found out, named and explained."""
    async with ScriptedS3(ignore_conditions=True) as server:
        code, found = await doctor(server.settings(), tmp_path)

    assert code == 1
    assert found["store prover"]["verdict"] == "fail"
    assert "create_has_one_winner" in found["store prover"]["seen"]
    assert "conditional PUT" in found["store prover"]["fix"]


@pytest.mark.full
async def test_gateways_of_two_stores_are_found_out(tmp_path: Path) -> None:
    """A second endpoint is raced with the first: where they do not share their keys, there are two winners."""
    async with ScriptedS3() as one, ScriptedS3() as other:
        code, found = await doctor(one.settings(), tmp_path, "--endpoint", other.settings().endpoint)

    assert code == 1
    assert found["store prover"]["verdict"] == "fail"


@pytest.mark.full
async def test_each_filer_is_asked_alone(bucket_settings: StoreSettings, weed: BucketEndpoints, tmp_path: Path) -> None:
    """A filer at a wrong port is named although the other answers: it would be missed only when that one is down."""
    code, found = await doctor(bucket_settings, tmp_path, filers=f"{weed.filer_grpc},127.0.0.1:1")

    assert code == 1
    assert found[f"filer {weed.filer_grpc}"]["verdict"] == "pass"
    assert found["filer 127.0.0.1:1"]["verdict"] == "fail"
    assert "10000" in found["filer 127.0.0.1:1"]["fix"]


async def test_no_store_at_all_fails_with_a_fix(tmp_path: Path) -> None:
    """A store that does not answer is one clear line, not a trace."""
    async with ScriptedS3() as server:
        settings = server.settings()
    code, found = await doctor(settings, tmp_path)

    assert code == 1
    assert found["store"]["verdict"] == "fail"
    assert found["store"]["fix"]
