"""The embedded bucket with the real server: it is private, it comes back the same, and it never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Denied, LakebedError, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.core.settings import Secret
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.embedded.weed import PORTS, Weed, WeedIdentity, find_weed
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.process_output import line_of
from support.runtimes import runtime_of

PARENT = """
import asyncio, pathlib, sys, time
from lakebed.core.runtime import system_runtime
from lakebed.embedded.weed import Weed
weed = Weed(pathlib.Path(sys.argv[1]), runtime=system_runtime())
asyncio.run(weed.start())
print(weed.child.pid, flush=True)
time.sleep(600)
"""


def open_store(settings: StoreSettings) -> Store:
    return connect(settings, runtime_of())


def test_listens_on_loopback_only(weed: BucketEndpoints) -> None:
    """Every address it answers at is on this machine."""
    for address in (weed.s3, weed.filer, weed.master, weed.filer_grpc, weed.s3_grpc):
        host, _, port = address.removeprefix("http://").partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=5).close()


async def test_writes_and_reads(bucket: Store) -> None:
    """A fresh prefix is empty, and what is created there is read back."""
    before = [info.key async for info in bucket.list("")]

    await bucket.create("folder/key", b"bytes")

    assert before == []
    assert (await bucket.get("folder/key")).data == b"bytes"


async def test_refuses_other_credentials(weed: BucketEndpoints, bucket_settings: StoreSettings) -> None:
    """Nobody without the generated secret gets in."""
    wrong = msgspec.structs.replace(bucket_settings, secret_access_key=Secret("0" * 40))

    with pytest.raises(Denied):
        await open_store(wrong).create("key", b"")


@pytest.mark.full
async def test_comes_back_the_same_after_a_kill_and_elsewhere_when_its_ports_are_taken(tmp_path: Path) -> None:
    """After kill -9 the same folder gives the same address, credentials and every acknowledged object; when somebody
    has taken its ports meanwhile, it answers at others.
    """
    weed = Weed(tmp_path / "bucket", runtime=system_runtime())
    before = await weed.start()
    await open_store(before.store_settings()).create("kept", b"here")
    os.kill(weed.child.pid, signal.SIGKILL)
    assert await weed.child.wait(60.0)

    again = Weed(tmp_path / "bucket", runtime=system_runtime())
    after = await again.start()
    kept = await open_store(after.store_settings()).get("kept")
    await again.stop(0.0)

    assert after == before
    assert kept.data == b"here"
    assert all((tmp_path / "bucket" / file).stat().st_mode & 0o777 == 0o600 for file in ("identity.json", "s3.json"))
    assert not Path(f"/proc/{again.child.pid}").exists()

    squatters = [socket.create_server(("127.0.0.1", port)) for port in _ports(tmp_path / "bucket").values()]
    moved = await again.start()
    kept = await open_store(moved.store_settings()).get("kept")
    await again.stop(0.0)
    for squatter in squatters:
        squatter.close()

    assert moved.s3 != before.s3
    assert moved.access_key_id == before.access_key_id
    assert kept.data == b"here"


SLOW_AT_FIRST = """#!/bin/sh
echo $$ >> "{told}"
[ "$(wc -l < "{told}")" -gt 1 ] && exec "{weed}" "$@"
exec sleep 600
"""


@pytest.mark.full
async def test_one_that_is_never_ready_is_started_a_second_time_in_the_same_folder(tmp_path: Path) -> None:
    """The first process is gone, the second takes writes at the same address, and there is no third."""
    told, program = tmp_path / "pids", tmp_path / "weed"
    program.write_text(SLOW_AT_FIRST.format(told=told, weed=find_weed()))
    program.chmod(0o700)
    weed = Weed(tmp_path / "bucket", runtime=system_runtime(), program=program, first_ready_s=1.0)

    found = await weed.start()
    await open_store(found.store_settings()).create("key", b"here")
    await weed.stop(0.0)

    first, second = (int(line) for line in told.read_text().split())
    assert (second, found.s3) == (weed.child.pid, f"http://127.0.0.1:{_ports(tmp_path / 'bucket')['s3']}")
    assert not Path(f"/proc/{first}").exists()


class Stopped(SystemClock):
    """A machine that stands still for an hour after it was first asked what time it is."""

    asked = 0

    def monotonic_s(self) -> float:
        self.asked += 1
        return super().monotonic_s() + (3600.0 if self.asked > 1 else 0.0)


@pytest.mark.full
async def test_a_machine_that_stood_still_is_not_taken_for_a_slow_start(tmp_path: Path) -> None:
    """Server and asker stood still together: the first start is waited for."""
    told, program = tmp_path / "pids", tmp_path / "weed"
    program.write_text(f'#!/bin/sh\necho $$ >> "{told}"\nexec "{find_weed()}" "$@"\n')
    program.chmod(0o700)
    weed = Weed(tmp_path / "bucket", runtime=Runtime(Stopped(), Ids(), Metrics()), program=program)

    await weed.start()
    await weed.stop(0.0)

    assert [weed.child.pid] == [int(line) for line in told.read_text().split()]


async def test_says_why_it_did_not_start(tmp_path: Path) -> None:
    """A server that dies while starting is reported with the last lines of its log, not waited for."""
    (tmp_path / "bucket" / "data").mkdir(parents=True)
    (tmp_path / "bucket" / "data" / "filerldb2").write_text("not a folder")
    weed = Weed(tmp_path / "bucket", runtime=system_runtime())

    with pytest.raises(Unavailable) as caught:
        await weed.start()

    assert "died while starting" in caught.value.message
    assert "filerldb2" in caught.value.message
    assert isinstance(caught.value, LakebedError)
    assert str(tmp_path) in caught.value.hint


@pytest.mark.full
async def test_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """kill -9 of the process that started it leaves no server behind."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "bucket")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child = int(await asyncio.to_thread(line_of, parent))
    assert Path(f"/proc/{child}").exists()

    parent.kill()
    parent.wait()

    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "the server outlived its parent"
        await asyncio.sleep(0.05)


def _ports(folder: Path) -> dict[str, int]:
    ports = msgspec.json.decode((folder / "identity.json").read_bytes(), type=WeedIdentity).ports
    assert set(PORTS) == set(ports)
    return ports


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"
