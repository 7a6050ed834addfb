"""Makes the context of a real process, from which every part is built."""

from __future__ import annotations

import os
import socket

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.settings import StoreSettings


def make_context(settings: Settings, *, role: str) -> Context:
    """The context of a real process: the system's clock and randomness, the settings' store. Opens no connection yet.

    The store checks its path before the first write: no write goes through an endpoint that ignores conditions.
    """
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    node = f"{role}-{socket.gethostname()}-{os.getpid()}-{ids.token()[:8]}"
    store = connect(settings.of(StoreSettings), clock=clock, ids=ids, metrics=metrics)
    guarded = GuardedStore(store, clock=clock, ids=ids, metrics=metrics)
    return Context(node=node, settings=settings, store=guarded, clock=clock, ids=ids, metrics=metrics)
