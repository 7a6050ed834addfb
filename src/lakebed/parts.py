"""Which parts there are and where each one plugs in. Adding a part is adding a row here and a folder beside.

Places are named, not imported, so that a command loads only what it uses. By the row's name a part also has, where it
needs them, `cli/<name>.py`, `sim/<name>.py`, `bench/<name>.py` and `demo/<name>.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import msgspec

from lakebed.context import Component, Context, Worker
from lakebed.settings import Section


class Part(msgspec.Struct, frozen=True):
    """Where a part plugs in, as `module:name`; an empty place is one the part does not have."""

    name: str
    about: str
    settings: str = ""  # a Section
    component: str = ""  # (Context) -> Component
    workers: str = ""  # (Context) -> Sequence[Worker]


PARTS: tuple[Part, ...] = (
    Part("store", "the seam to object storage", settings="lakebed.store.settings:StoreSettings"),
    Part("meta", "ordered keys the log coordinates through", settings="lakebed.meta.settings:MetaSettings"),
    Part("gateway", "HTTP in front of every part", settings="lakebed.gateway.settings:GatewaySettings"),
)


def sections() -> list[type[Section]]:
    return [cast(type[Section], resolve(part.settings)) for part in PARTS if part.settings]


def components(context: Context, names: Sequence[str] = ()) -> list[Component]:
    return [
        cast(Callable[[Context], Component], resolve(part.component))(context)
        for part in PARTS
        if part.component and (not names or part.name in names)
    ]


def workers(context: Context, names: Sequence[str] = ()) -> list[Worker]:
    return [
        worker
        for part in PARTS
        if part.workers and (not names or part.name in names)
        for worker in cast(Callable[[Context], Sequence[Worker]], resolve(part.workers))(context)
    ]


def resolve(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
