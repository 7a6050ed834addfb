"""A collector's gateway inside the test's own process, used to over HTTP without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from lakebed.batches.routes import BatchesRoutes
from lakebed.batches.settings import BatchesSettings
from lakebed.core.clock import Clock, SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.gateway.app import build
from lakebed.gateway.settings import GatewaySettings
from lakebed.store.protocol import Store


@asynccontextmanager
async def collector(
    store: Store,
    *,
    node: str = "collector-1",
    clock: Clock | None = None,
    keys: list[dict[str, Any]] | None = None,
    **ingest: Any,
) -> AsyncIterator[tuple[httpx2.AsyncClient, BatchesRoutes]]:
    sections = {
        BatchesSettings: BatchesSettings.of(ingest),
        GatewaySettings: GatewaySettings.of({"keys": keys or []}),
    }
    context = Context(
        node=node,
        settings=Settings(sections, {}),
        store=store,
        clock=clock or SystemClock(),
        ids=Ids(),
        metrics=Metrics(),
    )
    part = BatchesRoutes(context)
    app = build(context, [part])
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost", timeout=60) as client,
    ):
        yield client, part
