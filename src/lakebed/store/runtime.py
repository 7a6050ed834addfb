"""A bucket with clock, ids and metrics: what every role on a bucket is given."""

from __future__ import annotations

from lakebed.core.runtime import Runtime
from lakebed.store.protocol import Store


class StoreRuntime(Runtime, frozen=True):
    """`lakebed.core.context.Context` is one, so a part passes its context to its roles."""

    store: Store

    def on(self, store: Store) -> StoreRuntime:
        """The same on another store, for example one below a prefix or with other credentials."""
        return StoreRuntime(clock=self.clock, ids=self.ids, metrics=self.metrics, store=store)
