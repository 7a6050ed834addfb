"""A collector's gateway inside the test's own process, spoken to over HTTP without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from lakebed.batches.routes import Batches
from lakebed.batches.settings import IngestSettings
from lakebed.clock import Clock, SystemClock
from lakebed.context import Context
from lakebed.gateway.app import build
from lakebed.gateway.settings import GatewaySettings
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings
from lakebed.store.protocol import Store


@asynccontextmanager
async def collector(
    store: Store,
    *,
    node: str = "collector-1",
    clock: Clock | None = None,
    keys: list[dict[str, Any]] | None = None,
    **ingest: Any,
) -> AsyncIterator[tuple[httpx2.AsyncClient, Batches]]:
    sections = {
        IngestSettings: IngestSettings.of(ingest),
        GatewaySettings: GatewaySettings.of({"keys": keys or []}),
    }
    context = Context(node, Settings(sections, {}), store, clock or SystemClock(), Ids(), Metrics())
    part = Batches(context)
    app = build(context, [part])
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test", timeout=60) as client,
    ):
        yield client, part
