"""Builds the meta store that the settings name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.meta.sqlite import SqliteMeta
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store


def connect(settings: MetaSettings, *, store: Store, clock: Clock, ids: Ids, metrics: Metrics) -> Meta:
    """The meta store of `meta.backend`. Opens no file and no connection yet."""
    if settings.backend == "memory":
        return MemoryMeta(MemoryState(), clock=clock, ids=ids)
    if settings.backend == "sqlite":
        return SqliteMeta(
            settings.path,
            clock=clock,
            ids=ids,
            metrics=metrics,
            busy_timeout_s=settings.busy_timeout_s,
            sync=settings.sync,
        )
    made = import_module(f"lakebed.meta.{settings.backend}").connect(
        settings, store=store, clock=clock, ids=ids, metrics=metrics
    )
    return cast(Meta, made)  # these two load only where they are used: oxia needs an extra
