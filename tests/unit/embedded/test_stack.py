"""The supervisor's order of work, over programs that only note what is done with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import Conflict, NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded import stack as module
from lakebed.embedded import supervise
from lakebed.embedded.endpoints import TARGETS_FILE, Endpoints, StackProcess, environment, find, start_ticks, write
from lakebed.embedded.ports import HeldPorts
from lakebed.embedded.stack import RESTART_WINDOW_S, RESTARTS_MAX, Stack, clear_killed
from support.embedded_fixtures import BUCKET, FakeChild

MIB = 1024**2


class FakeProgram:
    """Comes up `slow_s` after it is started; fails as often as configured."""

    def __init__(self, name: str, noted: list[str], clock: ManualClock) -> None:
        self.name, self.url, self.endpoints, self.kafka = name, f"http://{name}", BUCKET, ""
        self.child, self._noted, self._clock = FakeChild(name, noted), noted, clock
        self.fails, self.moves = 0, False

    async def start(self) -> None:
        self._noted.append(f"start {self.name}")
        await self._clock.advance(1.5)
        if self.fails:
            self.fails -= 1
            raise Unavailable(f"{self.name} does not come up")
        if self.moves:
            self.endpoints = msgspec.structs.replace(BUCKET, s3="http://elsewhere")
        self.child.alive = True

    async def stop(self) -> None:
        self._noted.append(f"stop {self.name}")
        await self._clock.advance(0.5)
        self.child.alive = False

    def clear(self) -> None:
        self._noted.append("clear")


class Ground:
    def __init__(self, folder: Path) -> None:
        self.clock, self.noted, self.reported = ManualClock(), [], []  # type: ignore[var-annotated]
        ids = Ids.seeded(1)
        ids.jitter_s = lambda attempt, **_: float(attempt)  # type: ignore[method-assign]
        self.stack = Stack(folder, runtime=Runtime(self.clock, ids, Metrics()), report=self.reported.append)
        self.bucket, self.gateway, self.workers = (
            FakeProgram(name, self.noted, self.clock) for name in ("bucket", "gateway", "workers")
        )
        self.stack._bucket = self.bucket  # type: ignore[assignment]
        self.stack._plan = lambda held: [self.gateway, self.workers]  # type: ignore[assignment,method-assign,list-item,return-value]
        self.slept: list[float] = []
        self.clock.sleep = self.sleep  # type: ignore[method-assign]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.clock.advance(seconds)


async def test_the_bucket_comes_first_and_goes_last(tmp_path: Path) -> None:
    """While it runs the file names every process; afterwards there is no file and no lock."""
    ground = Ground(tmp_path)
    began_ms = now_ms(ground.clock)

    found = await ground.stack.start()
    seen = find(tmp_path)
    await ground.stack.stop()

    assert found == seen
    assert ("ready", began_ms, BUCKET, "http://gateway", "http://workers") == (
        found.state, found.started_at_ms, found.bucket, found.gateway, found.workers,
    )  # fmt: skip
    assert [("supervisor", 0.0), ("bucket", 1.5), ("gateway", 1.5), ("workers", 1.5)] == [
        (process.name, process.ready_s) for process in found.processes
    ]
    assert {start_ticks(os.getpid())} == {process.start_ticks for process in found.processes}
    assert ["start bucket", "start gateway", "start workers"] == ground.noted[:3]
    assert {"stop gateway", "stop workers"} == set(ground.noted[3:5])
    assert ["stop bucket", "kill workers", "kill gateway", "kill bucket", "clear"] == ground.noted[5:]
    assert not (tmp_path / "endpoints.json").exists()
    assert not ground.stack._lock.held
    assert [("bucket", "ready", 1.5), ("gateway", "ready", 1.5), ("workers", "ready", 1.5)] == [
        (event.name, event.what, event.seconds) for event in ground.reported[:3]
    ]
    assert ("stack", "stopped") == (ground.reported[-1].name, ground.reported[-1].what)


async def test_prometheus_finds_the_servers_of_a_stack_while_it_runs(tmp_path: Path) -> None:
    """By a file in its folder, in the form of `file_sd_configs`; a stack that has ended has no targets."""
    ground = Ground(tmp_path)
    ground.gateway.url, ground.workers.url = "https://127.0.0.1:5001", "http://127.0.0.1:5002"
    file = tmp_path / TARGETS_FILE

    await ground.stack.start()
    found = msgspec.json.decode(file.read_bytes())
    await ground.stack.stop()

    assert not file.exists()
    assert [
        {"targets": ["127.0.0.1:5001"], "labels": {"__scheme__": "https"}},
        {"targets": ["127.0.0.1:5002"], "labels": {"__scheme__": "http"}},
    ] == found


async def test_a_program_that_does_not_come_up_leaves_nothing(tmp_path: Path) -> None:
    """Nothing is drained: what was started is killed and the lock is given back."""
    ground = Ground(tmp_path)
    ground.gateway.fails = 1

    with pytest.raises(Unavailable, match="gateway does not come up"):
        await ground.stack.start()

    assert not [one for one in ground.noted if one.startswith("stop")]
    assert "kill bucket" in ground.noted
    assert not ground.stack._lock.held
    with pytest.raises(NotFound):
        find(tmp_path)


async def test_a_second_stack_in_the_folder_is_refused_after_some_tries(tmp_path: Path) -> None:
    first, second = Ground(tmp_path), Ground(tmp_path)
    await first.stack.start()

    with pytest.raises(Conflict):
        await second.stack.start()

    assert [module.LOCK_EVERY_S] * (module.LOCK_TRIES - 1) == second.slept
    assert [] == second.noted
    await second.stack.stop()
    assert [] == second.noted
    assert "ready" == find(tmp_path).state
    await first.stack.stop()


async def test_what_dies_is_started_again_with_growing_pauses_and_counted(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    ground.workers.child.alive = False
    ground.workers.fails = 2

    await ground.stack._restart(ground.workers)  # type: ignore[arg-type]

    assert ["kill workers", "start workers"] * 3 == ground.noted
    assert [0.0, 1.0, 2.0] == ground.slept
    assert (3, "ready") == (find(tmp_path).process("workers").restarts, find(tmp_path).state)
    assert 0 == find(tmp_path).process("gateway").restarts
    assert ["died"] * 3 + ["ready"] == [event.what for event in ground.reported[3:]]
    await ground.stack.stop()


async def test_a_program_that_keeps_dying_stops_the_stack_and_an_old_death_is_forgotten(tmp_path: Path) -> None:
    """Five restarts within two minutes are allowed, the sixth death is one too many."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.workers.fails = 10**6

    with pytest.raises(Unavailable, match="the workers died 6 times within 120 s"):
        await ground.stack._restart(ground.workers)  # type: ignore[arg-type]
    assert RESTARTS_MAX == ground.noted.count("start workers") - 1

    await ground.clock.advance(RESTART_WINDOW_S)
    assert 0 == ground.stack._count_restart(ground.workers)  # type: ignore[arg-type]
    assert 1 == ground.stack._count_restart(ground.workers)  # type: ignore[arg-type]
    assert 0 == ground.stack._count_restart(ground.gateway)  # type: ignore[arg-type]
    await ground.stack.stop()


