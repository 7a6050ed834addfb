"""A load test of ticks: a fleet of agents, gateways and a worker as processes, killed while they run, and a report.

`lakebed bench ticks --scenario fleet`. Agents upload folders that this process writes, until the time is over; then the
fleet is drained and counted: every tick committed once, every row in bronze once, every tick dispatched, none refused.
The folder `<out>/<utc time>-<scenario>/` has each process's log, `sent-ticks.jsonl`, `summary.json` and `report.html`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.bench.commands import note_of
from lakebed.bench.harness import BenchEnvironment
from lakebed.console.report import ChartLine, HtmlReport, ReportVerdict
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound, Unavailable
from lakebed.core.settings import env_name
from lakebed.delta import history
from lakebed.embedded.ports import HeldPorts
from lakebed.store.settings import StoreSettings
from lakebed.ticks import paths
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import DISPATCHED
from lakebed.ticks.dispatcher import DONE
from lakebed.ticks.fakes import FakeBronze
from lakebed.ticks.model import CommitRecord

PROJECT, TABLE = "main", "orders"
READY_S = 120.0  # for a process to answer; several Sparks start at once
P95_BAR_S = 30.0  # from a folder that is ready to its commit, as the seed has it
SPARK = {
    "spark.quick": "true",
    "spark.master": "local[2]",
    "spark.driver_memory": "512m",
    "spark.shuffle_partitions": "2",
}


class FleetScenario(msgspec.Struct, frozen=True):
    """`kill_agent_s` and `kill_gateway_s`: how often one of them is killed (kill -9) and started again."""

    name: str
    agents: int = 50
    gateways: int = 2
    seconds: float = 180.0
    tick_every_s: float = 30.0  # twice as often as agents are made for
    rows: int = 1_000
    kill_agent_s: float = 5.0
    kill_gateway_s: float = 45.0
    pipeline: str = "spark"
    drain_s: float = 600.0
    ticks_min: int = 1  # of each agent, however long that takes


SCENARIOS = {
    one.name: one
    for one in (
        FleetScenario("fleet"),
        FleetScenario("soak", seconds=900.0),
        FleetScenario(
            "smoke",
            agents=3,
            seconds=8.0,
            tick_every_s=0.8,
            rows=20,
            kill_agent_s=3.0,
            kill_gateway_s=4.0,
            pipeline="twin",
            ticks_min=4,
        ),
    )
}


class FleetTick(msgspec.Struct):
    """One tick of the fleet: when its folder was ready, committed and in silver; 0 means never. Seconds of the run."""

    agent: str
    tick_id: str
    rows: int
    ready_s: float
    committed_s: float = 0.0
    silver_s: float = 0.0
    inserted: int = 0
    replaced: int = 0


class FleetSummary(msgspec.Struct, frozen=True):
    scenario: str
    folder: str
    agents: int
    ticks_sent: int
    ticks_committed: int
    ticks_in_silver: int
    rows_sent: int
    rows_in_bronze: int
    commit_s: dict[str, float]
    silver_s: dict[str, float]
    kills: dict[str, int]
    held: bool
    broken: list[str]


async def run(environment: BenchEnvironment, name: str, out: Path) -> FleetSummary:
    """Runs one scenario and writes its folder. Raises Invalid for an unknown scenario."""
    if name not in SCENARIOS:
        raise Invalid(f"there is no scenario {name!r}", hint=f"one of: {', '.join(SCENARIOS)}")
    began = datetime.fromtimestamp(environment.context().clock.now_ns() / 1e9, UTC)
    folder = out / f"{began:%Y%m%dT%H%M%SZ}-{name}"
    folder.mkdir(parents=True)
    fleet = Fleet(environment, SCENARIOS[name], folder.resolve())
    async with fleet.running():
        environment.report(f"{fleet.scenario.agents} agents upload for {fleet.scenario.seconds:.0f} s, with kills")
        await fleet.drive()
        environment.report("No more ticks: the fleet is drained")
        drained = await fleet.drain()
    verdicts = await fleet.verdicts(drained)
    return _written(fleet, verdicts, note_of("ticks", environment.settings))


class Fleet:
    """The processes of a run, and what they were given."""

    def __init__(self, environment: BenchEnvironment, scenario: FleetScenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.context: Context = environment.context("loadtest")
        self.ticks: dict[tuple[str, str], FleetTick] = {}
        self.kills: list[tuple[float, str]] = []
        self.rows_in_bronze = 0
        self._token = self.context.ids.token()[:8].lower()
        self._agents = [f"load-{self._token}-{number:02d}" for number in range(scenario.agents)]
        more = {"ticks.pipeline": scenario.pipeline, **(SPARK if scenario.pipeline == "spark" else {})}
        layer = environment.settings.of(StoreSettings).as_layer() | more
        clean = {key: value for key, value in os.environ.items() if not key.startswith("LAKEBED_")}
        self._env = {**clean, **{env_name(key): str(value) for key, value in layer.items()}}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._began_s = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything is started, and ended in any case."""
        with HeldPorts(self.context.ids) as held:
            urls = {f"gateway-{n}": held.take() for n in range(self.scenario.gateways)}
            try:
                for name, port in urls.items():
                    arguments = ["serve", "--parts", "ticks", "--port", str(port), "--log", "warning"]
                    await self._start(name, arguments, ready=True)
                await self._start("worker", ["work", "--parts", "ticks", "--port", "0", "--log", "warning"], ready=True)
                for agent in self._agents:
                    await self._start_agent(agent, [f"http://127.0.0.1:{port}" for port in urls.values()])
                self._began_s = self.context.clock.now_ns() / 1e9
                yield
            finally:
                for process in self._processes.values():
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()

    async def _start_agent(self, agent: str, urls: Sequence[str]) -> None:
        secret = await open_vault(self.context).issue(agent, PROJECT)
        told = {
            "folder": str(self._drop(agent)), "project_id": PROJECT, "org_id": agent, "api_secret": secret,
            "urls": list(urls), "keys": {"": ["id"]}, "interval_s": 0.2,
        }  # fmt: skip
        own = {
            env_name("agent.ticks"): msgspec.json.encode([told]).decode(),
            env_name("agent.queue_dir"): str(self.folder / "agents" / agent / "queue"),
        }
        self._drop(agent).mkdir(parents=True)
        await self._start(agent, ["agent", "run", "--agent-id", agent], own)

    async def _start(
        self, name: str, arguments: list[str], env: Mapping[str, str] | None = None, *, ready: bool = False
    ) -> None:
        self._commands[name] = (arguments, dict(env or {}))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lakebed", *arguments, env={**self._env, **(env or {})}, cwd=self.folder,
                stdout=asyncio.subprocess.PIPE if ready else log, stderr=log,
            )  # fmt: skip
        self._processes[name] = process
        if ready:
            assert process.stdout is not None
            async with asyncio.timeout(READY_S):
                if not await process.stdout.readline():
                    raise Unavailable(f"{name} did not start", hint=f"see {self.folder / f'{name}.log'}")

    async def drive(self) -> None:
        """Writes folders and kills processes until the time is over."""
        gateways = [name for name in self._commands if name.startswith("gateway")]
        loops = [self._feed(agent, number) for number, agent in enumerate(self._agents)]
        if self.scenario.kill_agent_s:
            loops.append(self._kill_often(self._agents, self.scenario.kill_agent_s))
        if self.scenario.kill_gateway_s:
            loops.append(self._kill_often(gateways, self.scenario.kill_gateway_s))
        await asyncio.gather(*loops)

    async def _feed(self, agent: str, number: int) -> None:
        await self.context.clock.sleep(
            self.scenario.tick_every_s * number / len(self._agents)
        )  # not all at the same moment
        made = 0
        while self._now_s() < self.scenario.seconds or made < self.scenario.ticks_min:
            await asyncio.to_thread(self._write, agent, made)
            made += 1
            await self.context.clock.sleep(self.scenario.tick_every_s)

    def _write(self, agent: str, made: int) -> None:
        tick_id, rows = f"t-{made:05d}", self.scenario.rows
        folder = self._drop(agent) / tick_id
        folder.mkdir()
        ids = pa.array(range(made * rows, (made + 1) * rows), pa.int64())
        pq.write_table(pa.table({"id": ids, "note": pa.array([tick_id] * rows)}), folder / f"{TABLE}.parquet")
        self.ticks[agent, tick_id] = FleetTick(agent, tick_id, rows, self._now_s())
        (folder / "_ready").touch()

    async def _kill_often(self, names: Sequence[str], every_s: float) -> None:
        turn = 0
        while self._now_s() < self.scenario.seconds:
            await self.context.clock.sleep(every_s)
            name = names[turn % len(names)]
            turn += 1
            process = self._processes[name]
            process.send_signal(signal.SIGKILL)
            await process.wait()
            self.kills.append((self._now_s(), name))
            arguments, env = self._commands[name]
            await self._start(name, arguments, env, ready=name.startswith("gateway"))

    async def drain(self) -> bool:
        """Waits until every folder is gone and every tick is in silver; False when that takes too long."""
        dispatched = open_audit(self.context, DISPATCHED)
        until_s = self.context.clock.monotonic_s() + self.scenario.drain_s
        while self.context.clock.monotonic_s() < until_s:
            waiting = [key for key, tick in self.ticks.items() if (self._drop(tick.agent) / tick.tick_id).exists()]
            if not waiting:
                for tick in [one for one in self.ticks.values() if not one.silver_s]:
                    row = await dispatched.get(paths.tick_id(tick.agent, PROJECT, tick.tick_id))
                    if row is not None and row.state == DONE:
                        tick.silver_s = row.at_ms / 1000 - self._began_s
                if all(tick.silver_s for tick in self.ticks.values()):
                    return True
            await self.context.clock.sleep(0.5)
        return False

    async def verdicts(self, drained: bool) -> list[ReportVerdict]:
        """Counts what the bucket has; every claim is about all ticks."""
        await self._read_commits()
        self.rows_in_bronze = sum([await self._bronze_rows(agent) for agent in self._agents])
        ticks, depth = list(self.ticks.values()), await open_queue(self.context).depth()
        sent, committed = sum(tick.rows for tick in ticks), [tick for tick in ticks if tick.committed_s]
        inserted, replaced = sum(tick.inserted for tick in ticks), sum(tick.replaced for tick in ticks)
        waits = [tick.committed_s - tick.ready_s for tick in committed]
        p95 = quantiles(waits)["p95"]
        left = [path.name for agent in self._agents for path in self._drop(agent).iterdir() if path.name[0] != "."]
        in_silver = sum(bool(tick.silver_s) for tick in ticks)
        claims = [
            ("every tick is committed", len(committed) == len(ticks) > 0, f"{len(committed)} of {len(ticks)}"),
            ("every row is in bronze once", self.rows_in_bronze == sent, f"{self.rows_in_bronze} of {sent}"),
            ("no tick was applied twice", (inserted, replaced) == (sent, 0), f"{replaced} rows replaced"),
            ("agents have nothing left", not left, f"{len(left)} folders"),
            ("every tick reached silver", drained, f"{in_silver} of {len(ticks)}"),
            ("no dead letter", depth.dead == 0, f"{depth.dead} dead letters"),
            (f"p95 from ready to committed below {P95_BAR_S:g} s", p95 < P95_BAR_S, f"{p95:g} s"),
        ]
        return [ReportVerdict(*claim) for claim in claims]

    async def _read_commits(self) -> None:
        for tick in self.ticks.values():
            key = paths.commit(paths.tick_id(tick.agent, PROJECT, tick.tick_id))
            with suppress(NotFound):
                record = msgspec.json.decode((await self.context.store.get(key)).data, type=CommitRecord)
                tick.committed_s = record.committed_at_ms / 1000 - self._began_s
                tick.inserted, tick.replaced = record.bronze.rows_inserted, record.bronze.rows_replaced

    async def _bronze_rows(self, agent: str) -> int:
        if self.scenario.pipeline == "twin":
            return len((await FakeBronze(self.context).register(agent, PROJECT).read()).value.rows.get(TABLE, {}))
        return (await history.snapshot(self.context.store, f"{paths.bronze(agent, PROJECT)}/{TABLE}")).rows

    def _drop(self, agent: str) -> Path:
        return self.folder / "agents" / agent / "drop"

    def _now_s(self) -> float:
        return self.context.clock.now_ns() / 1e9 - self._began_s


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for name, share in shares.items()}


