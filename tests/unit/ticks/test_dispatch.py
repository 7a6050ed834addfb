"""From a committed tick to silver: grouped, dispatched once, again after a failure, a dead letter at last; replayed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import structlog

from lakebed.core import logs
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, NotFound, Unavailable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import read_record
from lakebed.ticks import auditor as auditor_module
from lakebed.ticks import commit_times, dispatcher, paths
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED, AuditRow, AuditTable
from lakebed.ticks.auditor import OVERLAP_MS, AuditWatermark, DispatchAuditor
from lakebed.ticks.dispatcher import TRIES_PER_RECEIVE, Dispatcher
from lakebed.ticks.model import SilverResult, SilverTick, TickId, TickMessage
from lakebed.ticks.queue.bucket import Shard
from lakebed.ticks.view import spark_page
from support.tick_fixtures import ORG, PROJECT, Guarded, Service, context_of, manifest, parquet


class Job:
    """Silver that remembers its runs, and fails or hangs as configured."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, str, list[str]]] = []
        self.replays: list[bool] = []
        self.fails = 0
        self.hangs: asyncio.Event | None = None

    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        self.runs.append((org_id, project_id, [tick.tick_id for tick in ticks]))
        self.replays += [tick.replay for tick in ticks]
        if self.hangs is not None:
            await self.hangs.wait()
        if self.fails:
            self.fails -= 1
            raise Unavailable("no executor is free")
        return SilverResult({"rows": 7})


class Fleet:
    """One queue and one set of rows, with as many dispatchers as wanted, on a clock that moves on request."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.store, self.job = clock, MemoryStore(clock=clock), Job()
        self.context = self.node("node-1")
        self.queue = open_queue(self.context)
        self.dispatched = open_audit(self.context, DISPATCHED)
        self.first = self.dispatcher(self.context)

    def node(self, name: str) -> Context:
        return context_of(
            self.store,
            clock=self.clock,
            node=name,
            seed=sum(name.encode()),
            visibility_timeout_s=60,
            batch_window_s=0.01,
        )

    def dispatcher(self, context: Context) -> Dispatcher:
        return Dispatcher(context, queue=open_queue(context), dispatched=open_audit(context, DISPATCHED), job=self.job)

    async def round(self, dispatcher: Dispatcher | None = None) -> int:
        going = asyncio.create_task((dispatcher or self.first).round())
        while not going.done():
            await self.clock.advance(0.01)
        return await going


@pytest.fixture
def fleet(manual_clock: ManualClock) -> Fleet:
    return Fleet(manual_clock)


def message(tick: str, project: str = "p", org: str = "o") -> TickMessage:
    return TickMessage(org, project, tick, "delta", "20261115", "k", "orders=3,lines=12", "2026-11-15T12:00:00Z")


async def test_messages_of_a_project_become_one_job(fleet: Fleet) -> None:
    """Grouped by org and project, each with its list of ticks and their versions."""
    for tick, project in (("t1", "p"), ("t2", "q"), ("t3", "p")):
        await fleet.queue.send(message(tick, project))

    await fleet.round()

    assert [("o", "p", ["t1", "t3"]), ("o", "q", ["t2"])] == sorted(fleet.job.runs)
    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None
    assert ("done", '{"rows":7}') == (row.state, row.fields["detail"])
    assert {"orders": 3, "lines": 12} == message("t1").versions
    assert (0, 0, 0) == ((d := await fleet.queue.depth()).waiting, d.in_flight, d.dead)


async def test_a_duplicate_message_starts_no_second_job(fleet: Fleet) -> None:
    """In one batch or later: the row that was created before the job stops it."""
    for _ in range(2):
        await fleet.queue.send(message("t1"))
    await fleet.round()
    await fleet.queue.send(message("t1"))
    await fleet.round()

    assert [("o", "p", ["t1"])] == fleet.job.runs
    assert 0 == (await fleet.queue.depth()).in_flight


async def test_the_row_is_there_before_the_job_starts(fleet: Fleet) -> None:
    """Another dispatcher with a duplicate finds it while the job runs, and leaves it alone."""
    fleet.job.hangs = asyncio.Event()
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(fleet.first.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    running = await fleet.dispatched.get(TickId("o", "p", "t1"))

    await fleet.queue.send(message("t1"))
    await fleet.round(fleet.dispatcher(fleet.node("node-2")))
    fleet.job.hangs.set()
    await first

    assert running is not None and running.state == "running"
    assert 1 == len(fleet.job.runs)


@pytest.mark.parametrize("after_s", [1.0, 15.0, 55.0])
async def test_a_duplicate_in_the_middle_of_a_job_starts_nothing(fleet: Fleet, after_s: float) -> None:
    """Another dispatcher gets it so long after the job began, within the timeout: the tick is not taken over."""
    fleet.job.hangs = asyncio.Event()
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(fleet.first.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    await fleet.clock.advance(after_s)
    running = await fleet.dispatched.get(TickId("o", "p", "t1"))

    await fleet.queue.send(message("t1"))
    node, rival = fleet.node("node-2"), Job()
    other = Dispatcher(node, queue=open_queue(node), dispatched=open_audit(node, DISPATCHED), job=rival)
    taken = await fleet.round(other)
    after = await fleet.dispatched.get(TickId("o", "p", "t1"))
    fleet.job.hangs.set()
    await first

    assert (1, [], 1) == (taken, rival.runs, len(fleet.job.runs))
    assert running == after and running is not None and ("running", "node-1") == (running.state, running.fields["by"])


@pytest.mark.parametrize("fails", [TRIES_PER_RECEIVE, 0])
async def test_a_job_that_was_taken_over_changes_nothing_when_it_ends(fleet: Fleet, fails: int) -> None:
    """Its dispatcher could not keep its row fresh: whether it fails or not, the other's row and message stay."""
    queue, rows = Guarded(fleet.queue), Guarded(fleet.dispatched)
    slow, quick = Job(), Job()
    slow.hangs, quick.hangs, slow.fails = asyncio.Event(), asyncio.Event(), fails
    node = fleet.node("node-2")
    other = Dispatcher(node, queue=open_queue(node), dispatched=open_audit(node, DISPATCHED), job=quick)
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(Dispatcher(fleet.context, queue=queue, dispatched=rows, job=slow).round())
    while not slow.runs:
        await fleet.clock.advance(0.01)
    queue.before, rows.before = {"hide": 99}, {"change": 99}
    await fleet.clock.advance(61.0)
    second = asyncio.create_task(other.round())
    while not quick.runs:
        await fleet.clock.advance(0.01)
    taken_over = await fleet.dispatched.get(TickId("o", "p", "t1"))
    queue.before, rows.before = {}, {}

    slow.hangs.set()
    while not first.done():
        await fleet.clock.advance(0.01)
    left = await fleet.dispatched.get(TickId("o", "p", "t1"))
    in_flight = (await fleet.queue.depth()).in_flight
    counted = fleet.context.metrics.value("lakebed_ticks_dispatched_total", outcome="done")
    quick.hangs.set()
    await second
    done = await fleet.dispatched.get(TickId("o", "p", "t1"))

    assert taken_over is not None and done is not None
    assert ("running", "node-2", 2) == (taken_over.state, taken_over.fields["by"], taken_over.fields["tries"])
    assert (taken_over, 1, 0) == (left, in_flight, counted)
    assert ("done", "node-2", 0) == (done.state, done.fields["by"], (await fleet.queue.depth()).in_flight)


