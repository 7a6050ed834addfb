"""What the manifests take and give, exactly at each limit and one beyond. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Overloaded
from lakebed.queue import appending, claiming
from lakebed.queue.claiming import ClaimRules
from lakebed.queue.model import (
    Append,
    BatchClaim,
    BatchTrouble,
    ConsumerManifest,
    IngestorSession,
    KeyValueEntry,
    PendingBatch,
    ProducerManifest,
)
from lakebed.queue.roles import Queue


def added(location: str, counter: int = 1, *, ingestor: str = "i", generation: int = 0) -> Append:
    return Append(ingestor, counter, generation, location, 10, 1)


def test_a_queue_takes_exactly_as_many_batches_as_its_limit() -> None:
    """One more is refused whole, with a time to come again; what was appended before is still answered."""
    manifest, _ = appending.append(ProducerManifest(), [added("a"), added("b", 2)], now_ms=5, pending_max=3)
    full, made = appending.append(manifest, [added("c", 3)], now_ms=6, pending_max=3)

    assert ["c"] == [one.location for one in made] and 3 == made[0].sequence
    assert PendingBatch(3, 10, 1, 6) == full.entries["c"] and PendingBatch(1, 10, 1, 5) == full.entries["a"]
    with pytest.raises(Overloaded) as refused:
        appending.append(full, [added("d", 4)], now_ms=7, pending_max=3)
    assert 5.0 == refused.value.retry_after_s
    same, again = appending.append(full, [added("b", 2), added("c", 3)], now_ms=7, pending_max=3)
    assert same is full and [(2, "b"), (3, "c")] == [(one.sequence, one.location) for one in again]


def test_known_and_new_batches_of_one_call_are_answered_in_their_order() -> None:
    """The known ones with their first sequences, the new ones behind everything."""
    manifest, _ = appending.append(ProducerManifest(), [added("a"), added("b", 2)], now_ms=1, pending_max=9)
    manifest, _ = appending.append(manifest, [added("x", ingestor="other")], now_ms=1, pending_max=9)
    after, made = appending.append(manifest, [added("b", 2), added("c", 3)], now_ms=1, pending_max=9)

    assert [("b", 2), ("c", 4)] == [(one.location, one.sequence) for one in made]
    assert ("a", "b", "x", "c") == after.pending and 5 == after.next_sequence
    assert IngestorSession(3, 0, 4) == after.sessions["i"]


def test_a_generation_is_over_when_two_newer_ones_have_begun() -> None:
    """The current one and the one before are taken."""
    assert [True, False, False] == [appending.is_over(each, 5) for each in (3, 4, 5)]
    old = ProducerManifest(
        generation=3, generation_at_ms=1000, sessions={"a": IngestorSession(1, 2, 1), "b": IngestorSession(1, 3, 2)}
    )
    young, _ = appending.age(old, now_ms=1999, horizon_ms=1000)
    aged, told = appending.age(old, now_ms=2000, horizon_ms=1000)

    assert young is old and aged is told
    assert (4, 2000, ["b"]) == (aged.generation, aged.generation_at_ms, list(aged.sessions))


def test_a_clean_up_has_a_number_only_when_something_left() -> None:
    """And takes out exactly what is done."""
    manifest, _ = appending.append(ProducerManifest(), [added("a"), added("b", 2)], now_ms=1, pending_max=9)
    same, none = appending.remove(manifest, {"x": (0, 0)})
    after, first = appending.remove(manifest, {"a": (0, 0), "x": (0, 0)})

    assert (0, 1) == (none, first) and same.pending == ("a", "b")
    assert ("b",) == after.pending and ["b"] == list(after.entries) and 1 == after.cleanups


def test_pieces_take_sequences_at_the_end_in_one_step() -> None:
    """The batch leaves, its pieces follow everything else, and an older view is outdated."""
    manifest, _ = appending.append(ProducerManifest(), [added("a"), added("b", 2)], now_ms=1, pending_max=2)
    after, done = appending.split(manifest, 1, 10, [added("p"), added("q")], now_ms=9)
    again, twice = appending.split(after, 1, 10, [added("r")], now_ms=9)

    assert done and not twice and again is after
    assert (("b", "p", "q"), 5, 1) == (after.pending, after.next_sequence, after.cleanups)
    assert [PendingBatch(3, 10, 1, 9), PendingBatch(4, 10, 1, 9)] == [after.entries[each] for each in "pq"]
    assert "a" not in after.entries


def rules(collector: str = "one", **more: Any) -> ClaimRules:
    told = {"timeout_ms": 30_000, "batches_max": 4, "bytes_max": 100, "parallel": False, "silences_max": 3}
    return ClaimRules(collector, **(told | more))


def producer(*sizes: int) -> ProducerManifest:
    names = tuple("abcdef"[: len(sizes)])
    entries = {name: PendingBatch(n + 1, size, 1, 7) for n, (name, size) in enumerate(zip(names, sizes, strict=True))}
    return ProducerManifest(pending=names, entries=entries, next_sequence=len(sizes) + 1)


@pytest.mark.parametrize(
    ("sizes", "more", "taken"),
    [
        ((10, 10, 10, 10, 10), {}, "abcd"),
        ((50, 50, 1), {}, "ab"),
        ((50, 51), {}, "a"),
        ((1000, 1), {}, "a"),
        ((10, 10), {"batches_max": 1}, "a"),
    ],
)
def test_a_claim_takes_batches_up_to_both_limits(sizes: tuple[int, ...], more: dict[str, Any], taken: str) -> None:
    """Exactly the limit fits; the first batch is taken whatever its size."""
    after, found = claiming.claim(ConsumerManifest(), producer(*sizes), rules(**more), held=(), now_ms=50)

    assert isinstance(found, list)
    assert list(taken) == [one.location for one in found]
    assert [(n + 1, n + 1, sizes[n], 7) for n in range(len(taken))] == [
        (one.sequence, one.epoch, one.size_bytes, one.enqueued_ms) for one in found
    ]
    assert dict.fromkeys(taken, 50) == after.claimed and len(taken) + 1 == after.next_epoch
    assert BatchClaim("one", 1, 1, 50, sizes[0], 7) == after.claims["a"]


def test_a_claim_is_stale_one_millisecond_after_its_timeout() -> None:
    """Until then it holds up everybody else; then it is taken over, and the silence is counted."""
    held, _ = claiming.claim(ConsumerManifest(), producer(10), rules(), held=(), now_ms=0)
    same, none = claiming.claim(held, producer(10), rules("two"), held=(), now_ms=30_000)
    after, found = claiming.claim(held, producer(10), rules("two"), held=(), now_ms=30_001)

    assert same is held and [] == none
    assert isinstance(found, list) and found[0].takeover and 2 == found[0].epoch
    assert BatchTrouble(0, "", 30_001, False, 1) == found[0].trouble == after.troubles["a"]


def test_a_reason_is_kept_up_to_its_limit_and_the_last_rejection_decides() -> None:
    """The count goes on from what is known; silences are kept."""
    held, found = claiming.claim(ConsumerManifest(), producer(10), rules(), held=(), now_ms=0)
    assert isinstance(found, list)
    held = msgspec.structs.replace(held, troubles={"a": BatchTrouble(1, "x", 1, False, 2)})
    _, second = claiming.reject(held, found[0], "r" * 501, now_ms=9, rules=claiming.RejectionRules(3, 100, 250))
    _, third = claiming.reject(held, found[0], "r", now_ms=9, rules=claiming.RejectionRules(2, 100, 250))

    assert BatchTrouble(2, "r" * 500, 9, False, 2, 209) == second
    assert third.bury


def test_the_delay_of_a_rejected_batch_doubles_up_to_its_limit() -> None:
    """However often it was rejected: it comes again within the limit."""
    held, found = claiming.claim(ConsumerManifest(), producer(10), rules(), held=(), now_ms=0)
    assert isinstance(found, list)
    delays = []
    for before in (0, 1, 2, 3, 60):
        known = msgspec.structs.replace(held, troubles={"a": BatchTrouble(before, "x", 1, False, 0)})
        _, trouble = claiming.reject(known, found[0], "r", now_ms=9, rules=claiming.RejectionRules(99, 100, 250))
        delays.append(trouble.until_ms - 9)

    assert [100, 200, 250, 250, 250] == delays


def test_a_lost_claim_is_told_and_a_finished_one_is_not() -> None:
    """A heartbeat refreshes ours, names those of others, and leaves out what was acked meanwhile."""
    held, found = claiming.claim(ConsumerManifest(), producer(10, 10, 10), rules(), held=(), now_ms=0)
    assert isinstance(found, list)
    held, done = claiming.ack(held, found[0], now_ms=5)
    after, lost = claiming.heartbeat(held, {"a": 1, "b": 2, "c": 77, "z": 5}, now_ms=9)

    assert 1 == done and frozenset({"c", "z"}) == lost
    assert {"b": 9, "c": 0} == after.claimed
    same, _ = claiming.heartbeat(held, {"z": 5}, now_ms=9)
    assert same is held


async def test_a_letter_is_dated_to_the_decision_not_to_its_writing(
    open_queue: Callable[..., Queue], manual_clock: ManualClock
) -> None:
    """A collector decides and dies; another writes the letter a minute later."""
    queue = open_queue()
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", b"v")])
    await ingestor.flush()
    (found,) = await queue.consumer.claim(await queue.producer.view(9), "one", ())  # type: ignore[misc]
    decided = await queue.consumer.reject(found, "bad", last=True)
    decided_ms = manual_clock.now_ns() // 1_000_000
    await manual_clock.advance(60.0)

    letter = await queue.dead_letters.bury(found, decided)

    assert decided_ms == letter.buried_ms == decided.at_ms