@pytest.mark.parametrize("moves", [False, True])
async def test_when_the_bucket_moved_the_others_are_started_again(tmp_path: Path, moves: bool) -> None:
    """They have its old address; at the same address they continue."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    ground.bucket.moves = moves
    ground.bucket.child.alive = False

    await ground.stack._restart(ground.bucket)  # type: ignore[arg-type]

    again = ["stop gateway", "start gateway", "stop workers", "start workers"] if moves else []
    assert ["kill bucket", "start bucket", *again] == ground.noted
    assert ground.bucket.endpoints == find(tmp_path).bucket
    await ground.stack.stop()


async def test_a_server_that_does_not_come_up_at_the_buckets_new_address_is_tried_again(tmp_path: Path) -> None:
    """As one that died: the others are started meanwhile, and the stack goes on."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    ground.bucket.moves, ground.gateway.fails = True, 1

    await ground.stack._restart(ground.bucket)  # type: ignore[arg-type]

    again = ["stop gateway", "start gateway", "stop workers", "start workers"]
    assert ["kill bucket", "start bucket", *again] == ground.noted
    assert (False, True) == (ground.gateway.child.running(), ground.workers.child.running())
    await ground.stack._restart(ground.gateway)  # type: ignore[arg-type]
    assert (True, 1) == (ground.gateway.child.running(), find(tmp_path).process("gateway").restarts)
    await ground.stack.stop()


