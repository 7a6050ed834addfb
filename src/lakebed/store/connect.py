"""Builds the store that the settings name."""

from __future__ import annotations

from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.store.bucket import BucketStore
from lakebed.store.memory import MemoryStore
from lakebed.store.obstore_client import ObstoreClient, open_bucket
from lakebed.store.prefixed import PrefixedStore
from lakebed.store.protocol import Store
from lakebed.store.puts import Puts
from lakebed.store.settings import StoreSettings


def connect(settings: StoreSettings, *, clock: Clock, ids: Ids, metrics: Metrics) -> Store:
    """The store at `store.url`, seen below `store.prefix`. Opens no connection yet."""
    if settings.url.startswith("memory:"):
        store: Store = MemoryStore(clock=clock)
    else:
        puts = Puts(settings, clock=clock, ids=ids) if Puts.reach(settings) else None
        client = ObstoreClient(open_bucket(settings), puts)
        store = BucketStore(client, clock=clock, ids=ids, metrics=metrics)
    return PrefixedStore(store, settings.prefix) if settings.prefix else store
