"""The writer and the batching producer: order, recovery, idempotence, back pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import LakebedError, OutcomeUnknown, Overloaded, Unavailable
from lakebed.log import paths, writer
from lakebed.log.blob import decode_header
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import BackPressureRejected, Control, LogFenced, OutOfOrderSequence, TopicPartition
from lakebed.log.producers import RecordChunk, Stamp
from lakebed.log.records import SWAPS_MAX
from lakebed.log.writer import Appended, PartitionAppend
from lakebed.meta.model import MetaEntry, Put
from support.log_host import METAS, TP, Host, each_put

pytestmark = pytest.mark.metas(*METAS)

OTHER = TopicPartition("clicks", 3)


async def test_one_blob_carries_many_partitions_and_each_commits_on_its_own(host: Host) -> None:
    """append_shared writes one object; control, index and cursor of each partition follow the seed's keys."""
    broker = host.broker()

    outcomes = await broker.writer.append_shared(
        [
            PartitionAppend(TP, (RecordChunk(columns([b"a", b"b"])),)),
            PartitionAppend(OTHER, (RecordChunk(columns([b"c"])),)),
        ]
    )
    await broker.writer.drain()

    ((first,), (second,)) = outcomes
    assert isinstance(first, Appended) and isinstance(second, Appended)
    assert (
        first.index_key,
        first.start_offset,
        first.end_offset,
    ) == ("llog/orders/partitions/0/index/00000000000000000002", 1, 2)
    (key,) = await host.objects()
    assert first.wal_uri == second.wal_uri == f"s3://lakebed/{key}" and key.startswith("llog/wal-shared/")
    header, _ = decode_header((await host.store.get(key)).data)
    assert [part.topic for part in header.partitions] == ["orders", "clicks"]
    assert await host.meta_keys("llog/orders/") == [
        "llog/orders/partitions/0/index/00000000000000000002",
        "llog/orders/partitions/0/meta/compaction-cursor",
        "llog/orders/partitions/0/meta/control",
    ]
    index = msgspec.json.decode(await host.meta_value(first.index_key))
    assert {"type", "msg_count", "data_key", "encoding", "byte_offset", "byte_length", "created_at_ms"} == set(index)
    control = msgspec.json.decode(await host.meta_value(paths.control(TP)))
    assert (control["sequence_counter"], control["pending"]) == (2, None)


async def test_a_crash_after_the_commit_is_recovered_by_the_next_writer(host: Host) -> None:
    """A pending append is readable at once, and in the index before the next one takes its place."""
    dying, successor = host.broker(), host.broker()
    await dying.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns([b"a", b"b"])),))])

    assert await host.meta_keys("/index/") == []
    assert await host.read(successor, 2) == [b"b"]
    await host.append(successor, b"c")

    assert await host.read_all(successor) == [b"a", b"b", b"c"]
    assert len(await host.meta_keys("/index/")) == 2


async def test_a_lost_answer_to_the_commit_is_not_appended_twice(host: Host) -> None:
    """The swap was done, its answer lost: the writer finds its own append and acknowledges it once."""
    broker = host.broker()
    await host.append(broker, b"a")
    put, lost = broker.meta.put, []
    each_put(broker.meta)

    async def losing(key: str, value: bytes, **options: object) -> object:
        done = await put(key, value, **options)  # type: ignore[arg-type]
        if key.endswith("/control") and not lost:
            lost.append(key)
            raise OutcomeUnknown("lost")
        return done

    broker.meta.put = losing  # type: ignore[assignment, method-assign]
    outcome = await host.append(broker, b"b")

    assert lost and isinstance(outcome, Appended) and outcome.start_offset == 2
    assert await host.read_all(broker) == [b"a", b"b"]