@pytest.mark.parametrize("moves", [False, True])
async def test_a_bucket_that_dies_while_a_server_is_restarted_is_restarted_first(tmp_path: Path, moves: bool) -> None:
    """A server is not ready without its bucket, however often it is started; where the bucket moved, all start anew."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    ground.gateway.child.alive, ground.bucket.moves = False, moves
    start = ground.gateway.start

    async def waits_for_the_bucket() -> None:
        if ground.noted.count("start gateway") == 0:
            ground.bucket.child.alive = False
        ground.gateway.fails = 0 if ground.bucket.child.alive else 1
        await start()

    ground.gateway.start = waits_for_the_bucket  # type: ignore[method-assign]
    await ground.stack._restart(ground.gateway)  # type: ignore[arg-type]

    again = ["stop gateway", "start gateway", "stop workers", "start workers"]
    assert ["kill gateway", "start gateway", "kill bucket", "start bucket"] == ground.noted[:4]
    assert (again if moves else ["kill gateway", "start gateway"]) == ground.noted[4:]
    assert ("ready", 1) == (find(tmp_path).state, find(tmp_path).process("bucket").restarts)
    await ground.stack.stop()


async def test_a_disk_that_has_space_again_while_a_server_is_restarted_lets_the_bucket_take_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the bucket was opened again it refuses what the server needs to start."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    free = [1, 500]
    monkeypatch.setattr(module, "free_bytes", lambda folder: free[0] * MIB)
    await ground.stack._watch_disk()
    ground.noted.clear()
    ground.gateway.fails = 1
    free.pop(0)

    await ground.stack._restart(ground.gateway)  # type: ignore[arg-type]

    opened = ["stop bucket", "kill bucket", "start bucket"]
    assert ["kill gateway", "start gateway", *opened, "kill gateway", "start gateway"] == ground.noted
    await ground.stack.stop()


async def test_a_watch_looks_at_every_program_and_starts_only_what_died(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    rounds = 0

    class Enough(Exception): ...

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += seconds == module.WATCH_EVERY_S
        ground.gateway.child.alive = False
        if rounds == 2:
            raise Enough

    ground.clock.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(Enough):
        await ground.stack.watch()

    assert ["kill gateway", "start gateway"] == ground.noted
    await ground.stack.stop()


@pytest.mark.parametrize(
    ("free_mib", "done"),
    [
        ([500, 20, 500], []),  # low, and never full
        ([500, 1, 20], []),  # still low
        ([500, 1, 20, 500, 500], ["stop bucket", "kill bucket", "start bucket"]),
    ],
)
async def test_after_a_full_disk_the_bucket_is_restarted_once_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: list[int], done: list[str]
) -> None:
    """Its metadata store refuses every write after one that the disk refused, until it is opened again."""
    ground = Ground(tmp_path)
    await ground.stack.start()
    ground.noted.clear()
    ground.reported.clear()
    rounds = iter(free_mib)

    class Enough(Exception): ...

    def free_bytes(folder: Path) -> int:
        try:
            return next(rounds) * MIB
        except StopIteration:
            raise Enough from None

    monkeypatch.setattr(module, "free_bytes", free_bytes)
    with pytest.raises(Enough):
        await ground.stack.watch()

    assert done == ground.noted
    assert [f"1.0 MiB free on the disk of {tmp_path}"] * (1 in free_mib) == [
        event.detail.split(":")[0] for event in ground.reported if event.what == "full"
    ]
    await ground.stack.stop()


def test_servers_keep_their_ports_over_restarts(tmp_path: Path) -> None:
    """Ports are written down privately, and wished for again; a file that does not decode is not believed."""
    stack = Stack(tmp_path, runtime=Runtime(ManualClock(), Ids.seeded(1), Metrics()))

    def planned() -> list[str]:
        with HeldPorts(Ids.seeded(len(urls))) as held:
            return [server.url for server in stack._plan(held)]

    urls: list[list[str]] = []
    urls.append(planned())
    urls.append(planned())
    (tmp_path / "ports.json").write_text("{")
    urls.append(planned())

    assert urls[0] == urls[1]
    assert 0o600 == (tmp_path / "ports.json").stat().st_mode & 0o777
    ports = msgspec.json.decode((tmp_path / "ports.json").read_bytes())
    assert [f"http://127.0.0.1:{ports[name]}" for name in ("gateway", "workers")] == urls[2]
    with HeldPorts(Ids.seeded(9)) as held:
        assert [f"127.0.0.1:{ports['kafka']}", ""] == [server.kafka for server in stack._plan(held)]


async def test_what_a_killed_stack_left_is_waited_for_and_then_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only processes that are still the same are ended, the supervisor is not among them."""
    alive = {11: 5, 12: 6, 13: 7}
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "start_ticks", lambda pid: alive.get(pid, 0))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)) or alive.pop(pid))
    left = (
        StackProcess("supervisor", 13, 7),
        StackProcess("gateway", 11, 5),
        StackProcess("workers", 12, 99),
        StackProcess("x", 14, 0),
    )
    write(tmp_path, Endpoints(str(tmp_path), "ready", 1, BUCKET, processes=left))
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    began_s = clock.monotonic_s()

    assert await clear_killed(tmp_path, clock=clock)
    assert [(11, signal.SIGKILL)] == killed
    assert module.ORPHANS_WAIT_S <= clock.monotonic_s() - began_s < module.ORPHANS_WAIT_S + 0.2
    assert not (tmp_path / "endpoints.json").exists()
    assert not await clear_killed(tmp_path, clock=clock)


