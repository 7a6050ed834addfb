"""The embedded bucket, a server of the stack, and a stack in the background, each without starting anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Corrupt, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded import child as child_module
from lakebed.embedded import program as program_module
from lakebed.embedded import supervise
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import BucketEndpoints, Endpoints, FolderLock, StackProcess, write
from lakebed.embedded.ports import HeldPorts
from lakebed.embedded.program import DRAIN_S, READY_S, BucketProgram, HealthResponse, ServerCommand, ServerProgram
from lakebed.embedded.weed import (
    FIRST_READY_S,
    PORTS,
    SOCKETS,
    Weed,
    WeedIdentity,
    _command,
    _environment,
    _socket_flags,
)
from lakebed.embedded.weed import READY_S as WEED_READY_S
from support.embedded_fixtures import BUCKET, FakeChild

# The embedded bucket.


def identity(folder: Path, start: int = 0) -> WeedIdentity:
    """The identity at one start; each start draws other random numbers."""
    with HeldPorts(Ids.seeded(100 + start)) as held:
        return Weed(folder, runtime=Runtime(ManualClock(), Ids.seeded(200 + start), Metrics()))._identity(held)


def test_a_bucket_keeps_its_keys_and_ports(tmp_path: Path) -> None:
    """Made on first use and kept privately: a restart is the same bucket at the same address."""
    first, second = identity(tmp_path, 1), identity(tmp_path, 2)

    assert first == second
    assert set(PORTS) == set(first.ports)
    assert len(set(first.ports.values())) == len(PORTS)
    assert 20 == len(first.access_key_id)
    secrets = {first.access_key_id, first.secret_access_key, first.volume_write_key, first.volume_read_key}
    assert 4 == len(secrets) and "" not in secrets
    assert {0o600} == {(tmp_path / name).stat().st_mode & 0o777 for name in ("identity.json", "s3.json")}
    (known,) = msgspec.json.decode((tmp_path / "s3.json").read_bytes())["identities"]
    assert [{"accessKey": first.access_key_id, "secretKey": first.secret_access_key}] == known["credentials"]


def test_an_identity_of_an_earlier_version_gets_the_keys_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_bytes(msgspec.json.encode(WeedIdentity("the-id", "the-secret")))

    found = identity(tmp_path)

    assert ("the-id", "the-secret") == (found.access_key_id, found.secret_access_key)
    assert found.volume_write_key and found.volume_read_key
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(Corrupt, match=r"identity\.json"):
        identity(tmp_path)


def test_the_bucket_is_started_on_its_own_ports_and_loopback_alone(tmp_path: Path) -> None:
    """Each port under its own flag; no telemetry, no HTTP of filer and master, no secret among the arguments."""
    known = identity(tmp_path)
    argv = _command(Path("/bin/weed"), tmp_path, known.ports)
    flags = dict(word.lstrip("-").split("=", 1) for word in argv if "=" in word)

    for name in ("master", "volume", "filer", "s3"):
        assert str(known.ports[name]) == flags[f"{name}.port"]
        assert str(known.ports[f"{name}.grpc"]) == flags[f"{name}.port.grpc"]
    assert ("127.0.0.1", "127.0.0.1", "false", "0") == (
        flags["ip"], flags["ip.bind"], flags["master.telemetry"], flags["volume.max"],
    )  # fmt: skip
    assert "-disableHttp" in argv
    assert (str(tmp_path / "data"), str(tmp_path / "s3.json")) == (flags["dir"], flags["s3.config"])
    assert known.secret_access_key not in " ".join(argv)
    assert {
        "WEED_JWT_SIGNING_KEY": known.volume_write_key, "WEED_JWT_SIGNING_READ_KEY": known.volume_read_key,
        "WEED_JWT_SIGNING_EXPIRES_AFTER_SECONDS": "600", "WEED_JWT_SIGNING_READ_EXPIRES_AFTER_SECONDS": "600",
    } == _environment(known)  # fmt: skip


def test_sockets_lie_in_the_folder_where_their_path_is_short_enough() -> None:
    short, long = Path("/a"), Path("/" + "a" * (100 - len("/filer.sock") - 1))

    assert ["-filer.localSocket=/a/filer.sock", "-s3.localSocket=/a/s3.sock"] == _socket_flags(short)
    assert 2 == len(_socket_flags(long))
    assert ["-s3.localSocket"] == [flag.partition("=")[0] for flag in _socket_flags(Path(f"{long}a"))]


def test_addresses_are_those_of_the_ports(tmp_path: Path) -> None:
    known = identity(tmp_path)
    weed = Weed(tmp_path, runtime=Runtime(ManualClock(), Ids.seeded(4), Metrics()), bucket="b", region="r")
    with pytest.raises(Unavailable, match="was not started"):
        _ = weed.endpoints
    at = {name: f"127.0.0.1:{port}" for name, port in known.ports.items()}

    assert BucketEndpoints(
        f"http://{at['s3']}", at["s3.grpc"], f"http://{at['filer']}", at["filer.grpc"], f"http://{at['master']}",
        "b", "r", known.access_key_id, known.secret_access_key,
    ) == weed._address(known)  # fmt: skip


def test_sockets_that_a_killed_bucket_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakebed.embedded import weed as weed_module

    patterns = tuple(str(tmp_path / Path(pattern).name) for pattern in SOCKETS)
    monkeypatch.setattr(weed_module, "SOCKETS", patterns)
    known = identity(tmp_path / "bucket")
    weed = Weed(tmp_path / "bucket", runtime=Runtime(ManualClock(), Ids.seeded(4), Metrics()))
    names = ("master.grpc", "volume.grpc", "filer.grpc", "s3.grpc")
    files = [Path(pattern.format(known.ports[name])) for pattern, name in zip(patterns, names, strict=True)]
    for file in files:
        file.touch()

    weed.clear()
    assert all(file.exists() for file in files)  # it was not started by us
    weed._endpoints = weed._address(known)
    weed.clear()
    assert not any(file.exists() for file in files)


class FakeWeedChild(FakeChild):
    def __init__(self, *, lives: bool = True) -> None:
        super().__init__("bucket", [])
        self.alive, self.lives, self.did = False, lives, list[str]()

    def start(self, argv: Any, *, env: Any) -> None:
        self.alive = self.lives
        self.did.append("start")

    async def stop(self, grace_s: float) -> bool:
        self.alive = False
        self.did.append(f"stop {grace_s:g}")
        return True


def weed_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ready: Callable[[float, FakeWeedChild], float | None], **child: Any
) -> tuple[Weed, FakeWeedChild, ManualClock]:
    """A bucket that is asked for a write at a time since its first start: it takes as long as `ready` says, or refuses
    at once when that is None."""
    clock, made = ManualClock(), FakeWeedChild(**child)

    async def ask(settings: Any) -> None:
        took_s = ready(clock.monotonic_s(), made)
        if took_s is None:
            raise Unavailable("not yet")
        await clock.advance(took_s)
        if took_s:
            raise Unavailable("too slow")

    monkeypatch.setattr(clock, "sleep", clock.advance)
    monkeypatch.setattr("lakebed.embedded.weed.ensure_bucket", ask)
    monkeypatch.setattr("lakebed.embedded.weed._remove_sockets", lambda ports: None)
    weed = Weed(folder, runtime=Runtime(clock, Ids.seeded(1), Metrics()), program=Path("weed"))
    weed.child = made  # type: ignore[assignment]
    return weed, made, clock


@pytest.mark.parametrize(
    ("ready_s", "expected"),
    [
        (0.0, ["start"]),
        (FIRST_READY_S - 1, ["start"]),
        (FIRST_READY_S + 1, ["start", "stop 0", "start"]),
        (FIRST_READY_S + WEED_READY_S - 1, ["start", "stop 0", "start"]),
        (FIRST_READY_S + WEED_READY_S + 1, ["start", "stop 0", "start", "stop 0"]),
    ],
)
async def test_a_bucket_that_is_slow_is_started_twice_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready_s: float, expected: list[str]
) -> None:
    """Never two at a time, and none is left when it fails."""
    weed, child, _ = weed_of(tmp_path, monkeypatch, lambda at_s, _: 0.0 if at_s >= ready_s else None)
    given_up = len(expected) == 4

    with pytest.raises(Unavailable, match="did not accept a write") if given_up else nullcontext():
        await weed.start()

    assert (expected, not given_up) == (child.did, child.alive)


async def test_time_in_which_the_machine_was_suspended_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour passes within one request: the server was suspended too, and is not killed for it."""
    asked: list[float] = []

    def ready(at_s: float, child: FakeWeedChild) -> float:
        asked.append(at_s)
        return 3600.0 if len(asked) == 1 else 0.0

    weed, child, _ = weed_of(tmp_path, monkeypatch, ready)
    await weed.start()

    assert (["start"], 2) == (child.did, len(asked))


