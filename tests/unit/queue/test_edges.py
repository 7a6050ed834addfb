"""Limits, counters and answers of the queue's pieces: exactly at the limit, and one beyond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Fenced, Invalid, NotFound, TooLarge, Unprocessable
from lakebed.core.feed import FeedFilter, Limit
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.queue import codec, paths, sweeper, view
from lakebed.queue.collector import Collector
from lakebed.queue.dead_letters import PIECES_MAX, decode_letter
from lakebed.queue.feed import QueueFeed, open_feed
from lakebed.queue.model import (
    Claimed,
    ClosedLetter,
    DeadLetter,
    KeyValueEntry,
)
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.workers import QueueMaintenance
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections

Open = Callable[..., Queue]


async def fill(queue: Queue, *words: str) -> None:
    ingestor = queue.ingestor()
    for word in words:
        await ingestor.ingest([KeyValueEntry(b"k", word.encode())])
        await ingestor.flush()


async def test_collectors_count_what_they_do(open_queue: Open, metrics: Metrics, manual_clock: ManualClock) -> None:
    """Claims, take-overs, fenced acks, acks, rejections, and how long batches waited."""
    queue = open_queue(heartbeat_timeout_s=30.0, prefetch_batches=1)
    await fill(queue, "a", "b")
    await manual_clock.advance(2.0)
    one, two = queue.collector("one"), open_queue(heartbeat_timeout_s=30.0).collector("two")
    first = await one.next_batch()
    assert first is not None and one.id.startswith("one-")
    assert one._heart is not None
    one._heart.cancel()
    await manual_clock.advance(31.0)
    taken = await two.next_batch()
    assert taken is not None
    with pytest.raises(Fenced):
        await one.ack(first)
    with pytest.raises(Fenced):
        await one.reject(first, "late")
    await two.reject(taken, "no")
    again = await two.next_batch()
    assert again is not None
    await two.ack(again)

    def value(name: str) -> float:
        return metrics.value(f"lakebed_queue_{name}")

    assert (5, 1, 2, 1, 1) == (  # the rejected one and the one behind it are claimed again
        value("claims_total"),
        value("takeovers_total"),
        value("fenced_total"),
        value("acked_total"),
        value("rejections_total"),
    )
    assert (3, 68.0) == (value("wait_seconds_count"), value("wait_seconds_sum"))
    await one.close()
    await two.close()


async def test_one_fenced_batch_does_not_keep_the_others_from_being_acked(open_queue: Open, metrics: Metrics) -> None:
    """The error names the loss; the others are done."""
    queue = open_queue()
    await fill(queue, "a", "b")
    collector = queue.collector()
    batches = [await collector.next_batch() for _ in range(2)]
    assert batches[0] is not None and batches[1] is not None
    stolen = msgspec.structs.replace(batches[0], claimed=msgspec.structs.replace(batches[0].claimed, epoch=99))

    with pytest.raises(Fenced):
        await collector.ack_all([stolen, batches[1]])

    assert 1 == (await queue.status()).done and 1 == metrics.value("lakebed_queue_acked_total")
    await collector.ack(batches[0])
    await collector.close()


async def test_a_clean_up_begins_with_exactly_the_threshold(open_queue: Open, metrics: Metrics) -> None:
    """One less is left; the done data is gone, the pending one is not."""
    queue = open_queue(done_cleanup_threshold=2)
    await fill(queue, "a", "b", "c")
    collector = queue.collector()
    for done in (1, 0):
        batch = await collector.next_batch()
        assert batch is not None
        await collector.ack(batch)
        await settle(100)
        assert done == (await queue.status()).done
    assert 2 == metrics.value("lakebed_queue_cleaned_total")
    assert 1 == (await queue.status()).pending
    await collector.close()


async def test_status_is_shown_in_the_gauges_of_its_queue(
    open_queue: Open, metrics: Metrics, manual_clock: ManualClock
) -> None:
    """Lengths, bytes and the age of the oldest in each state, in seconds."""
    queue = open_queue("orders")
    await fill(queue, "a")
    await manual_clock.advance(1.0)
    await fill(queue, "b", "c")
    await manual_clock.advance(1.0)
    collector = queue.collector("c")
    first = await collector.next_batch()
    assert first is not None
    await manual_clock.advance(2.0)
    await collector.ack(first)
    await manual_clock.advance(4.0)
    status = await queue.status()

    def gauge(name: str, **labels: str) -> float:
        return metrics.value(f"lakebed_queue_{name}", queue="orders", **labels)

    assert (2, 2, 1, 0) == (gauge("length"), gauge("claimed"), gauge("done"), gauge("dead_letters"))
    assert status.bytes_waiting == gauge("bytes_waiting") > 0
    assert (7.0, 6.0, 4.0) == tuple(
        gauge("oldest_age_seconds", state=state) for state in ("pending", "claimed", "done")
    )
    assert [collector.id] == status.collectors and ("orders", 4) == (status.queue, status.next_sequence)
    assert status.row()["pending"] == 2
    waiting = [(entry.sequence, holder) async for _, entry, holder in queue.waiting()]
    assert [(2, collector.id), (3, collector.id)] == waiting
    await collector.close()
    assert [(2, ""), (3, "")] == [(entry.sequence, holder) async for _, entry, holder in queue.waiting()]


async def buried(queue: Queue, collector: Collector, reason: str = "bad") -> DeadLetter:
    for _ in range(queue.settings.rejections_max):
        batch = await collector.next_batch()
        assert batch is not None
        await collector.reject(batch, reason)
    return await queue.dead_letters.show(paths.dead_id(batch.sequence, batch.location))


async def test_a_letter_says_when_and_why_and_closing_it_is_recorded(
    open_queue: Open, memory: MemoryStore, metrics: Metrics, manual_clock: ManualClock
) -> None:
    """Times in milliseconds, the last reason, how many rejections; a closed one keeps letter, action and reason."""
    queue = open_queue(rejections_max=2)
    await fill(queue, "a", "b")
    enqueued_ms = manual_clock.now_ns() // 1_000_000
    await manual_clock.advance(3.0)
    collector = queue.collector()
    first, second = await buried(queue, collector), await buried(queue, collector, "worse")

    assert (1, "bad", 2, enqueued_ms, enqueued_ms + 3000) == (
        first.sequence,
        first.reason,
        first.rejections,
        first.enqueued_ms,
        first.buried_ms,
    )
    assert [first, second] == [letter async for letter in queue.dead_letters.letters()]
    assert (2, 2) == (await queue.dead_letters.count(), metrics.value("lakebed_queue_buried_total"))
    for wrong in ("", "  "):
        with pytest.raises(Invalid, match="reason"):
            await queue.dead_letters.discard(first.id, wrong)
        with pytest.raises(Invalid, match="reason"):
            await queue.dead_letters.replay(first.id, wrong)
    await manual_clock.advance(1.0)
    assert first == await queue.dead_letters.discard(first.id, "not needed")
    stored = await memory.get(paths.closed_letter(queue.settings.manifest_path, first.id))
    assert ClosedLetter(first, "discarded", "not needed", enqueued_ms + 4000) == msgspec.json.decode(
        stored.data, type=ClosedLetter
    )
    with pytest.raises(NotFound, match="no dead letter"):
        await queue.dead_letters.show(first.id)
    with pytest.raises(NotFound):
        await memory.get(first.location)
    with pytest.raises(Invalid):
        await queue.dead_letters.show("../x")
    durable = await queue.dead_letters.replay(second.id, "again")
    entry = (await queue.producer.read()).entries[durable.location]
    assert (3, 1) == (entry.sequence, entry.count) and entry.size_bytes > 0
    assert durable.location.endswith(".batch") and durable.location != second.location
    closed = await memory.get(paths.closed_letter(queue.settings.manifest_path, second.id))
    assert "replayed" == msgspec.json.decode(closed.data, type=ClosedLetter).action
    await collector.close()


async def test_a_letter_that_does_not_decode_is_corrupt_and_named(open_queue: Open, memory: MemoryStore) -> None:
    """Nothing is passed over in silence; a letter of a later version is not read."""
    queue = open_queue()
    key = paths.dead_letter(queue.settings.manifest_path, "0000000000000001-00000000")
    await memory.create(
        key, b'{"id":"x","location":"l","sequence":1,"reason":"","rejections":0,"buried_ms":0,"version":2}'
    )

    with pytest.raises(Corrupt) as found:
        decode_letter(await memory.get(key))
    assert key == found.value.detail["key"]
    with pytest.raises(Corrupt):
        [letter async for letter in queue.dead_letters.letters()]


async def test_a_split_makes_few_pieces_of_neighbouring_entries(open_queue: Open, metrics: Metrics) -> None:
    """At most PIECES_MAX, all of one size but the last, in order."""
    queue = open_queue(rejections_max=1)
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"%d" % n) for n in range(PIECES_MAX * 2 + 1)])
    await ingestor.flush()
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None and not await collector.reject(batch, "no")

    manifest = await queue.producer.read()
    assert [3] * 11 == [manifest.entries[each].count for each in manifest.pending]
    assert 1 == metrics.value("lakebed_queue_splits_total")
    found = [codec.decode((await queue.store.get(each)).data) for each in manifest.pending]
    assert [b"%d" % n for n in range(33)] == [entry.value for entries in found for entry in entries]
    await collector.close()


async def test_a_sweep_takes_orphans_of_generations_that_are_over(
    open_queue: Open, memory: MemoryStore, metrics: Metrics, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the last two, no file that is no batch, at most so many a round; a dry run deletes nothing."""
    monkeypatch.setattr(sweeper, "SWEPT_AT_ONCE", 2)
    queue = open_queue()
    for generation in (0, 1):
        for name in ("x", "y", "z"):
            await memory.create(queue.settings.location(generation, name, "binary"), b"1")
    folders = [paths.generation_folder("ingest", "ingest/manifest.json", generation) for generation in (0, 1)]
    await memory.create(f"{folders[0]}notes.txt", b"1")
    assert [] == await queue.sweeper.sweep_orphans()  # generation 1 begins
    await manual_clock.advance(queue.settings.horizon_s)
    await queue.producer.age()

    dry = await queue.sweeper.sweep_orphans(dry_run=True)
    assert [f"{folders[0]}x.batch", f"{folders[0]}y.batch"] == dry
    assert 0 == metrics.value("lakebed_queue_swept_total")
    assert dry == await queue.sweeper.sweep_orphans()
    assert 2 == metrics.value("lakebed_queue_swept_total")
    assert [f"{folders[0]}z.batch"] == await queue.sweeper.sweep_orphans()
    left = [info.key async for info in memory.list("ingest/") if "/0000" in info.key]
    assert [f"{folders[0]}notes.txt", *[f"{folders[1]}{name}.batch" for name in "xyz"]] == left


