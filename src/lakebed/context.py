"""What a part is given to work with: settings are data, the rest are objects. Built once per process by the wiring."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec
from starlette.routing import BaseRoute

from lakebed.clock import Clock, SystemClock
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.trail import Trail


class Context(msgspec.Struct, frozen=True):
    """The process a part lives in. `node` is unique per process and boot: it names owners and writers."""

    node: str
    settings: Settings
    store: Store
    clock: Clock
    ids: Ids
    metrics: Metrics

    @property
    def trail(self) -> Trail:
        """Where what people do by hand is recorded, whichever way they do it."""
        return Trail(self.store, clock=self.clock, ids=self.ids, node=self.node)


def make_context(settings: Settings, *, role: str) -> Context:
    """The context of a real process: the system's clock and chance, the settings' store. Opens no connection yet.

    The store checks its path before the first write: nobody writes through an endpoint that ignores conditions.
    """
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    node = f"{role}-{socket.gethostname()}-{os.getpid()}-{ids.token()[:8]}"
    store = connect(settings.of(StoreSettings), clock=clock, ids=ids, metrics=metrics)
    guarded = GuardedStore(store, clock=clock, ids=ids, metrics=metrics)
    return Context(node=node, settings=settings, store=guarded, clock=clock, ids=ids, metrics=metrics)


class Diagnosis(msgspec.Struct, frozen=True):
    """One line of `lakebed doctor`: what was looked at, the verdict, what was seen and how to mend it."""

    name: str
    verdict: Literal["pass", "warn", "fail"]
    seen: str
    fix: str = ""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok", "degraded", "down"]
    detail: str = ""


class Component(Protocol):
    """A part inside a gateway. Made by `routes.component(context)`; started before its routes are served.

    `reads` change nothing and are all that a read-only gateway registers; `writes` are the rest. Hot routes are plain
    Starlette routes that decode with msgspec; others may come from a FastAPI router.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Sequence[BaseRoute]: ...

    @property
    def writes(self) -> Sequence[BaseRoute]: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Drains what was accepted; nothing is served any more."""

    async def health(self) -> Health:
        """Answers from what is known or one cheap request; never waits long."""


class Worker(msgspec.Struct, frozen=True):
    """A role that runs beside the gateway until cancelled. A failure is logged and it is started again."""

    name: str
    run: Callable[[], Awaitable[None]]
