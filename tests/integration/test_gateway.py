"""The gateway and the workers as real processes on real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx2
import pytest

from lakebed.store.protocol import Store
from lakebed.store.prover import REPORTS
from lakebed.store.settings import StoreSettings
from support.gateway_process import DEADLINE_S, MEMORY, Start, answer_of, bucket_env
from support.scripted_s3 import ScriptedS3

SECRET = "0123456789abcdef-very-secret"


async def test_the_real_command_serves_on_a_port_of_its_choice_and_ends_with_0(start: Start) -> None:
    """`python -m lakebed serve` reports where it answers, answers there, and drains on SIGTERM."""
    gateway = await (await start("serve", "--parts", "console", probe=False)).ready()

    health, page = await gateway.get("/healthz"), await gateway.get("/")

    assert (health.status_code, page.status_code) == (200, 200)
    assert health.json()["node"] == json.loads(gateway.said)["node"]
    assert await gateway.stop() == 0


async def test_ctrl_c_drains_too(start: Start) -> None:
    """SIGINT is an orderly end, without a trace."""
    gateway = await (await start("serve")).ready()

    gateway.process.send_signal(signal.SIGINT)

    assert await gateway.ended() == 0
    assert b"Traceback" not in gateway.errors


async def test_a_taken_port_is_said_at_once(start: Start) -> None:
    """Two gateways cannot share a port, and the second one reports it in words."""
    first = await (await start("serve")).ready()
    second = await start("serve", "--port", first.url.rsplit(":", 1)[1])

    assert await second.ended() == 9
    assert b"cannot listen on 127.0.0.1" in second.errors
    assert b"Traceback" not in second.errors


async def test_an_oversized_body_is_refused_before_it_is_read(start: Start) -> None:
    """A declared terabyte is answered 413 while not one byte of it was sent, and the connection closes."""
    gateway = await (await start("serve")).ready()
    reader, writer = await gateway.connect()

    writer.write(b"POST /probe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1099511627776\r\n\r\n")
    status, headers, body = await answer_of(reader)

    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["code"] == "too_large"
    assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
    writer.close()


async def test_a_chunked_body_is_cut_at_the_limit(start: Start) -> None:
    """Without a declared length, bytes are counted as they come."""
    gateway = await (await start("serve", env={**MEMORY, "LAKEBED_GATEWAY_BODY_BYTES_MAX": "100000"})).ready()
    reader, writer = await gateway.connect()

    writer.write(b"POST /probe HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(11):
        writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
    status, headers, _ = await answer_of(reader)

    assert (status, headers["connection"]) == (413, "close")
    writer.close()


async def test_slow_clients_time_out(start: Start) -> None:
    """A body that stops is answered 408; a head that never ends is cut; others are served meanwhile."""
    env = {**MEMORY, "LAKEBED_GATEWAY_BODY_TIMEOUT_S": "0.3", "LAKEBED_GATEWAY_HEAD_TIMEOUT_S": "3"}
    gateway = await (await start("serve", env=env)).ready()
    silent_reader, silent = await gateway.connect()
    half_reader, half = await gateway.connect()
    half.write(b"POST /probe HTTP/1.1\r\nhost: loc")
    slow_reader, slow = await gateway.connect()
    slow.write(b"POST /probe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc")
    other_reader, other = await gateway.connect()
    other.write(b"POST /probe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n12345")  # head and body at once

    served = await answer_of(other_reader)
    status, headers, body = await answer_of(slow_reader)

    assert (200, b"5") == (served[0], served[2])
    assert (status, headers["connection"], json.loads(body)["received_bytes"]) == (408, "close", 3)
    assert await asyncio.wait_for(silent_reader.read(), DEADLINE_S) == b""
    assert await asyncio.wait_for(half_reader.read(), DEADLINE_S) == b""
    for writer in (slow, silent, half, other):
        writer.close()


async def test_sigterm_finishes_what_is_under_way_and_takes_nothing_new(start: Start, tmp_path: Path) -> None:
    """The request in flight is answered, new connections are refused, components drain, the exit code is 0."""
    gateway = await (await start("serve", env={**MEMORY, "LAKEBED_GATEWAY_DRAIN_S": "100"})).ready()
    waiting = asyncio.create_task(gateway.get("/probe/until/go"))
    await gateway.logged("probe waits")

    gateway.process.send_signal(signal.SIGTERM)
    await gateway.logged("stopping")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                _, writer = await gateway.connect()
            except ConnectionRefusedError:
                break
            writer.close()
            await asyncio.sleep(0.01)
    refused_while_waiting = not waiting.done()
    (tmp_path / "go").touch()

    assert (await waiting).text == "waited"
    assert refused_while_waiting
    assert await gateway.ended() == 0
    assert b"probe drained" in gateway.errors


async def test_what_outlasts_the_drain_is_told_that_its_outcome_is_unknown(start: Start) -> None:
    """After `drain_s` a request is cut off with words, and the process still ends with 0."""
    gateway = await (await start("serve", env={**MEMORY, "LAKEBED_GATEWAY_DRAIN_S": "1"})).ready()
    waiting = asyncio.create_task(gateway.get("/probe/wait/60"))
    await gateway.logged("probe waits")

    code = await gateway.stop()

    answer = await waiting
    assert (answer.status_code, answer.json()["code"]) == (503, "outcome_unknown")
    assert code == 0
    assert b"probe drained" in gateway.errors


async def test_a_long_poll_does_not_hold_up_the_drain(start: Start) -> None:
    """What only waits learns of the stop and answers; the drain's time is not used up."""
    gateway = await (await start("serve", env={**MEMORY, "LAKEBED_GATEWAY_DRAIN_S": "200"})).ready()
    polling = asyncio.create_task(gateway.get("/probe/poll"))
    await gateway.logged("probe polls")

    code = await gateway.stop()  # within a deadline that is half of the drain's time

    assert ((await polling).text, code) == ("no news", 0)