async def test_a_long_job_keeps_its_messages_and_rows(fleet: Fleet) -> None:
    """Longer than the visibility timeout: it is still its own, and nobody starts it again."""
    fleet.job.hangs = asyncio.Event()
    other = fleet.dispatcher(fleet.node("node-2"))
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(fleet.first.round())
    for _ in range(10):
        await fleet.clock.advance(21.0)
        assert 0 == await other.round()
    fleet.job.hangs.set()
    await first

    assert 1 == len(fleet.job.runs)
    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None and row.state == "done"
    assert 180 < fleet.context.metrics.value("lakebed_ticks_job_seconds_sum") <= 210


async def test_a_hide_that_fails_once_shows_neither_a_running_nor_a_waiting_message(fleet: Fleet) -> None:
    """Several heartbeats fit into a visibility timeout: one that fails costs no receive, and starts no second job."""
    queue, failed = Guarded(fleet.queue), set[str]()
    fleet.job.hangs = asyncio.Event()
    made = Dispatcher(fleet.context, queue=queue, dispatched=fleet.dispatched, job=fleet.job)

    def fail_first_hides(*args: Any) -> None:
        if len(args) == 2 and args[0] not in failed:
            failed.add(args[0])
            raise Unavailable("the queue is away")

    queue.bend = fail_first_hides
    await fleet.queue.send(message("t1"))
    running = asyncio.create_task(made.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    await fleet.queue.send(message("t2"))
    waiting = asyncio.create_task(made.round())
    seen = []
    for _ in range(20):
        await fleet.clock.advance(10.0)
        seen += [received.message().tick_id for received in await fleet.queue.receive(10)]
    fleet.job.hangs.set()
    await asyncio.gather(running, waiting)

    assert ([], 2) == (seen, len(failed))
    assert [["t1"], ["t2"]] == [ticks for _, _, ticks in fleet.job.runs]


async def test_a_tick_whose_row_cannot_be_written_keeps_the_others_of_its_job_fresh(fleet: Fleet) -> None:
    """Only that one is received again while the job runs: a heartbeat goes on behind the tick that failed."""
    rows, seen = Guarded(fleet.dispatched), list[str]()
    fleet.job.hangs = asyncio.Event()
    made = Dispatcher(fleet.context, queue=fleet.queue, dispatched=rows, job=fleet.job)

    def fail_first_tick(*args: Any) -> None:
        if len(args) == 2 and args[0].tick_id == "t1":
            raise Unavailable("the row is away")

    rows.bend = fail_first_tick
    for tick in ("t1", "t2"):
        await fleet.queue.send(message(tick))
    running = asyncio.create_task(made.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    for _ in range(20):
        await fleet.clock.advance(10.0)
        seen += [received.message().tick_id for received in await fleet.queue.receive(10)]
    silent_ms = [
        fleet.clock.now_ns() // 1_000_000 - row.at_ms
        for tick in ("t1", "t2")
        if (row := await fleet.dispatched.get(TickId("o", "p", tick))) is not None
    ]
    rows.bend = lambda *args: None
    fleet.job.hangs.set()
    await running

    assert {"t1"} == set(seen)
    assert silent_ms[1] < 60_000 <= silent_ms[0]


async def test_a_heartbeat_that_was_cut_off_does_not_lose_the_tick(fleet: Fleet) -> None:
    """It wrote the row and nobody saw its answer: the job's end is written over it, and only then the message goes."""
    fleet.job.hangs = asyncio.Event()
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(fleet.first.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    running = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert running is not None
    unseen = msgspec.structs.replace(running, attempt_id="unseen")
    assert await fleet.dispatched.change(unseen, running)

    fleet.job.hangs.set()
    await first

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None
    assert ("done", 0) == (row.state, (await fleet.queue.depth()).in_flight)


async def test_a_heartbeat_whose_answer_was_lost_does_not_let_the_row_go_silent(fleet: Fleet) -> None:
    """The row that it wrote is ours: the next one writes over it, and a duplicate long after that starts nothing."""
    rows, rival = Guarded(fleet.dispatched), Job()
    fleet.job.hangs = asyncio.Event()
    made = Dispatcher(fleet.context, queue=fleet.queue, dispatched=rows, job=fleet.job)
    node = fleet.node("node-2")
    other = Dispatcher(node, queue=open_queue(node), dispatched=open_audit(node, DISPATCHED), job=rival)
    await fleet.queue.send(message("t1"))
    first = asyncio.create_task(made.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    rows.after = {"change": 1}
    for _ in range(12):
        await fleet.clock.advance(10.0)
    running = await fleet.dispatched.get(TickId("o", "p", "t1"))
    silent_ms = fleet.clock.now_ns() // 1_000_000 - (running.at_ms if running else 0)

    await fleet.queue.send(message("t1"))
    await fleet.round(other)
    fleet.job.hangs.set()
    await first

    assert rows.after == {"change": 0} and silent_ms <= 20_000
    assert ([], 1) == (rival.runs, len(fleet.job.runs))


async def test_a_heartbeat_takes_no_row_back_that_another_dispatcher_has_taken_over(fleet: Fleet) -> None:
    """Nor one that was cleared for a replay: only a row of this dispatcher's own is written over."""
    rows = Guarded(fleet.dispatched)
    fleet.job.hangs = asyncio.Event()
    made = Dispatcher(fleet.context, queue=fleet.queue, dispatched=rows, job=fleet.job)
    for tick in ("t1", "t2"):
        await fleet.queue.send(message(tick))
    running = asyncio.create_task(made.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    ours = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert ours is not None
    theirs = msgspec.structs.replace(ours, attempt_id="theirs", fields=ours.fields | {"by": "node-2"})
    assert await fleet.dispatched.change(theirs, ours)
    await fleet.dispatched.clear(TickId("o", "p", "t2"))
    for _ in range(12):
        await fleet.clock.advance(10.0)

    found = [await fleet.dispatched.get(TickId("o", "p", tick)) for tick in ("t1", "t2")]
    fleet.job.hangs.set()
    await running

    assert [theirs, None] == found


async def test_the_ticks_of_a_failed_job_are_dispatched_again(fleet: Fleet) -> None:
    """The row reports failed until then; the second receive is done."""
    fleet.job.fails = TRIES_PER_RECEIVE
    await fleet.queue.send(message("t1"))
    await fleet.round()
    failed = await fleet.dispatched.get(TickId("o", "p", "t1"))

    await fleet.clock.advance(61.0)
    await fleet.round()

    done = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert failed is not None and done is not None
    assert ("failed", "no executor is free", "done", 2) == (
        failed.state, failed.fields["detail"], done.state, done.fields["tries"],
    )  # fmt: skip


async def test_a_job_whose_dispatcher_died_is_taken_over(fleet: Fleet) -> None:
    """Its message comes back, its row has gone silent: another runs the ticks."""
    fleet.job.hangs = asyncio.Event()
    await fleet.queue.send(message("t1"))
    dying = asyncio.create_task(fleet.first.round())
    while not fleet.job.runs:
        await fleet.clock.advance(0.01)
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    fleet.job.hangs = None

    await fleet.clock.advance(61.0)
    await fleet.round(fleet.dispatcher(fleet.node("node-2")))

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None
    assert (2, "done") == (len(fleet.job.runs), row.state)


async def test_a_job_that_always_fails_ends_as_a_dead_letter(fleet: Fleet) -> None:
    """Five receives, each followed by a whole visibility timeout (60 s here); a replay starts over."""
    fleet.job.fails = 5 * TRIES_PER_RECEIVE
    began_s = fleet.clock.monotonic_s()
    await fleet.queue.send(message("t1"))
    while not await fleet.queue.dead_letters():
        await fleet.round()
        await fleet.clock.advance(1.0)

    took_s = fleet.clock.monotonic_s() - began_s
    dead = [letter.message().tick_id for letter in await fleet.queue.dead_letters()]
    await fleet.queue.replay()
    await fleet.round()

    assert (["t1"], 5 * TRIES_PER_RECEIVE + 1) == (dead, len(fleet.job.runs))
    assert 5 * 60 <= took_s <= 10 * 60
    assert 0 == (await fleet.queue.depth()).dead


async def test_a_short_failure_costs_seconds_not_a_visibility_timeout(fleet: Fleet) -> None:
    """The job is tried again within its receive, while its message stays hidden."""
    fleet.job.fails = TRIES_PER_RECEIVE - 1
    began_s = fleet.clock.monotonic_s()
    await fleet.queue.send(message("t1"))

    await fleet.round()

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None
    assert ("done", 1, TRIES_PER_RECEIVE) == (row.state, row.fields["tries"], len(fleet.job.runs))
    assert fleet.clock.monotonic_s() - began_s < 30


async def test_an_outage_of_minutes_makes_no_dead_letter(fleet: Fleet) -> None:
    """Silver is away for two visibility timeouts: the tick is dispatched afterwards, and nobody is needed."""
    fleet.job.fails = 10_000
    began_s = fleet.clock.monotonic_s()
    await fleet.queue.send(message("t1"))
    while fleet.clock.monotonic_s() - began_s < 120:
        await fleet.round()
        await fleet.clock.advance(1.0)
    fleet.job.fails = 0
    while (depth := await fleet.queue.depth()).in_flight or depth.waiting:
        await fleet.round()
        await fleet.clock.advance(1.0)

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert row is not None
    assert ("done", 0) == (row.state, (await fleet.queue.depth()).dead)


async def test_messages_that_are_in_hand_are_dispatched_when_the_next_receive_fails(fleet: Fleet) -> None:
    """Otherwise they would be hidden for a whole visibility timeout, and one of their receives would be gone."""
    flaky = Guarded(fleet.queue)
    made = Dispatcher(fleet.context, queue=flaky, dispatched=fleet.dispatched, job=fleet.job)
    await fleet.queue.send(message("t1"))

    def fail_second(*args: object) -> None:
        if flaky.calls["receive"] > 1:
            raise Unavailable("the queue is away")

    flaky.bend = fail_second
    await fleet.round(made)

    assert [("o", "p", ["t1"])] == fleet.job.runs


async def test_messages_of_one_shard_are_received_when_another_fails(fleet: Fleet) -> None:
    """The bucket's queue reads one shard after the other: what it has taken is not lost with the error."""
    for number in range(20):
        await fleet.queue.send(message("t1", f"p{number}"))
    flaky: Any = Guarded(fleet.store)
    last = paths.queue(3)

    def fail_last(*args: object) -> None:
        if args and args[0] == last:
            raise Unavailable("a shard is away")

    flaky.bend = fail_last
    flaky.list = fleet.store.list
    queue = open_queue(context_of(flaky, clock=fleet.clock, visibility_timeout_s=60))
    received = await queue.receive(100)

    assert 0 < len(received) < 20
    with pytest.raises(Unavailable):
        await queue.receive(100)  # nothing else is left: the error is told


@pytest.mark.parametrize("full", range(4))
async def test_a_shard_that_is_always_full_keeps_no_other_s_messages_back(fleet: Fleet, full: int) -> None:
    """A project with more messages than a receive takes is one of four: each receive begins at another shard."""
    projects = {zlib.crc32(f"o/p{number}".encode()) % 4: f"p{number}" for number in range(40)}
    for number in range(60):
        await fleet.queue.send(message(f"t{number}", projects[full]))
    others = {project for shard, project in projects.items() if shard != full}
    for project in others:
        await fleet.queue.send(message("t1", project))

    taken = [one.message().project_id for _ in range(4) for one in await fleet.queue.receive(10)]

    assert (40, others) == (len(taken), set(taken) - {projects[full]})


async def test_a_message_that_cannot_be_read_does_not_stop_the_others(fleet: Fleet) -> None:
    """It comes back until it is a dead letter."""
    await fleet.queue.send(message("bad"))
    key = next(info.key for info in [i async for i in fleet.store.list("ticks/v1/queue/")])
    stored = await fleet.store.get(key)
    await fleet.store.replace(key, stored.data.replace(b'\\"schema_version\\":\\"1.0\\"', b'\\"x\\":1'), stored.etag)
    queue = open_queue(fleet.node("node-3"))
    await queue.send(message("good", "another"))

    await fleet.round(fleet.dispatcher(fleet.node("node-4")))

    assert [("o", "another", ["good"])] == [run for run in fleet.job.runs if run[2] == ["good"]]


async def committed(clock: ManualClock) -> tuple[Service, DispatchAuditor, Fleet]:
    fleet = Fleet(clock)
    service = Service(fleet.node("service"))
    await service.issue()
    assert 200 == (await service.finalize(await service.upload())).status_code
    auditor = DispatchAuditor(
        fleet.context, queue=fleet.queue, committed=open_audit(fleet.context, COMMITTED), dispatched=fleet.dispatched
    )
    return service, auditor, fleet


async def test_a_committed_tick_whose_message_was_lost_is_found_and_sent_again(manual_clock: ManualClock) -> None:
    """The queue is purged; the audit lists what silver never got, its age is the lag, and re-enqueuing brings it in."""
    _, auditor, fleet = await committed(manual_clock)
    for received in await fleet.queue.receive(10):
        await fleet.queue.delete(received.receipt)
    await manual_clock.advance(1000.0)

    found = await auditor.undispatched(older_than_s=900)
    await auditor.measure()
    lag_s = fleet.context.metrics.value("lakebed_ticks_lag_seconds")
    await auditor.resend(TickId(ORG, PROJECT, found[0].tick_id))
    await fleet.round()
    await auditor.measure()

    assert 1 == len(found)
    assert lag_s >= 1000
    assert [(ORG, PROJECT, [found[0].tick_id])] == fleet.job.runs
    assert 0 == fleet.context.metrics.value("lakebed_ticks_undispatched")


async def test_the_lag_is_the_oldest_waiting_ticks(manual_clock: ManualClock) -> None:
    """Of ticks that wait, the one that waits longest counts; when it is done, the next one does; then nothing waits."""
    service, auditor, fleet = await committed(manual_clock)
    old = TickId(ORG, PROJECT, "20261115T120000__abc")
    await manual_clock.advance(600.0)
    young = TickId(ORG, PROJECT, "20261115T121000__abc")
    manifest = await service.upload(young.tick_id)
    assert 200 == (await service.finalize(manifest, tick=young.tick_id)).status_code
    await manual_clock.advance(30.0)

    async def measured() -> tuple[float, float]:
        await auditor.measure()
        value = fleet.context.metrics.value
        return value("lakebed_ticks_lag_seconds"), value("lakebed_ticks_undispatched")

    both = await measured()
    listed = [each.tick_id for each in await auditor.undispatched()]
    older = [each.tick_id for each in await auditor.undispatched(older_than_s=60.0)]
    await done(fleet, old)
    one = await measured()
    await done(fleet, young)
    none = await measured()

    assert ((630.0, 2), (30.0, 1), (0.0, 0)) == (both, one, none)
    assert ([old.tick_id, young.tick_id], [old.tick_id]) == (listed, older)


async def done(fleet: Fleet, tick: TickId) -> None:
    now = fleet.clock.now_ns() // 10**6
    row = AuditRow(tick.org_id, tick.project_id, tick.tick_id, "done", "a", now, now // 1000 + 3600)
    assert await fleet.dispatched.create(row)


async def test_a_replay_runs_silver_again_for_a_done_tick(manual_clock: ManualClock) -> None:
    """Its row is cleared first, its message is sent from the commit record, and the reason is kept."""
    _, auditor, fleet = await committed(manual_clock)
    await fleet.round()
    tick = await auditor.find((await auditor.find("20261115T120000__abc")).tick_id)

    await auditor.replay(tick, "a rule was wrong")
    await fleet.round()

    assert 2 == len(fleet.job.runs)
    notes = [(await fleet.store.get(info.key)).data async for info in fleet.store.list("ticks/v1/replays/")]
    assert len(notes) == 1 and b"a rule was wrong" in notes[0]


async def test_a_replay_by_another_process_is_waited_for_like_a_new_tick(manual_clock: ManualClock) -> None:
    """An auditor that has seen the tick's job done does not call it done while its replay waits or fails."""
    _, auditor, fleet = await committed(manual_clock)
    await fleet.round()
    tick = TickId(ORG, PROJECT, "20261115T120000__abc")
    assert [] == await auditor.undispatched()
    node = fleet.node("operator")
    operator = DispatchAuditor(
        node, queue=open_queue(node), committed=open_audit(node, COMMITTED), dispatched=open_audit(node, DISPATCHED)
    )
    await manual_clock.advance(5.0)

    await operator.replay(tick, "a rule was wrong")
    waiting = [each.state for each in await auditor.undispatched()]
    fleet.job.fails = TRIES_PER_RECEIVE
    await fleet.round()
    failed = [each.state for each in await auditor.undispatched()]
    await manual_clock.advance(301.0)
    await fleet.round()

    assert ([""], ["failed"], []) == (waiting, failed, await auditor.undispatched())


async def test_an_audit_in_the_middle_of_a_replay_does_not_forget_it(manual_clock: ManualClock) -> None:
    """It has seen the note of the replay and the row of the job before: the tick is looked at again."""
    _, auditor, fleet = await committed(manual_clock)
    await fleet.round()
    for _ in range(2):  # the note of the commit is behind what is read again
        await auditor.measure()
        await manual_clock.advance(1200.0)
    node = fleet.node("operator")
    dispatched = open_audit(node, DISPATCHED)
    clear = dispatched.clear

    async def interrupted(tick: TickId) -> None:
        assert [] == await auditor.undispatched()
        await manual_clock.advance(1.0)
        await clear(tick)

    dispatched.clear = interrupted  # type: ignore[method-assign]
    operator = DispatchAuditor(
        node, queue=open_queue(node), committed=open_audit(node, COMMITTED), dispatched=dispatched
    )
    await manual_clock.advance(5.0)

    await operator.replay(TickId(ORG, PROJECT, "20261115T120000__abc"), "a rule was wrong")

    assert [""] == [each.state for each in await auditor.undispatched()]


@pytest.mark.parametrize("resent_first", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
async def test_a_replay_is_not_lost_beside_an_ordinary_message_of_its_tick(
    manual_clock: ManualClock, resent_first: bool, rounds: int
) -> None:
    """Whichever is received first, in one round or in two, the tick's tables are computed again, once."""
    _, auditor, fleet = await committed(manual_clock)
    await fleet.round()
    tick = TickId(ORG, PROJECT, "20261115T120000__abc")
    plain, again = message(tick.tick_id, PROJECT, ORG), await _replay_message(auditor, fleet, tick)
    first, second = (plain, again) if resent_first else (again, plain)

    await fleet.queue.send(first)
    if rounds == 2:
        await fleet.round()
    await fleet.queue.send(second)
    await fleet.round()
    for copy in (again, plain):  # a queue may deliver a message twice
        await fleet.queue.send(copy)
    await fleet.round()

    assert 1 == fleet.job.replays.count(True)
    assert (0, 0) == ((await fleet.queue.depth()).waiting, (await fleet.queue.depth()).in_flight)
    assert [] == await auditor.undispatched()


async def _replay_message(auditor: DispatchAuditor, fleet: Fleet, tick: TickId) -> TickMessage:
    """The message of a replay, taken out of the queue: its row is cleared."""
    await auditor.replay(tick, "a rule was wrong")
    (held,) = await fleet.queue.receive(10)
    await fleet.queue.delete(held.receipt)
    return held.message()


async def test_a_tick_id_that_is_not_alone_must_be_named_in_full(manual_clock: ManualClock) -> None:
    """Two orgs may use one id: a replay never guesses."""
    service, auditor, _ = await committed(manual_clock)
    await service.issue("rival", PROJECT)
    await service.finalize(await service.upload(org="rival"), org="rival")

    with pytest.raises(Conflict):
        await auditor.find("20261115T120000__abc")
    with pytest.raises(NotFound):
        await auditor.find("another")
    assert TickId("rival", PROJECT, "20261115T120000__abc") == await auditor.find(
        "20261115T120000__abc", org_id="rival"
    )


async def test_a_project_alone_tells_two_ticks_of_an_org_apart(manual_clock: ManualClock) -> None:
    """A replay for one project never takes the other's tick, and none when the project has no such tick."""
    fleet = Fleet(manual_clock)
    table = open_audit(fleet.context, COMMITTED)
    for project in ("p-1", "p-2"):
        assert await table.create(AuditRow(ORG, project, "t", "committed", "a", 1, manual_clock.now_ns() // 10**9 + 60))
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=table, dispatched=fleet.dispatched)

    found = [await auditor.find("t", project_id=project) for project in ("p-1", "p-2")]

    assert [TickId(ORG, "p-1", "t"), TickId(ORG, "p-2", "t")] == found
    with pytest.raises(NotFound):
        await auditor.find("t", project_id="p-3")
    with pytest.raises(Conflict):
        await auditor.find("t", org_id=ORG)


async def test_no_more_jobs_run_at_once_than_are_set(manual_clock: ManualClock) -> None:
    """Of two projects one waits until the other's job has ended; both are done in the end."""
    fleet = Fleet(manual_clock)
    context = context_of(
        fleet.store, clock=manual_clock, node="one", seed=5, visibility_timeout_s=60, batch_window_s=0.01, jobs_max=1
    )
    for project in ("p", "q"):
        await fleet.queue.send(message("t1", project))
    fleet.job.hangs = asyncio.Event()

    going = asyncio.create_task(fleet.dispatcher(context).round())
    for _ in range(20):
        await manual_clock.advance(0.01)
    under_way = len(fleet.job.runs)
    fleet.job.hangs.set()
    while not going.done():
        await manual_clock.advance(0.01)

    assert (1, 2) == (under_way, len(fleet.job.runs))


async def test_no_tick_waits_for_the_slow_job_of_another_project(manual_clock: ManualClock) -> None:
    """It is received and done while the other runs. The slow project's own next tick waits, hidden for longer than the
    visibility timeout: it is received once, and its job runs after the first one. It holds no slot while it waits.
    """
    fleet = Fleet(manual_clock)
    context = context_of(
        fleet.store, clock=manual_clock, node="two", seed=5, visibility_timeout_s=60, batch_window_s=0.01, jobs_max=2
    )
    slow = asyncio.Event()
    ran: list[tuple[str, list[str]]] = []

    class Slow(Job):
        async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
            ran.append((project_id, [tick.tick_id for tick in ticks]))
            if project_id == "slow":
                await slow.wait()
            return SilverResult({})

    fleet.job = Slow()
    running = asyncio.create_task(fleet.dispatcher(context).run())

    async def until(wanted: int) -> None:
        for _ in range(10_000):
            if len(ran) >= wanted:
                return
            await manual_clock.advance(0.05)
        raise AssertionError(f"only {ran} ran")

    await fleet.queue.send(message("t1", "slow"))
    await until(1)
    await fleet.queue.send(message("t2", "slow"))
    for _ in range(100):
        await manual_clock.advance(0.05)
    await fleet.queue.send(message("t2", "quick"))
    await until(2)
    for _ in range(40):  # 200 s: more than three visibility timeouts of 60 s
        await manual_clock.advance(5.0)
    meanwhile, seen_again = list(ran), await fleet.queue.receive(10)
    states = [
        await fleet.context.store.get(info.key) async for info in fleet.context.store.list(f"{paths.ROOT}/queue/")
    ]
    receives = [entry.receive_count for state in states for entry in read_record(state, Shard).entries]
    slow.set()
    await until(3)
    for _ in range(100):
        await manual_clock.advance(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert ([("slow", ["t1"]), ("quick", ["t2"])], []) == (meanwhile, list(seen_again))
    assert [1, 1] == receives
    assert [("slow", ["t2"])] == ran[2:]
    assert (0, 0, 0) == ((d := await fleet.queue.depth()).waiting, d.in_flight, d.dead)


async def test_an_audit_pass_costs_what_was_committed_since_not_what_is_kept(manual_clock: ManualClock) -> None:
    """A thousand finished ticks behind the watermark: the next pass reads none of their rows again."""
    fleet = Fleet(manual_clock)
    rows = open_audit(fleet.context, COMMITTED)
    committed, dispatched = Guarded(rows), Guarded(fleet.dispatched)
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=committed, dispatched=dispatched)
    committed.ticks = rows.ticks
    for number in range(1000):
        await _done_tick(fleet, rows, TickId("o", "p", f"t{number:04d}"))
    await auditor.measure()
    await manual_clock.advance(OVERLAP_MS / 1000 + 1)
    await auditor.measure()
    dispatched.calls.clear()
    await _done_tick(fleet, rows, TickId("o", "p", "u0001"))
    await rows.create(_audit_row(TickId("o", "p", "u0002"), "committed", fleet))
    await commit_times.note(fleet.context, TickId("o", "p", "u0002"))

    await auditor.measure()
    first = dispatched.calls["get"]
    await auditor.measure()
    await auditor.measure()

    assert 2 == first
    assert first + 2 == dispatched.calls["get"]  # the unfinished one, once a pass; the finished one is remembered
    assert 1 == fleet.context.metrics.value("lakebed_ticks_undispatched")


async def test_the_watermark_waits_while_more_ticks_are_unfinished_than_it_can_carry(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass finds them by their notes; with one fewer the watermark carries the others and moves."""
    monkeypatch.setattr(auditor_module, "PENDING_MAX", 2)
    fleet = Fleet(manual_clock)
    rows, ticks = open_audit(fleet.context, COMMITTED), [TickId("o", "p", f"t{number}") for number in range(3)]
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=rows, dispatched=fleet.dispatched)
    await auditor.measure()
    begin_ms = (await auditor._watermark.read()).value.until_ms
    for tick in ticks:
        await commit_times.note(fleet.context, tick)
        await rows.create(_audit_row(tick, "committed", fleet))
    marks, counts = [], []
    for done in (None, None, ticks[0]):
        await manual_clock.advance(86_400.0)
        if done is not None:
            await fleet.dispatched.create(_audit_row(done, "done", fleet))
        await auditor.measure()
        mark = (await auditor._watermark.read()).value
        marks.append((mark.until_ms - begin_ms, sorted(mark.pending)))
        counts.append(fleet.context.metrics.value("lakebed_ticks_undispatched"))

    assert [3.0, 3.0, 2.0] == counts
    assert [(0, []), (0, []), (3 * 86_400_000, ["o/p/t1", "o/p/t2"])] == marks


async def test_an_unfinished_tick_stays_in_the_audit_however_long_ago_it_was(manual_clock: ManualClock) -> None:
    """Days after its note is behind the watermark, by another auditor too; once it is done it leaves."""
    _, auditor, fleet = await committed(manual_clock)
    for received in await fleet.queue.receive(10):
        await fleet.queue.delete(received.receipt)
    for _ in range(5):
        await auditor.measure()
        await manual_clock.advance(86_400.0)
    node = fleet.node("node-9")
    other = DispatchAuditor(
        node, queue=open_queue(node), committed=open_audit(node, COMMITTED), dispatched=open_audit(node, DISPATCHED)
    )

    found = [each.tick_id for each in await other.undispatched()]
    await other.resend(TickId(ORG, PROJECT, found[0]))
    await fleet.round()
    await other.measure()
    await auditor.measure()

    assert 1 == len(found)
    assert ([], []) == (list(await other.undispatched()), list(await auditor.undispatched()))


def test_a_pass_that_ends_late_drops_none_of_what_another_one_found_meanwhile() -> None:
    """Only what it has seen finished leaves; the watermark never goes back."""
    other = AuditWatermark(until_ms=9, pending={"o/p/late": 9, "o/p/done": 5})

    after = other.moved(7, {"o/p/mine": 7}, {"o/p/done"})

    assert (9, {"o/p/late": 9, "o/p/mine": 7}) == (after.until_ms, after.pending)


async def test_a_pass_between_a_commits_note_and_its_row_does_not_forget_the_tick(manual_clock: ManualClock) -> None:
    """The note comes first: a tick whose row is not there yet is looked for again."""
    fleet = Fleet(manual_clock)
    rows, tick = open_audit(fleet.context, COMMITTED), TickId("o", "p", "t1")
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=rows, dispatched=fleet.dispatched)
    await auditor.measure()
    await manual_clock.advance(1.0)
    await commit_times.note(fleet.context, tick)

    await auditor.measure()
    await rows.create(_audit_row(tick, "committed", fleet))
    await manual_clock.advance(60.0)
    await auditor.measure()
    await manual_clock.advance(86_400.0)

    assert ["t1"] == [each.tick_id for each in await auditor.undispatched()]


async def test_a_note_of_a_replica_whose_clock_is_behind_is_found_by_the_next_pass(manual_clock: ManualClock) -> None:
    """It is dated before the watermark: what was noted shortly before that is read again."""
    fleet = Fleet(manual_clock)
    rows, tick = open_audit(fleet.context, COMMITTED), TickId("o", "p", "t1")
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=rows, dispatched=fleet.dispatched)
    await manual_clock.advance(3600.0)
    await auditor.measure()
    behind_ms = fleet.clock.now_ns() // 1_000_000 - (OVERLAP_MS - 60_000)
    await fleet.store.create(paths.noted(behind_ms, tick), b"{}")
    await rows.create(_audit_row(tick, "committed", fleet))

    await auditor.measure()
    counted = fleet.context.metrics.value("lakebed_ticks_undispatched")
    await manual_clock.advance(86_400.0)

    assert (1, ["t1"]) == (counted, [each.tick_id for each in await auditor.undispatched()])


async def test_rows_of_before_the_watermark_existed_are_found_by_the_first_pass(manual_clock: ManualClock) -> None:
    """They have no notes: the first pass lists all rows, once."""
    fleet = Fleet(manual_clock)
    rows = open_audit(fleet.context, COMMITTED)
    await rows.create(_audit_row(TickId("o", "p", "old"), "committed", fleet))
    auditor = DispatchAuditor(fleet.context, queue=fleet.queue, committed=rows, dispatched=fleet.dispatched)

    await auditor.measure()
    await manual_clock.advance(3600.0)

    assert ["old"] == [each.tick_id for each in await auditor.undispatched()]


async def _done_tick(fleet: Fleet, rows: AuditTable, tick: TickId) -> None:
    await commit_times.note(fleet.context, tick)
    await rows.create(_audit_row(tick, "committed", fleet))
    await fleet.dispatched.create(_audit_row(tick, "done", fleet))


def _audit_row(tick: TickId, state: str, fleet: Fleet) -> AuditRow:
    at_ms = fleet.clock.now_ns() // 1_000_000
    return AuditRow(tick.org_id, tick.project_id, tick.tick_id, state, "a", at_ms, at_ms // 1000 + 30 * 86_400)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_the_job_logged_is_shown_with_its_tick(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Of a job that ended well, and with every retry of one that failed; and where Spark shows it."""
    logs.configure("info", as_json=True)
    monkeypatch.setattr(dispatcher, "log", logs.logger("ticks"))
    fleet.job.fails = TRIES_PER_RECEIVE if fails else 0
    await fleet.queue.send(message("t1"))

    await fleet.round()

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    structlog.reset_defaults()
    assert row is not None
    events = [line.split(" ", 2)[2].partition(" project=")[0] for line in str(row.fields["log"]).splitlines()]
    retried = ["silver job failed: retrying"] * (TRIES_PER_RECEIVE - 1)
    ended = [*retried, "silver job failed"] if fails else ["silver job done"]
    assert ["silver job started", *ended] == events


@pytest.mark.parametrize(
    ("report", "page"),
    [
        ({"spark": {"application": "local-1", "address": "http://127.0.0.1:4040"}}, "http://127.0.0.1:4040"),
        ({"spark": {"application": "local-1", "address": "javascript:alert(1)"}}, ""),
        ({"spark": {"application": "local-1"}}, ""),
        ({"spark": None}, ""),
        ("odd", ""),
        (None, ""),
    ],
)
def test_sparks_page_is_an_address_or_nothing(report: object, page: str) -> None:
    assert page == spark_page(report)


async def test_a_tick_that_is_committed_behind_the_watermark_of_an_audit_is_found_by_the_next(
    manual_clock: ManualClock,
) -> None:
    """Audits look only at what was noted since the last one: every finalize leaves its note."""
    service, auditor, _ = await committed(manual_clock)
    await auditor.measure()
    await manual_clock.advance(3600.0)
    parts = {1: parquet([7, 8])}
    await service.put(1, parts[1], tick="20261115T130000__late")
    answer = await service.finalize(manifest(parts, {1: 2}, tick="20261115T130000__late"), tick="20261115T130000__late")
    await manual_clock.advance(60.0)

    assert 200 == answer.status_code
    assert "20261115T130000__late" in [each.tick_id for each in await auditor.undispatched()]


async def test_a_round_never_asks_for_more_messages_than_a_batch_holds(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in hand counts: SQS refuses to be asked for more than ten."""
    queue, asked = open_queue(fleet.context), list[int]()
    dispatching = Dispatcher(fleet.context, queue=queue, dispatched=fleet.dispatched, job=fleet.job)
    receive = queue.receive

    async def counted(count: int) -> Any:
        asked.append(count)
        return await receive(count)

    monkeypatch.setattr(queue, "receive", counted)
    for number in range(4):
        await fleet.queue.send(message(f"t{number}"))

    await fleet.round(dispatching)

    assert (dispatcher.BATCH_MAX, {dispatcher.BATCH_MAX - 4}) == (asked[0], set(asked[1:]))


async def test_a_queue_that_is_away_ends_a_dispatcher_without_jobs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is seen to fail, and started again with a pause."""
    queue = open_queue(fleet.context)

    async def away(count: int) -> Any:
        raise Unavailable("the queue is away")

    monkeypatch.setattr(queue, "receive", away)

    with pytest.raises(Unavailable):
        async with asyncio.timeout(5):
            await Dispatcher(fleet.context, queue=queue, dispatched=fleet.dispatched, job=fleet.job).run()


async def test_a_dispatcher_that_is_stopped_ends_its_jobs_before_it_returns(fleet: Fleet) -> None:
    """No job goes on beside the process that takes its tick over; the row says that it was running."""
    ended: list[str] = []

    class Long(Job):
        async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
            self.runs.append((org_id, project_id, []))
            try:
                await asyncio.Event().wait()
                return SilverResult({})
            finally:
                for _ in range(20):  # it takes a moment to end
                    await asyncio.sleep(0)
                ended.append(project_id)

    fleet.job = Long()
    running = asyncio.create_task(fleet.dispatcher(fleet.context).run())
    await fleet.queue.send(message("t1"))
    for _ in range(200):
        if fleet.job.runs:
            break
        await fleet.clock.advance(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    at_return = list(ended)

    row = await fleet.dispatched.get(TickId("o", "p", "t1"))
    assert (["p"], "running") == (at_return, row and row.state)


async def test_a_receive_that_fails_cuts_no_job_that_runs(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is away for a while: the job ends as if nothing had happened, and the next message is dispatched."""
    fleet.job.hangs = asyncio.Event()
    queue = open_queue(fleet.context)
    dispatching = Dispatcher(fleet.context, queue=queue, dispatched=fleet.dispatched, job=fleet.job)
    receive, away = queue.receive, list[int]()

    async def failing(count: int) -> Any:
        if fleet.job.runs and len(away) < 3:
            away.append(count)
            raise Unavailable("the queue is away")
        return await receive(count)

    monkeypatch.setattr(queue, "receive", failing)
    running = asyncio.create_task(dispatching.run())
    await fleet.queue.send(message("t1"))
    for _ in range(200):
        await fleet.clock.advance(0.1)
    fleet.job.hangs.set()
    await fleet.queue.send(message("t2"))
    for _ in range(200):
        await fleet.clock.advance(0.1)
    going = not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    rows = [await fleet.dispatched.get(TickId("o", "p", tick)) for tick in ("t1", "t2")]
    assert (3, True) == (len(away), going)
    assert ["done", "done"] == [row and row.state for row in rows]
