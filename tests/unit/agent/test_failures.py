"""The sender, the batcher and the whole agent when disks, collectors and sources fail."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.agent.alerts import Alerts, AlertSources, read_alerts
from lakebed.agent.batcher import BUFFER_BATCHES, STORE_RETRY_S, Batcher, BatchLimits, weigh
from lakebed.agent.disk_queue import DiskQueue
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.files import Files
from lakebed.agent.inspector import QueueInspector
from lakebed.agent.model import AppendResult, DiskTrouble, Frame, QueuedBatch, QueueFull
from lakebed.agent.run import BACKOFF_BASE_S, BACKOFF_CAP_S, Agent
from lakebed.agent.sender import Sender
from lakebed.agent.settings import AgentSettings
from lakebed.agent.sources.host import HostSource
from lakebed.agent.sources.listen import OtlpListener
from lakebed.agent.sources.otlp import REASONS_MAX
from lakebed.agent.sources.stdin import StdinSource
from lakebed.agent.verdict import CollectorResponse
from lakebed.agent.waiting import wait_for_any, wait_for_first
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import Sample
from lakebed.core.clock import ManualClock, now_ms, settle
from lakebed.core.errors import Invalid, OutcomeUnknown, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from support.agent_fakes import AGENT, ScriptedCollectors, accepted, frame, inline, open_spool, problem
from support.runtimes import runtime_of

LIMITS = SendLimits(concurrency=2, base_s=0.5, cap_s=30.0, retry_after_max_s=300.0, denied_s=60.0, hedge_share_max=0.2)


class FullJitter(Ids):
    def uniform(self, low: float, high: float) -> float:
        return low

    def jitter_s(self, attempt: int, *, base_s: float, cap_s: float) -> float:
        return min(cap_s, base_s * 2.0**attempt)


class World:
    def __init__(self, folder: Path, collectors: ScriptedCollectors, names: Sequence[str], files: Files | None) -> None:
        self.clock, self.metrics, self.folder = ManualClock(), Metrics(), folder
        self.disk_queue: DiskQueue = open_spool(folder, files=files)
        self.alerting = Alerts(folder / "alerts", metrics=self.metrics, now_ms=lambda: 7)
        order = SendOrder([f"http://{name}" for name in names], LIMITS, FullJitter())
        self.order = order
        self.sender = Sender(
            runtime_of(self.clock, metrics=self.metrics),
            self.disk_queue,
            order,
            collectors,
            self.alerting,
            hedge_after_s=2.0,
            concurrency=2,
            offload=inline,
        )

    def put(self, *spans: tuple[int, int]) -> tuple[QueuedBatch, ...]:
        stored = self.disk_queue.append([frame("boot-1", *span) for span in spans]).stored
        self.sender.wake()
        return stored

    @property
    def on(self) -> list[str]:
        return sorted(alert.kind for alert in read_alerts(self.folder / "alerts"))

    def answers(self, outcome: str) -> float:
        return self.metrics.value("lakebed_agent_answers_total", outcome=outcome)


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(collectors: ScriptedCollectors, *names: str, files: Files | None = None) -> AsyncIterator[World]:
        made = World(tmp_path, collectors, names or ("one",), files)
        running = asyncio.ensure_future(made.sender.run())
        await settle()
        yield made
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made.disk_queue.close()

    return make


async def test_a_parked_batch_keeps_everything_its_owner_needs(world: Any) -> None:
    """Who answered what and when, and the alert reports the same in words and in detail."""
    other = "cd" * 32
    collectors = ScriptedCollectors(one=[problem(409, "identity_conflict", accepted_frame_sha256=other)])
    async with world(collectors) as w:
        (entry,) = w.put((3, 9))
        await w.clock.advance(1)
        at_ms = now_ms(w.clock)
        [parked] = QueueInspector(w.folder, lambda: 7).parked()
        [alert] = read_alerts(w.folder / "alerts")

    assert (AGENT, "boot-1", 3, 9, "identity_conflict", entry.sha256, other) == (
        parked.agent_id, parked.boot_id, parked.seq_start, parked.seq_end, parked.reason,
        parked.submitted_frame_sha256, parked.accepted_frame_sha256,
    )  # fmt: skip
    assert ("http://one", 409, "identity_conflict", entry.size_bytes) == (
        parked.collector, parked.status, parked.message, parked.size_bytes,
    )  # fmt: skip
    assert at_ms - 1000 <= parked.parked_at_ms <= at_ms
    assert "batch 3-9 of boot boot-1 is parked: identity_conflict" == alert.message
    assert {
        "boot_id": "boot-1", "seq_start": 3, "seq_end": 9, "accepted_frame_sha256": other,
        "submitted_frame_sha256": entry.sha256,
    } == alert.detail  # fmt: skip
    assert 1 == w.metrics.value("lakebed_agent_parked_total", reason="identity_conflict")
    assert (1, 0, 0) == (
        w.metrics.value("lakebed_agent_parked_batches"), w.metrics.value("lakebed_agent_queue_batches"),
        w.metrics.value("lakebed_agent_sent_samples_total"),
    )  # fmt: skip


async def test_every_answer_is_counted_by_its_outcome(world: Any) -> None:
    """Also those that were no answer."""
    script = [Unavailable("x"), OutcomeUnknown("x"), problem(503), problem(401), accepted(duplicate=True)]
    async with world(ScriptedCollectors(one=script)) as w:
        w.put((0, 0))
        await w.clock.advance(600)

    assert [1.0] * 5 == [w.answers(name) for name in ("unreached", "lost", "busy", "denied", "duplicate")]
    assert 1 == w.metrics.value("lakebed_agent_sent_samples_total")


async def test_a_disk_that_cannot_be_read_is_an_alert_and_the_batch_stays(world: Any) -> None:
    """It is tried again after a rest; nothing was sent meanwhile."""
    collectors = ScriptedCollectors(one=[accepted()])
    async with world(collectors) as w:
        read, broken = w.disk_queue.read, [True]

        def failing(entry: QueuedBatch) -> bytes:
            if broken:
                raise DiskTrouble("EIO")
            return bytes(read(entry))

        w.disk_queue.read = failing
        w.put((0, 0))
        await w.clock.advance(1)
        during = (w.on, len(collectors.sent), w.disk_queue.batches)
        broken.clear()
        await w.clock.advance(60)

    assert (["disk_trouble"], 0, 1) == during
    assert (1, 0) == (len(collectors.sent), w.disk_queue.batches)


async def test_a_batch_that_cannot_be_parked_stays_queued_with_an_alert(world: Any) -> None:
    """The reason cannot be written, so the batch does not move and is tried again."""

    class Refusing(Files):
        broken = False

        def write(self, path: Path, data: bytes) -> None:
            if self.broken and path.parent.name == "parked":
                raise OSError(28, "no space left")
            super().write(path, data)

    files = Refusing()
    async with world(ScriptedCollectors(one=[problem(422)]), files=files) as w:
        files.broken = True
        w.put((0, 0))
        await w.clock.advance(0.2)
        during = (w.on, w.disk_queue.batches, w.disk_queue.parked_batches)
        files.broken = False
        await w.clock.advance(60)

    assert (["disk_trouble"], 1, 0) == during
    assert (0, 1) == (w.disk_queue.batches, w.disk_queue.parked_batches)


async def test_alerts_of_parked_batches_last_until_the_last_one_is_settled(world: Any) -> None:
    """Looked at every five seconds."""
    async with world(ScriptedCollectors(one=[problem(422)])) as w:
        w.put((0, 0), (1, 1))
        await w.clock.advance(1)
        inspector_ = QueueInspector(w.folder, lambda: 7)
        inspector_.drop(inspector_.select([frame("boot-1", 0, 0).sha256]), reason="r")
        await w.clock.advance(6)
        one_left = (w.on, w.disk_queue.parked_batches)
        inspector_.drop(inspector_.select([], all_parked=True), reason="r")
        await w.clock.advance(6)

    assert (["rejected"], 1) == one_left
    assert ([], 0) == (w.on, w.disk_queue.parked_batches)


async def test_a_queue_that_cannot_be_looked_at_is_an_alert(world: Any) -> None:
    """The sender continues with what it knows."""
    collectors = ScriptedCollectors(one=[accepted()])
    async with world(collectors) as w:

        def failing() -> int:
            raise OSError(5, "I/O error")

        w.disk_queue.take_returned = failing
        await w.clock.advance(6)
        w.put((0, 0))
        await w.clock.advance(1)

    assert (["disk_trouble"], 1) == (w.on, len(collectors.sent))


async def test_a_send_that_breaks_unforeseen_is_tried_again_after_a_rest(world: Any) -> None:
    """The batch is neither lost nor sent in a tight loop."""
    broken: list[int] = []

    async def bug() -> CollectorResponse:
        broken.append(1)
        raise RuntimeError("a bug")

    async with world(ScriptedCollectors(one=[bug, bug, accepted()])) as w:
        w.put((0, 0))
        await w.clock.advance(0.4)
        early = len(broken)
        await w.clock.advance(60)

    assert (1, 2, 0, True) == (early, len(broken), w.disk_queue.batches, w.sender.idle)


async def test_an_outage_of_one_collector_is_learned_from_its_hedge_too(world: Any) -> None:
    """A second answer that is not final is waited past: the first collector's acceptance counts."""
    gate = asyncio.Event()

    async def slow() -> CollectorResponse:
        await gate.wait()
        return accepted()

    collectors = ScriptedCollectors(one=[slow], two=[problem(503)])
    async with world(collectors, "one", "two") as w:
        w.put((0, 0))
        await w.clock.advance(2.1)
        requested = [url for url, _ in collectors.arrived]
        gate.set()
        await w.clock.advance(0.1)

    assert ["http://one", "http://two"] == requested
    assert (0, 1.0, 1.0) == (w.disk_queue.batches, w.answers("accepted"), w.answers("busy"))
    assert (1, 0) == (w.order.collectors[1].failures, w.order.collectors[0].failures)
    assert [0, 0] == [collector.under_way for collector in w.order.collectors]


