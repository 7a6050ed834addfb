"""A gateway in this process: memory store, one part that can do and raise anything, a client that needs no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.clock import Clock, SystemClock
from lakebed.core.context import Component, Context, Health
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import Gateway, build
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections

ADDRESS = "http://127.0.0.1"


class Sample:
    """A part for tests: `/sample` reads, posting to it writes, `/raise` raises what it is given."""

    def __init__(self, name: str = "sample", *, more: Sequence[BaseRoute] = ()) -> None:
        self.name = name
        self.lived: list[str] = []
        self.told: Health | Exception = Health("ok")
        self.error: Exception = RuntimeError("nothing was told")
        self.reads: Sequence[BaseRoute] = (
            Route("/sample", self._read),
            Route("/sample/{thing}/part", self._read),
            Route("/raise", self._raise),
            *more,
        )
        self.writes: Sequence[BaseRoute] = (Route("/sample", self._echo, methods=["POST"]),)

    async def start(self) -> None:
        self.lived.append("started")

    async def stop(self) -> None:
        self.lived.append("stopped")

    async def health(self) -> Health:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    async def _read(self, request: Request) -> Response:
        """Who asks, and for what."""
        return Response(f"{request.state.principal.name} {request.path_params}")

    async def _raise(self, request: Request) -> Response:
        raise self.error

    async def _echo(self, request: Request) -> Response:
        """Sends the body back."""
        request.state.principal.demand("sample:write")
        return Response(await request.body())


def context_with(clock: Clock | None = None, **gateway: Any) -> Context:
    clock = clock or SystemClock()
    flags = {"meta.backend": "memory"} | {f"gateway.{name}": value for name, value in gateway.items()}
    settings = load(sections(), flags=flags)
    return Context(
        node="node-1",
        settings=settings,
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )


@pytest.fixture
def part() -> Sample:
    return Sample()


@pytest.fixture
def make(part: Sample) -> Callable[..., Gateway]:
    """Builds a gateway with settings given by name."""

    def build_with(components: Sequence[Component] | None = None, **gateway: Any) -> Gateway:
        clock = gateway.pop("clock", None)
        chosen = [part] if components is None else components
        return build(context_with(clock, **gateway), chosen, authority="authority-1")

    return build_with


@asynccontextmanager
async def client_of(app: Any, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url=ADDRESS, **options) as client:
        yield client


@pytest.fixture
def ask() -> Callable[..., Any]:
    """One request to an app: `await query(app, "GET", "/path", …)`."""

    async def once(app: Any, method: str, path: str, **options: Any) -> httpx2.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **options)

    return once
