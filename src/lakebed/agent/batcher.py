"""Checks samples, numbers them and writes them to disk in batches, within `batch_interval_s`, in the order they came.

A sample's number is its position in this boot's stream, fixed when it is put. A batch's bytes are made once; whatever
the disk does, the same bytes are offered again, so one number never means two samples. When the queue blocks, `put`
blocks, and with it the source: memory stays bounded by `BUFFER_BATCHES` batches. `checked` rejects a sample that would
make a collector reject its whole frame; `BadSampleReporter` counts and logs rejected samples.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from lakebed.agent.model import AppendResult, Frame
from lakebed.agent.waiting import Offload, in_thread, wait_for_any
from lakebed.batches.codec.frame import columns_of, encode
from lakebed.batches.model import LIMITS, BatchIdentity, Kind, Sample
from lakebed.core import logs
from lakebed.core.errors import Invalid, Overloaded, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime

STORE_RETRY_S = 0.5  # how soon a full queue or a failing disk is retried
BUFFER_BATCHES = 4  # batches that may wait in memory while the disk is busy; then sources wait


class BatchLimits(msgspec.Struct, frozen=True):
    bytes_max: int
    samples_max: int
    interval_s: float


class Batcher:
    """One per boot. `store` writes frames to disk and raises Overloaded or Unavailable when it cannot now."""

    def __init__(
        self,
        runtime: Runtime,
        agent_id: str,
        boot_id: str,
        limits: BatchLimits,
        store: Callable[[Sequence[Frame]], Awaitable[AppendResult]],
        *,
        offload: Offload = in_thread,
        trouble: Callable[[Overloaded | Unavailable | None], None] = lambda error: None,
    ) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._agent_id, self._boot_id, self._limits = agent_id, boot_id, limits
        self._store, self._clock, self._metrics = store, clock, metrics
        self._offload, self._trouble = offload, trouble
        self._samples: list[Sample] = []
        self._weights: list[int] = []
        self._weight = 0
        self._first_seq = 0  # number of self._samples[0]
        self._due_s = float("inf")
        self._stopping = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._settled = 0  # samples below this number are on disk, or counted as dropped
        self._settled_changed = asyncio.Event()
        self._frames: list[Frame] = []  # made, not yet stored

    @property
    def buffered(self) -> int:
        """Samples read but not yet on disk: what a kill -9 would take."""
        return self._next_seq - self._settled

    @property
    def settled(self) -> int:
        return self._settled

    @property
    def _next_seq(self) -> int:
        return self._first_seq + len(self._samples)

    async def put(self, samples: Sequence[Sample], *, within_s: float | None = None) -> int:
        """Takes checked samples, in order, waiting while the buffer is full. Returns the ticket for `durable`.

        `within_s` brings the next flush forward, for a source whose peer is waiting for the disk.
        """
        if not samples:
            return self._next_seq
        await self._room.wait()
        now = self._clock.monotonic_s()
        self._due_s = min(self._due_s, now + (self._limits.interval_s if within_s is None else within_s))
        weights = [weigh(sample) for sample in samples]
        self._samples += samples
        self._weights += weights
        self._weight += sum(weights)
        if self._weight >= BUFFER_BATCHES * self._limits.bytes_max:
            self._room.clear()
        self._changed.set()
        return self._next_seq

    def flush_now(self) -> None:
        """Flushes what is buffered now instead of when it is due."""
        self._due_s = self._clock.monotonic_s()
        self._changed.set()

    @property
    def has_room(self) -> bool:
        """Whether `put` would return at once."""
        return self._room.is_set()

    async def durable(self, ticket: int) -> None:
        """Returns when every sample up to the ticket is on disk (or was dropped, counted, by a full queue)."""
        while self._settled < ticket:
            self._settled_changed.clear()
            await self._settled_changed.wait()

    async def run(self) -> None:
        """Flushes until `stop`, then once more. Never gives up on a batch: a failing disk is retried."""
        while not (self._stopping and not self._samples and not self._frames):
            wait_s = self._due_s - self._clock.monotonic_s()
            if not self._frames and not self._full and not self._stopping and wait_s > 0:
                self._changed.clear()
                await wait_for_any(self._clock, wait_s if wait_s != float("inf") else None, self._changed)
                continue
            await self._flush()

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    @property
    def _full(self) -> bool:
        return self._weight >= self._limits.bytes_max or len(self._samples) >= self._limits.samples_max

    async def _flush(self) -> None:
        if not self._frames:
            if not self._samples:
                self._due_s = float("inf")
                return
            cuts = self._cuts()
            try:
                # Aside: encoding a large batch would hold up the sources for some milliseconds.
                self._frames = await self._offload(
                    lambda: [make_frame(identity, samples) for identity, samples in cuts]
                )
            except Invalid as error:  # a sample passed its check and cannot be encoded: stopping here would be worse
                self._give_up(cuts, error)
                return
        try:
            stored = await self._store(self._frames)
        except (Overloaded, Unavailable) as error:
            self._trouble(error)
            await self._clock.sleep(STORE_RETRY_S)
            return
        self._trouble(None)
        self._count(stored)
        self._settled = self._frames[-1].identity.seq_end + 1
        self._frames = []
        self._settled_changed.set()

    def _cuts(self) -> list[tuple[BatchIdentity, list[Sample]]]:
        """One batch, and those behind it that are full already: they share the folder's fsync."""
        cuts = [self._cut()]
        while self._full and len(cuts) < BUFFER_BATCHES:
            cuts.append(self._cut())
        return cuts

    def _cut(self) -> tuple[BatchIdentity, list[Sample]]:
        """Takes the next batch's worth out of the buffer: as much as fits the limits, at least one sample."""
        count, weight = 0, 0
        for size in self._weights[: self._limits.samples_max]:
            if count and weight + size > self._limits.bytes_max:
                break
            count, weight = count + 1, weight + size
        samples, self._samples = self._samples[:count], self._samples[count:]
        del self._weights[:count]
        self._weight -= weight
        start, self._first_seq = self._first_seq, self._first_seq + count
        if not self._samples:
            self._due_s = float("inf")
        if self._weight < BUFFER_BATCHES * self._limits.bytes_max:
            self._room.set()
        return BatchIdentity(self._agent_id, self._boot_id, start, start + count - 1), samples

    def _give_up(self, cuts: Sequence[tuple[BatchIdentity, list[Sample]]], error: Invalid) -> None:
        lost = sum(len(samples) for _, samples in cuts)
        self._metrics.counter("lakebed_agent_bad_samples_total").labels("batcher").inc(lost)
        logs.logger("agent").error("samples cannot be encoded and are lost", count=lost, error=error.message)
        self._settled = cuts[-1][0].seq_end + 1
        self._settled_changed.set()

    def _count(self, stored: AppendResult) -> None:
        self._metrics.counter("lakebed_agent_samples_total").inc(sum(f.identity.samples for f in self._frames))
        self._metrics.counter("lakebed_agent_batches_total").inc(len(stored.stored))
        if stored.dropped_batches:
            self._metrics.counter("lakebed_agent_dropped_batches_total").inc(stored.dropped_batches)
            self._metrics.counter("lakebed_agent_dropped_samples_total").inc(stored.dropped_samples)


