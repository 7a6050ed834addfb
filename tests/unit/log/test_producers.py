"""Idempotent producers: what is fresh, what is a duplicate, what is refused, and how much is kept to know it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.ids import Ids
from lakebed.log import control, producers
from lakebed.log.blob import BlobSlice
from lakebed.log.codec import columns
from lakebed.log.model import (
    Control,
    ProducerMark,
    SequenceReused,
    TooManyProducers,
    UnknownProducer,
)
from lakebed.log.producers import (
    AHEAD_MS_MAX,
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
from support.log_host import TP, Host

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
    """An id without a time cannot be told from a forgotten one, so none is forgotten: not after years."""
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
    """It counts as used when it was issued, even if the broker's clock said earlier."""
    ahead = IDS.uuid7(NOW + 5000)
    now = append(OPEN, stamped(0, ahead), at_ms=NOW)
    now = append(now, stamped(0, "other"), at_ms=NOW + 20_000, memory_ms=1000)

    assert isinstance(refusal(now, stamped(0, ahead), at_ms=NOW + 20_000), UnknownProducer)
    assert isinstance(refusal(OPEN, stamped(0, IDS.uuid7(NOW + AHEAD_MS_MAX + 1))), UnknownProducer)


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