async def test_a_bucket_that_dies_while_starting_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed, child, clock = weed_of(tmp_path, monkeypatch, lambda at_s, _: None, lives=False)

    with pytest.raises(Unavailable, match="died while starting"):
        await weed.start()

    assert (["start", "stop 0"], 0.0) == (child.did, clock.monotonic_s())


# A program that serves HTTP.


class FakeServerChild(FakeChild):
    def __init__(self) -> None:
        super().__init__("gateway", [])
        self.started: list[Any] = []
        self.stopped: list[float] = []
        self.alive = True

    def start(self, argv: Any, *, env: Any) -> None:
        self.started.append((list(argv), env["LAKEBED_STORE_ENDPOINT"]))

    async def stop(self, grace_s: float) -> bool:
        self.stopped.append(grace_s)
        return True


def server(folder: Path, clock: ManualClock) -> tuple[ServerProgram, FakeServerChild]:
    command = ServerCommand("gateway", ("lakebed", "serve", "--port", "{port}"))
    made = ServerProgram(command, {"gateway": 8123}, folder, SimpleNamespace(endpoints=BUCKET), clock=clock)  # type: ignore[arg-type]
    child = FakeServerChild()
    made.child = child  # type: ignore[assignment]
    return made, child


async def test_a_server_is_ready_when_its_health_is_200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    made, child = server(tmp_path, clock)
    refused = [HealthResponse(0, "refused")] * 2
    answers = [*refused, HealthResponse(503, "down"), HealthResponse(200, "ok")]
    probed: list[str] = []

    async def probe(url: str, path: str) -> HealthResponse:
        probed.append(url + path)
        return answers[len(probed) - 1]

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)

    monkeypatch.setattr(program_module, "probe", probe)
    monkeypatch.setattr(clock, "sleep", sleep)

    await made.start()
    await made.stop()

    assert ["http", "https", "http", "http"] == [url.partition("://127.0.0.1:8123/healthz")[0] for url in probed]
    assert "http://127.0.0.1:8123" == made.url
    assert [(["lakebed", "serve", "--port", "8123"], "http://h:1")] == child.started
    assert [DRAIN_S] == child.stopped
    assert made.child.name == "gateway"


