"""What each part is built from: the process's context, and the protocols of components, workers and health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from lakebed.core.runs import RunLog
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Settings
from lakebed.core.trail import Trail
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

if TYPE_CHECKING:  # an agent loads no web framework for a type
    from starlette.routing import BaseRoute


class Context(StoreRuntime, frozen=True):
    """One process: store, clock, ids, metrics, settings. `node` is unique per process and start; it names lease holders
    and writers. `url` is where it is reached over HTTP; empty where it serves nothing.
    """

    node: str
    settings: Settings
    url: str = ""

    @property
    def trail(self) -> Trail:
        """Records operator actions, from the console, HTTP and commands alike."""
        return Trail(self, node=self.node)

    def run_log(self, part: str) -> RunLog:
        """Records the runs of a part's jobs, for the console's runs page."""
        return RunLog(self, part, node=self.node)


def context_of(runtime: Runtime, store: Store, settings: Settings, *, node: str) -> Context:
    return Context(
        clock=runtime.clock, ids=runtime.ids, metrics=runtime.metrics, store=store, settings=settings, node=node
    )


class Diagnosis(msgspec.Struct, frozen=True):
    """One line of `lakebed doctor`: the check, its verdict, what was found and how to fix it."""

    name: str
    verdict: Literal["pass", "warn", "fail"]
    seen: str
    fix: str = ""


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok", "degraded", "down"]
    detail: str = ""


class Component(Protocol):
    """A part inside a gateway. Made by `routes.component(context)`; started before its routes are served.

    `reads` change nothing and are all that a read-only gateway registers; `writes` are the rest. Both are plain
    Starlette routes that decode with msgspec, or mounts.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Sequence[BaseRoute]: ...

    @property
    def writes(self) -> Sequence[BaseRoute]: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Drains what was accepted, then stops serving."""

    async def health(self) -> Health:
        """From memory or one cheap request; returns quickly."""


class StatelessComponent:
    """A component with nothing to start, to drain or to check."""

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        return Health("ok")


class Worker(msgspec.Struct, frozen=True):
    """A role that runs beside the gateway until cancelled. After a failure it is logged and restarted."""

    name: str
    run: Callable[[], Awaitable[None]]
