"""Idempotent producers: what is fresh, what is a duplicate, what is refused, and how much is kept to know it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.ids import Ids
from lakebed.log import control, paths, producers
from lakebed.log.blob import BlobSlice
from lakebed.log.codec import columns
from lakebed.log.model import (
    Control,
    OutOfOrderSequence,
    ProducerMark,
    ProducersSnapshot,
    SequenceReused,
    TooManyProducers,
    UnknownProducer,
)
from lakebed.log.producers import (
    CHANGES_MAX,
    MEMORY_MS,
    NAMES_MAX,
    PRODUCERS_MAX,
    Duplicate,
    Fresh,
    RecordChunk,
    RefusedChunk,
    Repeat,
    Stamp,
)
from lakebed.log.writer import Appended
from lakebed.meta.model import VALUE_BYTES_MAX
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)

NOW = 1_760_000_000_000
OPEN = control.opened(5)
IDS = Ids.seeded(1)


def append(now: Control, *chunks: RecordChunk, at_ms: int = NOW, memory_ms: int = MEMORY_MS) -> Control:
    return control.append(
        control.cleared(now),
        chunks,
        tp=TP,
        append_id="a",
        data_key="s3://b/llog/wal-shared/x",
        place=BlobSlice(100, 50),
        created_at_ms=at_ms,
        memory_ms=memory_ms,
    )


def judge(now: Control, *chunks: RecordChunk, at_ms: int = NOW) -> list[Any]:
    return producers.judge(now, chunks, now_ms=at_ms)


def stamped(sequence: int, producer: str = "p", *, count: int = 1, record: bytes = b"x") -> RecordChunk:
    return RecordChunk(columns([record] * count), Stamp(producer, sequence))


def refusal(now: Control, chunk: RecordChunk, at_ms: int = NOW) -> Any:
    (verdict,) = judge(now, chunk, at_ms=at_ms)
    return verdict.error if isinstance(verdict, RefusedChunk) else None


def test_a_batch_is_fresh_once_and_a_duplicate_afterwards() -> None:
    """The last five batches of a producer are recognised with their offsets; gaps and strangers are refused."""
    now = OPEN
    for sequence in range(7):
        now = append(now, stamped(sequence, count=2))

    duplicate, remembered, forgotten, gap, fresh, repeat = judge(
        now, stamped(6, count=2), stamped(2, count=2), stamped(1), stamped(8), stamped(7), stamped(7)
    )

    assert isinstance(duplicate, Duplicate) and (duplicate.mark.start_offset, duplicate.mark.end_offset) == (13, 14)
    assert isinstance(remembered, Duplicate)
    assert isinstance(forgotten, RefusedChunk) and isinstance(gap, RefusedChunk)
    assert isinstance(fresh, Fresh) and repeat == Repeat(4)
    assert isinstance(refusal(now, stamped(3, "other")), UnknownProducer)


def test_other_records_under_a_used_sequence_are_an_error_and_no_duplicate() -> None:
    """Also inside one append, and also when only the cut between the records is another."""
    now = append(OPEN, RecordChunk(columns([b"ab", b"c"]), Stamp("p", 0)))

    same, other, cut = judge(
        now,
        RecordChunk(columns([b"ab", b"c"]), Stamp("p", 0)),
        RecordChunk(columns([b"ab", b"d"]), Stamp("p", 0)),
        RecordChunk(columns([b"a", b"bc"]), Stamp("p", 0)),
    )
    first, twice, changed = judge(now, stamped(0, "q"), stamped(0, "q"), stamped(0, "q", record=b"y"))

    assert isinstance(same, Duplicate) and isinstance(first, Fresh) and twice == Repeat(0)
    for verdict in (other, cut, changed):
        assert isinstance(verdict, RefusedChunk) and isinstance(verdict.error, SequenceReused)


def test_marks_of_older_versions_are_read_and_their_content_is_not_compared() -> None:
    """A stored record without checksums and times decodes, and its batches are duplicates by their number alone."""
    stored = b'{"log_state":"OPEN","sequence_counter":9,"pending":null,"producers":{"p":[[0,1,4],[1,5,9]]}}'
    now = msgspec.json.decode(stored, type=Control)

    (duplicate,) = judge(now, stamped(1, record=b"whatever"))

    assert duplicate == Duplicate(ProducerMark(1, 5, 9))
    assert isinstance(judge(now, stamped(2))[0], Fresh)
    assert ["p", "q"] == list(append(now, stamped(0, "q")).producers)


def test_a_thousand_producers_do_not_evict_each_other() -> None:
    """A retry of a producer's only batch is a duplicate, however many others have written since."""
    now = OPEN
    for number in range(NAMES_MAX):
        now = append(now, stamped(0, f"p{number}"))

    assert [] == [n for n in range(NAMES_MAX) if not isinstance(judge(now, stamped(0, f"p{n}"))[0], Duplicate)]


