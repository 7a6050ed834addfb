"""Processes whose path to the bucket ignores conditions, and processes that were started before their store."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.store.connect import connect
from lakebed.store.fast.puts import FAST_BYTES_MAX
from lakebed.store.path_check import check_path
from lakebed.store.protocol import Store
from lakebed.store.prover import REPORTS, SCRATCH
from lakebed.store.settings import StoreSettings
from support.bucket_proxies import StrippingProxy
from support.gateway_process import DEADLINE_S, Running, Start, bucket_env
from support.runtimes import runtime_of
from support.scripted_s3 import Request, ScriptedS3, Step

SUPPORT = Path(__file__).parents[1] / "support"
ENTRIES = "/v1/queues/default/entries"
ENTRY = [{"key": "", "value": "MQ=="}]


class Stripping(ScriptedS3):
    """A bucket that ignores the conditions of bodies of some sizes: of one client, when two are used."""

    least_bytes = 0
    most_bytes = 1 << 30

    def _apply(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        self.ignore_conditions = self.least_bytes <= len(request.body) <= self.most_bytes
        return super()._apply(request)


@pytest.fixture
def proxy(weed: BucketEndpoints) -> Any:
    with StrippingProxy(weed.store_settings().endpoint.removeprefix("http://")) as made:
        yield made


def through(settings: StoreSettings, proxy: StrippingProxy) -> dict[str, str]:
    return bucket_env(msgspec.structs.replace(settings, endpoint=proxy.endpoint))


async def until(running: Running, path: str, status: int) -> Any:
    """The answer's JSON, once the path is answered with this status."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await running.get(path)).status_code != status:
            await asyncio.sleep(0.05)
    return answer.json()


@pytest.mark.parametrize(("least", "most"), [(0, FAST_BYTES_MAX), (FAST_BYTES_MAX + 1, 1 << 30)])
async def test_each_client_of_a_store_is_checked(least: int, most: int) -> None:
    """Small bodies go over our own connections, large ones through the general client: either may lose conditions."""
    async with Stripping() as server:
        server.least_bytes, server.most_bytes = least, most
        store = connect(server.settings(), runtime_of())

        proof = await check_path(store, runtime_of())

        found = {finding.name: finding.seen for finding in proof.findings if not finding.held}
        assert set(found) == {"stale_replace_is_refused", "second_create_is_refused"}
        assert all(str(64 if most == FAST_BYTES_MAX else FAST_BYTES_MAX + 1) in seen for seen in found.values())


@pytest.mark.parametrize("command", ["serve", pytest.param("work", marks=pytest.mark.full)])
async def test_a_path_that_strips_conditions_is_refused_on_a_bucket_that_was_proven(
    start: Start, bucket: Store, bucket_settings: StoreSettings, proxy: StrippingProxy, command: str
) -> None:
    """A good gateway proves the bucket; another process behind a proxy that drops the headers does not start."""
    good = await (await start("serve", "--parts", "queue", env=bucket_env(bucket_settings), probe=False)).ready()
    assert [info.key async for info in bucket.list(REPORTS)] != []

    bad = await start(command, "--parts", "queue", env=through(bucket_settings, proxy), probe=False)

    assert await bad.ended() == 3
    assert b"does not support concurrent writers" in bad.errors
    assert b"If-None-Match" in bad.errors
    assert b"Traceback" not in bad.errors
    assert (await good.ask("POST", ENTRIES, json=ENTRY)).status_code == 200
    assert [info.key async for info in bucket.list(SCRATCH)] == []


async def test_a_command_does_not_write_on_a_path_that_strips_conditions(
    start: Start, bucket: Store, bucket_settings: StoreSettings, proxy: StrippingProxy
) -> None:
    """`lakebed queue put` checks its path before its first write, and leaves nothing."""
    put = await start("queue", "put", "--value", "1", env=through(bucket_settings, proxy), probe=False)

    assert await put.ended() == 3
    assert b"does not support concurrent writers" in put.errors
    assert [info.key async for info in bucket.list("")] == []


@pytest.fixture
async def hasty(bucket_settings: StoreSettings, proxy: StrippingProxy, tmp_path: Path) -> AsyncIterator[Running]:
    """A gateway behind the proxy, which strips nothing yet; its hourly check comes several times a second."""
    proxy.strips = False
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
    clean["LAKEBED_QUEUE_FLUSH_TIMEOUT_S"] = "2"  # how long the queue goes on trying before its caller is told
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SUPPORT / "frequent_path_check.py"), "serve", "--parts", "queue",
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **through(bucket_settings, proxy)},
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Running(process)
    yield await running.ready()
    if process.returncode is None:
        process.kill()
    await running.ended()