async def test_a_component_that_cannot_start_ends_the_process_in_words(start: Start) -> None:
    """Its own error and exit code, no trace, and nothing was ever served."""
    gateway = await start("serve", env={**MEMORY, "PROBE_FAILS": "1"})

    assert await gateway.ended() == 9
    assert b"error: the probe has no disk" in gateway.errors
    assert b"next:  give it one" in gateway.errors
    assert b"Traceback" not in gateway.errors
    assert b"serving" not in gateway.errors


async def test_an_answer_that_breaks_half_way_is_cut_not_completed(start: Start) -> None:
    """A client never takes half an answer for a whole one, and the gateway continues."""
    gateway = await (await start("serve")).ready()

    with pytest.raises(httpx2.RemoteProtocolError):
        await gateway.get("/probe/break")

    assert (await gateway.get("/healthz")).status_code == 200
    await gateway.logged("broken half-way")


async def test_read_only_has_no_write_routes(start: Start) -> None:
    """Writes are unknown to a read-only gateway; reads are served."""
    gateway = await (await start("serve", "--read-only")).ready()

    assert (await gateway.ask("POST", "/probe", content=b"x")).status_code in (404, 405)
    assert (await gateway.get("/probe/whoami")).text == "anybody"
    assert not any("post" in item for item in (await gateway.get("/openapi.json")).json()["paths"].values())