def test_a_name_is_never_forgotten_and_one_too_many_is_refused() -> None:
    """An id without a time cannot be distinguished from a forgotten one, so none is forgotten: not after years."""
    now = OPEN
    for number in range(NAMES_MAX):
        now = append(now, stamped(0, f"p{number}"))
    later = NOW + 1000 * MEMORY_MS
    now = append(now, stamped(1, "p5"), at_ms=later)

    assert isinstance(judge(now, stamped(0, "p0"), at_ms=later)[0], Duplicate)
    refused = refusal(now, stamped(0, "one too many"), at_ms=later)
    assert isinstance(refused, TooManyProducers) and "POST /producers" in refused.hint
    assert isinstance(judge(now, stamped(0, IDS.uuid7(later)), at_ms=later)[0], Fresh)


def test_an_issued_producer_is_known_for_its_time_and_refused_afterwards() -> None:
    """Neither the retry of its first batch nor its next one is appended once its state is gone."""
    old, other = IDS.uuid7(NOW), IDS.uuid7(NOW)
    now = append(OPEN, stamped(0, old))
    now = append(now, stamped(0, other), at_ms=NOW + MEMORY_MS)
    assert isinstance(judge(now, stamped(0, old), at_ms=NOW + MEMORY_MS)[0], Duplicate)

    later = NOW + MEMORY_MS + 1
    now = append(now, stamped(1, other), at_ms=later)

    assert [other] == list(now.producers)
    for sequence in (0, 1):
        assert isinstance(refusal(now, stamped(sequence, old), at_ms=later), UnknownProducer)
    assert isinstance(judge(now, stamped(0, IDS.uuid7(later)), at_ms=later)[0], Fresh)


def test_what_was_forgotten_is_refused_whatever_another_broker_is_set_to() -> None:
    """A broker with a short memory forgets; one with a long memory must not take the id for a new one."""
    old = IDS.uuid7(NOW)
    now = append(OPEN, stamped(0, old))
    now = append(now, stamped(0, "other"), at_ms=NOW + 2000, memory_ms=1000)

    assert isinstance(refusal(now, stamped(0, old), at_ms=NOW + 2000), UnknownProducer)


def test_an_id_of_a_clock_that_is_ahead_cannot_come_back_after_it_was_forgotten() -> None:
    """It counts as used when it was issued, even if the broker's clock was earlier."""
    ahead = IDS.uuid7(NOW + 5000)
    now = append(OPEN, stamped(0, ahead), at_ms=NOW)
    now = append(now, stamped(0, "other"), at_ms=NOW + 20_000, memory_ms=1000)

    assert isinstance(refusal(now, stamped(0, ahead), at_ms=NOW + 20_000), UnknownProducer)
    assert isinstance(refusal(OPEN, stamped(0, IDS.uuid7(NOW + 3600_000 + 1))), UnknownProducer)
    assert [Fresh()] == judge(OPEN, stamped(0, IDS.uuid7(NOW + 3600_000)))  # another gateway's clock, an hour ahead


def test_what_was_forgotten_stays_forgotten_when_an_earlier_one_is_forgotten_after_it() -> None:
    """Brokers' clocks differ, so producers do not expire in the order of their times: the limit never goes back."""
    ahead, behind = IDS.uuid7(NOW + 5000), IDS.uuid7(NOW)
    now = append(OPEN, stamped(0, ahead), at_ms=NOW)
    now = append(now, stamped(0, behind), at_ms=NOW + 1)
    now = append(now, stamped(0, "other"), at_ms=NOW + 20_000, memory_ms=1000)

    assert ["other"] == list(now.producers)
    for old in (ahead, behind):
        assert isinstance(refusal(now, stamped(0, old), at_ms=NOW + 20_000), UnknownProducer)