class Disk:
    """Stores frames, or raises what it is given."""

    def __init__(self, *refusals: Exception, dropped: tuple[int, int] = (0, 0)) -> None:
        self.refusals, self.dropped = list(refusals), dropped
        self.frames: list[Frame] = []
        self.offered: list[int] = []

    async def __call__(self, frames: Sequence[Frame]) -> AppendResult:
        self.offered.append(len(frames))
        if self.refusals:
            raise self.refusals.pop(0)
        self.frames += frames
        stored = tuple(QueuedBatch(1, "b", f.identity.seq_start, f.identity.seq_end, f.sha256, 1) for f in frames)
        return AppendResult(stored, *self.dropped)


def samples(count: int) -> list[Sample]:
    return [Sample("m", 1, float(n)) for n in range(count)]


def batcher_of(disk: Disk, clock: ManualClock, metrics: Metrics, **more: Any) -> Batcher:
    limits = BatchLimits(more.pop("bytes_max", 10**6), more.pop("samples_max", 1000), 5.0)
    return Batcher(runtime_of(clock, metrics=metrics), "a", "b", limits, disk, offload=inline, **more)


async def test_what_became_of_samples_is_counted(metrics: Metrics) -> None:
    """Samples and batches stored, and those that a full queue gave up."""
    clock = ManualClock()
    batcher = batcher_of(Disk(dropped=(2, 30)), clock, metrics, samples_max=4)
    batcher.stop()
    await batcher.put(samples(8))
    await batcher.run()

    names = ("samples", "batches", "dropped_batches", "dropped_samples")
    assert (8.0, 2.0, 2.0, 30.0) == tuple(metrics.value(f"lakebed_agent_{name}_total") for name in names)


