"""Builds the meta store that the settings name."""

from __future__ import annotations

from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.meta.sqlite.backend import SqliteMeta
from lakebed.store.runtime import StoreRuntime


def connect(settings: MetaSettings, runtime: StoreRuntime) -> Meta:
    """The meta store of `meta.backend`. Opens no file and no connection yet."""
    if settings.backend == "memory":
        return MemoryMeta(runtime, MemoryState())
    if settings.backend == "sqlite":
        return SqliteMeta(runtime, settings.path, busy_timeout_s=settings.busy_timeout_s, sync=settings.sync)
    if settings.backend == "bucket":
        from lakebed.meta.bucket.backend import BucketMeta

        return BucketMeta(runtime, settings.prefix, layout="found")
    from lakebed.meta.oxia.backend import OxiaMeta  # loaded only where it is used: it needs an extra

    return OxiaMeta(
        runtime,
        settings.address,
        namespace=settings.namespace,
        timeout_s=settings.timeout_s,
        sorting=settings.sorting,
    )