def test_a_deleted_log_that_is_opened_again_takes_no_batch_of_producers_before() -> None:
    """Their batches are gone with it: a late retry must not put them back."""
    old = IDS.uuid7(NOW)
    now = control.reopened(control.deleted(append(OPEN, stamped(0, old)), reason="", now_ms=NOW + 10), NOW + 20)

    assert isinstance(refusal(now, stamped(0, old), at_ms=NOW + 30), UnknownProducer)
    assert isinstance(judge(now, stamped(0, IDS.uuid7(NOW + 25)), at_ms=NOW + 30)[0], Fresh)


def test_a_deleted_log_that_a_slower_clock_opens_again_takes_no_batch_of_producers_before() -> None:
    """The deletion counts, not only the moment at which another broker's clock opens the log again."""
    old = IDS.uuid7(NOW + 5)
    deleted = control.deleted(append(OPEN, stamped(0, old), at_ms=NOW + 6), reason="", now_ms=NOW + 10)
    now = control.reopened(deleted, NOW - 20)

    assert isinstance(refusal(now, stamped(0, old), at_ms=NOW + 30), UnknownProducer)


def test_the_record_stays_within_what_meta_takes() -> None:
    """With as many producers as there may be, long names among them, all of them busy; one more is refused."""
    names = [f"{number:0128d}" for number in range(NAMES_MAX)]
    issued = [IDS.uuid7(NOW) for _ in range(PRODUCERS_MAX - NAMES_MAX)]
    now = OPEN
    for sequence in range(5):
        for first in range(0, PRODUCERS_MAX, 100):
            some = [*names, *issued][first : first + 100]
            now = append(now, *[stamped(sequence, id) for id in some])

    size = len(msgspec.json.encode(now))

    assert len(now.producers) == PRODUCERS_MAX and size < VALUE_BYTES_MAX * 0.75, size
    assert isinstance(refusal(now, stamped(0, IDS.uuid7(NOW))), TooManyProducers)
    assert isinstance(judge(now, stamped(5, issued[0]))[0], Fresh)
    (room,) = judge(now, stamped(0, IDS.uuid7(NOW + 2 * MEMORY_MS)), at_ms=NOW + 2 * MEMORY_MS)
    assert isinstance(room, Fresh)


def test_new_producers_of_one_append_are_counted_too() -> None:
    """One request cannot bring more producers than there is room for."""
    verdicts = judge(OPEN, *[stamped(0, f"p{number}") for number in range(NAMES_MAX + 2)])

    assert [Fresh] * NAMES_MAX + [RefusedChunk] * 2 == [type(verdict) for verdict in verdicts]


@pytest.mark.parametrize("broker_changes", [False, True])
async def test_a_retry_of_an_early_producer_is_not_appended_after_three_hundred_others(
    host: Host, broker_changes: bool
) -> None:
    """Over the writer: the first producer's batch, sent again, is answered with its offset."""
    broker = host.broker()
    first = await host.append(broker, b"first", stamp=Stamp("p0", 0))
    for number in range(1, 301):
        await host.append(broker, b"x", stamp=Stamp(f"p{number}", 0))

    again = await host.append(host.broker() if broker_changes else broker, b"first", stamp=Stamp("p0", 0))

    assert isinstance(again, Appended) and again.duplicate and again.start_offset == first.start_offset
    assert len(await host.read_all(broker)) == 301


