from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.agent.batcher import TIME_NS_MAX, Batcher, BatchLimits, checked, make_frame, weigh
from lakebed.agent.model import AppendResult, DiskTrouble, Frame, QueueFull
from lakebed.agent.settings import BATCH_BYTES_MAX
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import BatchIdentity, Kind, Sample
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Invalid
from lakebed.core.metrics import Metrics
from support.agent_fakes import inline
from support.runtimes import runtime_of

INTERVAL_S = 5.0


def samples(count: int, *, start: int = 0) -> list[Sample]:
    return [Sample("m", 1_760_000_000_000_000_000, float(start + n)) for n in range(count)]


class Shelf:
    """A disk that keeps what it is given, or refuses for a while."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.offers: list[tuple[Frame, ...]] = []
        self.refusals: list[QueueFull | DiskTrouble] = []

    async def __call__(self, frames: Sequence[Frame]) -> AppendResult:
        self.offers.append(tuple(frames))
        if self.refusals:
            raise self.refusals.pop(0)
        self.frames += frames
        return AppendResult(())

    @property
    def values(self) -> list[float]:
        return [value for frame in self.frames for value in decode(frame.data).columns.values.tolist()]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(frame.identity.seq_start, frame.identity.seq_end) for frame in self.frames]


def batcher_on(disk_queue: Shelf, clock: ManualClock, *, bytes_max: int = 100_000, samples_max: int = 1000) -> Batcher:
    limits = BatchLimits(bytes_max, samples_max, INTERVAL_S)
    return Batcher(runtime_of(clock, metrics=Metrics()), "agent-a", "boot-1", limits, disk_queue, offload=inline)


names = st.text(min_size=1, max_size=80)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            names,
            st.integers(0, TIME_NS_MAX),
            st.floats(),
            st.sampled_from(Kind),
            st.dictionaries(names, st.text(max_size=300), max_size=5),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_passes_the_check_can_be_sent(said: list[tuple[str, int, float, Kind, dict[str, str]]]) -> None:
    """A sample that was taken never makes a frame that a collector refuses, and comes out of it as it went in."""
    taken = []
    for metric, time_ns, value, kind, labels in said:
        with contextlib.suppress(Invalid):
            taken.append(checked(metric, time_ns, value, kind, labels))
    if not taken:
        return

    made = make_frame(BatchIdentity("a", "b", 7, 6 + len(taken)), taken)
    rows = decode(made.data).columns.rows()

    assert [(row.metric, row.time_ns, row.kind, row.labels) for row in rows] == [
        (sample.metric, sample.time_ns, sample.kind, sample.labels) for sample in taken
    ]
    assert [repr(row.value) for row in rows] == [repr(sample.value) for sample in taken]


@pytest.mark.parametrize("labels", [0, 1, 64])
def test_the_largest_batch_of_the_shortest_names_keeps_within_a_frames_limits(labels: int) -> None:
    """No setting lets an agent make a frame that collectors refuse for its size."""
    samples: list[Sample] = []
    weight = 0
    while weight < BATCH_BYTES_MAX and len(samples) < 100_000:
        base = len(samples) * (labels + 1)
        said = {f"{base + n:x}": f"{base + n:x}v" for n in range(labels)}
        samples.append(checked(f"{len(samples):x}m", 1, 1.0, Kind.GAUGE, said))
        weight += weigh(samples[-1])

    made = make_frame(BatchIdentity("a", "b", 0, len(samples) - 1), samples)

    assert decode(made.data).columns.samples == len(samples)


async def test_nothing_waits_in_memory_longer_than_the_interval() -> None:
    """The interval counts from the oldest sample, however many come after it."""
    disk_queue, clock = Shelf(), ManualClock()
    batcher = batcher_on(disk_queue, clock)
    running = asyncio.ensure_future(batcher.run())

    await batcher.put(samples(1))
    await clock.advance(INTERVAL_S - 0.1)
    await batcher.put(samples(1, start=1))
    early = list(disk_queue.spans)
    await clock.advance(0.2)

    assert early == []
    assert disk_queue.spans == [(0, 1)]
    assert batcher.buffered == 0
    running.cancel()


async def test_numbers_are_contiguous_over_samples_and_batches_close_at_their_limits() -> None:
    """Every sample has one number, in order, and full batches do not wait for the interval."""
    disk_queue, clock = Shelf(), ManualClock()
    batcher = batcher_on(disk_queue, clock, samples_max=10)
    running = asyncio.ensure_future(batcher.run())

    await batcher.put(samples(25))
    await settle()
    full = list(disk_queue.spans)
    batcher.stop()
    await running

    assert full == [(0, 9), (10, 19)]
    assert disk_queue.spans == [(0, 9), (10, 19), (20, 24)]
    assert [float(n) for n in range(25)] == disk_queue.values


async def test_what_a_full_batch_leaves_behind_waits_no_longer_than_the_interval() -> None:
    """The rest of a burst is on disk when the interval of its samples is over, though nothing comes after it."""
    disk_queue, clock = Shelf(), ManualClock()
    batcher = batcher_on(disk_queue, clock, samples_max=10)
    running = asyncio.ensure_future(batcher.run())

    await batcher.put(samples(25))
    await clock.advance(INTERVAL_S + 0.1)

    assert disk_queue.spans == [(0, 9), (10, 19), (20, 24)]
    assert batcher.buffered == 0
    running.cancel()


async def test_the_byte_limit_closes_a_batch() -> None:
    """A batch holds as many samples as fit, and at least one."""
    disk_queue, clock = Shelf(), ManualClock()
    batcher = batcher_on(disk_queue, clock, bytes_max=3 * weigh(samples(1)[0]))
    batcher.stop()

    await batcher.put(samples(7))
    await batcher.run()

    assert disk_queue.spans == [(0, 2), (3, 5), (6, 6)]


async def test_a_refused_batch_is_offered_again_byte_for_byte() -> None:
    """A full queue or a failing disk never changes what a number represents, though more samples come meanwhile."""
    disk_queue, clock = Shelf(), ManualClock()
    disk_queue.refusals = [QueueFull("full"), DiskTrouble("EIO"), QueueFull("full")]
    batcher = batcher_on(disk_queue, clock)
    running = asyncio.ensure_future(batcher.run())

    await batcher.put(samples(3))
    await clock.advance(INTERVAL_S)
    await batcher.put(samples(2, start=3))
    await clock.advance(60)

    assert len(set(disk_queue.offers[:4])) == 1
    assert disk_queue.spans == [(0, 2), (3, 4)]
    assert disk_queue.values == [0.0, 1.0, 2.0, 3.0, 4.0]
    running.cancel()


async def test_a_stop_offers_a_refused_batch_again() -> None:
    """A disk that fails once during the stop takes everything at the next try."""
    disk_queue, clock = Shelf(), ManualClock()
    disk_queue.refusals = [DiskTrouble("EIO")]
    batcher = batcher_on(disk_queue, clock)
    running = asyncio.ensure_future(batcher.run())
    await batcher.put(samples(3))

    batcher.stop()
    await settle()
    early = running.done()
    await clock.advance(1)

    assert (False, True) == (early, running.done())
    assert [(0, 2)] == disk_queue.spans
    assert 0 == batcher.buffered


async def test_sources_wait_while_the_disk_does() -> None:
    """Memory is bounded: when the buffer is full, put does not return until there is room."""
    disk_queue, clock = Shelf(), ManualClock()
    disk_queue.refusals = [QueueFull("full")] * 20
    batcher = batcher_on(disk_queue, clock, bytes_max=10 * weigh(samples(1)[0]))
    running = asyncio.ensure_future(batcher.run())

    await batcher.put(samples(200))
    second = asyncio.ensure_future(batcher.put(samples(1, start=200)))
    await clock.advance(1)
    blocked = not second.done()
    await clock.advance(60)

    assert blocked
    assert second.done()
    assert [float(n) for n in range(201)] == disk_queue.values
    running.cancel()


async def test_durable_returns_only_after_the_disk_has_the_samples() -> None:
    """A source that acknowledges waits for its own samples, and can bring the flush forward."""
    disk_queue, clock = Shelf(), ManualClock()
    batcher = batcher_on(disk_queue, clock)
    running = asyncio.ensure_future(batcher.run())

    ticket = await batcher.put(samples(3), within_s=0.05)
    waiting = asyncio.ensure_future(batcher.durable(ticket))
    await clock.advance(0.04)
    early = waiting.done()
    await clock.advance(0.02)

    assert (early, waiting.done()) == (False, True)
    assert disk_queue.spans == [(0, 2)]
    running.cancel()


async def test_who_waits_for_samples_that_cannot_be_encoded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are lost and counted: a sender that waits for the disk must not wait for ever."""

    def refuse(identity: BatchIdentity, taken: Sequence[Sample]) -> Frame:
        raise Invalid("no frame can carry this")

    monkeypatch.setattr("lakebed.agent.batcher.make_frame", refuse)
    clock = ManualClock()
    batcher = batcher_on(Shelf(), clock)
    running = asyncio.ensure_future(batcher.run())
    waiting = asyncio.ensure_future(batcher.durable(await batcher.put(samples(3))))
    await settle()  # it waits before anything is flushed

    for _ in range(10):
        await clock.advance(1.0)

    assert (True, 0) == (waiting.done(), batcher.buffered)
    running.cancel()