async def test_an_ingest_is_taken_at_its_limits_and_refused_beyond(open_queue: Open, metrics: Metrics) -> None:
    """Entries, bytes of one entry and bytes of a call; nothing of a refused call is taken."""
    queue = open_queue(entries_max=2, entry_bytes_max=10, ingest_bytes_max=36)
    ingestor = queue.ingestor()
    two = [KeyValueEntry(b"kk", b"v" * 8)] * 2  # 20 bytes and 16 of offsets
    watcher = await ingestor.ingest(two)
    for wrong in ([KeyValueEntry(b"", b"")] * 3, [KeyValueEntry(b"k", b"v" * 10)]):
        with pytest.raises(TooLarge):
            await ingestor.ingest(wrong)
    with pytest.raises(Unprocessable):
        await ingestor.ingest([])
    assert 36 == ingestor.unflushed_bytes
    await ingestor.close()

    assert 1 == (await watcher.await_durable()).sequence and 0 == ingestor.unflushed_bytes
    assert (2, 36, 1) == tuple(metrics.value(f"lakebed_queue_{name}_total") for name in ("entries", "bytes", "batches"))
    tight = open_queue(ingest_bytes_max=35, flush_size_bytes=1).ingestor()
    with pytest.raises(TooLarge):
        await tight.ingest(two)


