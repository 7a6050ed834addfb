"""Lakebed: a data lake on one bucket: ingest, log, queue, uploads, Spark pipeline, lifecycle rules.

`lakebed.connect()` opens a lake for programs and notebooks, `lakebed.connect_async()` for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakebed.lake.blocking import Lake, connect
    from lakebed.lake.connect import AsyncLake
    from lakebed.lake.connect import open_lake as connect_async

__version__ = "0.1.0"
__all__ = ["AsyncLake", "Lake", "__version__", "connect", "connect_async"]

_PLACES = {
    "connect": ("lakebed.lake.blocking", "connect"),
    "Lake": ("lakebed.lake.blocking", "Lake"),
    "connect_async": ("lakebed.lake.connect", "open_lake"),
    "AsyncLake": ("lakebed.lake.connect", "AsyncLake"),
}


def __getattr__(name: str) -> Any:
    """Loaded when it is used: the command and the agent import this package without it."""
    if name not in _PLACES:
        raise AttributeError(f"module 'lakebed' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
