"""Makes the context of a real process, from which every part is built."""

from __future__ import annotations

import os
import socket

from lakebed.core.context import Context, context_of
from lakebed.core.runtime import system_runtime
from lakebed.core.settings import Settings
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.settings import StoreSettings


def make_context(settings: Settings, *, role: str) -> Context:
    """The context of a real process: the system's clock and randomness, the settings' store. Opens no connection yet.

    The store checks its path before the first write: no write goes through an endpoint that ignores conditions.
    """
    runtime = system_runtime()
    node = f"{role}-{socket.gethostname()}-{os.getpid()}-{runtime.ids.token()[:8]}"
    store = GuardedStore(connect(settings.of(StoreSettings), runtime), runtime)
    return context_of(runtime, store, settings, node=node)
