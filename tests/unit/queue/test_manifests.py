"""What may be appended, claimed, finished and forgotten: the manifests' own rules, without any store."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.errors import Fenced, Overloaded
from lakebed.queue import appending, claiming, paths
from lakebed.queue.claiming import ClaimRules, RejectionRules, StaleManifest
from lakebed.queue.model import (
    Append,
    Claimed,
    ConsumerManifest,
    Durable,
    GenerationExpired,
    PendingBatch,
    PendingView,
    ProducerManifest,
    status_of,
)

NOW = 1_719_400_000_000
TIMEOUT = 30_000
REJECTIONS = RejectionRules(2, 1000, 8000)
SEED_PRODUCER = b'{"pending": ["data/f47a.batch", "data/9b2e.batch", "data/3d6f.batch"]}'
SEED_CONSUMER = b'{"claimed": {"data/f47a.batch": 1719400000000}, "done": ["data/3d6f.batch"]}'


def batch(counter: int, *, ingestor: str = "one", generation: int = 0) -> Append:
    return Append(ingestor, counter, generation, f"ingest/{generation:08d}/{ingestor}-{counter}.batch", 100, 3)


def appended(manifest: ProducerManifest, *batches: Append, pending_max: int = 100) -> ProducerManifest:
    return appending.append(manifest, batches, now_ms=NOW, pending_max=pending_max)[0]


def view(manifest: ProducerManifest) -> PendingView:
    manifest = appending.complete(manifest)
    return PendingView(manifest.pending, manifest.entries, manifest.cleanups, manifest)


def rules(
    collector: str = "a",
    *,
    batches_max: int = 10,
    bytes_max: int = 10**9,
    parallel: bool = False,
    silences_max: int = 99,
) -> ClaimRules:
    return ClaimRules(collector, TIMEOUT, batches_max, bytes_max, parallel, silences_max)


def claimed(
    consumer: ConsumerManifest, producer: ProducerManifest, by: ClaimRules, *, at: int = NOW, held: tuple[str, ...] = ()
) -> tuple[ConsumerManifest, list[Claimed]]:
    after, answer = claiming.claim(consumer, producer, by, held=held, now_ms=at)
    assert not isinstance(answer, StaleManifest)
    return after, answer


THREE = appended(ProducerManifest(), batch(1), batch(2), batch(3))


def test_locations_are_appended_at_the_end_in_order() -> None:
    """Pending keeps the order of appends, and sequences rise with it."""
    after = appended(THREE, batch(1, ingestor="two"))

    assert after.pending == (*THREE.pending, batch(1, ingestor="two").location)
    assert [after.entries[location].sequence for location in after.pending] == [1, 2, 3, 4]


def test_an_append_that_stands_is_only_answered_again() -> None:
    """After a lost answer nothing is enqueued twice, and the sequences are the same."""
    after, answers = appending.append(THREE, [batch(2), batch(3)], now_ms=NOW, pending_max=100)

    assert after == THREE
    assert answers == [Durable(batch(2).location, 2), Durable(batch(3).location, 3)]


def test_an_append_is_recognised_after_its_batch_is_gone() -> None:
    """Collected, acked and removed: the ingestor's counter still says that it was enqueued."""
    emptied, _ = appending.remove(THREE, dict.fromkeys(THREE.pending, (0, 0)))

    after, answers = appending.append(emptied, [batch(3)], now_ms=NOW, pending_max=100)

    assert after.pending == ()
    assert answers == [Durable(batch(3).location, 3)]


def test_a_batch_of_an_old_generation_is_refused() -> None:
    """What the sweep may have removed can no longer be enqueued; what it cannot have removed still can."""
    third = msgspec.structs.replace(THREE, generation=3)

    with pytest.raises(GenerationExpired):
        appended(third, batch(9, generation=1))
    assert appended(third, batch(9, generation=2)).pending[-1] == batch(9, generation=2).location


def test_a_counter_is_forgotten_only_when_its_batches_would_be_refused() -> None:
    """However generations pass, a repeated append is recognised or refused, never taken for a new one."""
    manifest = appended(ProducerManifest(), batch(1, generation=0))
    for _ in range(4):
        manifest, _ = appending.age(manifest, now_ms=manifest.generation_at_ms + 1000, horizon_ms=1000)

        if "one" in manifest.sessions:
            assert appended(manifest, batch(1, generation=0)) == manifest
        else:
            with pytest.raises(GenerationExpired):
                appended(manifest, batch(1, generation=0))
    assert manifest.sessions == {}


