from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.agent.alerts import Alerts, read_alerts
from lakebed.agent.disk_queue import DiskQueue
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.inspector import QueueInspector
from lakebed.agent.model import DiskTrouble
from lakebed.agent.sender import Sender
from lakebed.agent.verdict import CollectorResponse
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import OutcomeUnknown, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from support.agent_fakes import ScriptedCollectors, accepted, frame, inline, open_spool, problem
from support.runtimes import runtime_of

LIMITS = SendLimits(concurrency=2, base_s=0.5, cap_s=30.0, retry_after_max_s=300.0, denied_s=60.0, hedge_share_max=0.2)


class World:
    def __init__(self, folder: Path, collectors: ScriptedCollectors, names: tuple[str, ...], **settings: Any) -> None:
        self.clock, self.metrics = ManualClock(), Metrics()
        self.folder, self.collectors = folder, collectors
        self.disk_queue: DiskQueue = open_spool(folder)
        alerts = Alerts(folder / "alerts", metrics=self.metrics, now_ms=lambda: 7)
        self.order = SendOrder([f"http://{name}" for name in names], LIMITS, FirstIds())
        self.sender = Sender(
            runtime_of(self.clock, metrics=self.metrics),
            self.disk_queue,
            self.order,
            collectors,
            alerts,
            hedge_after_s=settings.get("hedge_after_s", 0.0),
            concurrency=2,
            offload=inline,
        )

    def put(self, *spans: tuple[int, int]) -> None:
        self.disk_queue.append([frame("boot-1", *span) for span in spans])
        self.sender.wake()

    @property
    def alerts(self) -> list[str]:
        return [alert.kind for alert in read_alerts(self.folder / "alerts")]


class FirstIds(Ids):
    """Chance without chance: jitter always takes its upper bound, the fleet starts at the first collector."""

    def uniform(self, low: float, high: float) -> float:
        return low

    def jitter_s(self, attempt: int, *, base_s: float, cap_s: float) -> float:
        return min(cap_s, base_s * 2.0**attempt)


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(collectors: ScriptedCollectors, *names: str, **settings: Any) -> AsyncIterator[World]:
        made = World(tmp_path, collectors, names or ("one",), **settings)
        running = asyncio.ensure_future(made.sender.run())
        await settle()
        yield made
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made.disk_queue.close()

    return make


async def test_batches_are_sent_oldest_first_and_deleted_on_200(world: Any) -> None:
    """Each goes out once, in order, and its file is gone after the answer."""
    collectors = ScriptedCollectors(one=[accepted()])
    async with world(collectors) as w:
        w.put((0, 1), (2, 3), (4, 5))
        await w.clock.advance(0.1)

    assert collectors.sent == ["boot-1:0-1", "boot-1:2-3", "boot-1:4-5"]
    assert list((w.folder / "boots").rglob("*.lmbatch")) == []
    assert w.metrics.value("lakebed_agent_sent_samples_total") == 6


async def test_never_more_under_way_than_allowed(world: Any) -> None:
    """Concurrency is bounded, and used."""
    collectors = ScriptedCollectors(one=[accepted()])
    async with world(collectors) as w:
        w.put(*[(n, n) for n in range(20)])
        for _ in range(20):
            await w.clock.advance(0.1)

    assert collectors.most_under_way == 2
    assert len(collectors.sent) == 20


async def test_a_collector_that_is_down_is_asked_again_with_growing_pauses_by_one_probe(world: Any) -> None:
    """While it is down nothing is lost, one batch at a time probes, and the pauses double up to the cap."""
    collectors = ScriptedCollectors(one=[*[Unavailable("down")] * 9, accepted()])
    async with world(collectors) as w:
        w.put((0, 0), (1, 1), (2, 2))
        await w.clock.advance(0.4)
        first_burst = len(collectors.sent)
        await w.clock.advance(0.2)
        after_first_pause = len(collectors.sent)
        await w.clock.advance(3600)

    assert (first_burst, after_first_pause) == (2, 3)
    assert len(collectors.sent) == 9 + 3
    assert w.disk_queue.batches == 0


async def test_retry_after_is_obeyed_to_the_second(world: Any) -> None:
    """A collector that requests 40 s is left alone for 40 s."""
    collectors = ScriptedCollectors(one=[problem(503, "unavailable", {"retry-after": "40"}), accepted()])
    async with world(collectors) as w:
        w.put((0, 0))
        await w.clock.advance(39.9)
        before = len(collectors.sent)
        await w.clock.advance(0.2)

    assert (before, len(collectors.sent)) == (1, 2)


async def test_an_answer_lost_after_acceptance_ends_as_a_duplicate(world: Any) -> None:
    """The same bytes are sent again, and the duplicate's 200 deletes them."""
    collectors = ScriptedCollectors(one=[OutcomeUnknown("reset"), accepted(duplicate=True)])
    async with world(collectors) as w:
        w.put((0, 4))
        await w.clock.advance(5)

    assert collectors.sent == ["boot-1:0-4", "boot-1:0-4"]
    assert len({data for _, data in collectors.arrived}) == 1
    assert w.metrics.value("lakebed_agent_answers_total", outcome="duplicate") == 1
    assert w.disk_queue.batches == 0