async def test_a_gateway_whose_settings_have_a_certificate_is_reached_over_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing over HTTP; its address in `lakebed status` is the one that works."""
    made, _ = server(tmp_path, ManualClock())

    async def probe(url: str, path: str) -> HealthResponse:
        return HealthResponse(200, "ok") if url.startswith("https:") else HealthResponse(0, "no HTTP")

    monkeypatch.setattr(program_module, "probe", probe)
    await made.start()

    assert "https://127.0.0.1:8123" == made.url


@pytest.mark.parametrize(
    ("dies", "output"),
    [(True, "died while starting"), (False, r"was not ready within 60 s \(503: down\)")],
)
async def test_a_server_that_does_not_come_up_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool, output: str
) -> None:
    clock = ManualClock()
    made, child = server(tmp_path, clock)
    began_s = clock.monotonic_s()

    async def probe(url: str, path: str) -> HealthResponse:
        child.alive = not dies
        return HealthResponse(503, "down")

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)

    monkeypatch.setattr(program_module, "probe", probe)
    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(Unavailable, match=output):
        await made.start()

    assert [0.0] == child.stopped
    assert (clock.monotonic_s() - began_s >= READY_S) == (not dies)


@pytest.mark.parametrize(("settled", "grace_s"), [(True, 0.0), (False, program_module.BUCKET_GRACE_S)])
async def test_a_bucket_whose_log_is_written_is_ended_at_once(settled: bool, grace_s: float) -> None:
    given: list[float] = []

    class FakeWeed:
        async def settle(self) -> bool:
            return settled

        async def stop(self, grace_s: float) -> None:
            given.append(grace_s)

    await BucketProgram(FakeWeed()).stop()  # type: ignore[arg-type]

    assert [grace_s] == given


# A stack that is started in the background.


class Spawned:
    def __init__(self, pid: int) -> None:
        self.pid, self.code, self.terminated = pid, None, 0  # type: ignore[var-annotated]

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.terminated += 1


async def test_a_detached_stack_reports_each_process_once_and_returns_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another supervisor is not believed."""
    clock, spawned, reported = ManualClock(), Spawned(77), []  # type: ignore[var-annotated]
    lock = FolderLock(tmp_path)
    mine, other = StackProcess("supervisor", 77, 1), StackProcess("supervisor", 78, 1)
    bucket, gateway = StackProcess("bucket", 1, 1), StackProcess("gateway", 2, 1)
    steps = [
        ("ready", (other, bucket)), ("starting", (mine, bucket)), ("starting", (mine, bucket, gateway)),
        ("ready", (mine, bucket, gateway)),
    ]  # fmt: skip

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)
        if not lock.held:
            lock.take()
            return
        state, processes = steps.pop(0)
        write(tmp_path, Endpoints(str(tmp_path), state, 1, BUCKET, processes=processes))  # type: ignore[arg-type]

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(supervise, "_spawn", lambda log, argv: spawned)

    found = await supervise.detach(tmp_path, ["up"], clock=clock, report=lambda one: reported.append(one.name))

    assert ("ready", [], ["bucket", "gateway"]) == (found.state, steps, reported)
    with pytest.raises(Conflict):
        await supervise.detach(tmp_path, ["up"], clock=clock)
    lock.release()