def test_a_session_keeps_its_newest_generation() -> None:
    """Batches of one append may be of several generations; forgetting goes by the newest."""
    manifest = appended(ProducerManifest(generation=1), batch(1, generation=1), batch(2, generation=0))

    assert manifest.sessions["one"].generation == 1


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    """Beyond the limit appends are Overloaded; one that stands already is still answered."""
    with pytest.raises(Overloaded):
        appended(THREE, batch(4), pending_max=3)
    assert appended(THREE, batch(3), pending_max=3) == THREE


def test_too_many_ingestors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest does not grow without bound by ingestors that come and go."""
    monkeypatch.setattr(appending, "SESSIONS_MAX", 1)

    with pytest.raises(Overloaded):
        appended(THREE, batch(1, ingestor="two"))
    assert len(appended(THREE, batch(4)).pending) == 4


def test_the_generation_rises_once_a_horizon() -> None:
    """Pace comes from the clock; what is over is decided by number."""
    first, _ = appending.age(ProducerManifest(), now_ms=NOW, horizon_ms=1000)
    same, _ = appending.age(first, now_ms=NOW + 999, horizon_ms=1000)
    second, _ = appending.age(first, now_ms=NOW + 1000, horizon_ms=1000)

    assert [first.generation, same.generation, second.generation] == [1, 1, 2]
    assert same is first


def test_a_plain_seed_manifest_is_read_and_continued() -> None:
    """Locations without more get sequences in their order, the same for every reader."""
    plain = msgspec.json.decode(SEED_PRODUCER, type=ProducerManifest)

    complete = appending.complete(plain)

    assert [complete.entries[location].sequence for location in plain.pending] == [1, 2, 3]
    assert complete == appending.complete(plain)
    assert appended(plain, batch(1)).entries[batch(1).location].sequence == 4


def test_a_plain_seed_consumer_manifest_is_honoured() -> None:
    """Its claims are fresh until they go stale, its done list is done."""
    producer = appending.complete(msgspec.json.decode(SEED_PRODUCER, type=ProducerManifest))
    consumer = msgspec.json.decode(SEED_CONSUMER, type=ConsumerManifest)

    _, early = claimed(consumer, producer, rules(), at=NOW + TIMEOUT)
    _, late = claimed(consumer, producer, rules(), at=NOW + TIMEOUT + 1)

    assert early == []
    assert [one.location for one in late] == ["data/f47a.batch", "data/9b2e.batch"]
    assert late[0].takeover


@pytest.mark.parametrize("kind", [ProducerManifest, ConsumerManifest])
def test_an_unknown_version_is_refused(kind: type) -> None:
    """A manifest from the future is not read as if it were ours."""
    with pytest.raises(msgspec.ValidationError, match="version 3 is unknown"):
        msgspec.json.decode(b'{"version": 3}', type=kind)


def test_claims_come_in_order_and_within_limits() -> None:
    """The first pending batches, as many as the rules allow; one always fits."""
    _, two = claimed(ConsumerManifest(), THREE, rules(batches_max=2))
    _, one = claimed(ConsumerManifest(), THREE, rules(bytes_max=50))

    assert [each.sequence for each in two] == [1, 2]
    assert [each.sequence for each in one] == [1]


def test_a_fresh_claim_holds_up_others_and_a_stale_one_does_not() -> None:
    """In order: nothing behind another's fresh claim; after the timeout it starts over from there."""
    consumer, _ = claimed(ConsumerManifest(), THREE, rules("a", batches_max=2))

    _, early = claimed(consumer, THREE, rules("b"), at=NOW + TIMEOUT)
    _, late = claimed(consumer, THREE, rules("b"), at=NOW + TIMEOUT + 1)

    assert early == []
    assert [(one.sequence, one.takeover) for one in late] == [(1, True), (2, True), (3, False)]


def test_in_parallel_a_fresh_claim_is_passed_by() -> None:
    """Giving up order between collectors, each has batches at once and none has another's."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules("a", batches_max=2, parallel=True))
    _, theirs = claimed(consumer, THREE, rules("b", parallel=True))

    assert [one.sequence for one in (*mine, *theirs)] == [1, 2, 3]


def test_a_take_over_voids_all_claims_of_the_late() -> None:
    """A collector that lost its first batch cannot go on with its second: order would be lost."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules("a", batches_max=3))
    consumer, _ = claimed(consumer, THREE, rules("b", batches_max=1), at=NOW + TIMEOUT + 1)

    _, lost = claiming.heartbeat(consumer, {one.location: one.epoch for one in mine}, now_ms=NOW + TIMEOUT + 2)

    assert lost == {one.location for one in mine}