def make_frame(identity: BatchIdentity, samples: Sequence[Sample]) -> Frame:
    data = encode(identity, columns_of(samples))
    return Frame(identity, data, hashlib.sha256(data).hexdigest())


def weigh(sample: Sample) -> int:
    """About what the sample takes in an uncompressed frame that repeats nothing."""
    return 32 + len(sample.metric) + sum(len(name) + len(value) + 8 for name, value in sample.labels.items())


TIME_NS_MAX = 2**63 - 1
REPORTED_MAX = 5  # bad items logged one by one in each report; the rest are counted


def checked(metric: str, time_ns: int, value: float, kind: Kind, labels: Mapping[str, str]) -> Sample:
    """The sample, or Invalid saying what no frame could carry. Labels with empty values are left out."""
    _name("metric", metric)
    if any(not value for value in labels.values()):
        labels = {name: value for name, value in labels.items() if value}
    if len(labels) > LIMITS.labels_per_series:
        raise Invalid(f"{len(labels)} labels are over the limit of {LIMITS.labels_per_series}")
    for name, text in labels.items():
        _name("label", name)
        if _size(text) > LIMITS.label_value_bytes:
            raise Invalid(f"the value of label {name!r} is longer than {LIMITS.label_value_bytes} bytes")
    if not 0 <= time_ns <= TIME_NS_MAX:
        raise Invalid(f"time {time_ns} ns is not between 1970 and 2262")
    return Sample(metric, time_ns, value, kind, labels)


class BadSampleReporter:
    """Bad items of one source: counted in a metric, the first few of each report logged with their place."""

    def __init__(self, source: str, metrics: Metrics) -> None:
        self._source, self._metrics, self._log = source, metrics, logs.logger("agent")

    def report(self, problems: Iterable[tuple[int, str]], *, origin: str = "", count: int = 0) -> int:
        """Takes (line or item number, what is wrong); returns how many there were: `count` if these are the first."""
        found = list(problems)
        count = max(count, len(found))
        if found:
            self._metrics.counter("lakebed_agent_bad_samples_total").labels(self._source).inc(count)
            first = [f"{place}: {why}" for place, why in found[:REPORTED_MAX]]
            self._log.warning("bad samples", source=self._source, origin=origin, count=count, first=first)
        return count


def _name(what: str, name: str) -> None:
    if not 1 <= _size(name) <= LIMITS.name_bytes:
        raise Invalid(f"a {what} name must be 1 to {LIMITS.name_bytes} bytes: {name[:40]!r}")


def _size(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"text is not Unicode: {error.reason}") from error
