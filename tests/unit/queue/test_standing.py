"""How a queue stands, and a dead letter whose replay does not come to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import LakebedError, Unavailable
from lakebed.queue import paths
from lakebed.queue.appending import complete
from lakebed.queue.model import (
    BatchClaim,
    ConsumerManifest,
    DoneBatch,
    KeyValueEntry,
    PendingBatch,
    PendingView,
    ProducerManifest,
    status_of,
)
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo


def view(manifest: ProducerManifest) -> PendingView:
    manifest = complete(manifest)
    return PendingView(manifest.pending, manifest.entries, manifest.cleanups, manifest)


def test_ages_are_those_of_the_oldest_and_done_is_not_waiting() -> None:
    """Of each kind the longest waiting one counts; a claim is stale only after the timeout, in milliseconds."""
    producer = ProducerManifest(
        pending=("a", "b", "c", "d"),
        entries={name: PendingBatch(at, 10 * at, 1, at * 1000) for at, name in enumerate(("a", "b", "c", "d"), 1)},
        next_sequence=5,
    )
    consumer = ConsumerManifest(
        claimed={"b": 70_000, "c": 70_001},
        done=("a",),
        claims={"b": BatchClaim("one", 1, 2, 20_000), "c": BatchClaim("two", 2, 3, 30_000)},
        finished={"a": DoneBatch(1, 40_000), "z": DoneBatch(2, 60_000)},
    )

    found = status_of("q", view(producer), consumer, dead=7, timeout_ms=30_000, now_ms=100_001)

    assert (3, 90, 2, 1, 7) == (found.pending, found.bytes_waiting, found.claimed, found.done, found.dead)
    assert (98.001, 80.001, 60.001) == (found.pending_age_s, found.claimed_age_s, found.done_age_s)
    assert (1, ["one", "two"]) == (found.stale_claims, found.collectors)
    empty = status_of("q", view(ProducerManifest()), ConsumerManifest(), dead=0, timeout_ms=1, now_ms=5)
    assert (None, None, None) == (empty.pending_age_s, empty.claimed_age_s, empty.done_age_s)


class Refusing(MemoryStore):
    """Refuses to change the producer manifest while told to."""

    refusing = False

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        if self.refusing and key == "ingest/manifest.json":
            raise Unavailable("the store does not answer")
        return await super().replace(key, data, etag)


async def test_a_letter_whose_replay_could_not_be_enqueued_stays_with_its_data(
    open_queue: Callable[..., Queue], manual_clock: object, running: Callable[..., object]
) -> None:
    """Nothing is closed before the entries are in the queue again; the next replay enqueues them once."""
    store = Refusing(clock=manual_clock)  # type: ignore[arg-type]
    queue = open_queue(store=store)
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"bad")])
    await ingestor.flush()
    collector = queue.collector()
    for _ in range(queue.settings.rejections_max):
        batch = await collector.next_batch()
        assert batch is not None
        await collector.reject(batch, "no")
    letter_id = paths.dead_id(batch.sequence, batch.location)

    store.refusing = True
    with pytest.raises(LakebedError):
        await running(queue.dead_letters.replay(letter_id, "first"))  # type: ignore[misc]
    letter = await queue.dead_letters.show(letter_id)
    assert [b"bad"] == [entry.value for entry in await queue.dead_letters.entries(letter)]

    store.refusing = False
    await queue.dead_letters.replay(letter_id, "second")
    again = await collector.next_batch()
    assert again is not None
    assert [b"bad"] == [entry.value for entry in again.entries]
    await collector.ack(again)
    assert await collector.next_batch() is None
    await collector.close()


async def test_a_split_whose_pieces_were_stored_too_slowly_stores_them_again(
    open_queue: Callable[..., Queue], manual_clock: ManualClock
) -> None:
    """Two generations pass while the pieces are stored: they are stored again, and every entry comes once."""

    class Slow(MemoryStore):
        ageing: Queue | None = None

        async def create(self, key: str, data: bytes) -> ObjectInfo:
            made = await super().create(key, data)
            queue, self.ageing = self.ageing, None
            for _ in range(2 if queue is not None else 0):
                assert queue is not None
                await manual_clock.advance(queue.settings.horizon_s + 1.0)
                await queue.producer.age()
            return made

    store = Slow(clock=manual_clock)
    queue = open_queue(store=store)
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"a"), KeyValueEntry(b"k", b"b")])
    await ingestor.flush()
    collector = queue.collector()
    for number in range(queue.settings.rejections_max):
        batch = await collector.next_batch()
        assert batch is not None
        if number < queue.settings.rejections_max - 1:
            await collector.reject(batch, "no")
    store.ageing = open_queue(store=store)

    assert not await collector.reject(batch, "no")

    values = []
    while (piece := await collector.next_batch()) is not None:
        values += [entry.value for entry in piece.entries]
        await collector.ack(piece)
    await collector.close()
    assert [b"a", b"b"] == values


async def test_a_letter_is_closed_before_anything_of_it_is_deleted(
    open_queue: Callable[..., Queue], manual_clock: object
) -> None:
    """The record of what became of it cannot be stored: the letter and its data stay."""

    class Unwritten(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            if key.startswith(paths.closed_folder("ingest/manifest.json")):
                raise Unavailable("the store does not answer")
            return await super().create(key, data)

    queue = open_queue(store=Unwritten(clock=manual_clock), rejections_max=1)  # type: ignore[arg-type]
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"bad")])
    await ingestor.flush()
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    await collector.reject(batch, "no")
    letter_id = paths.dead_id(batch.sequence, batch.location)

    with pytest.raises(Unavailable):
        await queue.dead_letters.discard(letter_id, "not needed")

    letter = await queue.dead_letters.show(letter_id)
    assert [b"bad"] == [entry.value for entry in await queue.dead_letters.entries(letter)]
    await collector.close()
