"""What tests of ticks share: small Parquet parts, manifests, a context in memory, seams that fail on request."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.core.clock import Clock, SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.fakes import FakeBronze
from lakebed.ticks.model import BronzeResult, BronzeTick
from lakebed.ticks.routes import TicksRoutes
from lakebed.wiring.parts import sections

PAYLOAD_KEY = "0123456789abcdef0123456789abcdef0123456789A="
ORG, PROJECT, TICK = "acme", "p-1", "20261115T120000__abc"


def parquet(ids: Sequence[int], note: str = "x", **more: Any) -> bytes:
    rows = {"id": pa.array(list(ids), pa.int64()), "note": pa.array([note] * len(ids), pa.string()), **more}
    out = io.BytesIO()
    pq.write_table(pa.table(rows), out)
    return out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(
    parts: dict[int, bytes], rows: dict[int, int], *, mode: str = "delta", tick: str = TICK, project: str = PROJECT
) -> dict[str, Any]:
    listed = [
        {"file_seq": seq, "sha256": sha(data), "rows": rows[seq], "bytes": len(data)} for seq, data in parts.items()
    ]
    table = {
        "name": "orders",
        "mode": mode,
        "primary_keys": ["id"],
        "schema": [{"name": "id", "type": "long"}, {"name": "note", "type": "string"}],
        "row_count": sum(rows.values()),
        "parquets": listed,
    }
    return {"schema_version": "1.0", "tick_id": tick, "project_id": project, "dt": "20261115", "tables": [table]}


def context_of(
    store: Store | None = None, *, clock: Clock | None = None, node: str = "node-1", seed: int = 1, **ticks: Any
) -> Context:
    clock = clock or SystemClock()
    flags = {"ticks.payload_key": PAYLOAD_KEY, "ticks.pipeline": "twin", "store.url": "memory:"}
    flags |= {f"ticks.{name}": value for name, value in ticks.items()}
    settings = load(sections(), flags=flags)
    return Context(
        node=node,
        settings=settings,
        store=store or MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(seed),
        metrics=Metrics(),
    )


class Guarded:
    """Any seam, whose named methods fail before or after they did their work, as often as configured."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.bend: Callable[..., None] = lambda *args: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        async def call(*args: Any, **named: Any) -> Any:
            self.calls[name] += 1
            if self.before.get(name, 0):
                self.before[name] -= 1
                raise Unavailable(f"{name} was told to fail")
            self.bend(*args)
            result = await method(*args, **named)
            if self.after.get(name, 0):
                self.after[name] -= 1
                raise Unavailable(f"the answer of {name} was lost")
            return result

        return call


class CountingBronze:
    """Counts how many commits of one org, and of all, run at once."""

    def __init__(self, inner: Any, pause: Callable[[], Any] = lambda: asyncio.sleep(0.01)) -> None:
        self._inner, self._pause = inner, pause
        self.running: Counter[str] = Counter()
        self.most_of_an_org = self.most = self.commits = 0

    async def commit(self, tick: BronzeTick) -> BronzeResult:
        self.running[tick.org_id] += 1
        self.commits += 1
        self.most_of_an_org = max(self.most_of_an_org, self.running[tick.org_id])
        self.most = max(self.most, sum(self.running.values()))
        try:
            await self._pause()
            result: BronzeResult = await self._inner.commit(tick)
            return result
        finally:
            self.running[tick.org_id] -= 1


class Service:
    """One replica in this process: its routes behind a gateway, and the seams it works with."""

    def __init__(self, context: Context, *, bronze: Any = None) -> None:
        self.context = context
        self.vault = open_vault(context)
        self.bronze = Guarded(bronze or FakeBronze(context))
        self.queue = Guarded(open_queue(context))
        self.committed = Guarded(open_audit(context, COMMITTED))
        self.routes = TicksRoutes(
            context, vault=self.vault, bronze=self.bronze, queue=self.queue, committed=self.committed
        )
        self.app = build(context, [self.routes])
        self.secrets: dict[tuple[str, str], str] = {}

    async def issue(self, org: str = ORG, project: str = PROJECT) -> str:
        self.secrets[org, project] = await self.vault.issue(org, project)
        return self.secrets[org, project]

    async def ask(
        self, method: str, path: str, *, org: str = ORG, project: str = PROJECT, headers: Any = None, **options: Any
    ) -> httpx2.Response:
        sent = {"x-api-key": org, "x-api-secret": self.secrets.get((org, project), "nothing"), **(headers or {})}
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, f"/v1/projects/{project}/{path}", headers=sent, **options)

    async def put(self, seq: int, data: bytes, *, tick: str = TICK, sha256: str = "", **whose: str) -> httpx2.Response:
        headers = {"x-sha256": sha256 or sha(data)}
        return await self.ask("PUT", f"ticks/{tick}/parts/{seq}", headers=headers, content=data, **whose)

    async def delete(self, seq: int, *, tick: str = TICK, **whose: str) -> httpx2.Response:
        return await self.ask("DELETE", f"ticks/{tick}/parts/{seq}", **whose)

    async def finalize(self, said: Any, *, tick: str = TICK, **whose: str) -> httpx2.Response:
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        return await self.ask("POST", f"ticks/{tick}/finalize", content=body, **whose)

    async def upload(self, tick: str = TICK, *, org: str = ORG, project: str = PROJECT) -> dict[str, Any]:
        """One small tick's parts; gives its manifest."""
        parts = {1: parquet([1, 2, 3]), 2: parquet([4, 5])}
        for seq, data in parts.items():
            assert (await self.put(seq, data, tick=tick, org=org, project=project)).status_code in (200, 202)
        return manifest(parts, {1: 3, 2: 2}, tick=tick, project=project)

    async def rows(self, org: str = ORG, project: str = PROJECT) -> dict[str, Any]:
        tables = (await FakeBronze(self.context).register(org, project).read()).value
        return tables.rows.get("orders", {})


@asynccontextmanager
async def serving(context: Context, *, bronze: Any = None) -> AsyncIterator[Service]:
    """A replica with a secret for the usual project; drained at the end."""
    service = Service(context, bronze=bronze)
    await service.routes.start()
    await service.issue()
    try:
        yield service
    finally:
        await service.routes.stop()
