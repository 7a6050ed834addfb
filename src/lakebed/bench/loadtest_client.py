"""The load test's client: lanes that send produce requests to the owners of partitions, over raw sockets.

A broker that does not answer is left alone for a while, and its partitions go to others of their owner set, never
outside it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lakebed.bench import routing
from lakebed.bench.hammer import Connection, Request
from lakebed.bench.log import frames_of
from lakebed.bench.routing import Manifest, Route
from lakebed.bench.scenarios import Scenario

DOWN_S = 1.0  # how long a broker that did not answer is left alone
ATTEMPTS_MAX = 10


class Client:
    """What the hammer knows and has seen."""

    def __init__(self, scenario: Scenario, manifest: Manifest, urls: Mapping[str, str]) -> None:
        self._scenario, self._manifest, self._urls = scenario, manifest, urls
        self.acknowledged = self.requests = self.failed = self.unknown = 0
        self.latencies_ms: list[float] = []
        self.inflight: Counter[str] = Counter()
        self.down: dict[str, float] = {}
        self.remaps: list[dict[str, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.began = time.perf_counter()

    async def hammer(self) -> None:
        """Sends for as long as the scenario says."""
        scenario, manifest = self._scenario, self._manifest
        requests = {
            (route, broker): frames_of(
                self._urls[broker], route.topic, route.partition, scenario.records_per_request, scenario.record_bytes
            )
            for route in manifest.routes
            for broker in route.owners
        }
        self.began = time.perf_counter()
        ends = self.began + scenario.seconds

        async def lane(number: int) -> None:
            connections = {broker: Connection(url) for broker, url in self._urls.items()}
            turn = number
            while time.perf_counter() < ends:
                route = manifest.routes[turn % len(manifest.routes)]
                turn += scenario.lanes
                await self._send(route, turn, requests, connections)
            for connection in connections.values():
                connection.close()

        await asyncio.gather(*(lane(number) for number in range(scenario.lanes)))

    def note(self, **event: Any) -> None:
        self.remaps.append({"at_s": round(time.perf_counter() - self.began, 3), **event})

    async def _send(
        self,
        route: Route,
        turn: int,
        requests: Mapping[tuple[Route, str], Request],
        connections: Mapping[str, Connection],
    ) -> None:
        for attempt in range(ATTEMPTS_MAX):
            now = time.perf_counter()
            down = {broker for broker, until in self.down.items() if until > now}
            broker = routing.choose(
                route, turn + attempt, selection=self._scenario.selection, inflight=self.inflight, down=down
            )
            if broker is None:
                await asyncio.sleep(DOWN_S / 4)
                continue
            request = requests[route, broker]
            self.requests += 1
            self.inflight[broker] += 1
            try:
                status, _ = await connections[broker].ask(request.data)
            except OSError:
                self.unknown += 1
                self.down[broker] = time.perf_counter() + DOWN_S
                self.note(topic=route.topic, partition=route.partition, **{"from": broker})
                continue
            finally:
                self.inflight[broker] -= 1
            self.latencies_ms.append((time.perf_counter() - now) * 1e3)
            self.statuses[status] += 1
            if status == 200:
                self.acknowledged += request.records
                return
            self.failed += 1
            await asyncio.sleep(0.05)
