"""A real agent process against a real HTTP collector: killed, stopped, cut off, refused; nothing lost, counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from support.agent_collector import TestCollector

DEADLINE_S = 120.0
SRC = str(Path(__file__).parents[2] / "src")

FAST = {
    "AGENT_ID": "agent-a",
    "TOKEN": "t0ken",
    "BATCH_INTERVAL_S": "0.05",
    "BATCH_SAMPLES_MAX": "50",
    "REQUEST_TIMEOUT_S": "30",
    "STDIN": "true",
    "STDIN_ACKS": "true",
    "DRAIN_S": "100",
    "STOP_S": "30",
}
WHOLE = {"BATCH_INTERVAL_S": "3600"}  # batches are cut by their size alone, however slowly lines come


class AgentProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.durable_lines = 0
        self.log: list[dict[str, Any]] = []
        self._readers = [asyncio.ensure_future(self._acks()), asyncio.ensure_future(self._logs())]

    async def feed(self, lines: Iterable[str], *, pause_every: int = 0) -> None:
        """Writes lines, giving the agent a moment every so many; a killed agent ends it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number, line in enumerate(lines):
                self.process.stdin.write(line.encode() + b"\n")
                if pause_every and number % pause_every == 0:
                    await self.process.stdin.drain()
                    await asyncio.sleep(0.01)
            await self.process.stdin.drain()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            code = await self.process.wait()
            await asyncio.gather(*self._readers)
        return code

    async def kill(self) -> None:
        self.process.kill()
        await self.ended()

    async def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def _acks(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.durable_lines = msgspec.json.decode(line)["durable_lines"]

    async def _logs(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(msgspec.DecodeError):
                self.log.append(msgspec.json.decode(line))


class Home:
    """One agent's folder, over any number of runs of it."""

    def __init__(self, folder: Path, collectors: list[str]) -> None:
        self.folder, self._collectors = folder, collectors
        self.queue = folder / "queue"
        self._runs: list[AgentProcess] = []

    async def run(self, **settings: str) -> AgentProcess:
        process = await self._spawn("agent", "run", pipes=True, **settings)
        agent = AgentProcess(process)
        self._runs.append(agent)
        return agent

    async def command(self, *argv: str) -> tuple[int, Any]:
        process = await self._spawn("agent", *argv, pipes=True)
        out, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        return process.returncode or 0, msgspec.json.decode(out) if out.strip() else None

    async def _spawn(self, *argv: str, pipes: bool, **settings: str) -> asyncio.subprocess.Process:
        values = {**FAST, "QUEUE_DIR": str(self.queue), "COLLECTORS": msgspec.json.encode(self._collectors).decode()}
        env = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        env |= {f"LAKEBED_AGENT_{name}": value for name, value in {**values, **settings}.items()} | {"PYTHONPATH": SRC}
        pipe = asyncio.subprocess.PIPE if pipes else None
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lakebed", *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=self.folder
        )

    async def close(self) -> None:
        for run in self._runs:
            if run.process.returncode is None:
                run.process.kill()
                await run.process.wait()


@pytest.fixture
async def collector() -> AsyncIterator[TestCollector]:
    made = TestCollector()
    await made.start()
    yield made
    with contextlib.suppress(AssertionError):
        await made.stop()
    made.close()


@pytest.fixture
async def home(tmp_path: Path, collector: TestCollector) -> AsyncIterator[Home]:
    made = Home(tmp_path, [collector.url])
    yield made
    await made.close()


def lines(start: int, end: int) -> list[str]:
    return [f'{{"metric":"m","value":{n},"labels":{{"host":"h{n % 7}"}}}}' for n in range(start, end)]


async def until(true: Callable[[], bool], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not true():
        assert asyncio.get_running_loop().time() < deadline_s, f"not within {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.01)


def assert_sound(collector: TestCollector) -> None:
    """Within each boot, accepted batches never overlap: no sample was accepted under two identities."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for identity in collector.accepted:
        spans.setdefault(identity.boot_id, []).append((identity.seq_start, identity.seq_end))
    for found in spans.values():
        found.sort()
        assert all(one[1] < other[0] for one, other in pairwise(found)), found


async def test_kill_9_in_the_middle_loses_nothing_that_was_acknowledged(home: Home, collector: TestCollector) -> None:
    """Three kills at awkward moments; each restart is fed from the line after the last acknowledged."""
    ahead, position = 10_000, 0  # more than a pipe holds: however late a kill comes, there are lines left
    for kill_after in (1, 400, 900):
        agent = await home.run()
        feeding = asyncio.ensure_future(agent.feed(lines(position, position + ahead), pause_every=20))
        await until(lambda least=kill_after, run=agent: run.durable_lines >= least, "acknowledged")
        await agent.kill()
        await feeding
        position += agent.durable_lines
    agent, total = await home.run(), position + 2000

    await agent.feed(lines(position, total))
    agent.end_input()
    code = await agent.ended()

    assert code == 0
    assert set(collector.values) == {float(n) for n in range(total)}
    assert len(collector.boots) == 4
    assert all(len(values) == len(set(values)) for values in collector.boots.values()), "doubled within a boot"
    assert_sound(collector)
    assert collector.tokens == {"Bearer t0ken"}


async def test_batches_queued_in_an_outage_are_sent_oldest_first_by_a_later_boot(
    home: Home, collector: TestCollector
) -> None:
    """The collector is away over two runs of the agent; the third delivers everything, in order."""
    await collector.stop()
    for start in (0, 200):
        agent = await home.run()
        await agent.feed(lines(start, start + 200))
        await until(lambda run=agent: run.durable_lines == 200, "on disk")
        assert await agent.terminate() == 0
    await collector.start()

    agent = await home.run(SEND_CONCURRENCY="1")
    await agent.feed(lines(400, 500))
    agent.end_input()

    assert await agent.ended() == 0
    assert collector.values == [float(n) for n in range(500)]
    assert list(home.queue.rglob("*.lmbatch")) == []


async def test_a_collector_that_goes_away_and_returns_under_load_loses_nothing(
    home: Home, collector: TestCollector
) -> None:
    """Cut off in the middle of sending, again and again."""
    agent = await home.run()
    feeding = asyncio.ensure_future(agent.feed(lines(0, 2000), pause_every=20))
    for share in (300, 800, 1300):
        await until(lambda least=share: len(collector.values) >= least, "some arrived")
        await collector.stop()
        await asyncio.sleep(0.1)
        await collector.start()
    await feeding
    agent.end_input()

    assert await agent.ended() == 0
    assert sorted(collector.values) == [float(n) for n in range(2000)]
    assert_sound(collector)


@pytest.mark.full
async def test_answers_lost_after_acceptance_become_duplicates_and_nothing_is_doubled(
    home: Home, collector: TestCollector
) -> None:
    """Every third answer is lost after the batch was accepted, every fifth request before it was read."""
    collector.fault = lambda number, identity: "lose" if number % 3 == 0 else "drop" if number % 5 == 0 else ""
    agent = await home.run()

    await agent.feed(lines(0, 1000))
    agent.end_input()

    assert await agent.ended() == 0
    assert sorted(collector.values) == [float(n) for n in range(1000)]
    assert collector.duplicates >= 3
    assert_sound(collector)


@pytest.mark.full
async def test_a_conflict_is_parked_later_batches_go_on_and_its_owner_settles_it(
    home: Home, collector: TestCollector
) -> None:
    """The conflicting batch stays on disk with both hashes until it is dropped with a reason."""
    collector.fault = lambda number, identity: "conflict" if identity.seq_start == 100 else ""
    agent = await home.run(**WHOLE)
    await agent.feed(lines(0, 400))
    agent.end_input()
    code = await agent.ended()

    listed = (await home.command("conflicts", "-o", "json"))[1]
    sha = listed[0]["submitted_frame_sha256"]
    without_reason = (await home.command("drop", sha))[0]
    dry = (await home.command("drop", sha[:12], "--reason", "the accepted batch stands", "--dry-run", "-o", "json"))[1]
    still = len((await home.command("conflicts", "-o", "json"))[1])
    await home.command("drop", sha[:12], "--reason", "the accepted batch stands", "-o", "json")

    assert code == 0
    assert sorted(collector.values) == [float(n) for n in range(400) if not 100 <= n < 150]
    assert (
        len(listed),
        listed[0]["reason"],
        listed[0]["accepted_frame_sha256"],
        listed[0]["seq_start"],
        listed[0]["seq_end"],
    ) == (1, "identity_conflict", "ab" * 32, 100, 149)
    assert (2, sha, 1) == (without_reason, dry[0]["sha256"], still)
    assert (await home.command("conflicts", "-o", "json"))[1] == []
    assert '"the accepted batch stands"' in (home.queue / "ledger.jsonl").read_text()
    assert [entry["kind"] for entry in agent.log if entry.get("event") == "alert"] == ["identity_conflict"]


async def test_sigterm_puts_what_was_read_on_disk(home: Home, collector: TestCollector) -> None:
    """With an interval of an hour everything is still in memory; the stop flushes it before the process ends."""
    await collector.stop()
    agent = await home.run(**WHOLE, BATCH_SAMPLES_MAX="10000", OTLP_PORT="0")
    await until(lambda: any(entry.get("event") == "listening" for entry in agent.log), "listening")
    address = next(entry["address"] for entry in agent.log if entry.get("event") == "listening")
    await agent.feed(lines(0, 77))
    async with httpx2.AsyncClient(base_url=address, timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
        while (await client.get("/health")).json()["buffered_samples"] < 77:
            await asyncio.sleep(0.02)
    before = list(home.queue.rglob("*.lmbatch"))

    code = await agent.terminate()
    rows = (await home.command("queue", "-o", "json"))[1]

    assert (code, before) == (0, [])
    assert [row["samples"] for row in rows] == [77]


async def test_sigterm_under_load_keeps_every_line_it_took(home: Home, collector: TestCollector) -> None:
    """Stopped while lines pour in: what was acknowledged at the end is exactly what arrives, in order, no line torn."""
    agent = await home.run()
    feeding = asyncio.ensure_future(agent.feed(lines(0, 200_000)))
    await until(lambda: agent.durable_lines > 0, "some are on disk")

    code = await agent.terminate()
    await feeding
    rest = await home.run(STDIN="false", STDIN_ACKS="false")
    await until(lambda: len(collector.values) >= agent.durable_lines, "all sent")
    await rest.terminate()

    assert code == 0
    assert sorted(collector.values) == [float(n) for n in range(agent.durable_lines)]
    assert not [entry for entry in agent.log if entry.get("event") == "bad samples"]


async def test_a_full_queue_blocks_its_source_and_loses_nothing(home: Home, collector: TestCollector) -> None:
    """With room for 40 small batches and the collector away, input waits; when it is back, all of it arrives."""
    await collector.stop()
    agent = await home.run(QUEUE_BYTES_MAX=str(40 * 4096), BATCH_BYTES="4096", BATCH_SAMPLES_MAX="10")
    feeding = asyncio.ensure_future(agent.feed(lines(0, 5000)))
    await until(lambda: (home.queue / "alerts" / "queue_full.json").exists(), "the queue is full")
    waiting = len(list(home.queue.rglob("*.lmbatch")))
    await collector.start()
    await feeding
    agent.end_input()

    assert await agent.ended() == 0
    assert waiting <= 40
    assert sorted(collector.values) == [float(n) for n in range(5000)]
    assert not (home.queue / "alerts" / "queue_full.json").exists()


async def test_a_full_queue_that_drops_counts_exactly_what_is_missing(home: Home, collector: TestCollector) -> None:
    """Under drop_oldest input never waits; what arrived and what the ledger reports was given up make the whole."""
    await collector.stop()
    agent = await home.run(
        **WHOLE, QUEUE_BYTES_MAX=str(40 * 4096), BATCH_BYTES="4096", BATCH_SAMPLES_MAX="10", WHEN_FULL="drop_oldest"
    )
    await agent.feed(lines(0, 3000))
    await until(lambda: agent.durable_lines == 3000, "all of it was read")
    await collector.start()
    agent.end_input()
    code = await agent.ended()

    ledger = [msgspec.json.decode(line) for line in (home.queue / "ledger.jsonl").read_bytes().splitlines()]
    dropped = sum(entry["samples"] for entry in ledger if entry["what"] == "dropped_when_full")
    assert code == 0
    assert dropped > 2000
    assert len(collector.values) + dropped == 3000
    assert {float(n) for n in range(2900, 3000)} <= set(collector.values), "the newest are kept"


async def test_two_agents_never_share_a_queue(home: Home) -> None:
    """The second one gives the reason and ends with the code for a conflict."""
    first = await home.run()
    await until(lambda: any(entry.get("event") == "agent starts" for entry in first.log), "started")

    second = await home.run()

    assert await second.ended() == 6
    assert await first.terminate() == 0


async def test_a_port_that_is_taken_is_said_and_nothing_is_lost(home: Home, collector: TestCollector) -> None:
    """The agent ends with the code for a wrong setting, and its queue can be used again at once."""
    refused = await home.run(OTLP_PORT=str(collector.port))
    code = await refused.ended()

    agent = await home.run()
    await agent.feed(lines(0, 10))
    agent.end_input()

    assert (code, await agent.ended()) == (3, 0)
    assert len(collector.values) == 10


async def test_a_dead_collector_is_gone_around(tmp_path: Path, collector: TestCollector) -> None:
    """With one address of nobody and one of a collector, everything arrives."""
    home = Home(tmp_path, ["http://127.0.0.1:9", collector.url])
    agent = await home.run()

    await agent.feed(lines(0, 300))
    agent.end_input()

    assert await agent.ended() == 0
    assert sorted(collector.values) == [float(n) for n in range(300)]
    await home.close()


async def test_every_source_of_one_agent_arrives(home: Home, collector: TestCollector) -> None:
    """OTLP, a scraped target and host metrics, all in one run, stopped by SIGTERM."""
    scrape = msgspec.json.encode([{"url": f"{collector.url}/target", "interval_s": 0.2}]).decode()
    agent = await home.run(STDIN="false", OTLP_PORT="0", HOST_INTERVAL_S="0.2", BATCH_SAMPLES_MAX="5000", SCRAPE=scrape)
    await until(lambda: any(entry.get("event") == "listening" for entry in agent.log), "listening")
    address = next(entry["address"] for entry in agent.log if entry.get("event") == "listening")
    point = {"asDouble": 4711.5, "timeUnixNano": "1750000000000000000"}
    metric = {"name": "shop.orders", "gauge": {"dataPoints": [point]}}

    async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
        answer = await client.post(
            f"{address}/v1/metrics", json={"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
        )
        on_disk_or_sent = bool(list(home.queue.rglob("*.lmbatch"))) or 4711.5 in collector.values
        await until(lambda: {4711.5, 815.25} <= set(collector.values) and len(collector.values) > 20, "sent")
        health = (await client.get(f"{address}/health")).json()
        own = (await client.get(f"{address}/metrics")).text

    assert (answer.status_code, on_disk_or_sent) == (200, True)
    assert (health["status"], health["agent_id"]) == ("ok", "agent-a")
    assert "lakebed_agent_sent_samples_total" in own
    assert 'lakebed_agent_bad_samples_total{source="scrape"}' in own
    assert await agent.terminate() == 0