async def test_trouble_is_told_while_it_lasts_and_asked_again_after_a_pause(metrics: Metrics) -> None:
    """The error itself, then None; nothing is settled before the disk has it."""
    clock, reported = ManualClock(), list[Any]()
    disk = Disk(QueueFull("full"), DiskTrouble("EIO"))
    batcher = batcher_of(disk, clock, metrics, trouble=lambda error: reported.append(error and error.message))
    running = asyncio.ensure_future(batcher.run())
    await batcher.put(samples(3))
    await clock.advance(5.0)
    during = (batcher.buffered, batcher.settled, len(disk.offered))
    await clock.advance(2 * STORE_RETRY_S + 0.1)
    running.cancel()

    assert (3, 0, 1) == during
    assert (["full", "EIO", None], 0, 3) == (reported, batcher.buffered, batcher.settled)


async def test_a_batch_that_is_exactly_full_does_not_wait(metrics: Metrics) -> None:
    """By bytes or by samples; one byte less waits for the interval."""
    clock, size = ManualClock(), weigh(samples(1)[0])
    done = []
    for limits in ({"bytes_max": 3 * size}, {"samples_max": 3}, {"bytes_max": 3 * size + 1}, {"samples_max": 4}):
        disk = Disk()
        batcher = batcher_of(disk, clock, metrics, **limits)
        running = asyncio.ensure_future(batcher.run())
        await batcher.put(samples(3))
        await settle()
        done.append(len(disk.frames))
        running.cancel()

    assert [1, 1, 0, 0] == done