@pytest.mark.parametrize("made", [True, False])
async def test_the_last_swap_before_an_append_is_given_up_is_looked_for_too(host: Host, made: bool) -> None:
    """Its answer is lost like those before it: where it was made the records are acknowledged, otherwise refused."""
    broker = host.broker()
    await host.append(broker, b"a")
    put, tries, last = broker.meta.put, list[str](), SWAPS_MAX + 1  # one together with other partitions, then alone

    async def losing(key: str, *arguments: Any, **options: Any) -> Any:
        if key == paths.control(TP):
            tries.append(key)
        if key != paths.control(TP) or len(tries) > last or (made and len(tries) == last):
            done = await put(key, *arguments, **options)
        if key != paths.control(TP) or len(tries) > last:
            return done
        raise OutcomeUnknown("lost")

    each_put(broker.meta)
    broker.meta.put = losing  # type: ignore[method-assign]
    working = asyncio.ensure_future(host.append(broker, b"b"))
    while not working.done():
        await host.clock.advance(1.0)
    outcome = working.result()

    assert last <= len(tries)
    assert isinstance(outcome, Appended if made else Overloaded)
    assert ([b"a", b"b"] if made else [b"a"]) == await host.read_all(host.broker())


async def test_a_lost_answer_whose_append_was_trimmed_meanwhile_is_not_appended_again(host: Host) -> None:
    """The commit was made, its answer lost, and its place is gone from the index: nobody can report, so nobody does."""
    broker, operating, services = host.broker(), host.broker(), host.services()
    await host.append(broker, b"a")
    put, lost = broker.meta.put, []
    each_put(broker.meta)

    async def losing(key: str, value: bytes, **options: object) -> object:
        done = await put(key, value, **options)  # type: ignore[arg-type]
        if key.endswith("/control") and not lost:
            lost.append(key)
            await host.append(operating, b"c")
            await operating.admin.trim(TP, 4)
            await services.retention.apply_once(TP)
            raise OutcomeUnknown("lost")
        return done

    broker.meta.put = losing  # type: ignore[assignment, method-assign]
    outcome = await host.append(broker, b"b")

    assert lost and isinstance(outcome, OutcomeUnknown)
    assert (await broker.reader.control(TP)).sequence_counter == 3


async def test_a_failed_blob_fails_its_groups_and_changes_no_log(host: Host) -> None:
    """Nothing is committed without its bytes in the bucket."""
    broker = host.broker()
    await host.append(broker, b"a")
    create = host.store.create

    async def failing(key: str, data: bytes) -> object:
        raise Unavailable("no bucket")

    host.store.create = failing  # type: ignore[assignment, method-assign]
    outcome = await host.append(broker, b"b")
    host.store.create = create  # type: ignore[method-assign]

    assert isinstance(outcome, Unavailable)
    assert await host.read_all(broker) == [b"a"]
    assert isinstance(await host.append(broker, b"c"), Appended)


@pytest.mark.parametrize("partitions", [(TP,), (TP, OTHER)])
async def test_records_whose_blob_was_vacuumed_before_the_commit_are_written_again(
    host: Host, partitions: Sequence[TopicPartition]
) -> None:
    """A broker that stalls between upload and commit loses its blob to the vacuum: all its records are acknowledged
    under a new one, in order, and stay readable through the next vacuum."""
    broker, services, create = host.broker(), host.services(), host.store.create
    for tp in partitions:
        await host.append(broker, b"first", tp=tp)
    broker.writer._sequencers.clear()
    chunks = tuple(RecordChunk(columns([b"%d" % n, b"x"])) for n in range(3))

    async def stalled(key: str, data: bytes) -> Any:
        host.store.create = create  # type: ignore[method-assign]
        made = await create(key, data)
        await host.clock.advance(1000)
        assert [key] == (await services.sweeper.sweep_once()).orphans
        return made

    host.store.create = stalled  # type: ignore[method-assign]
    outcomes = await broker.writer.append_shared([PartitionAppend(tp, chunks) for tp in partitions])
    await broker.writer.drain()
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()

    for tp, of_group in zip(partitions, outcomes, strict=True):
        assert [(2, 3), (4, 5), (6, 7)] == [(each.start_offset, each.end_offset) for each in of_group]  # type: ignore[union-attr]
        assert [b"first", b"0", b"x", b"1", b"x", b"2", b"x"] == await host.read_all(host.broker(), tp)


