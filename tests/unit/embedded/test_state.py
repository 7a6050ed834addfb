"""What the stack knows of itself without starting anything: its lock, its ports, its file, and who is well."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Corrupt, NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.embedded import supervise
from lakebed.embedded.endpoints import (
    BucketEndpoints,
    Endpoints,
    FolderLock,
    StackProcess,
    child_environment,
    find,
    is_held,
    read,
    start_ticks,
    write,
)
from lakebed.embedded.ports import HIGHEST, HOST, LOWEST, HeldPorts
from lakebed.embedded.program import HealthResponse

BUCKET = BucketEndpoints("http://h:1", "h:2", "http://h:3", "h:4", "h:5", "lake", "eu-1", "the-id", "the-secret")


def endpoints(folder: Path, *processes: StackProcess) -> Endpoints:
    return Endpoints(str(folder), "ready", 1, BUCKET, kafka="h:7", processes=processes)


def test_a_folder_has_one_stack_until_its_lock_is_given_back(tmp_path: Path) -> None:
    """Looking takes nothing away, and a folder that is not there has no stack."""
    first, second = FolderLock(tmp_path / "s"), FolderLock(tmp_path / "s")
    assert not is_held(tmp_path / "s")

    first.take()
    assert is_held(tmp_path / "s") and first.held
    with pytest.raises(Conflict):
        second.take()
    assert not second.held
    second.release()  # of what it does not hold: nothing
    assert is_held(tmp_path / "s")

    first.release()
    assert not is_held(tmp_path / "s")
    second.take()
    second.release()


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid()) > 0
    assert start_ticks(2**22 + 1) == 0  # over the largest pid that Linux gives


def test_a_dead_process_that_nobody_waited_for_is_gone() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert start_ticks(pid) == 0
    finally:
        os.waitpid(pid, 0)


def test_ports_are_distinct_held_and_given_back() -> None:
    """A wish that is free is granted, one that is taken is not, and all lie where Linux takes none by itself."""
    with HeldPorts(Ids.seeded(1)) as held, HeldPorts(Ids.seeded(1)) as others:  # the same ports by chance
        mine = held.take_all(["a", "b", "c"], {})
        assert len(set(mine.values())) == 3
        assert all(LOWEST <= port < HIGHEST for port in mine.values())
        assert others.take() not in mine.values()
        assert held.take(mine["a"]) != mine["a"]  # once is enough
        listening = socket.create_server((HOST, mine["b"]))  # whom it was promised to may listen
        listening.close()
    with HeldPorts(Ids.seeded(2)) as again:
        assert again.take_all(["a", "b"], {"a": mine["a"]})["a"] == mine["a"]


def test_endpoints_are_private_and_only_believed_while_the_stack_runs(tmp_path: Path) -> None:
    lock, reported = FolderLock(tmp_path), endpoints(tmp_path, StackProcess("gateway", 7, 9))
    with pytest.raises(NotFound, match="no stack runs"):
        find(tmp_path)
    lock.take()
    with pytest.raises(NotFound, match="no bucket yet"):
        find(tmp_path)

    write(tmp_path, reported)

    assert find(tmp_path) == reported
    assert stat.S_IMODE((tmp_path / "endpoints.json").stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["endpoints.json", "lock"]
    assert reported.process("gateway").pid == 7
    with pytest.raises(NotFound):
        reported.process("workers")
    lock.release()
    with pytest.raises(NotFound, match="was killed"):
        find(tmp_path)
    (tmp_path / "endpoints.json").write_text('{"folder": 1')
    with pytest.raises(Corrupt):
        read(tmp_path)


def test_a_child_is_told_of_this_stacks_bucket_over_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEBED_STORE__ENDPOINT", "http://elsewhere")
    monkeypatch.setenv("LAKEBED_STORE_ENDPOINT", "http://elsewhere")
    reported = child_environment(tmp_path, BUCKET)

    assert sorted(key for key, value in reported.items() if value == "http://h:1")
    assert [value for key, value in reported.items() if key.startswith("LAKEBED_") and "SECRET" in key] == [
        "the-secret"
    ]
    assert reported["LAKEBED_DIR"] == str(tmp_path)
    assert [value for key, value in reported.items() if key.endswith("PATH") and "META" in key] == [
        str(tmp_path / "meta.sqlite")
    ]
    assert BUCKET.store_settings("p/").access_key_id.reveal() == "the-id"
    assert (BUCKET.store_settings("p/").url, BUCKET.store_settings("p/").prefix) == ("s3://lake", "p/")
    assert BUCKET.as_settings()["filer.grpc"] == "h:4"


@pytest.mark.parametrize(
    ("name", "answer", "state"),
    [
        ("bucket", HealthResponse(403, "denied"), "ok"),  # it refuses strangers
        ("bucket", HealthResponse(0, "refused"), "down"),
        ("gateway", HealthResponse(200, '{"status":"ok"}'), "ok"),
        ("gateway", HealthResponse(200, '{"status":"degraded"}'), "degraded"),
        ("gateway", HealthResponse(503, '{"status":"down"}'), "down"),
        ("gateway", HealthResponse(0, "refused"), "down"),
        ("gateway", HealthResponse(404, "somebody else"), "down"),
    ],
)
async def test_a_process_is_as_well_as_it_says(
    name: str, answer: HealthResponse, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []

    async def probe(url: str, path: str) -> HealthResponse:
        requested.append(url + path)
        return answer

    monkeypatch.setattr(supervise, "probe", probe)
    lock = FolderLock(tmp_path)
    lock.take()
    alive = start_ticks(os.getpid())
    write(
        tmp_path,
        endpoints(
            tmp_path,
            StackProcess(name, os.getpid(), alive, "http://h:9", 1.5, 2),
            StackProcess("workers", os.getpid(), alive + 1, "http://h:8"),  # its pid is another's by now
            StackProcess("supervisor", os.getpid(), alive),
        ),
    )

    rows = await supervise.status(tmp_path)

    assert [row.state for row in rows] == [state, "gone", "ok"]
    assert (rows[0].restarts, rows[0].ready_s, rows[0].url) == (2, 1.5, "http://h:9")
    assert [row.kafka for row in rows] == ["h:7" if name == "gateway" else "", "", ""]
    assert requested == ["http://h:9/" if name == "bucket" else "http://h:9/healthz"]
    lock.release()


async def test_a_bucket_on_a_full_disk_is_down_and_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers requests, and refuses every write."""

    async def probe(url: str, path: str) -> HealthResponse:
        return HealthResponse(403, "denied")

    monkeypatch.setattr(supervise, "probe", probe)
    monkeypatch.setattr("lakebed.embedded.endpoints.free_bytes", lambda _: 20 * 1024**2)
    lock = FolderLock(tmp_path)
    lock.take()
    write(tmp_path, endpoints(tmp_path, StackProcess("bucket", os.getpid(), start_ticks(os.getpid()), "http://h:9")))

    (row,) = await supervise.status(tmp_path)

    assert "down" == row.state
    assert f"20.0 MiB free on the disk of {tmp_path}" in row.detail
    lock.release()


