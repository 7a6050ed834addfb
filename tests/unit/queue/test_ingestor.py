"""The ingestor: when it flushes, when it waits, and what a watcher may say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Corrupt, Invalid, OutcomeUnknown, TooLarge, Unavailable, Unprocessable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction
from lakebed.queue import codec
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import Closed, Durable, KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

Open = Callable[..., Queue]
NEVER_S = 1e6


def entry(name: str, size: int = 10) -> KeyValueEntry:
    return KeyValueEntry(name.encode(), b"v" * size)


class Moody(MemoryStore):
    """A store that refuses, loses answers or makes a verb wait, as told."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.refuse: set[str] = set()
        self.unsure: set[str] = set()
        self.lose = 0
        self.gate = asyncio.Event()
        self.stall = asyncio.Event()
        self.gate.set()
        self.stall.set()
        self.creates: list[str] = []

    def twin(self) -> MemoryStore:
        """The same objects, in a good mood: another process's view of them."""
        return MemoryStore(clock=self._clock, bucket=self.bucket)

    async def create(self, key: str, data: bytes) -> Any:
        self.creates.append(key)
        await self.gate.wait()
        self._mood("create")
        done = await super().create(key, data)
        await self.stall.wait()
        return done

    async def replace(self, key: str, data: bytes, etag: str) -> Any:
        self._mood("replace")
        done = await super().replace(key, data, etag)
        if self.lose:
            self.lose -= 1
            raise OutcomeUnknown("the answer was lost")
        return done

    def _mood(self, verb: str) -> None:
        if verb in self.refuse:
            raise Unavailable(f"{verb} is refused")
        if verb in self.unsure:
            raise OutcomeUnknown(f"{verb} may have been done")


@pytest.fixture
def moody(manual_clock: ManualClock) -> Moody:
    return Moody(manual_clock)


async def test_entries_are_durable_when_stored_and_enqueued(open_queue: Open, manual_clock: ManualClock) -> None:
    """The watcher is silent until the batch object is there and its location is in the manifest."""
    queue = open_queue()
    watcher = await queue.ingestor().ingest([entry("a"), entry("b")])
    before = watcher.result()

    await manual_clock.advance(0.1)

    durable = await watcher.await_durable()
    assert before is None
    assert watcher.result() == durable == Durable((await queue.producer.read()).pending[0], 1)
    assert codec.decode((await queue.store.get(durable.location)).data) == [entry("a"), entry("b")]


async def test_a_batch_waits_for_the_interval(open_queue: Open, manual_clock: ManualClock) -> None:
    """Entries that come within one interval of the first share a batch."""
    queue = open_queue(flush_interval_s=1.0)
    ingestor = queue.ingestor()
    first = await ingestor.ingest([entry("a")])
    await manual_clock.advance(0.9)
    second = await ingestor.ingest([entry("b")])
    between = first.result()

    await manual_clock.advance(0.1)

    assert between is None
    assert await first.await_durable() == await second.await_durable()


async def test_a_batch_that_exceeds_the_size_is_flushed_at_once(open_queue: Open) -> None:
    """The limit is loose: reaching it is not enough, exceeding it is."""
    queue = open_queue(flush_interval_s=NEVER_S, flush_size_bytes=100)
    ingestor = queue.ingestor()
    first = await ingestor.ingest([entry("a", 91)])
    await settle()
    reached = first.result()

    await ingestor.ingest([entry("b", 0)])

    assert reached is None
    assert (await first.await_durable()).sequence == 1


async def test_batches_are_stored_while_a_caller_goes_on_without_a_pause(open_queue: Open, moody: Moody) -> None:
    """A call that has nothing to wait for gives those that store a turn: they do not begin when the caller ends."""
    ingestor = open_queue(store=moody, flush_size_bytes=5, flush_interval_s=NEVER_S).ingestor()
    for number in range(20):
        await ingestor.ingest([entry(f"{number}")])

    assert moody.creates
    await ingestor.close()