async def test_the_buffer_is_full_at_so_many_batches(metrics: Metrics) -> None:
    """`has_room` reports what `put` would do; full batches share one store call."""
    clock, size = ManualClock(), weigh(samples(1)[0])
    disk = Disk()
    batcher = batcher_of(disk, clock, metrics, bytes_max=2 * size)
    await batcher.put(samples(2 * BUFFER_BATCHES - 1))
    before = batcher.has_room
    await batcher.put(samples(1))
    after = batcher.has_room
    batcher.stop()
    await batcher.run()

    assert (True, False, True, [BUFFER_BATCHES]) == (before, after, batcher.has_room, disk.offered)


async def test_hurry_flushes_now_and_an_empty_put_gives_the_last_ticket(metrics: Metrics) -> None:
    """Nothing is read between them that is not durable after."""
    clock, disk = ManualClock(), Disk()
    batcher = batcher_of(disk, clock, metrics)
    running = asyncio.ensure_future(batcher.run())
    ticket = await batcher.put(samples(3))
    empty = await batcher.put(())
    batcher.flush_now()
    await settle()
    running.cancel()

    assert (3, 3, 1) == (ticket, empty, len(disk.frames))
    assert [0.0, 1.0, 2.0] == decode(disk.frames[0].data).columns.values.tolist()


