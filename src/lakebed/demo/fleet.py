"""A machine full of agents, as a program: `python -m lakebed.demo.fleet FOLDER AGENTS SAMPLES COLLECTOR…`.

Each agent has its own queue and sends the numbers 0 to SAMPLES-1. It notes how far its disk has come, so that a fleet
killed with -9 and started again goes on where the note was. Ends when every queue is empty.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from lakebed import logs
from lakebed.agent.alerts import Alerts
from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.model import Frame, Stored
from lakebed.agent.order import Order, OrderLimits
from lakebed.agent.sender import Sender
from lakebed.agent.spool import Spool, SpoolLimits
from lakebed.agent.transport import HttpTransport
from lakebed.agent.waiting import cancel, in_thread
from lakebed.clock import SystemClock, now_ms
from lakebed.demo.numbers import counting
from lakebed.frame.model import Kind, Sample
from lakebed.ids import Ids
from lakebed.metrics import Metrics

PACE = 20  # samples put at a time
PAUSE_S = 0.02
BATCH = BatchLimits(bytes_max=64 * 1024, samples_max=100, interval_s=0.5)
QUEUE = SpoolLimits(bytes_max=64 * 1024 * 1024, batches_max=10_000)
ORDER = OrderLimits(concurrency=2, base_s=0.1, cap_s=2.0, retry_after_max_s=5.0, denied_s=5.0, hedge_share_max=0.2)


class FleetAgent:
    """One agent: the parts of `lakebed agent run` with a source that counts."""

    def __init__(
        self,
        folder: Path,
        agent_id: str,
        total: int,
        collectors: list[str],
        transport: HttpTransport,
        metrics: Metrics,
    ) -> None:
        clock, ids = SystemClock(), Ids()
        self._clock, self._total, self._progress = clock, total, folder / "progress"
        boot_id = ids.uuid()
        self.spool = Spool.open(
            folder / "queue", agent_id=agent_id, boot_id=boot_id, limits=QUEUE, now_ms=lambda: now_ms(clock)
        )
        self._sender = Sender(
            self.spool,
            Order(collectors, ORDER, ids),
            transport,
            Alerts(folder / "queue" / "alerts", metrics=metrics, now_ms=lambda: now_ms(clock)),
            hedge_after_s=1.0,
            concurrency=ORDER.concurrency,
            clock=clock,
            metrics=metrics,
        )

        self._batcher = Batcher(agent_id, boot_id, BATCH, self._store, clock=clock, metrics=metrics)
        self._start = int(self._progress.read_text()) if self._progress.exists() else 0

    async def run(self) -> None:
        """Counts to the end and sends everything."""
        roles = [asyncio.ensure_future(self._batcher.run()), asyncio.ensure_future(self._sender.run())]
        noting = asyncio.ensure_future(self._note())
        try:
            for at in range(self._start, self._total, PACE):
                await self._batcher.put([self._sample(n) for n in range(at, min(at + PACE, self._total))])
                await self._clock.sleep(PAUSE_S)
            self._batcher.hurry()
            await self._batcher.durable(max(0, self._total - self._start))
            while self.spool.batches or not self._sender.idle:
                await self._clock.sleep(PAUSE_S)
        finally:
            await cancel([*roles, noting])
            self._progress.write_text(str(self._start + self._batcher.settled))
            self.spool.close()

    async def _store(self, frames: Sequence[Frame]) -> Stored:
        stored = await in_thread(lambda: self.spool.append(frames))
        self._sender.wake()
        return stored

    async def _note(self) -> None:
        while True:
            await self._clock.sleep(PAUSE_S)
            self._progress.with_suffix(".tmp").write_text(str(self._start + self._batcher.settled))
            self._progress.with_suffix(".tmp").replace(self._progress)

    def _sample(self, number: int) -> Sample:
        return Sample("demo_count", self._clock.now_ns(), float(number), Kind.GAUGE, {"shard": str(number % 4)})


async def run(folder: Path, agents: int, samples: int, collectors: list[str], metrics: Metrics) -> None:
    async with HttpTransport(timeout_s=10, connect_timeout_s=2, concurrency=agents) as transport:
        fleet = []
        for number in range(agents):
            agent_id = f"{folder.name}-{number:02d}"
            (folder / agent_id).mkdir(parents=True, exist_ok=True)
            fleet.append(FleetAgent(folder / agent_id, agent_id, samples, collectors, transport, metrics))
        await asyncio.gather(*(agent.run() for agent in fleet))


if __name__ == "__main__":
    logs.configure("error")
    numbers = Metrics()
    work = run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:], numbers)
    asyncio.run(counting(numbers, SystemClock(), work))