async def test_ingest_waits_while_too_much_is_not_durable(open_queue: Open, moody: Moody) -> None:
    """Beyond the loose limit a call waits, and goes on when what was before it is durable."""
    queue = open_queue(store=moody, flush_interval_s=NEVER_S, max_unflushed_bytes=100)
    ingestor = queue.ingestor()
    moody.gate.clear()
    await ingestor.ingest([entry("a", 200)])
    waiting = asyncio.ensure_future(ingestor.ingest([entry("b")]))
    await settle()
    blocked, stored = waiting.done(), list(moody.creates)

    moody.gate.set()
    await waiting

    assert not blocked
    assert len(stored) == 1
    assert ingestor.unflushed_bytes == codec.size_of([entry("b")])


async def test_calls_with_one_key_that_wait_for_room_together_are_enqueued_once(open_queue: Open, moody: Moody) -> None:
    """The one that goes on first counts, and the other reports what became of it."""
    queue = open_queue(store=moody, flush_interval_s=NEVER_S, max_unflushed_bytes=100)
    ingestor = queue.ingestor()
    moody.gate.clear()
    await ingestor.ingest([entry("a", 200)])
    waiting = [asyncio.ensure_future(ingestor.ingest([entry("b")], key="order-7")) for _ in range(2)]
    await settle()
    blocked = [each.done() for each in waiting]

    moody.gate.set()
    watchers = await asyncio.gather(*waiting)
    await ingestor.close()

    first, second = [watcher.result() for watcher in watchers]
    enqueued = [pending.count async for _, pending in queue.producer.pending()]
    assert [False, False] == blocked
    assert isinstance(first, Durable)
    assert first == second
    assert [1, 1] == enqueued


async def test_a_call_that_waits_for_room_is_refused_when_the_ingestor_closes(open_queue: Open, moody: Moody) -> None:
    """Nothing would flush what it brings: its watcher would wait for ever."""
    ingestor = open_queue(store=moody, flush_interval_s=NEVER_S, max_unflushed_bytes=100).ingestor()
    moody.gate.clear()
    await ingestor.ingest([entry("a", 200)])
    waiting = asyncio.ensure_future(ingestor.ingest([entry("b")]))
    await settle()

    closing = asyncio.ensure_future(ingestor.close())
    await settle()
    moody.gate.set()
    await closing

    with pytest.raises(Closed):
        await waiting


async def test_a_caller_that_no_longer_waits_does_not_end_the_others_wait(open_queue: Open) -> None:
    """They watch one batch: it is enqueued, and whoever still waits is told."""
    ingestor = open_queue(flush_interval_s=NEVER_S).ingestor()
    watchers = [await ingestor.ingest([entry(name)]) for name in "ab"]
    gone, waiting = (asyncio.ensure_future(watcher.await_durable()) for watcher in watchers)
    await settle()

    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await ingestor.close()

    assert isinstance(await waiting, Durable)


async def test_close_flushes_and_ends(open_queue: Open) -> None:
    """Nothing that was taken in is left behind, and nothing more is taken."""
    queue = open_queue(flush_interval_s=NEVER_S)
    ingestor = queue.ingestor()
    watcher = await ingestor.ingest([entry("a")])

    await ingestor.close()
    await ingestor.close()

    assert isinstance(watcher.result(), Durable)
    with pytest.raises(Closed):
        await ingestor.ingest([entry("b")])


async def test_bad_input_is_refused_whole(open_queue: Open, memory: MemoryStore) -> None:
    """No entries, an entry over the limit, too many entries, too many bytes: a clear error, and nothing is stored."""
    ingestor = open_queue(entry_bytes_max=50, entries_max=3, ingest_bytes_max=120, flush_interval_s=NEVER_S).ingestor()

    with pytest.raises(Unprocessable):
        await ingestor.ingest([])
    with pytest.raises(TooLarge, match="an entry of 51 bytes"):
        await ingestor.ingest([entry("a"), entry("b", 50)])
    with pytest.raises(TooLarge, match="4 entries"):
        await ingestor.ingest([entry("a")] * 4)
    with pytest.raises(TooLarge, match="bytes in one call"):
        await ingestor.ingest([entry("a", 49)] * 3)
    await ingestor.close()

    assert [info async for info in memory.list("")] == []