async def test_keys_let_in_and_are_never_logged(start: Start, tmp_path: Path) -> None:
    """A key of the file is known, a wrong one is not, rights hold, and no secret reaches any output at any level."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "writer"\nsecret = "{SECRET}"\nrights = ["probe:write"]\n')
    file.chmod(0o600)
    reader = [{"name": "reader", "secret": "R" + SECRET, "rights": ["probe:read"]}]
    env = {**MEMORY, "LAKEBED_GATEWAY_KEYS_FILE": str(file), "LAKEBED_GATEWAY_KEYS": json.dumps(reader)}
    gateway = await (await start("serve", "--log", "debug", env=env)).ready()

    answers = {
        "writer": await gateway.ask("POST", "/probe", content=b"abc", headers={"authorization": f"Bearer {SECRET}"}),
        "reader": await gateway.ask("POST", "/probe", content=b"abc", headers={"x-api-key": "R" + SECRET}),
        "wrong": await gateway.ask("POST", "/probe", content=b"abc", headers={"x-api-key": "W" + SECRET}),
        "broken": await gateway.ask("GET", "/probe/whoami", headers={"authorization": f"Basic {SECRET}"}),
        "nobody": await gateway.get(f"/probe/whoami?key={SECRET}"),
        "health": await gateway.get("/healthz"),
    }
    with pytest.raises(httpx2.RemoteProtocolError):
        await gateway.get("/probe/break", **{"x-api-key": SECRET})
    await gateway.logged("broken half-way")
    await gateway.stop()

    statuses = {name: answer.status_code for name, answer in answers.items()}
    assert statuses == {"writer": 200, "reader": 403, "wrong": 401, "broken": 401, "nobody": 401, "health": 200}
    lines = [json.loads(line) for line in gateway.errors.splitlines()]
    logged = {line["request_id"]: line["status"] for line in lines if line["event"] == "answered"}
    assert {answer.headers["x-request-id"]: answer.status_code for answer in answers.values()}.items() <= logged.items()
    assert SECRET.encode() not in gateway.errors + gateway.said


async def test_a_bad_keys_file_stops_the_start(start: Start, tmp_path: Path) -> None:
    """Exit code of Invalid, the file named, the secret not."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "writer"\nsecret = "{SECRET}"\nrigths = []\n')
    gateway = await start("serve", env={**MEMORY, "LAKEBED_GATEWAY_KEYS_FILE": str(file)})

    assert await gateway.ended() == 3
    assert str(file).encode() in gateway.errors
    assert SECRET.encode() not in gateway.errors


async def test_the_store_is_proven_once_and_another_authority_is_refused(
    start: Start, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """On a real bucket: the first start proves it, the second believes it, a gateway told another id does not start."""
    env = bucket_env(bucket_settings)
    first = await (await start("serve", env=env)).ready()
    second = await (await start("serve", env=env)).ready()
    proofs = [info.key async for info in bucket.list(REPORTS)]
    third = await start("serve", env={**env, "LAKEBED_STORE_AUTHORITY": "another-authority"})

    code = await third.ended()

    authority = json.loads(first.said)["authority"]
    assert json.loads(second.said)["authority"] == authority
    assert len(proofs) == 1
    assert code == 6
    assert f"the authority of this bucket is {authority}".encode() in third.errors
    assert b"another-authority" in third.errors
    assert b"Traceback" not in third.errors
    assert (await first.get("/healthz")).json()["components"]["store"]["status"] == "ok"


async def test_a_store_that_ignores_conditions_is_refused(start: Start) -> None:
    """A server that answers 200 to every conditional PUT never carries an active-active part."""
    async with ScriptedS3(ignore_conditions=True) as server:
        env = bucket_env(server.settings())
        gateway = await start("serve", env=env)

        assert await gateway.ended() == 3
        assert b"does not support concurrent writers" in gateway.errors
        assert b"conditional PUT" in gateway.errors


async def test_workers_run_restart_and_put_down_their_work(start: Start) -> None:
    """Health and metrics report of each worker; SIGTERM lets a worker finish; the exit code is 0."""
    supervised = await (await start("work", "--parts", "probe")).ready()
    async with asyncio.timeout(DEADLINE_S):
        while (metrics := (await supervised.get("/metrics", accept="application/json")).json())[
            "lakebed_worker_restarts_total"
        ] == [{"labels": {"worker": name}, "value": 0.0} for name in ("steady", "failing")]:
            await asyncio.sleep(0.05)
    components = (await supervised.get("/health")).json()["components"]

    code = await supervised.stop()

    restarts = {row["labels"]["worker"]: row["value"] for row in metrics["lakebed_worker_restarts_total"]}
    assert (restarts["steady"], restarts["failing"] >= 1) == (0, True)
    assert components["steady"]["status"] == "ok"
    assert components["failing"]["status"] in ("degraded", "down")
    assert code == 0
    assert b"steady put down its work" in supervised.errors


async def test_work_without_workers_serves_health(start: Start) -> None:
    """Before any part has workers, the process still reports that it is well."""
    supervised = await (await start("work", "--parts", "console", probe=False)).ready()

    assert (await supervised.get("/healthz")).status_code == 200
    assert await supervised.stop() == 0
