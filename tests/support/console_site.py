"""A console in this process: memory store, a client that behaves as a browser does where it matters."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from lakebed.console.routes import Console
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import Gateway, build
from lakebed.store.authority import claim
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.wiring.parts import sections

ADDRESS = "http://127.0.0.1"
OPERATOR = "0123456789abcdef-operator"
WATCHER = "0123456789abcdef-watcher"
KEYS = [
    {"name": "operator", "secret": OPERATOR, "rights": ["*"]},
    {"name": "watcher", "secret": WATCHER, "rights": ["console:read", "queue:read*"]},
]


class Browser:
    """Keeps cookies, names its origin, and knows the token of the page it last opened."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.token = ""

    async def open(self, path: str) -> httpx2.Response:
        answer = await self.client.get(path, headers={"accept": "text/html"}, follow_redirects=False)
        found = re.search(r'x-csrf-token": "([0-9a-f]{64})"', answer.text)
        self.token = found[1] if found else self.token
        return answer

    async def post(self, path: str, form: dict[str, str] | None = None, **headers: str) -> httpx2.Response:
        sent = {"origin": ADDRESS, "x-csrf-token": self.token, **headers}
        return await self.client.post(
            path, data=form or {}, headers={name: text for name, text in sent.items() if text}
        )

    async def sign_in(self, key: str, **form: str) -> httpx2.Response:
        return await self.post("/login", {"key": key, **form})


class Site:
    def __init__(self, app: Gateway, console: Console, context: Context, browser: Browser) -> None:
        self.app, self.console, self.context, self.browser = app, console, context, browser


@asynccontextmanager
async def site(store: Store | None = None, components: Any = (), **settings: Any) -> AsyncIterator[Site]:
    clock = SystemClock()
    flags = {"meta.backend": "memory", "store.url": "memory:"}
    flags |= {f"gateway.{name}": value for name, value in settings.items()}
    context = Context(
        node="node-1",
        settings=load(sections(), flags=flags),
        store=store or MemoryStore(clock=clock),
        clock=clock,
        ids=Ids(),
        metrics=Metrics(),
    )
    await claim(context, expected="")
    console = Console(context)
    app = build(context, [console, *components], authority="authority-1")
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url=ADDRESS, timeout=30) as client:
        try:
            yield Site(app, console, context, Browser(client))
        finally:
            await console.stop()