async def test_the_generation_is_read_again_after_half_a_horizon(open_queue: Open, manual_clock: ManualClock) -> None:
    """A process that only stores would otherwise use a folder that is over."""
    mine, other = open_queue(horizon_s=100.0), open_queue(horizon_s=100.0)
    assert 0 == await mine.producer.generation()
    await other.producer.age()
    assert 0 == await mine.producer.generation()
    await manual_clock.advance(49.9)
    assert 0 == await mine.producer.generation()
    await manual_clock.advance(0.1)
    assert 1 == await mine.producer.generation()


def test_stored_objects_are_shown_in_plain_words() -> None:
    """A manifest as it is, a batch by its entries, bytes that are no text as base64, anything else as corrupt."""
    entries = [KeyValueEntry(b"k", b"v"), KeyValueEntry(b"\xff", b"")]
    binary, plain = codec.encode(entries), codec.encode(entries, form="json")

    shown = [{"key": "k", "value": "v"}, {"key_base64": "/w==", "value": ""}]
    assert {"key": "a", "kind": "binary batch", "bytes": len(binary), "count": 2, "entries": shown} == view.dump(
        "a", binary
    )
    assert ("json batch", 2) == (view.dump("a", plain)["kind"], view.dump("a", plain)["count"])
    assert {"key": "m", "kind": "json", "bytes": 7, "object": {"a": 1}} == view.dump("m", b'{"a":1}')
    for wrong in (b"{", b"PAR1 and more"):
        with pytest.raises(Corrupt, match="its first bytes are"):
            view.dump("a", wrong)


