"""What a part is given to work with: settings are data, the rest are objects. Built once per process by the wiring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec
from starlette.routing import BaseRoute

from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.settings import Settings
from lakebed.store.protocol import Store


class Context(msgspec.Struct, frozen=True):
    """The process a part lives in. `node` is unique per process and boot: it names owners and writers."""

    node: str
    settings: Settings
    store: Store
    clock: Clock
    ids: Ids
    metrics: Metrics


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