@pytest.mark.parametrize("left_over", [False, True])
async def test_records_whose_blob_is_of_a_former_life_of_the_log_are_written_again(host: Host, left_over: bool) -> None:
    """The broker was suspended while the topic was deleted and made again, and the vacuum took its blob: the new
    control record refuses the blob as the old one would have. Made again behind a tombstone of a late entry, too."""
    broker, services, create = host.broker(), host.services(), host.store.create
    await host.append(broker, b"old")
    late = await host.meta_value(paths.index(TP, 1))

    async def suspended(key: str, data: bytes) -> Any:
        host.store.create = create  # type: ignore[method-assign]
        made = await create(key, data)
        await services.admin.delete("orders", reason="test")
        await host.clock.advance(200)
        await services.sweeper.sweep_once()
        await services.retention.apply_once(TP)
        assert key not in await host.objects() and paths.control(TP) not in await host.meta_keys()
        if left_over:
            await host.meta_put(paths.index(TP, 1), late)
            await services.retention.apply_once(TP)
        await host.append(host.broker(), b"new")
        return made

    host.store.create = suspended  # type: ignore[method-assign]
    outcome = await host.append(broker, b"late")

    assert isinstance(outcome, Appended)
    assert [b"new", b"late"] == await host.read_all(host.broker())


async def test_two_brokers_interleave_without_gaps_or_loss(host: Host) -> None:
    """Appends of two processes to one partition all get their own offsets."""
    one, two = host.broker(), host.broker()

    async def many(broker: object, name: str) -> list[Appended]:
        return [await host.append(broker, f"{name}{n}".encode()) for n in range(10)]  # type: ignore[arg-type]

    working = asyncio.gather(many(one, "a"), many(two, "b"))
    while not working.done():
        await host.clock.advance(0.1)
    outcomes = [outcome for some in working.result() for outcome in some]

    assert list(range(1, 21)) == sorted(outcome.start_offset for outcome in outcomes)
    found = await host.read_all(one)
    for outcome, name in zip(outcomes, [f"{who}{n}".encode() for who in "ab" for n in range(10)], strict=True):
        assert found[outcome.start_offset - 1] == name


async def test_blobs_travel_together_while_each_partition_stays_ordered(host: Host) -> None:
    """The second blob arrives first, and its records still come second."""
    broker = host.broker(batch_max_bytes=1)
    gates: list[asyncio.Event] = []
    create = host.store.create

    async def gated(key: str, data: bytes) -> object:
        gate = asyncio.Event()
        gates.append(gate)
        await gate.wait()
        return await create(key, data)

    host.store.create = gated  # type: ignore[assignment, method-assign]
    first = asyncio.ensure_future(broker.produce([(TP, RecordChunk(columns([b"a"])))]))
    second = asyncio.ensure_future(broker.produce([(TP, RecordChunk(columns([b"b"])))]))
    await settle()
    assert len(gates) == 2
    gates[1].set()
    await settle()
    assert not second.done()
    gates[0].set()

    (one,), (two,) = await first, await second
    assert isinstance(one, Appended) and isinstance(two, Appended)
    assert (one.start_offset, two.start_offset) == (1, 2)


async def test_a_retried_batch_is_appended_once_wherever_it_is_retried(host: Host) -> None:
    """The same producer and sequence, on the same broker, on another, and merged with fresh batches."""
    one, two = host.broker(), host.broker()
    stamp = Stamp("p", 0)
    first = await host.append(one, b"a", stamp=stamp)
    again = await host.append(one, b"a", stamp=stamp)
    elsewhere = await host.append(two, b"a", stamp=stamp)
    ((merged, plain, gap),) = await two.writer.append_shared(
        [
            PartitionAppend(
                TP,
                (
                    RecordChunk(columns([b"a"]), stamp),
                    RecordChunk(columns([b"b"])),
                    RecordChunk(columns([b"z"]), Stamp("p", 5)),
                ),
            )
        ]
    )
    await two.writer.drain()

    assert [(outcome.start_offset, outcome.duplicate) for outcome in (first, again, elsewhere, merged)] == [
        (1, False),
        (1, True),
        (1, True),
        (1, True),
    ]
    assert isinstance(plain, Appended) and plain.start_offset == 2
    assert isinstance(gap, OutOfOrderSequence)
    assert await host.read_all(one) == [b"a", b"b"]


async def test_fencing_refuses_appends_of_every_broker(host: Host) -> None:
    """A broker that knew the log as open learns of the fence at its next append."""
    one, two = host.broker(), host.broker()
    await host.append(one, b"a")
    await two.admin.fence(TP, reason="maintenance")

    refused = await host.append(one, b"b")
    await two.admin.unfence(TP)
    taken = await host.append(one, b"c")

    assert isinstance(refused, LogFenced)
    assert isinstance(taken, Appended) and taken.start_offset == 2