@pytest.mark.parametrize("code", [3, None])
async def test_a_detached_stack_that_does_not_come_up_shows_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    clock, spawned = ManualClock(), Spawned(77)
    spawned.code = code
    (tmp_path / supervise.SUPERVISOR_LOG).write_text("\n".join(f"line {number}" for number in range(100)))

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(supervise, "_spawn", lambda log, argv: spawned)
    began_s = clock.monotonic_s()

    with pytest.raises(Unavailable) as caught:
        await supervise.detach(tmp_path, ["up"], clock=clock)

    output = "did not start (code 3)" if code else "was not ready within 240 s"
    assert output in caught.value.message
    assert "line 99" in caught.value.message and "line 87" not in caught.value.message
    assert (0 if code else 1) == spawned.terminated
    assert code is not None or clock.monotonic_s() - began_s >= supervise.UP_S


def test_a_log_is_rotated_when_it_passes_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child continues with the same file; one older log is kept. The last lines are those of the end."""
    monkeypatch.setattr(child_module, "LOG_BYTES_MAX", 20_000)
    child = Child("gateway", tmp_path / "gateway.log", clock=ManualClock())
    assert "" == child.tail()
    child.rotate_log()
    lines = b"".join(b"line %d\n" % number for number in range(1000))
    child.log.write_bytes(lines.ljust(20_000, b"x"))
    child.rotate_log()
    assert 20_000 == child.log.stat().st_size
    child.log.write_bytes(b"y" * 20_001)
    child.rotate_log()

    assert (0, 20_001) == (child.log.stat().st_size, (tmp_path / "gateway.log.1").stat().st_size)
    child.log.write_bytes(lines)
    assert [f"line {number}" for number in range(988, 1000)] == child.tail().splitlines()
    assert ["line 999"] == child.tail(1).splitlines()


def test_a_child_that_was_never_started_has_no_pid_and_no_end(tmp_path: Path) -> None:
    child = Child("gateway", tmp_path / "gateway.log", clock=ManualClock())

    assert (0, False, None) == (child.pid, child.running(), child.exit_code())
    child.kill()
    error = child.ended("it is away")
    assert error.message.startswith("it is away: gateway is still running; last lines of")
    assert f"read {child.log}" == error.hint
    assert "look there" == child.ended("it is away", hint="look there").hint
