"""What a queue leaves alone and what it gives back: other manifests, dropped collectors, rejected and dead batches."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, LakebedError, NotFound, OutcomeUnknown, TooLarge, Unavailable
from lakebed.queue import commands, paths
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from lakebed.store.model import Written

Open = Callable[..., Queue]
Run = Callable[[Awaitable[Any]], Awaitable[Any]]


async def put(queue: Queue, *values: str) -> None:
    """One batch for each value."""
    ingestor = queue.ingestor()
    for value in values:
        await ingestor.ingest([KeyValueEntry(b"k", value.encode())])
        await ingestor.flush()


async def drained(queue: Queue) -> list[str]:
    collector = queue.collector()
    found = []
    while (batch := await collector.next_batch()) is not None:
        found += [entry.value.decode() for entry in batch.entries]
        await collector.ack(batch)
    await collector.close()
    return found


async def aged(queue: Queue, clock: ManualClock, rounds: int) -> None:
    for _ in range(rounds):
        await clock.advance(queue.settings.horizon_s)
        await queue.sweeper.sweep_orphans()


async def test_two_manifests_over_one_data_prefix_lose_nothing(open_queue: Open, manual_clock: ManualClock) -> None:
    """A queue whose generations are over sweeps its own folders only, whatever else is stored beside them."""
    one, other = open_queue(manifest_path="meta/a.json"), open_queue(manifest_path="meta/b.json")
    await put(one, "a")
    await put(other, "b")
    await aged(one, manual_clock, 5)
    await put(other, "c")

    await aged(one, manual_clock, 5)

    assert (["b", "c"], ["a"]) == (await drained(other), await drained(one))


async def test_the_backlog_of_a_renamed_manifest_survives_the_new_ones_sweeps(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """The setting is changed in place: the old manifest still finds all of its batches."""
    await put(open_queue(), "old")
    renamed = open_queue(manifest_path="ingest/renamed.json")
    await put(renamed, "new")
    await aged(renamed, manual_clock, 6)

    assert ["old"] == await drained(open_queue())


async def test_folders_without_an_owner_are_never_swept(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """They were written before folders named their manifest: several manifests may refer to what is in them."""
    await memory.create("ingest/00000000/x.batch", b"1")
    queue = open_queue()
    await aged(queue, manual_clock, 6)

    assert b"1" == (await memory.get("ingest/00000000/x.batch")).data


class Losing(MemoryStore):
    """Fails to store a batch, or to say whether the manifest was replaced, when told to."""

    lost: tuple[int, ...] = ()
    unknown = False
    batches = 0

    async def create(self, key: str, data: bytes) -> Written:
        if paths.is_batch(key):
            self.batches += 1
            if self.batches in self.lost:
                raise LakebedError("the disk is full")
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> Written:
        if self.unknown and key == "ingest/manifest.json":
            raise OutcomeUnknown("no response")
        return await super().replace(key, data, etag)


def lines(count: int) -> Iterator[KeyValueEntry]:
    return (KeyValueEntry(b"k", b"%d" % number) for number in range(count))


async def test_a_put_counts_what_became_durable_and_what_did_not(
    open_queue: Open, manual_clock: ManualClock, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is awaited: a lost one in the middle is an error with the counts."""
    monkeypatch.setattr(commands, "LINES_AT_ONCE", 1)
    store = Losing(clock=manual_clock)
    store.lost = (2, 3)
    queue = open_queue(store=store, flush_size_bytes=1)

    with pytest.raises(LakebedError, match="3 entries are durable, 2 are not, 0 may or may not be"):
        await running(commands._put(queue, lines(5)))

    assert ["0", "3", "4"] == await drained(queue)


