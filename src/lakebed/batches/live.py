"""Live state: the batches accepted lately, in memory, bounded by bytes and age. Never a truth of its own.

It holds what this collector won, and what it rebuilt by reading accepted manifests. An identity is held at most once,
so a duplicate can never be counted twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from lakebed.batches import paths
from lakebed.clock import Clock
from lakebed.frame.model import Batch, Identity
from lakebed.metrics import Metrics

ROW_OVERHEAD_BYTES = 2048  # what a batch costs beside its columns: dictionaries and objects


class Live:
    """The last batches, oldest acceptance first out."""

    def __init__(self, *, bytes_max: int, window_s: float, clock: Clock, metrics: Metrics) -> None:
        self._bytes_max, self._window_ns, self._clock = bytes_max, round(window_s * 1e9), clock
        self._held: OrderedDict[Identity, tuple[int, int, Batch]] = OrderedDict()
        self._ids: set[str] = set()
        self._bytes = 0
        self._gauge = metrics.gauge("lakebed_batches_live_bytes")
        self._batches = metrics.gauge("lakebed_batches_live_batches")
        self.evicted_through_ns = 0  # acceptances up to here may be missing

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._held

    def holds(self, manifest_id: str) -> bool:
        """Whether the batch of this by-time entry is held: asked without reading the entry."""
        return manifest_id in self._ids

    def __len__(self) -> int:
        return len(self._held)

    def add(self, accepted_at_ns: int, batch: Batch) -> bool:
        """Holds the batch unless it is held already; evicts what is over the bounds."""
        if batch.identity in self._held:
            return False
        size = batch_bytes(batch)
        self._held[batch.identity] = (accepted_at_ns, size, batch)
        self._ids.add(paths.manifest_id(batch.identity, accepted_at_ns))
        self._bytes += size
        self._evict()
        self._gauge.set(self._bytes)
        self._batches.set(len(self._held))
        return True

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    def batches(self) -> Iterator[tuple[Identity, Batch]]:
        self._evict()
        for identity, (_, _, batch) in self._held.items():
            yield identity, batch

    def accepted(self) -> Iterator[tuple[str, Batch]]:
        """Each batch held, with its name in the index by time."""
        self._evict()
        for identity, (at_ns, _, batch) in self._held.items():
            yield paths.manifest_id(identity, at_ns), batch

    def _evict(self) -> None:
        horizon_ns = self._clock.now_ns() - self._window_ns
        while self._held:
            identity = next(iter(self._held))
            at_ns, size, _ = self._held[identity]
            if self._bytes <= self._bytes_max and at_ns >= horizon_ns:
                return
            del self._held[identity]
            self._ids.discard(paths.manifest_id(identity, at_ns))
            self._bytes -= size
            self.evicted_through_ns = max(self.evicted_through_ns, at_ns)


def batch_bytes(batch: Batch) -> int:
    columns = batch.columns
    return int(columns.times_ns.nbytes * 3 + len(columns.strings) * 80) + ROW_OVERHEAD_BYTES
