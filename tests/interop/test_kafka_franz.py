"""franz-go, the Go client, on a gateway. Built here by its module's name, where there is Go and a module proxy."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from lakebed.store.settings import StoreSettings
from support.log_processes import crew_of, settings_of

SOURCE = Path(__file__).with_name("franz.go")
MODULE = "github.com/twmb/franz-go@v1.18.0"
BUILD_S = 400


def built(folder: Path) -> Path:
    """The program's binary. Skips where it cannot be built."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("franz-go is not tested: there is no Go on this machine")
    shutil.copy(SOURCE, folder / "main.go")
    try:
        for arguments in (["mod", "init", "franz"], ["get", MODULE], ["mod", "tidy"]):
            subprocess.run([go, *arguments], cwd=folder, check=True, timeout=BUILD_S, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        pytest.skip(f"franz-go is not tested: {MODULE} cannot be fetched")
    subprocess.run([go, "build", "-o", "franz", "."], cwd=folder, check=True, timeout=BUILD_S)
    return folder / "franz"


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_franz_go_works(tmp_path: Path) -> None:
    """Idempotent producers with each compression, a group that goes on where it committed; no transactions."""
    folder = tmp_path / "go"
    folder.mkdir()
    program = await asyncio.to_thread(built, folder)
    async with crew_of(tmp_path, settings_of(StoreSettings(url="memory:"), tmp_path)) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")
        command = [program, f"127.0.0.1:{ports[1]}", "go"]
        done = await asyncio.to_thread(subprocess.run, command, timeout=200, capture_output=True, text=True)

    assert ["sent 200", "read 200 left 0", "transactions refused true"] == done.stdout.splitlines(), done.stderr