async def test_a_put_with_a_line_that_is_refused_counts_what_was_before_it(
    open_queue: Open, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines before it become durable and are counted; it and the lines after it are not sent."""
    monkeypatch.setattr(commands, "LINES_AT_ONCE", 2)
    queue = open_queue(entry_bytes_max=10)
    entries = [KeyValueEntry(b"k", value) for value in (b"0", b"1", b"2", b"three, which is too long", b"4")]

    with pytest.raises(TooLarge, match=r"2 entries are durable, 2 are not, 0 may or may not be.*an entry of 25 bytes"):
        await running(commands._put(queue, iter(entries)))

    assert ["0", "1"] == await drained(queue)


async def test_a_put_whose_outcome_is_unknown_says_so(
    open_queue: Open, manual_clock: ManualClock, running: Run
) -> None:
    """What may be in the queue is counted apart from what is not."""
    store = Losing(clock=manual_clock)
    queue = open_queue(store=store, flush_timeout_s=1.0)
    await put(queue, "first")
    store.unknown = True

    with pytest.raises(OutcomeUnknown, match="0 entries are durable, 0 are not, 2 may or may not be"):
        await running(commands._put(queue, lines(2)))


async def test_a_dropped_collector_stops_its_heartbeat(open_queue: Open, manual_clock: ManualClock) -> None:
    """Nobody closed it: its claims go stale, and another takes over after the timeout."""
    await put(open_queue(), "a")
    dropped = open_queue(heartbeat_timeout_s=30.0).collector()
    assert await dropped.next_batch() is not None
    del dropped
    gc.collect()

    await manual_clock.advance(41.0)  # one heartbeat may have been on its way

    assert ["a"] == await drained(open_queue(heartbeat_timeout_s=30.0))


async def test_a_collector_that_is_dropped_between_two_heartbeats_stops_them(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """The task that has sent one does not keep the collector alive while it waits for the next."""
    await put(open_queue(), "a")
    dropped = open_queue(heartbeat_timeout_s=30.0).collector()
    assert await dropped.next_batch() is not None
    await manual_clock.advance(11.0)
    del dropped
    gc.collect()

    for _ in range(8):
        await manual_clock.advance(5.0)

    assert ["a"] == await drained(open_queue(heartbeat_timeout_s=30.0))


async def test_a_collector_gives_its_claims_back_at_the_end_of_its_context(open_queue: Open) -> None:
    """Others need not wait for a timeout."""
    await put(open_queue(), "a", "b")
    async with open_queue().collector() as collector:
        assert await collector.next_batch() is not None

    assert ["a", "b"] == await drained(open_queue())


async def test_a_rejected_batch_comes_back_after_a_delay_that_doubles(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """In an ordered queue, what is behind it waits with it; the delay has a limit."""
    queue = open_queue(redelivery_delay_s=2.0, redelivery_delay_max_s=7.0, rejections_max=99)
    await put(queue, "a", "b")
    collector = queue.collector()
    delays = []
    for _ in range(4):
        batch = await collector.next_batch()
        assert batch is not None and b"a" == batch.entries[0].value
        await collector.reject(batch, "the database is away")
        waited = 0.0
        while await queue.collector("looks").next_batch() is None:
            await manual_clock.advance(0.5)
            waited += 0.5
        delays.append(waited)
        await manual_clock.advance(41.0)  # the looking collector is dropped: its claim goes stale
    await collector.close()

    assert [2.0, 4.0, 7.0, 7.0] == delays


async def test_a_rejection_gives_back_what_was_claimed_behind_it(open_queue: Open) -> None:
    """In an ordered queue: another collector may take the rejected batch and all that follows."""
    queue = open_queue(redelivery_delay_s=1e-6, prefetch_batches=3)
    await put(queue, "a", "b", "c")
    first = queue.collector()
    batch = await first.next_batch()
    assert batch is not None
    await first.reject(batch, "no")

    assert {} == (await queue.consumer.read()).claimed
    assert ["a", "b", "c"] == await drained(open_queue())
    await first.close()


async def test_a_batch_that_was_missing_and_came_back_has_a_minute_again(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """Only a minute without it counts: what was seen since starts anew."""

    class Blinking(MemoryStore):
        away = False

        async def get(self, key: str) -> Any:
            if self.away and key.endswith(".batch"):
                raise NotFound("not there")
            return await super().get(key)

    store = Blinking(clock=manual_clock)
    queue = open_queue(store=store)
    await put(queue, "a")
    collector = queue.collector()
    store.away = True
    with pytest.raises(Unavailable):
        await collector.next_batch()
    store.away = False
    await manual_clock.advance(59.0)
    batch = await collector.next_batch()
    assert batch is not None
    await collector.reject(batch, "later")
    store.away = True
    await manual_clock.advance(2.0)
    with pytest.raises(Unavailable):
        await collector.next_batch()
    store.away = False

    assert await collector.next_batch() is not None
    assert 0 == await queue.dead_letters.count()
    await collector.close()


async def test_a_short_outage_of_the_consumers_database_makes_no_dead_letters(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """With the defaults, a consumer that rejects everything for five minutes loses nothing to the dead letters."""
    queue = open_queue(redelivery_delay_s=1.0)
    await put(queue, "a", "b")
    back_s = manual_clock.monotonic_s() + 300.0
    collector, seen = queue.collector(), []
    for _ in range(3000):
        batch = await collector.next_batch()
        if batch is None:
            await manual_clock.advance(0.5)
        elif manual_clock.monotonic_s() < back_s:
            await collector.reject(batch, "the database is away")
        else:
            seen.append(batch.entries[0].value)
            await collector.ack(batch)
        if len(seen) == 2:
            break
    await collector.close()

    assert ([b"a", b"b"], 0) == (seen, await queue.dead_letters.count())


async def test_a_rejected_batch_does_not_hold_up_others_where_order_is_given_up(open_queue: Open) -> None:
    """With parallel collectors, the next ones are delivered while it waits."""
    queue = open_queue(parallel=True, redelivery_delay_s=60.0, prefetch_batches=1)
    await put(queue, "a", "b")
    collector = queue.collector()
    first = await collector.next_batch()
    assert first is not None
    await collector.reject(first, "no")

    second = await collector.next_batch()

    assert second is not None and b"b" == second.entries[0].value
    await collector.close()


async def buried(queue: Queue, value: str = "bad") -> str:
    await put(queue, value)
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    letter = await queue.dead_letters.bury(batch.claimed, await queue.consumer.reject(batch.claimed, "no", last=True))
    await collector.close()
    return letter.id


class Dies(Exception):
    """The process ends here."""


class Mortal(MemoryStore):
    """Dies before the n-th write from now on, again and again until n is 0."""

    left = 0

    def _step(self) -> None:
        if self.left:
            self.left -= 1
            if not self.left:
                raise Dies

    async def create(self, key: str, data: bytes) -> Written:
        self._step()
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> Written:
        self._step()
        return await super().replace(key, data, etag)

    async def delete(self, key: str) -> None:
        self._step()
        await super().delete(key)


@pytest.mark.parametrize("writes", range(1, 9))
@pytest.mark.parametrize("later_s", [0.0, 5 * 3600.0], ids=["at once", "hours later"])
async def test_a_replay_that_was_interrupted_anywhere_can_be_finished(
    open_queue: Open, manual_clock: ManualClock, writes: int, later_s: float
) -> None:
    """At once, or when its generation is long over: the data is in the queue once, and the letter is closed."""
    store = Mortal(clock=manual_clock)
    queue = open_queue(store=store)
    letter = await buried(queue)
    await queue.sweeper.sweep_done()
    store.left = writes
    interrupted = False
    try:
        await queue.dead_letters.replay(letter, "fixed")
    except Dies:
        interrupted = True
    store.left = 0
    await aged(open_queue(store=store), manual_clock, round(later_s / 3600.0))

    again = open_queue(store=store)
    if interrupted:
        try:
            await again.dead_letters.replay(letter, "fixed")
        except NotFound:
            assert writes == 8  # everything was done but the last answer

    assert (0, ["bad"]) == (await again.dead_letters.count(), await drained(again))
    assert {} == (await again.producer.read()).replays


async def test_a_letter_whose_replay_is_enqueued_is_not_discarded(open_queue: Open, manual_clock: ManualClock) -> None:
    """That would close it under the wrong word; replaying it again finishes it."""
    store = Mortal(clock=manual_clock)
    queue = open_queue(store=store)
    letter = await buried(queue)
    store.left = 4
    with pytest.raises(Dies):
        await queue.dead_letters.replay(letter, "fixed")
    store.left = 0

    with pytest.raises(Conflict, match="was replayed"):
        await queue.dead_letters.discard(letter, "no")
    await queue.dead_letters.replay(letter, "fixed")

    assert 0 == await queue.dead_letters.count()


def _only_appends(change: Any) -> Any:
    """A register whose process dies before it can shorten the manifest."""

    async def changed(decide: Any, **options: Any) -> Any:
        if "seal" in decide.__qualname__:
            raise Unavailable("the process is dead")
        return await change(decide, **options)

    return changed


class TestKeys:
    """Calls with an idempotency key."""

    async def test_a_repeated_call_enqueues_nothing(self, open_queue: Open) -> None:
        """At the same ingestor while the first is on its way, after it, and in another process."""
        queue, other = open_queue(), open_queue()
        ingestor, elsewhere = queue.ingestor(), other.ingestor()
        watchers = [await ingestor.ingest([KeyValueEntry(b"k", b"once")], key="order-7") for _ in range(2)]
        await ingestor.flush()
        watchers.append(await ingestor.ingest([KeyValueEntry(b"k", b"once")], key="order-7"))
        await ingestor.flush()
        watchers.append(await elsewhere.ingest([KeyValueEntry(b"k", b"once")], key="order-7"))
        await elsewhere.flush()

        told = [await watcher.await_durable() for watcher in watchers]

        assert [(1, False), (1, False), (1, True), (1, True)] == [(one.sequence, one.repeated) for one in told]
        assert ["once"] == await drained(queue)

    async def test_others_in_the_batch_of_a_repeated_call_are_enqueued(self, open_queue: Open) -> None:
        """A gateway mixes calls: only the repeated one is left out."""
        first, second = open_queue().ingestor(), open_queue().ingestor()
        await first.ingest([KeyValueEntry(b"k", b"a")], key="a")
        await first.flush()
        entries = {"a": b"a", "b": b"b", "": b"plain"}
        watchers = [await second.ingest([KeyValueEntry(b"k", value)], key=key) for key, value in entries.items()]
        await second.flush()

        told = [await watcher.await_durable() for watcher in watchers]
        counters = (await open_queue().producer.read()).sessions
        batches = [await second.ingest([KeyValueEntry(b"k", b"c")])]
        await second.flush()

        assert [True, False, False] == [one.repeated for one in told]
        assert 3 == (await batches[0].await_durable()).sequence
        assert ["a", "b", "plain", "c"] == await drained(open_queue())
        assert 0 == second.unflushed_bytes
        assert 1 == counters[second.id].counter  # the batch keeps its number, whatever is left out of it

    async def test_a_key_is_known_after_its_batch_is_gone_and_in_segments(
        self, open_queue: Open, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Keys outlive their batches, for as long as they are kept; then they are forgotten and swept."""
        monkeypatch.setattr("lakebed.queue.producer.KEYS_BLOCK", 4)
        queue = open_queue(idempotency_s=600.0, horizon_s=100.0)
        ingestor = queue.ingestor()
        for number in range(10):
            await ingestor.ingest([KeyValueEntry(b"k", b"v")], key=f"key-{number}")
            await ingestor.flush()
            await queue.producer.settled()
        await drained(queue)
        await queue.sweeper.sweep_done()
        folder = paths.keys_folder(queue.settings.manifest_path)
        fresh = open_queue(idempotency_s=600.0).ingestor()
        again = [await fresh.ingest([KeyValueEntry(b"k", b"v")], key=f"key-{number}") for number in (0, 9)]
        await fresh.flush()

        assert [(1, True), (10, True)] == [
            (told.sequence, told.repeated) for told in [await watcher.await_durable() for watcher in again]
        ]
        assert 2 == len([info async for info in queue.store.list(folder)])
        await aged(queue, manual_clock, 7)
        assert 0 == len([info async for info in queue.store.list(folder)])

    async def test_the_seeds_manifest_forgets_keys_that_are_old(
        self, open_queue: Open, manual_clock: ManualClock
    ) -> None:
        """It has no key segments: its keys are in the manifest itself, which must not grow without end."""
        queue = open_queue(format="seed", idempotency_s=600.0, horizon_s=100.0)
        ingestor = queue.ingestor()
        for number in range(300):
            await ingestor.ingest([KeyValueEntry(b"k", b"v")], key=f"old-{number}")
        await ingestor.flush()
        await manual_clock.advance(400.0)
        await ingestor.ingest([KeyValueEntry(b"k", b"v")], key="young")
        await ingestor.flush()
        await manual_clock.advance(400.0)
        await queue.sweeper.sweep_orphans()
        again = await queue.ingestor().ingest([KeyValueEntry(b"k", b"v")], key="young")

        assert 1 == len((await queue.producer.read()).keys)
        await manual_clock.advance(1.0)
        assert (await again.await_durable()).repeated

    async def test_keys_are_sealed_after_a_time_in_the_seeds_format(
        self, open_queue: Open, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A key segment of a dead process is adopted, though the manifest has forgotten its keys since."""
        monkeypatch.setattr("lakebed.queue.producer.KEYS_BLOCK", 2)
        settings = {"idempotency_s": 600.0, "horizon_s": 100.0}
        dying, seed, queue = open_queue(**settings), open_queue(format="seed", **settings), open_queue(**settings)
        monkeypatch.setattr(dying.producer._register, "change", _only_appends(dying.producer._register.change))
        for opened, keys in ((queue, "xy"), (dying, "ab"), (seed, "c"), (queue, "def")):
            ingestor = opened.ingestor()
            for key in keys:
                await ingestor.ingest([KeyValueEntry(b"k", b"v")], key=key)
                await ingestor.flush()
                await opened.producer.settled()
            if opened is seed:
                await manual_clock.advance(700.0)
                await seed.sweeper.sweep_orphans()
        again = [await queue.ingestor().ingest([KeyValueEntry(b"k", b"v")], key=key) for key in "def"]

        assert len((await queue.producer.read()).keys) < 2
        await manual_clock.advance(1.0)
        assert all([(await one.await_durable()).repeated for one in again])

    async def test_a_key_segment_is_kept_while_one_of_its_keys_is_young(
        self, open_queue: Open, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The older keys in it are known for longer; none is known for too short a time."""
        monkeypatch.setattr("lakebed.queue.producer.KEYS_BLOCK", 2)
        queue = open_queue(idempotency_s=600.0, horizon_s=100.0)
        ingestor = queue.ingestor()
        for key in ("old", "young"):
            await ingestor.ingest([KeyValueEntry(b"k", b"v")], key=key)
            await ingestor.flush()
            await queue.producer.settled()
            await manual_clock.advance(400.0)
        await queue.sweeper.sweep_orphans()
        fresh = open_queue(idempotency_s=600.0).ingestor()
        again = await fresh.ingest([KeyValueEntry(b"k", b"v")], key="young")
        await fresh.flush()

        assert (await again.await_durable()).repeated


async def test_a_store_that_is_away_while_the_manifest_is_shortened_harms_nothing(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """The append was durable before; the next one shortens it."""

    class NoSegments(MemoryStore):
        away = True

        async def create(self, key: str, data: bytes) -> Written:
            if self.away and ".segments/" in key:
                raise Unavailable("away")
            return await super().create(key, data)

    store = NoSegments(clock=manual_clock)
    queue = open_queue(store=store, segment_batches=2)
    await put(queue, "a", "b", "c", "d", "e")
    await queue.producer.settled()
    store.away = False
    await put(queue, "f", "g")
    await queue.producer.settled()

    assert 2 >= len((await queue.producer.read()).pending)
    assert list("abcdefg") == await drained(queue)
