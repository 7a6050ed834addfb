"""What lifecycle shows in numbers, set in one place: the names and labels are those of the metrics table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lakebed.core.metrics import Metrics
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.model import Degraded, DeleteOutcome, Mode, StreamKind
from lakebed.lifecycle.state import BlockerState, BucketLifecycle

_ERRORS = (DeleteOutcome.TRANSPORT_ERROR, DeleteOutcome.FATAL_EVENT_ERROR)


def stream_name(delay_ns: int | None) -> str:
    """How a sweep is called wherever numbers are shown."""
    return "predicate" if delay_ns is None else f"{delay_ns / 1_000_000_000:g}s"


class Gauges:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._blocked: set[tuple[str, str]] = set()
        self._shown: dict[str, set[str]] = {}
        self._aside: set[str] = set()
        self._faulty: set[str] = {""}
        self._lagging: set[str] = set()

    # Deletes.

    def evaluated(self, ref: ActionRef, entries: int) -> None:
        self._count("lakebed_lifecycle_evaluated_total", ref).inc(entries)

    def verdict(self, ref: ActionRef, outcome: DeleteOutcome) -> None:
        verdicts = self._metrics.counter("lakebed_lifecycle_verdicts_total")
        verdicts.labels(bucket=ref.bucket, kind=ref.key.kind.value, outcome=outcome.value).inc()
        if outcome is DeleteOutcome.DELETED:
            self._count("lakebed_lifecycle_expired_total", ref).inc()
        elif outcome is DeleteOutcome.SKIPPED_OBJECT_LOCK:
            self._count("lakebed_lifecycle_skipped_object_lock_total", ref).inc()
        elif outcome in _ERRORS:
            errors = self._metrics.counter("lakebed_lifecycle_errors_total")
            errors.labels(bucket=ref.bucket, action=str(ref.key), kind=outcome.value).inc()

    def metadata_only(self, ref: ActionRef) -> None:
        self._count("lakebed_lifecycle_metadata_only_total", ref).inc()

    def saturation(self, part: float) -> None:
        self._metrics.gauge("lakebed_lifecycle_delete_saturation").set(part)

    def took(self, seconds: float) -> None:
        self._metrics.histogram("lakebed_lifecycle_delete_seconds").observe(seconds)

    # Streams.

    def lag(self, delay_ns: int | None, behind_ns: int, *, high: bool) -> None:
        """`behind_ns`: from the cursor to the latest event that is due."""
        name = stream_name(delay_ns)
        behind_s = max(0, behind_ns) / 1e9
        self._metrics.gauge("lakebed_lifecycle_watermark_lag_seconds").labels(stream=name).set(behind_s)
        self._metrics.gauge("lakebed_lifecycle_lag_warning").labels(stream=name).set(high)
        self._lagging.add(name)
        if delay_ns is None:
            self._metrics.gauge("lakebed_lifecycle_predicate_lag_seconds").set(behind_s)

    def lags_only(self, delays_ns: Iterable[int | None]) -> None:
        """Streams that no rule needs any more have no lag."""
        gone = self._lagging - set(map(stream_name, delays_ns))
        for name in gone:
            self._metrics.gauge("lakebed_lifecycle_watermark_lag_seconds").remove(name)
            self._metrics.gauge("lakebed_lifecycle_lag_warning").remove(name)
        if stream_name(None) in gone:
            self._metrics.gauge("lakebed_lifecycle_predicate_lag_seconds").set(0)
        self._lagging -= gone

    def retention(self, retention_ns: int | None) -> None:
        self._metrics.gauge("lakebed_lifecycle_log_retention_seconds").set((retention_ns or 0) / 1e9)

    def blockers(self, blockers: BlockerState) -> None:
        """One sample per kind and bucket that has or had blockers, and one per kind when there are none."""
        found = Counter((one.stream.kind.value, one.bucket) for one in blockers.blockers.values())
        self._blocked |= set(found) | {(kind.value, "") for kind in StreamKind}
        gauge = self._metrics.gauge("lakebed_lifecycle_blocked_streams")
        for kind, bucket in self._blocked:
            gauge.labels(stream_kind=kind, bucket=bucket).set(found[(kind, bucket)])

    def isolated(self, blockers: BlockerState) -> None:
        """One sample per bucket that has or had something isolated, and one without a bucket when there are none."""
        found = Counter(one.bucket for one in blockers.isolated.values())
        self._aside |= {*found, ""}
        gauge = self._metrics.gauge("lakebed_lifecycle_isolated")
        for bucket in self._aside:
            gauge.labels(bucket=bucket).set(found[bucket])

    # Actions.

    def problems(self, counts: Mapping[str, int]) -> None:
        """Problems of stored policies, by bucket; 0 where there were some and are none."""
        self._faulty |= set(counts)
        gauge = self._metrics.gauge("lakebed_lifecycle_policy_problems")
        for bucket in self._faulty:
            gauge.labels(bucket=bucket).set(counts.get(bucket, 0))

    def actions_of(self, states: Mapping[str, BucketLifecycle]) -> None:
        """Those of every bucket that has a policy; the others have no sample any more."""
        for bucket in set(self._shown) - set(states):
            self.actions(bucket, BucketLifecycle())
            del self._shown[bucket]
        for bucket, state in states.items():
            self.actions(bucket, state)

    def actions(self, bucket: str, state: BucketLifecycle) -> None:
        """1 for the mode and the reason an action has, 0 for the others; an action that is gone has none."""
        modes = self._metrics.gauge("lakebed_lifecycle_action_mode")
        reasons = self._metrics.gauge("lakebed_lifecycle_degraded")
        for name, action in state.actions.items():
            mode = Mode.DISABLED if action.paused else action.mode
            reason = Degraded.OPERATOR_PAUSED if action.paused else action.degraded
            for one in Mode:
                modes.labels(bucket=bucket, action=name, mode=one.value).set(one is mode)
            for why in Degraded:
                if why is not Degraded.NONE:
                    reasons.labels(bucket=bucket, action=name, reason=why.value).set(why is reason)
        for name in self._shown.get(bucket, set()) - set(state.actions):
            for one in Mode:
                modes.remove(bucket, name, one.value)
            for why in Degraded:
                if why is not Degraded.NONE:
                    reasons.remove(bucket, name, why.value)
        self._shown[bucket] = set(state.actions)

    def _count(self, name: str, ref: ActionRef) -> Any:
        return self._metrics.counter(name).labels(bucket=ref.bucket, action=str(ref.key))