async def test_a_conflict_is_parked_with_both_hashes_an_alert_is_raised_and_later_batches_go_on(world: Any) -> None:
    """The agent's copy stays on disk, outside the retry order."""
    conflict = problem(409, "identity_conflict", accepted_frame_sha256="ab" * 32)
    collectors = ScriptedCollectors(one=[accepted()])
    collectors.by_batch[frame("boot-1", 2, 3).data] = conflict
    async with world(collectors) as w:
        w.put((0, 1), (2, 3), (4, 5))
        await w.clock.advance(3600)
        on = w.alerts

    [parked] = QueueInspector(w.folder, lambda: 7).parked()
    assert collectors.sent == ["boot-1:0-1", "boot-1:2-3", "boot-1:4-5"]
    assert (
        parked.reason,
        parked.accepted_frame_sha256,
        parked.seq_start,
        parked.seq_end,
    ) == ("identity_conflict", "ab" * 32, 2, 3)
    assert frame("boot-1", 2, 3).sha256 == parked.submitted_frame_sha256
    assert [frame("boot-1", 2, 3).data] == [path.read_bytes() for path in (w.folder / "parked").glob("*.lmbatch")]
    assert on == ["identity_conflict"]
    assert w.metrics.value("lakebed_agent_alert_on", kind="identity_conflict") == 1


async def test_batches_of_a_boot_an_operator_set_aside_are_parked_and_other_boots_go_on(world: Any) -> None:
    """Quarantine of one boot holds up nobody else, and its data stays here."""
    collectors = ScriptedCollectors(one=[accepted()])
    collectors.by_batch[frame("boot-0", 0, 9).data] = problem(409, "boot_quarantined")
    async with world(collectors) as w:
        w.disk_queue.append([frame("boot-0", 0, 9), frame("boot-1", 10, 19)])
        w.sender.wake()
        await w.clock.advance(60)
        on = w.alerts

    assert [parked.reason for parked in QueueInspector(w.folder, lambda: 7).parked()] == ["boot_quarantined"]
    assert on == ["boot_quarantined"]
    assert w.disk_queue.batches == 0


@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_what_no_collector_will_ever_take_is_parked_not_dropped(world: Any, status: int) -> None:
    """A rejected batch stays for its owner, and later ones continue."""
    collectors = ScriptedCollectors(one=[problem(status, "invalid"), accepted()])
    async with world(collectors) as w:
        w.put((0, 0))
        await w.clock.advance(1)
        w.put((1, 1))
        await w.clock.advance(1)

    assert [parked.reason for parked in QueueInspector(w.folder, lambda: 7).parked()] == ["rejected"]
    assert collectors.sent == ["boot-1:0-0", "boot-1:1-1"]
    assert w.disk_queue.batches == 0


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refused_agent_keeps_everything_alerts_and_asks_again_slowly(world: Any, status: int) -> None:
    """A wrong token loses nothing: one request a minute, and all goes out once it is right."""
    collectors = ScriptedCollectors(one=[*[problem(status, "denied")] * 5, accepted()])
    async with world(collectors) as w:
        w.put((0, 0), (1, 1))
        await w.clock.advance(47)
        early, on = len(collectors.sent), read_alerts(w.folder / "alerts")
        await w.clock.advance(400)

    assert early == 2
    assert len(on) == 1
    assert ("check agent.collectors" if status == 404 else "check agent.token") in on[0].message
    assert w.disk_queue.batches == 0
    assert w.alerts == []


@pytest.mark.parametrize(
    "reply",
    [problem(500, "error"), OutcomeUnknown("no answer"), CollectorResponse(413, {}, b"<html>too large</html>")],
    ids=["error", "no answer", "page of a proxy"],
)
async def test_a_poisoned_batch_delays_only_itself(world: Any, reply: Any) -> None:
    """One batch that always fails, in whatever way, does not hold up the hundred behind it."""
    collectors = ScriptedCollectors(one=[accepted()])
    collectors.by_batch[frame("boot-1", 0, 0).data] = reply
    async with world(collectors) as w:
        w.put(*[(n, n) for n in range(100)])
        for _ in range(100):
            await w.clock.advance(0.1)
        left = w.disk_queue.batches

    assert left == 1


async def test_a_slow_collector_is_hedged_and_the_first_answer_wins(world: Any) -> None:
    """The second collector gets the very same bytes after the pause; the slow one is queried last from then on."""

    async def never() -> CollectorResponse:
        await asyncio.Event().wait()
        raise AssertionError

    collectors = ScriptedCollectors(one=[never], two=[accepted()])
    async with world(collectors, "one", "two", hedge_after_s=2.0) as w:
        w.put((0, 0))
        await w.clock.advance(1.9)
        before = len(collectors.arrived)
        await w.clock.advance(0.2)
        after = w.disk_queue.batches
        w.put((1, 1))
        await w.clock.advance(0.1)

    assert (before, after) == (1, 0)
    assert [url for url, _ in collectors.arrived] == ["http://one", "http://two", "http://two"]
    assert collectors.arrived[0][1] == collectors.arrived[1][1]
    assert w.metrics.value("lakebed_agent_hedges_total") == 1


