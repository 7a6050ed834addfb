"""The stack as real processes: it comes up, is found, is alone in its folder, comes back, and never leaves anything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from lakebed.core.clock import SystemClock
from lakebed.core.errors import NotFound
from lakebed.embedded.endpoints import Endpoints, environment, find, start_ticks
from lakebed.embedded.supervise import down, status
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from support import fake_stack as stand_in_stack
from support.kafka_gateway import QUIET
from support.runtimes import runtime_of

UP_S = 240.0
GONE_S = 100.0

LIST_BUCKETS = "import boto3; print(*(b['Name'] for b in boto3.client('s3').list_buckets()['Buckets']))"

Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts a supervisor in its own process; whatever a failing test leaves is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str = "quick") -> subprocess.Popen[str]:
        with (tmp_path / "out").open("a") as out:
            supervisor = subprocess.Popen(
                [sys.executable, stand_in_stack.__file__, str(tmp_path / "lake"), mode],
                stdout=out,
                stderr=out,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        started.append(supervisor)
        return supervisor

    yield start
    for supervisor in started:
        supervisor.kill()
        supervisor.wait()


def wait_for(what: Callable[[], bool], within_s: float, why: str) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def is_up(folder: Path) -> bool:
    try:
        return find(folder).state == "ready"
    except NotFound:
        return False


def bring_up(start: Starter, folder: Path, mode: str = "quick") -> tuple[subprocess.Popen[str], Endpoints]:
    supervisor = start(mode)
    wait_for(
        lambda: is_up(folder) or supervisor.poll() is not None,
        UP_S,
        f"not up: {(folder.parent / 'out').read_text()}",
    )
    return supervisor, find(folder)


def family(endpoints: Endpoints) -> set[int]:
    """Every process of the stack except the supervisor: its children and all that are in their sessions."""
    leaders = {process.pid for process in endpoints.processes if process.name != "supervisor"}
    return {pid for pid in _pids() if pid in leaders or _session(pid) in leaders}


def none_is_left(pids: set[int]) -> None:
    wait_for(lambda: not any(start_ticks(pid) for pid in pids), GONE_S, f"left behind: {pids}")


async def all_are_well(folder: Path) -> None:
    """Each of the four reports it within a deadline: a look has 3 s, which a pause may take."""
    deadline = time.monotonic() + UP_S
    rows = await status(folder)
    while [row.state for row in rows] != ["ok"] * 4:
        assert time.monotonic() < deadline, rows
        await asyncio.sleep(0.1)
        rows = await status(folder)


def children_of(supervisor: subprocess.Popen[str]) -> set[int]:
    return {pid for pid in _pids() if _parent(pid) == supervisor.pid}


def open_store(endpoints: Endpoints) -> Store:
    return connect(endpoints.bucket.store_settings(), runtime_of())


@pytest.mark.full
async def test_comes_up_is_found_and_drains_on_sigterm(start: Starter, tmp_path: Path) -> None:
    """Up writes private endpoints that work, refuses a second stack, and SIGTERM drains and leaves nothing."""
    folder = tmp_path / "lake"
    supervisor, endpoints = bring_up(start, folder)
    pids = family(endpoints)

    # found, private, and what the children were told is what stands there
    assert (folder / "endpoints.json").stat().st_mode & 0o777 == 0o600
    assert supervisor.pid == endpoints.process("supervisor").pid
    assert [process.name for process in endpoints.processes] == ["supervisor", "bucket", "gateway", "workers"]
    assert all(process.ready_s > 0 for process in endpoints.processes[1:])
    assert len(pids) >= 5, "three programs, and the helpers that two of them started"
    reported = json.loads((folder / "gateway.env").read_text())
    assert reported["LAKEBED_STORE_ENDPOINT"] == endpoints.bucket.s3 == environment(endpoints)["AWS_ENDPOINT_URL"]
    await open_store(endpoints).create("key", b"value")
    await all_are_well(folder)

    # alone in its folder
    second = start()
    assert second.wait(UP_S) == 9
    assert "already runs" in (tmp_path / "out").read_text()
    assert find(folder) == endpoints

    # SIGTERM
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(GONE_S) == 0
    none_is_left(pids)
    assert (folder / "gateway.drained").exists()
    assert (folder / "workers.drained").exists()
    assert not (folder / "endpoints.json").exists()
    with pytest.raises(NotFound) as missing:
        find(folder)
    assert "lakebed up" in missing.value.hint


@pytest.mark.full
async def test_ctrl_c_leaves_nothing_and_a_restart_keeps_the_data(start: Starter, tmp_path: Path) -> None:
    """Ctrl-C drains too; the same folder comes back with the same addresses, credentials and data; `down` stops it."""
    folder = tmp_path / "lake"
    supervisor, before = bring_up(start, folder)
    pids = family(before)
    await open_store(before).create("kept", b"here")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(GONE_S) == 0
    none_is_left(pids)
    assert (folder / "gateway.drained").exists()

    again, after = bring_up(start, folder)
    kept = await open_store(after).get("kept")
    stopped = await down(folder, clock=SystemClock())

    assert before.bucket == after.bucket
    assert before.gateway == after.gateway
    assert kept.data == b"here"
    assert stopped == "stopped"
    assert again.wait(GONE_S) == 0
    assert await down(folder, clock=SystemClock()) == "none"


@pytest.mark.full
async def test_kill_9_of_the_supervisor_leaves_nothing(start: Starter, tmp_path: Path) -> None:
    """The kernel ends every child of a killed supervisor; its stale file fools nobody, and the folder starts again."""
    folder = tmp_path / "lake"
    supervisor, endpoints = bring_up(start, folder)
    children = {process.pid for process in endpoints.processes if process.name != "supervisor"}
    await open_store(endpoints).create("kept", b"here")

    supervisor.kill()
    supervisor.wait()

    none_is_left(children)
    assert (folder / "endpoints.json").exists()
    with pytest.raises(NotFound):
        find(folder)
    _, after = bring_up(start, folder)
    assert (await open_store(after).get("kept")).data == b"here"


def test_after_a_kill_every_command_says_what_happened_and_what_to_do(start: Starter, tmp_path: Path) -> None:
    """One typed answer that names the kill and both ways on; `doctor` still looks at the machine; `down` clears up."""
    folder = tmp_path / "lake"
    supervisor, _ = bring_up(start, folder)
    supervisor.kill()
    supervisor.wait()

    where = ("--dir", str(folder))
    requested = [
        lakebed(*words, *where, cwd=tmp_path)
        for words in (("status",), ("env",), ("topics", "list"), ("queue", "put", "--value", "x"), ("serve",))
    ]
    looked = lakebed("doctor", *where, cwd=tmp_path)
    cleared, none = lakebed("down", *where, cwd=tmp_path), lakebed("down", *where, cwd=tmp_path)
    after = lakebed("status", *where, cwd=tmp_path)

    assert {4} == {answer.returncode for answer in requested}
    for answer in requested:
        error, hint = answer.stderr.splitlines()[:2]  # a third one, how long it took, follows on a slow machine
        assert error == f"error: the stack in {folder} was killed: its endpoints.json is out of date"
        assert f"lakebed up --dir {folder}" in hint and f"lakebed down --dir {folder}" in hint
    assert looked.returncode == 1
    assert "✓ python" in looked.stdout and "✗ store" in looked.stdout and "was killed" in looked.stdout
    assert "cleaned up after a killed stack" in cleared.stderr
    assert "no stack runs" in none.stderr
    assert after.returncode == 4 and "no stack runs" in after.stderr


@pytest.mark.full
def test_where_nothing_runs_and_nothing_is_named_a_command_says_so(tmp_path: Path) -> None:
    """Before the first `up` nobody is sent to a cloud: one line on what is missing, one on what to type."""
    for words in (("topics", "list"), ("tables", "list"), ("queue", "put", "--value", "x"), ("serve", "--port", "0")):
        answer = lakebed(*words, cwd=tmp_path)

        assert answer.returncode == 4
        error, hint = answer.stderr.splitlines()[:2]
        assert error == "error: no stack runs in .lakebed, and no store is named"
        assert "lakebed up" in hint and "LAKEBED_STORE_URL" in hint


def test_status_of_a_deployment_says_where_to_ask_instead(tmp_path: Path) -> None:
    """Where a settings file names a store, `status` does not send its operator to `lakebed up`."""
    (tmp_path / "lakebed.toml").write_text('[store]\nurl = "s3://lakebed"\n')

    answer = lakebed("status", cwd=tmp_path)

    assert answer.returncode == 4
    error, hint = answer.stderr.splitlines()[:2]
    assert error == "error: no stack runs in .lakebed"
    assert "/healthz" in hint and "lakebed doctor" in hint


@pytest.mark.full
async def test_a_killed_child_is_started_again(start: Starter, tmp_path: Path) -> None:
    """A program that dies comes back by itself; when the bucket comes back elsewhere, the others are informed."""
    folder = tmp_path / "lake"
    supervisor, before = bring_up(start, folder)
    await open_store(before).create("kept", b"here")

    os.kill(before.process("gateway").pid, signal.SIGKILL)
    wait_for(lambda: is_up(folder) and find(folder).process("gateway").restarts == 1, UP_S, "the gateway stayed away")
    assert find(folder).gateway == before.gateway
    assert find(folder).process("gateway").pid != before.process("gateway").pid

    # the supervisor is held still while somebody takes the dead bucket's port
    supervisor.send_signal(signal.SIGSTOP)
    os.kill(before.process("bucket").pid, signal.SIGKILL)
    with squat(int(before.bucket.s3.rsplit(":", 1)[1])):
        supervisor.send_signal(signal.SIGCONT)
        wait_for(lambda: is_up(folder) and find(folder).process("bucket").restarts == 1, UP_S, "the bucket stayed away")
    after = find(folder)

    assert after.bucket.s3 != before.bucket.s3
    assert json.loads((folder / "workers.env").read_text())["LAKEBED_STORE_ENDPOINT"] == after.bucket.s3
    assert (await open_store(after).get("kept")).data == b"here"
    await all_are_well(folder)
    assert supervisor.poll() is None


def test_a_signal_while_it_starts_leaves_nothing(start: Starter, tmp_path: Path) -> None:
    """SIGTERM before anything is ready ends the stack as cleanly as later."""
    supervisor = start()
    wait_for(lambda: bool(children_of(supervisor)), UP_S, "the bucket was not started")
    children = children_of(supervisor)

    supervisor.send_signal(signal.SIGTERM)

    assert supervisor.wait(GONE_S) == 0
    none_is_left(children)
    assert not (tmp_path / "lake" / "endpoints.json").exists()


@pytest.mark.full
async def test_gives_up_in_words_when_a_child_keeps_dying(start: Starter, tmp_path: Path) -> None:
    """A program that dies again and again stops the stack, reporting which and with its last words."""
    folder = tmp_path / "lake"
    supervisor = start("crashing")

    code = await asyncio.to_thread(supervisor.wait, UP_S)

    output = (tmp_path / "out").read_text()
    assert code == 9
    assert "the workers died" in output
    assert "no more of this" in output
    with pytest.raises(NotFound):
        find(folder)


def lakebed(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBED_", "AWS_"))}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "LAKEBED_PIPELINE_WARM": "false"}
    return subprocess.run(
        [sys.executable, "-m", "lakebed", *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=UP_S
    )


def test_the_commands_bring_up_show_and_stop_the_real_stack(tmp_path: Path) -> None:
    """`up --detach` starts the real gateway and workers, `status` and `env` find them, `down` leaves nothing.

    A Kafka client connects to the port that `status` shows.
    """
    folder = tmp_path / ".lakebed"
    try:
        upped = lakebed("up", "--detach", cwd=tmp_path)
        assert upped.returncode == 0, upped.stderr
        endpoints = find(folder)
        pids = family(endpoints) | {endpoints.process("supervisor").pid}

        shown = json.loads(lakebed("status", "-o", "json", cwd=tmp_path).stdout)
        kafka = next(row["kafka"] for row in shown if row["name"] == "gateway")
        brokers = AdminClient({"bootstrap.servers": kafka, **QUIET}).list_topics(timeout=60).brokers.values()
        again = lakebed("up", cwd=tmp_path)
        exports = lakebed("env", cwd=tmp_path).stdout
        listed = subprocess.run(
            ["sh", "-c", f'{exports}\n"{sys.executable}" -c "{LIST_BUCKETS}"'],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        downed = lakebed("down", "--now", cwd=tmp_path)

    assert upped.stdout.strip() == endpoints.gateway
    assert [line.split()[:2] for line in upped.stderr.splitlines()[:3]] == [
        [name, "ready"] for name in ("bucket", "gateway", "workers")
    ]
    assert [(row["name"], row["state"]) for row in shown] == [
        (name, "ok") for name in ("supervisor", "bucket", "gateway", "workers")
    ]
    assert [kafka] == [f"{broker.host}:{broker.port}" for broker in brokers]
    assert again.returncode == 6, "a second stack in the same folder is a Conflict"
    assert listed.stdout.strip() == "lakebed", listed.stderr
    assert downed.returncode == 0, downed.stderr
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{endpoints.bucket.filer_grpc.rsplit(':', 1)[1]}.sock"))
    none_is_left(pids)
    assert lakebed("status", cwd=tmp_path).returncode == 4
    assert lakebed("down", cwd=tmp_path).returncode == 0, "nothing to stop is fine"


def squat(port: int) -> socket.socket:
    """Listens on the port as soon as its server is dead."""
    deadline = time.monotonic() + UP_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is never free"
            time.sleep(0.02)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except FileNotFoundError:
        return 0