async def test_requests_are_coalesced_and_waiters_fanned_out(host: Host) -> None:
    """What arrives at the same moment shares one blob; everybody gets their own offsets."""
    broker = host.broker(batch_max_delay_ms=10.0)
    requested = [
        asyncio.ensure_future(broker.produce([(TP, RecordChunk(columns([b"%d" % n, b"x"])))])) for n in range(5)
    ]
    await settle(200)

    outcomes = [(await one)[0] for one in requested]

    assert [(outcome.start_offset, outcome.end_offset) for outcome in outcomes if isinstance(outcome, Appended)] == [
        (1, 2),
        (3, 4),
        (5, 6),
        (7, 8),
        (9, 10),
    ]
    assert len(await host.objects()) == 1


async def test_too_much_at_once_is_refused_with_nothing_changed(host: Host) -> None:
    """The buffer is bounded: what does not fit is rejected at once, what was taken is appended."""
    broker = host.broker(buffer_max_bytes=2000, batch_max_bytes=2000, record_max_bytes=2000)
    create = host.store.create

    async def slow(key: str, data: bytes) -> Any:
        await host.clock.sleep(0.05)
        return await create(key, data)

    host.store.create = slow  # type: ignore[method-assign]
    taken = asyncio.ensure_future(broker.produce([(TP, RecordChunk(columns([b"x" * 1500])))]))
    await settle()

    (refused,) = await broker.produce([(TP, RecordChunk(columns([b"y" * 1500])))])
    await host.clock.advance(0.1)

    assert isinstance(refused, BackPressureRejected)
    assert isinstance((await taken)[0], Appended)
    assert await host.read_all(broker) == [b"x" * 1500]
    assert broker.producer.held_bytes == 0


async def test_a_request_is_answered_when_its_last_chunk_is(host: Host) -> None:
    """What is refused at once waits for what was taken with it: one answer, outcomes in the order of the request."""
    broker = host.broker(buffer_max_bytes=2000, batch_max_bytes=2000, record_max_bytes=2000)
    reported: list[Sequence[Any]] = []
    both = [(TP, RecordChunk(columns([b"y" * 1500]))), (TP, RecordChunk(columns([b"x" * 1500])))]

    broker.producer.append(both, reported.append)
    before = list(reported)
    await host.clock.advance(0.1)

    assert [] == before
    assert [[Appended, BackPressureRejected]] == [[type(outcome) for outcome in outcomes] for outcomes in reported]