async def test_samples_that_cannot_be_encoded_are_counted_and_hold_up_nobody(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who waits for them continues; the next batch keeps its numbers."""
    from lakebed.agent import batcher as module

    clock, disk, make, broken = ManualClock(), Disk(), module.make_frame, [True]

    def failing(identity: Any, taken: Any) -> Frame:
        if broken:
            broken.clear()
            raise Invalid("no frame")
        return make(identity, taken)

    monkeypatch.setattr(module, "make_frame", failing)
    batcher = batcher_of(disk, clock, metrics)
    running = asyncio.ensure_future(batcher.run())
    ticket = await batcher.put(samples(3))
    await clock.advance(5.0)
    await batcher.durable(ticket)
    await batcher.put(samples(2))
    await clock.advance(5.0)
    running.cancel()

    assert 3 == metrics.value("lakebed_agent_bad_samples_total", source="batcher")
    assert [(3, 4)] == [(each.identity.seq_start, each.identity.seq_end) for each in disk.frames]


async def test_host_metrics_are_read_at_their_interval(metrics: Metrics, tmp_path: Path) -> None:
    """Once at the start, then once each interval."""
    clock, disk = ManualClock(), Disk()
    (tmp_path / "loadavg").write_text("1 2 3 1/1 1\n")
    batcher = batcher_of(disk, clock, metrics)
    source = HostSource(runtime_of(clock, metrics=metrics), batcher, interval_s=10.0, proc=tmp_path)
    running = asyncio.ensure_future(source.run())
    await settle()
    first = batcher.buffered
    await clock.advance(9.9)
    early = batcher.buffered
    await clock.advance(0.2)
    running.cancel()

    assert (first, first, 2 * first) == (6, early, batcher.buffered)


async def test_waiting_ends_with_the_first_of_several(metrics: Metrics) -> None:
    """An event that is set already, one that is set later, the time; a task that ends or the time."""
    clock, one, two = ManualClock(), asyncio.Event(), asyncio.Event()
    one.set()
    await wait_for_any(clock, None, two, one)
    one.clear()
    waiting = [asyncio.ensure_future(wait_for_any(clock, 5.0, one, two)) for _ in range(2)]
    forever = asyncio.ensure_future(wait_for_any(clock, None, one))
    task = asyncio.ensure_future(two.wait())
    first = asyncio.ensure_future(wait_for_first(clock, 3.0, [task]))
    await clock.advance(2.9)
    early = [each.done() for each in (*waiting, forever, first)]
    await clock.advance(0.2)
    timed = (first.done(), task.done())
    two.set()
    await settle()
    woken = [each.done() for each in (*waiting, forever)]
    one.set()
    await settle()

    assert ([False] * 4, (True, False), [True, True, False]) == (early, timed, woken)
    assert forever.done()


def agent_of(tmp_path: Path, metrics: Metrics, **more: Any) -> Agent:
    settings = AgentSettings.of({"queue_dir": str(tmp_path / "q"), "agent_id": "me", **more})
    return Agent(runtime_of(ManualClock(), ids=Ids.seeded(1), metrics=metrics), settings)


async def opened(agent: Agent) -> Any:
    """The agent wired on its queue, without its loops."""
    agent._queue = agent._open()
    agent._alerts = Alerts(agent._queue.folder / "alerts", metrics=agent._metrics, now_ms=agent._now_ms)
    transport: Any = ScriptedCollectors()
    agent._wire(transport)
    return agent


def test_an_alert_of_several_folders_is_over_when_it_is_over_in_all_of_them() -> None:
    """One that has not reported yet may be the one that raised it before the agent was restarted."""
    alerts: dict[str, str | None] = {"ticks_stuck": "of the run before"}
    sources = AlertSources(alerts.__setitem__)
    one, other = sources.source(), sources.source()

    one("ticks_stuck", None)
    waits = dict(alerts)
    other("ticks_stuck", "the service is away")
    one("ticks_stuck", None)
    raised = dict(alerts)
    other("ticks_stuck", None)

    assert ({"ticks_stuck": "of the run before"}, {"ticks_stuck": "the service is away"}) == (waits, raised)
    assert {"ticks_stuck": None} == alerts


async def test_the_health_of_an_agent_is_that_of_its_queue(tmp_path: Path, metrics: Metrics) -> None:
    """Degraded while an alert lasts; every number is of what waits now."""
    agent = await opened(agent_of(tmp_path, metrics))
    await agent._batcher.put(samples(3))
    before = agent.health()
    stored = await agent._store([frame("boot-1", 0, 4)])
    agent.alert("ticks_stuck", "no way")
    during = agent.health()
    agent.alert("ticks_stuck", None)

    assert ("ok", "me", agent.boot_id, 3, 0, 0, 0, []) == tuple(before.values())
    assert ("degraded", ["ticks_stuck"], 1, 4096) == (
        during["status"], during["alerts"], during["queue_batches"], during["queue_bytes"],
    )  # fmt: skip
    assert ("ok", 1) == (agent.health()["status"], len(stored.stored))
    assert metrics.value("lakebed_agent_fsyncs_total") == agent._queue.files.fsyncs
    agent._queue.close()


async def test_files_that_a_crash_left_unfinished_are_counted_when_the_agent_starts(
    tmp_path: Path, metrics: Metrics
) -> None:
    before = await opened(agent_of(tmp_path, metrics))
    await before._store([frame("boot-1", 0, 4)])
    before._queue.close()
    (boot,) = (tmp_path / "q" / "boots").iterdir()
    (boot / "a.tmp").write_bytes(b"x")

    again = await opened(agent_of(tmp_path, metrics))
    again._queue.close()

    assert 1 == metrics.value("lakebed_agent_torn_total")


async def test_every_synchronous_write_is_counted_once(tmp_path: Path, metrics: Metrics) -> None:
    """However many batches are stored one after the other."""
    agent = await opened(agent_of(tmp_path, metrics))

    for first in (0, 5, 10):
        await agent._store([frame("boot-1", first, first + 4)])

    assert metrics.value("lakebed_agent_fsyncs_total") == agent._queue.files.fsyncs
    agent._queue.close()


async def test_a_queue_that_gives_up_batches_is_an_alert_until_it_has_room(tmp_path: Path, metrics: Metrics) -> None:
    """A blocked queue too; trouble of the disk has an alert of its own."""
    limits = {"queue_batches_max": 8, "when_full": "drop_oldest"}
    agent = await opened(agent_of(tmp_path, metrics, **limits))
    folder = agent._queue.folder / "alerts"
    await agent._store([frame("boot-1", n, n) for n in range(8)])
    none = read_alerts(folder)
    await agent._store([frame("boot-1", 8, 9), frame("boot-1", 10, 12)])
    [full] = read_alerts(folder)
    entry = agent._queue.claim()
    agent._queue.complete(entry)
    await agent._store([frame("boot-1", 13, 13)])
    over = read_alerts(folder)
    agent._trouble(QueueFull("blocked"))
    agent._trouble(DiskTrouble("EIO"))
    both = {alert.kind: alert.message for alert in read_alerts(folder)}
    agent._trouble(None)

    assert ([], "queue_full", []) == (none, full.kind, over)
    assert "2 batches (2 samples) were dropped" in full.message
    assert {"queue_full": "blocked", "disk_trouble": "EIO"} == both
    assert ["queue_full"] == [alert.kind for alert in read_alerts(folder)]
    agent._queue.close()


async def test_what_runs_beside_is_started_again_when_it_fails(tmp_path: Path, metrics: Metrics) -> None:
    """After a second, for ever."""
    agent = agent_of(tmp_path, metrics)
    clock: Any = agent._clock
    runs: list[int] = []

    async def fails() -> None:
        runs.append(1)
        raise RuntimeError("a bug")

    running = asyncio.ensure_future(agent._again(fails))
    await settle()
    first = len(runs)
    await clock.advance(0.9)
    early = len(runs)
    await clock.advance(1.2)
    running.cancel()

    assert (1, 1, 3) == (first, early, len(runs))


async def test_an_agents_name_is_the_hosts_unless_it_is_set(tmp_path: Path, metrics: Metrics, monkeypatch: Any) -> None:
    """And each run is a boot of its own."""
    monkeypatch.setattr("socket.gethostname", lambda: "host-7")
    one, two = agent_of(tmp_path, metrics, agent_id=""), agent_of(tmp_path, metrics)
    other = Agent(runtime_of(ManualClock(), ids=Ids.seeded(2), metrics=metrics), one._settings)

    assert ("host-7", "me") == (one.agent_id, two.agent_id)
    assert one.boot_id != other.boot_id


async def test_a_batch_is_hedged_once_however_slow_all_collectors_are(world: Any) -> None:
    """A third collector is not queried after the second."""

    async def never() -> CollectorResponse:
        await asyncio.Event().wait()
        raise AssertionError

    collectors = ScriptedCollectors(one=[never], two=[never], three=[never])
    async with world(collectors, "one", "two", "three") as w:
        w.put((0, 0))
        await w.clock.advance(2.1)
        await w.clock.advance(20.0)

    assert ["http://one", "http://two"] == [url for url, _ in collectors.arrived]
    assert 1 == w.metrics.value("lakebed_agent_hedges_total")


async def test_one_sample_is_waited_for_like_many(metrics: Metrics) -> None:
    """A ticket is good only when its last sample is on disk."""
    clock, disk = ManualClock(), Disk()
    batcher = batcher_of(disk, clock, metrics)
    running = asyncio.ensure_future(batcher.run())
    waiting = asyncio.ensure_future(batcher.durable(await batcher.put(samples(1))))
    await settle()
    early = waiting.done()
    await clock.advance(5.1)
    running.cancel()

    assert (False, True) == (early, waiting.done())


async def test_a_line_that_is_too_long_is_given_up_before_it_ends(metrics: Metrics) -> None:
    """No more of it is held than the limit and a chunk; the line after it is read."""
    clock, disk = ManualClock(), Disk()
    batcher = batcher_of(disk, clock, metrics)
    source = StdinSource(runtime_of(clock, metrics=metrics), batcher, line_bytes_max=100)
    counted: list[float] = []

    class Reader:
        chunks = [b"x" * 100, b"x", b"x" * 500, b'x\n{"metric":"m","value":1}\n', b""]

        async def read(self) -> bytes:
            counted.append(metrics.value("lakebed_agent_bad_samples_total", source="stdin"))
            return self.chunks.pop(0)

        def stop(self) -> None: ...

    await source._read(Reader())

    assert [0.0, 0.0, 1.0, 1.0, 1.0] == counted
    assert 1 == batcher.buffered


async def test_a_line_that_a_stop_cut_off_is_not_taken_for_a_bad_one(metrics: Metrics) -> None:
    """The rest of it was never read; the lines before it count."""
    clock = ManualClock()
    batcher = batcher_of(Disk(), clock, metrics)
    source = StdinSource(runtime_of(clock, metrics=metrics), batcher, line_bytes_max=100)

    class Reader:
        chunks = [b'{"metric":"m","value":1}\n{"metric":', b""]

        async def read(self) -> bytes:
            if len(self.chunks) == 1:
                source.stop()
            return self.chunks.pop(0)

        def stop(self) -> None: ...

    await source._read(Reader())

    assert (1, 0) == (batcher.buffered, metrics.value("lakebed_agent_bad_samples_total", source="stdin"))


async def _asked(metrics: Metrics, body: bytes, *, points_max: int = 10, **headers: str) -> int:
    clock = ManualClock()
    listener = OtlpListener(
        runtime_of(clock, metrics=metrics),
        batcher_of(Disk(), clock, metrics),
        linger_s=0.01,
        bytes_max=1000,
        points_max=points_max,
        health=lambda: {"status": "ok"},
    )
    transport = httpx2.ASGITransport(app=listener.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/metrics", content=body, headers={"content-type": "application/json", **headers})
    return answer.status_code


async def test_every_rejected_point_of_a_request_is_counted(metrics: Metrics) -> None:
    """Also those whose reason is not told: a request names the first ones only."""
    points = [{"timeUnixNano": "1"} for _ in range(REASONS_MAX + 5)]
    metric = {"name": "m", "gauge": {"dataPoints": points}}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}

    status = await _asked(metrics, msgspec.json.encode(body), points_max=100)

    assert (200, len(points)) == (status, metrics.value("lakebed_agent_bad_samples_total", source="otlp"))


async def test_a_compressed_body_is_one_whole_stream_within_the_limit(metrics: Metrics) -> None:
    """Cut off, followed by more, another encoding, or too large once it is decompressed: refused."""
    packed = gzip.compress(b"{}")
    bodies = [packed, packed[:-1], packed + b"x", packed + packed, gzip.compress(b" " * 998 + b"{}")]
    found = [await _asked(metrics, body, **{"content-encoding": "gzip"}) for body in bodies]
    large = await _asked(metrics, gzip.compress(b" " * 1001), **{"content-encoding": "gzip"})
    plain = [await _asked(metrics, b" " * size + b"{}") for size in (998, 999)]
    other = await _asked(metrics, b"{}", **{"content-encoding": "br"})

    assert ([200, 400, 400, 400, 200], 413) == (found, large)
    assert ([200, 413], 415) == (plain, other)


async def test_every_setting_reaches_what_it_is_for(tmp_path: Path, metrics: Metrics) -> None:
    """Each value is another one, so that none can represent its neighbour."""
    values: dict[str, Any] = {
        "queue_bytes_max": 9_000_001, "queue_batches_max": 77, "when_full": "drop_oldest", "batch_bytes": 1001,
        "batch_samples_max": 102, "batch_interval_s": 1.5, "send_concurrency": 3, "hedge_after_s": 2.5,
        "retry_after_max_s": 301.0, "denied_retry_s": 61.0,
        "hedge_share_max": 0.3, "collectors": ["http://c"],
    }  # fmt: skip
    agent = await opened(agent_of(tmp_path, metrics, **values))

    assert (9_000_001, 77, "drop_oldest") == (
        agent._queue.limits.bytes_max, agent._queue.limits.batches_max, agent._queue.limits.when_full,
    )  # fmt: skip
    assert BatchLimits(1001, 102, 1.5) == agent._batcher._limits
    assert (2.5, 3, ["http://c"]) == (
        agent._sender._hedge_after_s,
        agent._sender._concurrency,
        [each.url for each in agent._sender._order.collectors],
    )
    assert agent._sender._order._limits == SendLimits(
        concurrency=3,
        base_s=BACKOFF_BASE_S,
        cap_s=BACKOFF_CAP_S,
        retry_after_max_s=301.0,
        denied_s=61.0,
        hedge_share_max=0.3,
    )
    agent._queue.close()
