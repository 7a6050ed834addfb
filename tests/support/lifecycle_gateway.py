"""A gateway with the lifecycle routes."""

from __future__ import annotations

import httpx2

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import Gateway, build
from lakebed.lifecycle.routes import component
from lakebed.store.authority import claim
from lakebed.wiring.parts import sections
from support.lifecycle_harness import Harness


async def gateway(world: Harness) -> Gateway:
    clock = SystemClock()
    context = Context(
        node="node-1", settings=load(sections()), store=world.store, clock=clock, ids=Ids(), metrics=Metrics()
    )
    await claim(context, expected="")
    return build(context, [component(context)], authority="authority-1")


def client(app: Gateway) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1")