async def test_a_flight_that_is_cut_off_says_that_nothing_is_known(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who waits for a blob whose flight is cancelled gets OutcomeUnknown."""
    broker = host.broker(batch_max_delay_ms=1.0)
    monkeypatch.setattr(broker.writer, "append_shared", lambda *_, **__: _never())
    requested = asyncio.ensure_future(broker.produce([(TP, RecordChunk(columns([b"x"])))]))
    await host.clock.advance(0.01)

    for flight in list(broker.producer._flights):
        flight.cancel()
    (outcome,) = await asyncio.wait_for(requested, 5)

    assert isinstance(outcome, OutcomeUnknown)
    assert broker.producer.held_bytes == 0


async def _never(*_: object) -> None:
    await asyncio.get_running_loop().create_future()


async def test_the_commits_of_a_blob_are_one_call_to_meta(host: Host) -> None:
    """However many partitions a blob carries: it swaps all control records and brings the index entries before."""
    broker, calls = host.broker(), list[int]()
    put_all = broker.meta.put_all

    async def counted(puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        calls.append(len(puts))
        return await put_all(puts)

    broker.meta.put_all = counted  # type: ignore[method-assign]
    groups = [PartitionAppend(TopicPartition("t", number), (RecordChunk(columns([b"x"])),)) for number in range(50)]

    for _ in range(3):
        outcomes = await broker.writer.append_shared(groups)
        assert all(isinstance(one, Appended) for (one,) in outcomes)
    busy = list(calls)
    await broker.writer.drain()

    assert [50] * 3 == busy
    assert [50] * 4 == calls  # and then pending is cleared everywhere, at once
    assert [3] * 50 == [(await broker.reader.control(group.tp)).sequence_counter for group in groups]


async def test_a_partition_that_another_has_changed_holds_up_no_other_of_the_blob(host: Host) -> None:
    """A lost swap is tried again on its own; the others of the same blob are committed by the first attempt."""
    ours, theirs = host.broker(), host.broker()
    groups = [PartitionAppend(TopicPartition("t", number), (RecordChunk(columns([b"x"])),)) for number in range(4)]
    await ours.writer.append_shared(groups)
    await theirs.writer.append_shared([groups[2]])

    working = asyncio.ensure_future(ours.writer.append_shared(groups))
    await host.clock.advance(5.0)
    outcomes = await working

    assert [(2, 2), (2, 2), (3, 3), (2, 2)] == [
        (one.start_offset, one.end_offset) for (one,) in outcomes if isinstance(one, Appended)
    ]


async def test_what_is_kept_of_partitions_between_appends_is_bounded(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest unused lanes go; an append to such a partition only reads its control record again."""
    monkeypatch.setattr(writer, "SEQUENCERS_MAX", 3)
    broker = host.broker()
    tps = [TopicPartition("t", number) for number in range(10)]
    for tp in (*tps, *tps):
        assert isinstance(await host.append(broker, b"x", tp=tp), Appended)

    assert len(broker.writer._sequencers) <= 3
    assert [2] * 10 == [(await broker.reader.control(tp)).sequence_counter for tp in tps]


async def test_no_blob_grows_beyond_its_limit(host: Host) -> None:
    """What would make a blob larger goes into the next one; only a chunk that is larger itself may."""
    broker = host.broker(batch_max_bytes=10_000, batch_max_delay_ms=5.0)
    sent = [(TopicPartition("t", number % 3), RecordChunk(columns([b"x" * 900]))) for number in range(40)]

    working = asyncio.ensure_future(broker.produce([*sent, (TP, RecordChunk(columns([b"y" * 20_000])))]))
    await host.clock.advance(1.0)
    outcomes = await working

    sizes = sorted([info.size async for info in host.store.list("llog/wal-shared/")])
    assert all(isinstance(one, Appended) for one in outcomes)
    assert sizes[-2] <= 10_000 < 20_000 < sizes[-1]
    assert len(sizes) <= 7


async def test_appends_are_counted_once_each_whichever_attempt_commits_them(host: Host) -> None:
    """One partition of the blob loses its first swap; it is counted when it is committed, and not before."""
    ours, theirs = host.broker(), host.broker()
    groups = [PartitionAppend(TopicPartition("t", number), (RecordChunk(columns([b"x"])),)) for number in range(4)]
    metrics = ours.writer._appends
    await ours.writer.append_shared(groups)
    await theirs.writer.append_shared([groups[2]])
    before = metrics._value.get()

    working = asyncio.ensure_future(ours.writer.append_shared(groups))
    await host.clock.advance(5.0)
    await working

    assert (4, 8) == (before, metrics._value.get())


async def test_a_writer_that_saw_a_partition_deleted_does_not_open_it_a_second_time(host: Host) -> None:
    """Another opened it meanwhile and appended: what it appended stays readable."""
    late, quick = host.broker(), host.broker()
    await host.append(quick, b"old")
    await quick.admin.delete(TP.topic, reason="test")
    seen = await late.records.find(TP, paths.control(TP), Control)
    await host.append(host.broker(), b"new")

    find, answers = late.records.find, [seen]

    async def stale(*place: Any) -> Any:
        return answers.pop() if answers else await find(*place)

    late.records.find = stale  # type: ignore[method-assign]
    found = await late.writer.ensure(TP)

    assert (2, 2) == (found.value.log_start_offset, found.value.sequence_counter)
    assert [b"new"] == await host.read_all(host.broker())


async def test_a_swap_that_another_broker_won_is_counted(host: Host) -> None:
    """Once each: that is what the count of lost swaps shows of brokers which append to the same partition."""
    contexts = [host.context(), host.context()]
    one, two = (Broker(context, host.meta()) for context in contexts)
    for broker in (one, two, one, one):
        await host.append(broker, b"x")

    assert [1, 0] == [context.metrics.value("lakebed_log_lost_swaps_total") for context in contexts]