def test_a_claim_is_a_heartbeat_for_the_claims_before_it() -> None:
    """One's claims go stale together."""
    consumer, first = claimed(ConsumerManifest(), THREE, rules("a", batches_max=1))
    held = tuple(one.location for one in first)

    consumer, _ = claimed(consumer, THREE, rules("a", batches_max=1), at=NOW + 20_000, held=held)

    assert consumer.claimed[held[0]] == NOW + 20_000


def test_a_claim_whose_answer_was_lost_is_taken_again() -> None:
    """Ones own claims that one does not know of are claimed anew, under a new epoch."""
    consumer, lost = claimed(ConsumerManifest(), THREE, rules("a", batches_max=1))

    _, again = claimed(consumer, THREE, rules("a", batches_max=1), at=NOW + 1)

    assert again[0].location == lost[0].location
    assert again[0].epoch > lost[0].epoch
    assert not again[0].takeover


def test_a_late_collector_cannot_ack_reject_or_bury() -> None:
    """After a take-over the old epoch is Fenced, whatever it wants."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules("a"))
    consumer, _ = claimed(consumer, THREE, rules("b"), at=NOW + TIMEOUT + 1)

    for attempt in (
        lambda: claiming.ack(consumer, mine[0], now_ms=NOW),
        lambda: claiming.bury(consumer, mine[0], now_ms=NOW),
        lambda: claiming.reject(consumer, mine[0], "no", now_ms=NOW, rules=REJECTIONS),
    ):
        with pytest.raises(Fenced):
            attempt()


def test_an_ack_is_idempotent_even_after_clean_up() -> None:
    """An ack whose answer was lost is answered yes, also when the batch has been removed since."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules())
    consumer, done = claiming.ack(consumer, mine[0], now_ms=NOW)
    again, _ = claiming.ack(consumer, mine[0], now_ms=NOW)
    trimmed, _ = claiming.trim(consumer, consumer.done, 1)
    after, _ = claiming.ack(trimmed, mine[0], now_ms=NOW)

    assert done == 1
    assert again is consumer
    assert after is trimmed


def test_a_done_batch_is_not_claimed_again() -> None:
    """Until clean-up the done list says so; after it, an outdated producer manifest is recognised."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules(batches_max=1))
    consumer, _ = claiming.ack(consumer, mine[0], now_ms=NOW)
    _, then = claimed(consumer, THREE, rules("b"))
    cleaned, number = appending.remove(THREE, dict.fromkeys(consumer.done, (0, 0)))
    consumer, _ = claiming.trim(consumer, consumer.done, number)

    _, outdated = claiming.claim(consumer, THREE, rules("b"), held=(), now_ms=NOW)
    _, fresh = claimed(consumer, cleaned, rules("b"))

    assert [one.sequence for one in then] == [2, 3]
    assert isinstance(outdated, StaleManifest)
    assert [one.sequence for one in fresh] == [2, 3]


def test_a_rejection_gives_back_no_claim_that_another_collector_has_by_now() -> None:
    """A collector that was silent for long still believes that the batch behind the rejected one is its own."""
    consumer, before = claimed(ConsumerManifest(), THREE, rules("a", batches_max=2))
    at = NOW + TIMEOUT + 1
    consumer, theirs = claimed(consumer, THREE, rules("b", batches_max=2), at=at)
    consumer, _ = claiming.reject(consumer, theirs[0], "no", now_ms=at, rules=REJECTIONS)
    consumer, mine = claimed(consumer, THREE, rules("a", batches_max=1), at=at + 1000)
    more = msgspec.structs.replace(REJECTIONS, rejections_max=9, also={before[1].location: before[1].epoch})
    consumer, _ = claiming.reject(consumer, mine[0], "no", now_ms=at + 1000, rules=more)

    consumer, _ = claiming.ack(consumer, theirs[1], now_ms=at + 1000)

    assert (before[1].location,) == consumer.done


def test_the_last_rejection_is_the_burial() -> None:
    """Rejections are counted in the manifest, and whoever claims next knows."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules("a", batches_max=1))
    consumer, first = claiming.reject(consumer, mine[0], "no", now_ms=NOW, rules=REJECTIONS)
    _, delayed = claimed(consumer, THREE, rules("b", batches_max=1), at=NOW + 999)
    consumer, mine = claimed(consumer, THREE, rules("a", batches_max=1), at=NOW + 1000)
    consumer, second = claiming.reject(consumer, mine[0], "n" * 9999, now_ms=NOW, rules=REJECTIONS)
    _, theirs = claimed(consumer, THREE, rules("b", batches_max=1), at=NOW + 1000 + TIMEOUT + 1)

    assert [] == delayed
    assert (first.count, first.bury, second.count, second.bury) == (1, False, 2, True)
    assert len(second.reason) == claiming.REASON_CHARS_MAX
    assert theirs[0].trouble == msgspec.structs.replace(second, silences=1)