def _written(fleet: Fleet, verdicts: Sequence[ReportVerdict], note: str) -> FleetSummary:
    ticks = sorted(fleet.ticks.values(), key=lambda tick: tick.ready_s)
    committed = [tick for tick in ticks if tick.committed_s]
    kinds = Counter("gateways" if name.startswith("gateway") else "agents" for _, name in fleet.kills)
    summary = FleetSummary(
        scenario=fleet.scenario.name,
        folder=str(fleet.folder),
        agents=fleet.scenario.agents,
        ticks_sent=len(ticks),
        ticks_committed=len(committed),
        ticks_in_silver=sum(bool(tick.silver_s) for tick in ticks),
        rows_sent=sum(tick.rows for tick in ticks),
        rows_in_bronze=fleet.rows_in_bronze,
        commit_s=quantiles([tick.committed_s - tick.ready_s for tick in committed]),
        silver_s=quantiles([tick.silver_s - tick.committed_s for tick in committed if tick.silver_s]),
        kills=dict(kinds),
        held=all(one.held for one in verdicts),
        broken=[f"{one.name}: {one.seen}" for one in verdicts if not one.held],
    )
    (fleet.folder / "sent-ticks.jsonl").write_bytes(b"".join(msgspec.json.encode(tick) + b"\n" for tick in ticks))
    (fleet.folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
    (fleet.folder / "report.html").write_text(page(fleet.scenario, summary, ticks, fleet.kills, verdicts, note))
    return summary


def page(
    scenario: FleetScenario,
    summary: FleetSummary,
    ticks: Sequence[FleetTick],
    kills: Sequence[tuple[float, str]],
    verdicts: Sequence[ReportVerdict],
    note: str = "",
) -> str:
    """Pure: the report of a run."""
    report = HtmlReport(f"Fleet of ticks: {scenario.name}", "Agents, gateways and a worker as processes, with kill -9.")
    report.facts(
        {
            "agents": summary.agents,
            "ticks committed": summary.ticks_committed,
            "rows in bronze": summary.rows_in_bronze,
            "p95 to the commit, s": summary.commit_s["p95"],
            "p95 from there to silver, s": summary.silver_s["p95"],
            "killed": sum(summary.kills.values()),
        }
    )
    report.machine()
    if note:
        report.text(note)
    report.section("Integrity").verdicts(verdicts)
    marks = [(at_s, f"{name} killed") for at_s, name in kills]
    end = max([0.0, *(max(tick.ready_s, tick.committed_s, tick.silver_s) for tick in ticks)])
    width = max(end / 60, 0.25)
    report.section("Over time")
    report.lines(
        "Ticks", [_per_s(name, [getattr(tick, field) for tick in ticks], width, end) for name, field in STAGES],
        unit="ticks/s", marks=marks, about="After a dashed line, a killed process, commits drop and catch up.",
    )  # fmt: skip
    waits = [("to the commit", "ready_s", "committed_s"), ("to silver", "committed_s", "silver_s")]
    report.lines(
        "Latency of each tick",
        [ChartLine(name, _latencies(ticks, begin, until)) for name, begin, until in waits],
        unit="s", marks=marks, about="By the moment its folder was ready.",
    )  # fmt: skip
    report.section("Latency").histogram(
        "From ready to committed",
        [tick.committed_s - tick.ready_s for tick in ticks if tick.committed_s],
        unit="s",
        about="A long tail to the right is what p99 measures.",
    )
    report.section("The scenario").table(
        ("setting", "value"), [(name, str(value)) for name, value in msgspec.structs.asdict(scenario).items()]
    )
    return str(report)


STAGES = (("ready", "ready_s"), ("committed", "committed_s"), ("in silver", "silver_s"))


def _per_s(name: str, moments: Sequence[float], width: float, end: float) -> ChartLine:
    counted = Counter(int(at // width) for at in moments if at)
    return ChartLine(name, tuple((n * width, counted.get(n, 0) / width) for n in range(int(end // width) + 1)))


def _latencies(ticks: Sequence[FleetTick], begin: str, until: str) -> tuple[tuple[float, float], ...]:
    reached = [tick for tick in ticks if getattr(tick, until)]
    return tuple((tick.ready_s, getattr(tick, until) - getattr(tick, begin)) for tick in reached)