@pytest.mark.full
async def test_a_path_that_begins_to_strip_stops_writes_until_it_holds_again(
    hasty: Running, proxy: StrippingProxy
) -> None:
    """From the failed check on nothing is acknowledged: 503 with Retry-After, health down, an error in the log."""
    assert (await hasty.ask("POST", ENTRIES, json=ENTRY)).status_code == 200

    proxy.strips = True
    report = await until(hasty, "/healthz", 503)
    refused = await hasty.ask("POST", ENTRIES, json=ENTRY)

    assert report["components"]["store_path"]["status"] == "down"
    assert (refused.status_code, refused.json()["code"]) == (503, "conditions_ignored")
    assert int(refused.headers["retry-after"]) > 0
    assert b"writes are refused" in hasty.errors
    metrics = (await hasty.get("/metrics", accept="application/json")).json()
    assert metrics["lakebed_store_conditions_ignored"] == 1.0

    proxy.strips = False
    await until(hasty, "/healthz", 200)
    assert (await hasty.ask("POST", ENTRIES, json=ENTRY)).status_code == 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.parametrize("command", ["serve", pytest.param("work", marks=pytest.mark.full)])
async def test_a_process_that_starts_before_its_store_waits_and_says_so(
    start: Start, bucket_settings: StoreSettings, weed: BucketEndpoints, command: str
) -> None:
    """It does not exit: its address answers 503, and it continues by itself once the store is there."""
    store_port, own_port = free_port(), free_port()
    env = bucket_env(msgspec.structs.replace(bucket_settings, endpoint=f"http://127.0.0.1:{store_port}"))
    early = await start(command, "--parts", "queue", "--port", str(own_port), env=env, probe=False)
    await early.logged("waiting for the store")
    early.url = f"http://127.0.0.1:{own_port}"
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                health, other = await early.get("/healthz"), await early.ask("POST", ENTRIES, json=ENTRY)
                break
            except httpx2.TransportError:  # not listening yet
                await asyncio.sleep(0.05)
    await asyncio.sleep(5.0)

    assert (health.status_code, other.status_code) == (503, 503)
    assert "waiting for the store" in health.json()["components"]["store"]["detail"]
    assert other.json()["code"] == "unavailable"
    assert int(other.headers["retry-after"]) > 0
    assert early.process.returncode is None

    target = weed.store_settings().endpoint.removeprefix("http://")
    with StrippingProxy(target, strips=False, port=store_port):
        await early.ready()
        assert (await early.get("/healthz")).status_code == 200
        assert await early.stop() == 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_ends_the_wait(start: Start, stop: signal.Signals) -> None:
    """Anyone who started it too early can stop it like any other."""
    async with ScriptedS3() as server:
        settings = server.settings()
    early = await start("serve", "--parts", "queue", env=bucket_env(settings), probe=False)
    await early.logged("waiting for the store")

    early.process.send_signal(stop)

    assert await early.ended() == 0
    assert b"Traceback" not in early.errors
    assert early.said == b""


async def test_what_waiting_cannot_change_ends_the_process_at_once(
    start: Start, bucket_settings: StoreSettings
) -> None:
    """Wrong credentials and a bucket that is not there are reported at once, with their own exit codes."""
    wrong = bucket_env(bucket_settings) | {"LAKEBED_STORE_SECRET_ACCESS_KEY": "wrong"}
    denied = await start("serve", "--parts", "queue", env=wrong, probe=False)
    async with ScriptedS3([Step(status=404, code="NoSuchBucket")]) as absent:  # SeaweedFS would make the bucket
        missing = await start("serve", "--parts", "queue", env=bucket_env(absent.settings()), probe=False)

        assert (await denied.ended(), await missing.ended()) == (5, 4)
    assert b"waiting" not in denied.errors + missing.errors


async def test_a_command_does_not_wait(start: Start) -> None:
    """A one-shot command fails at once with the exit code of a store that is away."""
    async with ScriptedS3() as server:
        settings = server.settings()

    put = await start("queue", "status", env=bucket_env(settings), probe=False)

    assert await put.ended() == 9