async def test_batches_are_enqueued_in_order_though_stored_at_once(open_queue: Open, moody: Moody) -> None:
    """Several batches are under way together; the manifest has them in the order they came."""
    queue = open_queue(store=moody, flush_interval_s=NEVER_S, flush_size_bytes=1, uploads_max=3)
    ingestor = queue.ingestor()
    moody.gate.clear()
    watchers = [await ingestor.ingest([entry(f"e{n}")]) for n in range(5)]
    await settle()
    under_way = len(moody.creates)

    moody.gate.set()
    sequences = [(await watcher.await_durable()).sequence for watcher in watchers]

    assert under_way == 3
    assert sequences == [1, 2, 3, 4, 5]


async def test_ingestors_that_share_a_producer_share_writes(open_queue: Open, metrics: Metrics) -> None:
    """Sixteen ingestors of one process cost far fewer manifest writes than batches, and no conflict."""
    queue = open_queue(flush_interval_s=NEVER_S, flush_size_bytes=1)
    fleet = [queue.ingestor() for _ in range(16)]

    await asyncio.gather(*(ingestor.ingest([entry(f"i{n}")]) for n, ingestor in enumerate(fleet)))
    await asyncio.gather(*(ingestor.close() for ingestor in fleet))

    writes = metrics.value("lakebed_register_writes_total", register="queue_producer")
    assert metrics.value("lakebed_register_changes_total", register="queue_producer") == 16
    assert writes <= 4
    assert metrics.value("lakebed_register_conflicts_total", register="queue_producer") == 0


async def test_a_lost_answer_enqueues_nothing_twice(open_queue: Open, moody: Moody, running: Any) -> None:
    """The append was made and its answer lost: trying again finds it there."""
    queue = open_queue(store=moody)
    ingestor = queue.ingestor()
    await running((await ingestor.ingest([entry("a")])).await_durable())
    moody.lose = 1

    durable = await running((await ingestor.ingest([entry("b")])).await_durable())

    assert durable.sequence == 2
    assert len((await queue.producer.read()).pending) == 2


async def test_a_store_that_comes_back_in_time_loses_nothing(
    open_queue: Open, moody: Moody, manual_clock: ManualClock, running: Any
) -> None:
    """While it is away a batch is tried again; the watcher hears only the good end."""
    queue = open_queue(store=moody, flush_timeout_s=60.0)
    watcher = await queue.ingestor().ingest([entry("a")])
    moody.refuse = {"create", "replace"}
    await manual_clock.advance(10.0)
    meanwhile = watcher.result()

    moody.refuse = set()

    assert meanwhile is None
    assert (await running(watcher.await_durable())).sequence == 1


async def test_a_batch_that_cannot_be_stored_fails_its_watchers_alone(
    open_queue: Open, moody: Moody, running: Any
) -> None:
    """After the time for it is over the caller is told, and the next batch goes through."""
    queue = open_queue(store=moody, flush_timeout_s=5.0)
    ingestor = queue.ingestor()
    moody.refuse = {"create"}
    watcher = await ingestor.ingest([entry("a")])

    with pytest.raises(Unavailable):
        await running(watcher.await_durable())
    moody.refuse = set()

    assert isinstance(watcher.result(), Unavailable)
    assert ingestor.unflushed_bytes == 0
    assert (await running((await ingestor.ingest([entry("b")])).await_durable())).sequence == 1


