"""What a worker shows of the state it has read: modes, degradations, blockers, events. Asks the store for nothing.

Each showing replaces the one before as a whole, so what has left a policy or was resumed is not shown for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakebed.lifecycle.model import Degraded, Mode, StreamKind
from lakebed.lifecycle.reader import Sweep
from lakebed.lifecycle.state import BucketState, Troubles
from lakebed.metrics import Metrics


class Gauges:
    def __init__(self, metrics: Metrics) -> None:
        self._modes = metrics.gauge("lakebed_lifecycle_action_mode")
        self._degraded = metrics.gauge("lakebed_lifecycle_degraded")
        self._blocked = metrics.gauge("lakebed_lifecycle_blocked_streams")
        self._events = metrics.counter("lakebed_lifecycle_events_total")

    def states(self, states: Mapping[str, BucketState]) -> None:
        self._modes.clear()
        self._degraded.clear()
        for bucket, state in states.items():
            for action, known in state.actions.items():
                mode = Mode.DISABLED if known.paused else known.mode
                self._modes.labels(bucket=bucket, action=action, mode=mode.value).set(1)
                if known.degraded is not Degraded.NONE:
                    self._degraded.labels(bucket=bucket, action=action, reason=known.degraded.value).set(1)

    def troubles(self, troubles: Troubles) -> None:
        for kind in StreamKind:
            held = sum(blocker.stream.kind is kind for blocker in troubles.blockers.values())
            self._blocked.labels(stream_kind=kind.value).set(held)

    def sweeps(self, sweeps: Iterable[Sweep]) -> None:
        for sweep in sweeps:
            stream = "predicate" if sweep.delay_ns is None else f"{sweep.delay_ns // 1_000_000_000}s"
            self._events.labels(stream=stream).inc(sweep.read)