def test_a_batch_that_kills_its_collectors_is_set_aside() -> None:
    """Each one that goes silent with it first in hand counts; those behind it are not blamed."""
    consumer, at, seen = ConsumerManifest(), NOW, []
    for name in "abcd":
        consumer, taken = claimed(consumer, THREE, rules(name, silences_max=3), at=at)
        seen.append([(one.trouble.silences, one.trouble.bury) if one.trouble else None for one in taken])
        at += TIMEOUT + 1

    assert seen == [
        [None, None, None],
        [(1, False), None, None],
        [(2, False), None, None],
        [(3, True), None, None],
    ]
    assert consumer.troubles[THREE.pending[0]].reason == "3 collectors stopped while they processed it"


def test_release_gives_back_ones_own_only() -> None:
    """What another has taken over stays theirs."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules("a", batches_max=1))
    taken, _ = claimed(consumer, THREE, rules("b", batches_max=1), at=NOW + TIMEOUT + 1)
    epochs = {one.location: one.epoch for one in mine}

    freed, _ = claiming.release(consumer, epochs)
    kept, _ = claiming.release(taken, epochs)

    assert freed.claimed == {}
    assert kept is taken


def test_epochs_kept_for_late_acks_are_bounded() -> None:
    """The manifest does not grow with every batch that ever was."""
    consumer = ConsumerManifest(settled=tuple(range(1, claiming.SETTLED_MAX + 1)), next_epoch=5000)
    consumer, mine = claimed(consumer, THREE, rules())
    consumer, _ = claiming.ack(consumer, mine[0], now_ms=NOW)

    trimmed, _ = claiming.trim(consumer, consumer.done, 1)

    assert len(trimmed.settled) == claiming.SETTLED_MAX
    assert trimmed.settled[-1] == mine[0].epoch


def test_the_standing_tells_ages_and_sizes() -> None:
    """Waiting is what is not done; ages are of the oldest."""
    consumer, mine = claimed(ConsumerManifest(), THREE, rules(batches_max=2), at=NOW + 1000)
    consumer, _ = claiming.ack(consumer, mine[0], now_ms=NOW + 2000)

    told = status_of("q", view(THREE), consumer, dead=1, timeout_ms=TIMEOUT, now_ms=NOW + 4000)

    assert (told.pending, told.bytes_waiting, told.claimed, told.done, told.dead) == (2, 200, 1, 1, 1)
    assert (told.pending_age_s, told.claimed_age_s, told.done_age_s) == (4.0, 3.0, 2.0)
    assert (told.collectors, told.stale_claims) == (["a"], 0)
    assert (
        status_of("q", view(ProducerManifest()), ConsumerManifest(), dead=0, timeout_ms=1, now_ms=1).pending_age_s
        is None
    )
    assert PendingBatch(1).enqueued_ms == 0


@pytest.mark.parametrize(
    ("path", "derived"),
    [
        ("ingest/manifest.json", "ingest/manifest.consumer.json"),
        ("ingest/manifest", "ingest/manifest.consumer"),
        ("a.b/manifest", "a.b/manifest.consumer"),
        ("manifest.v2.json", "manifest.v2.consumer.json"),
        (".hidden", ".hidden.consumer"),
    ],
)
def test_the_consumer_manifest_stands_beside(path: str, derived: str) -> None:
    """`consumer` goes in front of the extension, or to the end where there is none."""
    assert paths.consumer_manifest(path) == derived