@pytest.mark.parametrize(
    ("answer", "state", "detail"),
    [
        (
            HealthResponse(
                503,
                '{"status":"down","components":{"store":{"status":"ok","detail":"fine"},'
                '"log-vacuum":{"status":"down","detail":"the disk is full"},'
                '"queue":{"status":"degraded","detail":""}}}',
            ),
            "down",
            "log-vacuum is down: the disk is full; queue is degraded",
        ),
        (
            HealthResponse(200, '{"status":"degraded","components":{}}'),
            "degraded",
            '{"status":"degraded","components":{}}',
        ),
        (HealthResponse(502, "a page of a proxy"), "down", "a page of a proxy"),
    ],
)
async def test_the_status_names_what_is_not_well(
    answer: HealthResponse, state: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the whole report of a process, whose end, with the reason, was cut off."""

    async def probe(url: str, path: str) -> HealthResponse:
        return answer

    monkeypatch.setattr(supervise, "probe", probe)

    assert (state, detail) == await supervise._condition(StackProcess("workers", os.getpid(), 0, "http://h:8"))


class Env:
    """A stack that is only a lock and a file, and a clock that counts what `down` waits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, ends_after: int) -> None:
        self.lock, self.sent, self.sleeps = FolderLock(folder), [], 0  # type: ignore[var-annotated]
        self.clock = ManualClock()
        self._ends_after = ends_after
        monkeypatch.setattr(os, "kill", lambda pid, number: self.sent.append((pid, number)))
        monkeypatch.setattr(self.clock, "sleep", self.sleep)
        self.lock.take()

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await self.clock.advance(seconds)
        if self.sleeps == self._ends_after:
            self.lock.release()


@pytest.mark.parametrize(("now", "signals"), [(False, 1), (True, 4)])
async def test_down_asks_once_and_at_once_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: bool, signals: int
) -> None:
    """A second SIGTERM cuts the drain short: it is sent only on request."""
    env = Env(tmp_path, monkeypatch, ends_after=3)
    write(tmp_path, endpoints(tmp_path, StackProcess("supervisor", os.getpid(), start_ticks(os.getpid()))))

    assert await supervise.down(tmp_path, clock=env.clock, now=now) == "stopped"

    assert env.sent == [(os.getpid(), signal.SIGTERM)] * signals


async def test_down_signals_nobody_else_and_gives_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Env(tmp_path, monkeypatch, ends_after=10**9)
    write(tmp_path, endpoints(tmp_path, StackProcess("supervisor", os.getpid(), start_ticks(os.getpid()) + 1)))

    with pytest.raises(Unavailable, match="did not stop"):
        await supervise.down(tmp_path, clock=env.clock)

    assert env.sent == []
    assert env.sleeps == pytest.approx(supervise.DOWN_S / supervise.POLL_S, abs=2)
    env.lock.release()


async def test_down_where_nothing_runs_is_none(tmp_path: Path) -> None:
    assert await supervise.down(tmp_path, clock=ManualClock()) == "none"


async def test_a_process_whose_start_is_unknown_is_probed_and_not_called_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not report when a process started, its answer decides."""

    async def probe(url: str, path: str) -> HealthResponse:
        return HealthResponse(200, '{"status":"ok"}')

    monkeypatch.setattr(supervise, "probe", probe)
    lock = FolderLock(tmp_path)
    lock.take()
    write(tmp_path, endpoints(tmp_path, StackProcess("gateway", os.getpid(), 0, "http://h:9")))

    assert ["ok"] == [row.state for row in await supervise.status(tmp_path)]
    lock.release()