async def test_processes_that_do_not_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_ticks", lambda pid: 5)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    write(tmp_path, Endpoints(str(tmp_path), "ready", 1, BUCKET, processes=(StackProcess("gateway", 11, 5),)))
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(Unavailable, match=r"processes \[11\]"):
        await clear_killed(tmp_path, clock=clock)

    assert (tmp_path / "endpoints.json").exists()


async def test_down_clears_what_a_killed_stack_left(tmp_path: Path) -> None:
    write(tmp_path, Endpoints(str(tmp_path), "ready", 1, BUCKET))

    assert "cleared" == await supervise.down(tmp_path, clock=ManualClock())
    assert "none" == await supervise.down(tmp_path, clock=ManualClock())


def test_hints_name_the_folder_unless_it_is_the_usual_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as elsewhere:
        find(tmp_path)
    with pytest.raises(NotFound) as usual:
        find(Path(".lakebed"))

    assert (f"lakebed up --dir {tmp_path}", "lakebed up") == (elsewhere.value.hint, usual.value.hint)


def test_other_tools_are_told_the_buckets_address_and_keys(tmp_path: Path) -> None:
    reports_seen = environment(Endpoints(str(tmp_path), "ready", 1, BUCKET))

    assert ("the-id", "the-secret") == (reports_seen["AWS_ACCESS_KEY_ID"], reports_seen["AWS_SECRET_ACCESS_KEY"])
    assert {"http://h:1"} == {reports_seen["AWS_ENDPOINT_URL"], reports_seen["AWS_ENDPOINT_URL_S3"]}
    assert {"eu-1"} == {reports_seen["AWS_REGION"], reports_seen["AWS_DEFAULT_REGION"]}
    assert "fs.s3a.endpoint=http://h:1 " in reports_seen["PYSPARK_SUBMIT_ARGS"]
    assert str(tmp_path) == reports_seen["LAKEBED_DIR"]


def test_settings_of_a_stack_are_its_bucket_and_its_meta_file(tmp_path: Path) -> None:
    assert {
        "store.url": "s3://lake", "store.endpoint": "http://h:1", "store.region": "eu-1",
        "store.access_key_id": "the-id", "store.secret_access_key": "the-secret", "filer.grpc": "h:4",
        "meta.path": str(tmp_path / "meta.sqlite"),
    } == Endpoints(str(tmp_path), "ready", 1, BUCKET).as_settings()  # fmt: skip
    assert ("eu-1", "http://h:1") == (BUCKET.store_settings().region, BUCKET.store_settings().endpoint)