async def test_an_expired_producer_is_refused_by_every_broker(host: Host) -> None:
    """The setting log.producer_memory_s is the time; the record keeps up to when producers were forgotten."""
    one, two = host.broker(producer_memory_s=60.0), host.broker()
    old = IDS.uuid7(host.clock.now_ns() // 1_000_000)
    await host.append(one, b"a", stamp=Stamp(old, 0))
    await host.clock.advance(61)
    await host.append(one, b"b", stamp=Stamp("other", 0))

    refused = [await host.append(broker, b"a", stamp=Stamp(old, 0)) for broker in (one, two)]

    assert [UnknownProducer, UnknownProducer] == [type(outcome) for outcome in refused]
    assert [b"a", b"b"] == await host.read_all(one)


def kafka_chunk(pid: int, epoch: int, sequence: int, *values: str) -> RecordChunk:
    from lakebed.log import kafka_batch
    from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords

    made = kafka_batch.encode([KafkaRecord(value.encode()) for value in values], now_ms=1)
    return RecordChunk(KafkaRecords(len(values), made), producers.kafka_stamp(pid, epoch, sequence))


def test_the_sequences_of_a_kafka_producer_count_records() -> None:
    """Each batch begins where the one before it ended; a repeated one is a duplicate, and a gap is refused."""
    pid = producers.new_kafka_id(1000, 7)
    first, second, gap = kafka_chunk(pid, 0, 0, "a", "b"), kafka_chunk(pid, 0, 2, "c"), kafka_chunk(pid, 0, 5, "e")
    now = control.opened(1)
    marks, forgotten = producers.remember(now, [first, second], 1, 2000, producers.MEMORY_MS)
    after = msgspec.structs.replace(now, producers=marks, forgotten_ms=forgotten)

    fresh = producers.judge(now, [first, second], now_ms=2000)
    repeated = producers.judge(after, [first, second, kafka_chunk(pid, 0, 3, "d"), gap], now_ms=2000)

    assert producers.all_fresh(fresh)
    assert [(1, 2), (3, 3)] == [(one.mark.start_offset, one.mark.end_offset) for one in repeated[:2]]  # type: ignore[union-attr]
    assert isinstance(repeated[2], producers.Fresh)
    assert isinstance(repeated[3], producers.RefusedChunk) and isinstance(repeated[3].error, OutOfOrderSequence)


def test_the_sequence_of_a_kafka_producer_begins_again_after_the_largest_number() -> None:
    """As its client does: 2147483647 is followed by 0."""
    pid = producers.new_kafka_id(1000, 7)
    last = kafka_chunk(pid, 0, 2**31 - 2, "a", "b")
    marks, _ = producers.remember(control.opened(1), [last], 1, 2000, producers.MEMORY_MS)
    now = msgspec.structs.replace(control.opened(1), producers=marks)

    assert producers.all_fresh(producers.judge(now, [kafka_chunk(pid, 0, 0, "c")], now_ms=2000))


def test_a_new_epoch_of_a_kafka_producer_begins_at_0_also_where_producers_were_forgotten() -> None:
    """A client keeps its id for weeks, and writes to a partition for the first time at any time."""
    pid = producers.new_kafka_id(1000, 7)
    now = msgspec.structs.replace(control.opened(1), forgotten_ms=5000)

    assert producers.all_fresh(producers.judge(now, [kafka_chunk(pid, 1, 0, "a")], now_ms=9000))
    (unknown,) = producers.judge(now, [kafka_chunk(pid, 1, 3, "a")], now_ms=9000)
    assert isinstance(unknown, producers.RefusedChunk) and isinstance(unknown.error, UnknownProducer)


def test_a_kafka_producer_is_forgotten_like_others_whose_id_has_a_time() -> None:
    """So that partitions do not collect the ids of all clients there ever were."""
    pid = producers.new_kafka_id(1_000_000, 2**40)
    stamp = producers.kafka_stamp(pid, 0, 0)

    assert pid < 2**63
    assert 1_000_000 == producers.issued_ms(stamp.producer_id)


async def test_what_is_known_of_many_producers_is_not_in_the_control_record(host: Host) -> None:
    """200 producers with five batches each: the control record stays small, one snapshot is kept, retries are found."""
    broker = host.broker()
    sizes: list[int] = []
    ids = [broker.producer_id() for _ in range(200)]
    for sequence in range(5):
        for id in ids:
            done = await host.append(broker, b"%d" % sequence, stamp=Stamp(id, sequence))
            assert not done.duplicate
            sizes.append(len(await host.meta_value(paths.control(TP))))

    assert max(sizes) < 8_000, max(sizes)
    assert 1 == len(await host.meta_keys("meta/producers/"))
    for other in (broker, host.broker()):
        again = await host.append(other, b"4", stamp=Stamp(ids[0], 4))
        assert again.duplicate and 801 == again.start_offset
    assert 200 == (await broker.admin.describe(TP)).producers
    assert 1001 == (await host.append(host.broker(), b"5", stamp=Stamp(ids[7], 5))).start_offset


async def test_two_brokers_that_write_snapshots_in_turn_keep_one_and_append_nothing_twice(host: Host) -> None:
    """Each reads the other's snapshot, and a plain append between them changes nothing of it."""
    brokers = [host.broker(), host.broker()]
    ids = [brokers[0].producer_id() for _ in range(60)]
    for number, id in enumerate(ids * 2):
        broker = brokers[number % 2]
        stamp = Stamp(id, number // 60)
        first = await host.append(broker, b"x", stamp=stamp)
        await host.append(brokers[1 - number % 2], b"plain")
        again = await host.append(brokers[1 - number % 2], b"x", stamp=stamp)
        assert (False, True, first.start_offset) == (first.duplicate, again.duplicate, again.start_offset)

    assert 1 == len(await host.meta_keys("meta/producers/"))


async def test_a_snapshot_that_an_append_could_not_replace_stays_for_those_behind_it(host: Host) -> None:
    """Another broker was faster: the control record still names the snapshot, and nobody can append without it."""
    broker, other = host.broker(), host.broker()
    for id in [broker.producer_id() for _ in range(1 + 2 * CHANGES_MAX)]:  # one more writes another snapshot
        await host.append(broker, b"x", stamp=Stamp(id, 0))
    (replaced,) = await host.meta_keys("meta/producers/")
    await host.append(other, b"plain")

    stamp = Stamp(broker.producer_id(), 0)
    beaten = await host.append(broker, b"x", stamp=stamp)
    again = await host.append(other, b"x", stamp=stamp)

    assert 35 == beaten.start_offset == again.start_offset and again.duplicate
    assert replaced not in await host.meta_keys("meta/producers/")


async def test_a_snapshot_whose_append_failed_is_swept_and_the_current_one_stays(host: Host) -> None:
    """A crash between the snapshot and the swap leaves it; deleting the topic removes all of them."""
    broker, services = host.broker(), host.services()
    ids = [broker.producer_id() for _ in range(40)]
    for id in ids:
        await host.append(broker, b"x", stamp=Stamp(id, 0))
    (current,) = await host.meta_keys("meta/producers/")
    await host.meta_put(paths.producers(TP, "lost"), await host.meta_value(current))
    await services.sweeper.sweep_once()
    assert 2 == len(await host.meta_keys("meta/producers/"))
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()

    assert [current] == await host.meta_keys("meta/producers/")
    assert (await host.append(host.broker(), b"x", stamp=Stamp(ids[0], 0))).duplicate
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(1000)
    await services.retention.apply_once(TP)
    assert [] == await host.meta_keys("/partitions/0/")


async def test_a_snapshot_whose_append_is_under_way_is_not_swept(host: Host) -> None:
    """Its swap comes a moment later: while the append could still be committed, the snapshot stays."""
    broker, services = host.broker(), host.services()
    for id in [broker.producer_id() for _ in range(40)]:
        await host.append(broker, b"x", stamp=Stamp(id, 0))
    await host.clock.advance(1000)  # the blobs are old: the sweep looks at every partition
    made = ProducersSnapshot(host.clock.now_ns() // 1_000_000, {})
    under_way = paths.producers(TP, "underway")
    await host.meta_put(under_way, msgspec.json.encode(made))

    await services.sweeper.sweep_once()
    assert under_way in await host.meta_keys("meta/producers/")
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()
    assert under_way not in await host.meta_keys("meta/producers/")


def test_changes_and_their_snapshot_give_the_same_producers() -> None:
    """Added, changed and forgotten ones, the longest unused first."""
    before = {name: [ProducerMark(0, 1, 1, 1, at)] for name, at in (("a", 1), ("b", 2), ("c", 3))}
    after = {"c": before["c"], "b": [ProducerMark(1, 5, 5, 1, 4)], "d": [ProducerMark(0, 6, 6, 1, 5)]}
    changes = producers.changes_since(before, after)

    assert {"a": [], "b": after["b"], "d": after["d"]} == changes
    assert list(after.items()) == list(producers.expanded(before, changes).items())