async def test_a_feed_is_bounded_by_its_options_and_names_its_queue(
    memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """`end` is exclusive; time is when it was enqueued; other options are refused."""
    settings = load(sections(), flags={"store.url": "memory:"})
    context = Context(
        node="n", settings=settings, store=memory, clock=manual_clock, ids=Ids.seeded(1), metrics=Metrics()
    )
    queue = Queue.of(context, "orders")
    await fill(queue, "a", "b", "c", "d")
    feed = open_feed(context, {"queue": "orders", "start": "2", "end": "4"})

    start = await feed.begin()
    end = await feed.reach(start, Limit())
    pieces = await feed.slices(start, end, FeedFilter())
    table = await feed.load(pieces[0], ["queue", "sequence", "time", "key"], FeedFilter())

    assert ({"sequence": 1}, {"sequence": 3}, 2) == (start, end, len(pieces))
    row = table.to_pylist()[0]
    assert ("orders", 2, b"k") == (row["queue"], row["sequence"], row["key"])
    assert manual_clock.now_ns() // 1_000_000 == round(row["time"].timestamp() * 1000)
    assert pieces[0] == await feed.described(pieces[0])
    for wanted, sequence in ((FeedFilter(low={"sequence": 3}), 3), (FeedFilter(high={"sequence": 2}), 2)):
        (one,) = await feed.slices(start, end, wanted)
        assert sequence == msgspec.json.decode(one.locator)["sequence"]
    assert 4 == (await QueueFeed(queue).reach({"sequence": 0}, Limit()))["sequence"]
    with pytest.raises(Invalid, match="option start"):
        open_feed(context, {"start": "x"})


async def test_queues_are_found_by_their_manifests(open_queue: Open, memory: MemoryStore) -> None:
    """The default one first; a folder without a manifest, or with a name that is none, is no queue."""
    for name in ("orders", "default", "alpha"):
        await fill(open_queue(name), "x")
    await memory.create("ingest/empty/00000000/x.batch", b"")
    await memory.create("ingest/UPPER/manifest.json", b"{}")

    assert ["default", "alpha", "orders"] == await queue_names(memory, open_queue().settings)
    assert await open_queue("orders").exists() and not await open_queue("empty").exists()


async def test_the_keeper_comes_round_at_its_interval(memory: MemoryStore, manual_clock: ManualClock) -> None:
    """Done batches of exactly a horizon are left, older ones are removed at the next round."""
    flags = {"store.url": "memory:", "queue.horizon_s": 100.0, "queue.sweep_interval_s": 60.0}
    context = Context(
        node="n",
        settings=load(sections(), flags=flags),
        store=memory,
        clock=manual_clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )
    queue = Queue.of(context)
    await fill(queue, "a")
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    await collector.ack(batch)
    await collector.close()
    running = asyncio.ensure_future(QueueMaintenance(context).run())
    await settle(100)
    for advance, done in ((60.0, 1), (59.0, 1), (1.0, 0)):
        await manual_clock.advance(advance)
        await settle(100)
        assert done == (await queue.status()).done
    running.cancel()


def test_names_and_keys_of_a_queue() -> None:
    """Which names are taken, which folders are generations, which objects are batches."""
    for wrong in ("", "1a", "A", "a" * 64, "a\n", "a.b"):
        with pytest.raises(Invalid):
            paths.check_name(wrong)
    assert "a" * 63 == paths.check_name("a" * 63)
    mine, other = paths.owner("ingest/manifest.json"), paths.owner("ingest/other.json")
    folders = (f"00000003-{mine}", f"3-{mine}", "orders", f"123456789-{mine}", f"00000003-{other}", "00000003")
    assert [3, None, None, 123456789, None, None] == [
        paths.generation_of(each, "ingest/manifest.json") for each in folders
    ]
    assert [True, True, False, False] == [
        paths.is_batch(each) for each in ("a/b.batch", "a/b.json", "a/manifest.json", "a/b.txt")
    ]
    first, second = Claimed("a", 9, 1, 0, 0), Claimed("a", 10, 1, 0, 0)
    assert paths.dead_id(first.sequence, "a") < paths.dead_id(second.sequence, "a")
    assert paths.dead_id(9, "a") != paths.dead_id(9, "b")