async def test_hedges_are_bounded_by_a_budget(world: Any) -> None:
    """When every collector is slow, hedging stops after its burst instead of doubling the load."""

    async def never() -> CollectorResponse:
        await asyncio.Event().wait()
        raise AssertionError

    collectors = ScriptedCollectors(one=[never], two=[never])
    async with world(collectors, "one", "two", hedge_after_s=1.0) as w:
        for n in range(20):
            w.put((n, n))
        await w.clock.advance(100)

    assert w.metrics.value("lakebed_agent_hedges_total") <= 5


async def test_the_second_collector_takes_over_while_the_first_is_down(world: Any) -> None:
    """A list of collectors is a list of ways in."""
    collectors = ScriptedCollectors(one=[Unavailable("down")], two=[accepted()])
    async with world(collectors, "one", "two") as w:
        w.put(*[(n, n) for n in range(10)])
        await w.clock.advance(5)

    assert w.disk_queue.batches == 0


async def test_a_damaged_file_is_parked_as_corrupt_and_never_sent(world: Any) -> None:
    """What the disk spoilt is kept and reported, not sent and not dropped."""
    collectors = ScriptedCollectors(one=[accepted()])
    async with world(collectors) as w:
        w.disk_queue.append([frame("boot-1", 0, 0), frame("boot-1", 1, 1)])
        next(iter(sorted((w.folder / "boots").rglob("*.lmbatch")))).write_bytes(b"spoilt")
        w.sender.wake()
        await w.clock.advance(1)

    assert collectors.sent == ["boot-1:1-1"]
    assert [parked.reason for parked in QueueInspector(w.folder, lambda: 7).parked()] == ["corrupt"]


async def test_a_parked_batch_its_owner_returns_is_sent_again_as_it_was(world: Any) -> None:
    """After the collector was repaired, retry sends the same identity and bytes, and the alert ends."""
    collectors = ScriptedCollectors(one=[problem(422, "invalid"), accepted()])
    async with world(collectors) as w:
        w.put((0, 4))
        await w.clock.advance(1)
        inspector_ = QueueInspector(w.folder, lambda: 7)
        inspector_.requeue(inspector_.select([], all_parked=True), reason="collector mended")
        await w.clock.advance(20)
        on = w.alerts

    assert collectors.sent == ["boot-1:0-4", "boot-1:0-4"]
    assert (w.disk_queue.batches, w.disk_queue.parked_batches, on) == (0, 0, [])


async def test_a_batch_its_owner_drops_is_forgotten_and_written_into_the_ledger(world: Any) -> None:
    """A drop beside a running agent is noticed, and recorded with its reason."""
    collectors = ScriptedCollectors(one=[problem(503, "", {"retry-after": "10"}), accepted()])
    async with world(collectors) as w:
        w.put((0, 4), (5, 5))
        await w.clock.advance(1)
        inspector_ = QueueInspector(w.folder, lambda: 7)
        assert w.disk_queue.batches == 1, "the other one was under way already"
        inspector_.drop(inspector_.select([frame("boot-1", 0, 4).sha256[:12]]), reason="test data")
        await w.clock.advance(20)

    assert collectors.sent == ["boot-1:0-4", "boot-1:5-5"]
    assert w.disk_queue.batches == 0
    [line] = [msgspec.json.decode(line) for line in (w.folder / "ledger.jsonl").read_bytes().splitlines()]
    assert (
        line["what"],
        line["reason"],
        line["seq_start"],
        line["seq_end"],
    ) == ("dropped_by_owner", "test data", 0, 4)


async def test_stopping_finishes_what_is_under_way_and_begins_nothing(world: Any) -> None:
    """A stop lets answers arrive, so that fewer batches are sent twice."""
    gate = asyncio.Event()

    async def slow() -> CollectorResponse:
        await gate.wait()
        return accepted()

    collectors = ScriptedCollectors(one=[slow])
    async with world(collectors) as w:
        w.put((0, 0), (1, 1), (2, 2))
        await w.clock.advance(0.1)
        w.sender.stop()
        gate.set()
        await w.clock.advance(0.1)

    assert len(collectors.sent) == 2
    assert w.disk_queue.batches == 1


async def test_a_file_that_cannot_be_read_now_is_read_again_after_a_pause(world: Any) -> None:
    """A disk that fails is not asked without end; the batch stays, and is sent when it can be read."""
    collectors = ScriptedCollectors(one=[accepted()])
    reads = 0

    async with world(collectors) as w:
        real = w.disk_queue.read

        def fails(entry: Any) -> bytes:
            nonlocal reads
            reads += 1
            if reads > 50:
                raise AssertionError("read again and again")
            raise DiskTrouble("batch cannot be read: I/O error")

        w.disk_queue.read = fails
        w.put((0, 0))
        await settle()
        at_first = reads
        w.disk_queue.read = real
        await w.clock.advance(60)

    assert (1, ["boot-1:0-0"]) == (at_first, collectors.sent)