@pytest.mark.parametrize("stored", [b"not a manifest", b'{"version": 9, "pending": ["x"]}', b'{"pending": 7}'])
async def test_a_manifest_that_is_not_understood_is_left_alone(
    open_queue: Open, memory: MemoryStore, running: Any, stored: bytes
) -> None:
    """Corrupt or of an unknown version: the watcher gets a clear error and not a byte of it changes."""
    queue = open_queue()
    await memory.create("ingest/manifest.json", stored)
    watcher = await queue.ingestor().ingest([entry("a")])

    with pytest.raises(Corrupt, match=r"ingest/manifest\.json"):
        await running(watcher.await_durable())

    assert (await memory.get("ingest/manifest.json")).data == stored


async def sweep_for_long(keeper: Queue, clock: ManualClock) -> list[str]:
    """Sweeps until what is stored now is over, as a keeper does while somebody stands still."""
    swept: list[str] = []
    for _ in range(3):
        await clock.advance(keeper.settings.horizon_s)
        swept += await keeper.sweeper.sweep_orphans()
    return swept


async def test_a_batch_that_was_swept_before_it_was_enqueued_is_stored_again(
    open_queue: Open, moody: Moody, manual_clock: ManualClock, running: Any
) -> None:
    """An ingestor that stalls between storing and enqueuing, for so long that its batch is swept, loses nothing."""
    stalled, keeper = open_queue(store=moody), open_queue(store=moody.twin(), horizon_s=5.0)
    moody.stall.clear()
    watcher = await stalled.ingestor().ingest([entry("a")])
    await manual_clock.advance(0.2)
    swept = await sweep_for_long(keeper, manual_clock)

    moody.stall.set()
    durable = await running(watcher.await_durable())

    assert swept == [moody.creates[0]]
    assert durable.location != moody.creates[0]
    assert codec.decode((await moody.get(durable.location)).data) == [entry("a")]


async def test_what_was_doubtful_for_too_long_is_called_unknown(
    open_queue: Open, moody: Moody, manual_clock: ManualClock, running: Any
) -> None:
    """An append that was neither answered nor can be recognised any more is not tried again: it might be the second."""
    stalled, keeper = open_queue(store=moody), open_queue(store=moody.twin(), horizon_s=5.0)
    await keeper.producer.age()
    moody.unsure = {"replace"}
    watcher = await stalled.ingestor().ingest([entry("a")])
    await manual_clock.advance(0.5)
    await sweep_for_long(keeper, manual_clock)

    moody.unsure = set()

    with pytest.raises(OutcomeUnknown, match="may or may not be enqueued"):
        await running(watcher.await_durable())


async def test_a_doubt_is_not_forgotten_for_a_later_refusal(
    open_queue: Open, moody: Moody, manual_clock: ManualClock, running: Any
) -> None:
    """Unknown first and refused last is unknown: a caller that hears anything else may send again without fear."""
    queue = open_queue(store=moody, flush_timeout_s=5.0)
    await queue.producer.age()
    moody.unsure = {"replace"}
    watcher = await queue.ingestor().ingest([entry("a")])
    await manual_clock.advance(1.0)
    moody.unsure, moody.refuse = set(), {"replace"}

    with pytest.raises(OutcomeUnknown):
        await running(watcher.await_durable())


async def test_a_single_ingestor_needs_only_settings_and_a_runtime(
    memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """As in the documentation of the queue."""
    runtime = StoreRuntime(clock=manual_clock, ids=Ids(), metrics=Metrics(), store=memory)
    ingestor = Ingestor(QueueSettings(), runtime)

    watcher = await ingestor.ingest([entry("a")])
    await ingestor.close()

    assert isinstance(watcher.result(), Durable)


def test_contradictory_settings_are_refused() -> None:
    """Batches that could not be read back, and limits of nothing."""
    with pytest.raises(Contradiction, match="batch_bytes_max"):
        QueueSettings.of({"flush_size_bytes": 2**29})
    with pytest.raises(Contradiction, match="uploads_max"):
        QueueSettings.of({"uploads_max": 0})
    with pytest.raises(Invalid):
        QueueSettings().of_queue("Not A Name")
    assert QueueSettings().of_queue("orders").manifest_path == "ingest/orders/manifest.json"
    assert QueueSettings().of_queue("default").manifest_path == "ingest/manifest.json"
