"""What the tail cache and the kept batches answer: nothing of another life of a partition, no more than the bound."""

from __future__ import annotations

import msgspec
import pytest

import lakebed.log.cache
from lakebed.core.metrics import Metrics
from lakebed.log import codec, control
from lakebed.log.cache import UNKNOWN, TailCache
from lakebed.log.codec import columns
from lakebed.log.model import Control, TopicPartition
from lakebed.log.reader import BatchCache
from support.log_host import TP

CREATED = TopicPartition("other", 0)


def _control(*, changed_at_ms: int, end: int = 0, start: int = 1) -> Control:
    return msgspec.structs.replace(control.opened(changed_at_ms), sequence_counter=end, log_start_offset=start)


def _found(cache: TailCache, offset: int, bytes_max: int = 1 << 20, tp: TopicPartition = TP) -> list[bytes] | None:
    read = cache.read(tp, offset, bytes_max)
    return None if read is None else [record for part in read.parts for record in part]


def test_records_appended_before_the_partition_changed_its_state_are_not_cached() -> None:
    """The control record reports it was changed at 20: an append of 19 belongs to the log before, one of 20 to this."""
    cache = TailCache(1 << 20, metrics=Metrics())
    cache.looked(TP, _control(changed_at_ms=20), at_ms=30)

    cache.add(TP, 1, columns([b"before"]), at_ms=19)
    assert (0, []) == (cache.end(TP), _found(cache, 1))
    cache.add(TP, 1, columns([b"after"]), at_ms=20)
    assert (1, [b"after"]) == (cache.end(TP), _found(cache, 1))


def test_a_change_after_the_oldest_of_what_is_cached_drops_all_of_it() -> None:
    """The oldest counts, in whichever order things were learned; a change as old as the oldest drops nothing."""
    for times in ((10, 30), (30, 10)):
        cache = TailCache(1 << 20, metrics=Metrics())
        for offset, at_ms in enumerate(times, 1):
            cache.add(TP, offset, columns([b"%d" % at_ms]), at_ms=at_ms)

        cache.looked(TP, _control(changed_at_ms=10, end=2), at_ms=40)
        assert [b"%d" % at_ms for at_ms in times] == _found(cache, 1)
        cache.looked(TP, _control(changed_at_ms=20, end=1), at_ms=50)

        assert (1, None) == (cache.end(TP), _found(cache, 1)), times


def test_an_older_answer_does_not_take_back_a_change_that_is_known() -> None:
    """Two looks cross: the one that was requested first is answered last."""
    cache = TailCache(1 << 20, metrics=Metrics())
    cache.looked(TP, _control(changed_at_ms=20, end=4, start=3), at_ms=30)
    cache.looked(TP, _control(changed_at_ms=5, end=3, start=1), at_ms=31)

    cache.add(TP, 5, columns([b"before"]), at_ms=19)

    assert (4, 3, []) == (cache.end(TP), cache.start(TP), _found(cache, 5))
    assert None is _found(cache, 2)


async def test_who_waits_for_a_partition_is_woken_when_it_moves_or_is_forgotten() -> None:
    """Not by what is known already, and not by another partition."""
    cache = TailCache(1 << 20, metrics=Metrics())
    cache.saw(TP, 3, 1, at_ms=1)
    (moves,) = cache.changes([TP])
    cache.saw(TP, 3, 1, at_ms=2)
    cache.saw(CREATED, 9, 1, at_ms=2)
    assert not moves.is_set()
    cache.add(TP, 4, columns([b"x"]), at_ms=3)
    assert moves.is_set()

    (forgotten,) = cache.changes([TP])
    cache.forget(TP)
    assert (True, UNKNOWN, 1) == (forgotten.is_set(), cache.end(TP), cache.start(TP))


def test_of_too_many_partitions_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is appended to or looked at stays; what the forgotten one held is no longer counted."""
    monkeypatch.setattr(lakebed.log.cache, "NAMES_MAX", 2)
    metrics = Metrics()
    cache = TailCache(1 << 20, metrics=metrics)
    first, second, third = (TopicPartition("t", n) for n in range(3))
    cache.add(first, 1, columns([b"a"]), at_ms=1)
    one = metrics.value("lakebed_log_cache_bytes")
    cache.add(second, 1, columns([b"b"]), at_ms=1)
    cache.saw(first, 1, 1, at_ms=2)

    cache.add(third, 1, columns([b"c"]), at_ms=3)

    assert [[b"a"], None, [b"c"]] == [_found(cache, 1, tp=tp) for tp in (first, second, third)]
    assert 2 * one == metrics.value("lakebed_log_cache_bytes")


def test_reads_are_answered_up_to_a_gap_a_limit_or_the_end_and_counted_by_outcome() -> None:
    """Offsets 3 to 5 and 8; 6 and 7 are another broker's, 9 is the end, 10 is beyond it, 2 is trimmed."""
    metrics = Metrics()
    cache = TailCache(1 << 20, metrics=metrics)
    cache.add(TP, 8, columns([b"eight"]), at_ms=1)
    cache.add(TP, 3, columns([b"three", b"four"]), at_ms=1)
    cache.add(TP, 5, columns([b"five"]), at_ms=1)
    cache.add(TP, 5, columns([b"again"]), at_ms=1)
    cache.saw(TP, 8, 3, at_ms=2)

    found = {offset: _found(cache, offset) for offset in range(2, 11)}

    assert [b"three", b"four", b"five"] == found[3]
    assert ([b"four", b"five"], [b"five"], [b"eight"]) == (found[4], found[5], found[8])
    assert [None, None, None, [], None] == [found[offset] for offset in (2, 6, 7, 9, 10)]
    assert [b"three"] == _found(cache, 3, 1)  # at least one, however large
    size = columns([b"three", b"four"]).size
    assert [b"three", b"four"] == _found(cache, 3, size)
    assert [b"three"] == _found(cache, 3, size - 1)
    counted = [metrics.value("lakebed_log_cache_reads_total", outcome=outcome) for outcome in ("hit", "at_end", "miss")]
    assert [7, 1, 4] == counted


def test_kept_batches_stay_within_their_bound_and_the_longest_unused_goes_first() -> None:
    """Kept twice is counted once; one that is larger than the bound drops nobody."""
    bodies = BatchCache(100)
    batch = codec.decode(b"".join(codec.encode([columns([b"x"])], [codec.BatchSegment(1, 1)])))
    for n in range(2):
        bodies.keep(("blob", n), batch, 50)
        bodies.keep(("blob", n), batch, 50)
    bodies.keep(("large", 0), batch, 101)
    assert [True, True, False] == [bodies.get(key) is batch for key in (("blob", 1), ("blob", 0), ("large", 0))]

    for n in range(2, 40):
        bodies.keep(("blob", n), batch, 50)
        assert bodies.get(("blob", 0)) is batch  # in use all the time
        assert [n] == [other for other in range(1, n + 1) if bodies.get(("blob", other)) is not None]
        bodies.get(("blob", 0))
    bodies.keep(("whole", 0), batch, 100)
    assert [None, None, batch] == [bodies.get(key) for key in (("blob", 0), ("blob", 39), ("whole", 0))]
