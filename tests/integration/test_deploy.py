"""The Dockerfile's steps in an empty environment: what they install serves, is healthy, and drains on SIGTERM."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900
NOT_HERE = ("useradd",)  # changes the users of the machine: only a container may


def steps() -> list[str]:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    return [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]


@pytest.mark.timeout(1200)
def test_the_steps_of_the_dockerfile_make_a_gateway_that_serves(tmp_path: Path) -> None:
    """Nothing but Python and pip is used; the entry point and command are those of the file."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    shutil.copytree(ROOT, tmp_path / "src", ignore=shutil.ignore_patterns(*(name.split("/")[-1] for name in ignored)))
    place = str(tmp_path / "opt")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBED_", "PYTHON"))}

    for step in steps():
        if step.startswith(NOT_HERE):
            continue
        line = step.replace("/opt/lakebed", place).replace("python -m venv", f"{sys.executable} -m venv")
        done = subprocess.run(
            line, shell=True, cwd=tmp_path / "src", env=clean, capture_output=True, timeout=DEADLINE_S
        )
        assert 0 == done.returncode, f"{line}\n{done.stderr.decode()[-3000:]}"

    text = (ROOT / "deploy/Dockerfile").read_text()
    entry, command = (json.loads(re.search(rf"^{word} (.*)$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))  # type: ignore[index]
    env = {
        **clean,
        "PATH": f"{place}/bin:{clean['PATH']}",
        "LAKEBED_STORE_URL": "memory:",
        "LAKEBED_META_BACKEND": "bucket",
    }
    gateway = subprocess.Popen([*entry, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert gateway.stdout is not None
        url = json.loads(gateway.stdout.readline())["url"]
        with urlopen(f"{url}/healthz", timeout=30) as answer:
            healthy = answer.status
        gateway.terminate()
        assert (200, 0) == (healthy, gateway.wait(60))
    finally:
        gateway.kill()
        gateway.wait()
